"""Videos of what a policy does: its best win and its best paid failure, with the reward underneath."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from jaxreward.data.annotate import annotate
from jaxreward.data.video import write_video
from jaxreward.evaluation.policies import Episode, Evaluation, pad_frames
from jaxreward.evaluation.preflight import episode_rewards
from jaxreward.types import Array

FRAMES_PER_SECOND = 4
CANDIDATES = 32  # episodes of each outcome that are rewarded to find the best


def write_showcase(
    environment, reward, scorer, evaluation: Evaluation, key: Array, folder: pathlib.Path
) -> dict[str, str]:
    """Writes best.mp4 (the best paid success) and failure.mp4 (the best paid failure).

    Args:
      environment: the environment of the evaluation.
      reward: the reward that the policy was trained on.
      scorer: the PreparedScorer, or None.
      evaluation: the played episodes.
      key: a typed key for the reward's random choices.
      folder: where the files go.

    Returns:
      {'best': path, 'failure': path}, without an outcome that did not occur.

    Raises:
      StorageError: the folder cannot be written.
    """
    written = {}
    for name, outcome in (("best", True), ("failure", False)):
        chosen = best_paid(environment, reward, scorer, evaluation, outcome, key)
        if chosen is not None:
            write_episode(environment, *chosen, folder / f"{name}.mp4")
            written[name] = str(folder / f"{name}.mp4")
    return written


def best_paid(
    environment, reward, scorer, evaluation: Evaluation, success: bool, key: Array
) -> tuple[Episode, np.ndarray] | None:
    """The episode with the highest reward among the first successes or failures, and its rewards."""
    episodes = [e for e in evaluation.episodes if e.success == success][:CANDIDATES]
    if not episodes:
        return None
    paid = reward_episodes(environment, reward, scorer, episodes, key)
    chosen = int(np.argmax([p.sum() for p in paid]))
    return episodes[chosen], paid[chosen]


def reward_episodes(environment, reward, scorer, episodes: list[Episode], key: Array) -> list[np.ndarray]:
    """The reward of every step of each episode: a float32 [length] for each."""
    steps = environment.spec.max_episode_steps
    frames, lengths = pad_frames(episodes, steps)
    judge = (None, None, None) if scorer is None else (scorer.scorer, scorer.params, scorer.context)
    paid = episode_rewards(
        reward,
        *judge,
        frames,
        lengths,
        key,
        env_rewards=np.stack([np.pad(e.env_rewards, (0, steps - e.length)) for e in episodes], axis=1),
        reached=np.stack([np.pad(e.reached, (0, steps - e.length)) for e in episodes], axis=1),
        render_with=environment,
    )
    return [paid[: e.length, i] for i, e in enumerate(episodes)]


def write_episode(environment, episode: Episode, paid: np.ndarray, path: pathlib.Path) -> None:
    """Writes one episode as a video that any player shows, with step and reward under each frame."""
    pictures = environment_pictures(environment, episode)
    total = np.concatenate([[0.0], np.cumsum(paid)])
    outcome = "solved" if episode.success else "not solved"
    texts = [
        f"step {i}/{episode.length}  reward {total[i]:+.2f}" + (f"  {outcome}" if i == episode.length else "")
        for i in range(episode.length + 1)
    ]
    write_video(path, annotate(pictures, texts, total), FRAMES_PER_SECOND, lossless=False)


def environment_pictures(environment, episode: Episode) -> np.ndarray:
    """Pictures uint8 [length + 1, H, W, 3], by the environment's own full-size renderer if it has one."""
    replay = getattr(environment, "pictures", None)
    if replay is not None:
        return np.asarray(replay(episode.frames, episode.actions))
    return np.asarray(jax.jit(environment.render)(episode.frames))
