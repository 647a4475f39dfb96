"""Preflight: does the reward tell expert clips from reversed, frozen, slow and random ones?

Run before acting, because a reward that pays non-experts like experts will be hacked, and finding out
costs a table instead of a training run.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.training.scoring import score_queries, score_queries_on_host
from jaxreward.types import Array, EnvironmentSpec, PyTree, Rollout, TimeStep

MARGIN = 0.3  # expert minus random below this is reported as too weak to learn from
PARTIAL = 0.6  # how much of the solution the slow and the frozen clips reach


@dataclasses.dataclass(frozen=True)
class PreflightResult:
    """Mean and standard deviation of the episode reward by kind of clip.

    Attributes:
      rewards: {kind: float32 [V]} total reward of each clip.
    """

    rewards: dict[str, np.ndarray]

    @property
    def margin(self) -> float:
        """Mean reward of expert clips minus that of random-policy clips."""
        return float(self.rewards["expert"].mean() - self.rewards["random"].mean())

    def warnings(self) -> list[str]:
        """What a user should know before acting on this reward."""
        found = []
        if self.margin < MARGIN:
            found.append(
                f"expert clips earn only {self.margin:.2f} more than random play (expected at least "
                f"{MARGIN}): the reward is too weak to learn from"
            )
        for kind in ("slow", "frozen", "reversed"):
            gap = float(self.rewards["expert"].mean() - self.rewards[kind].mean())
            if gap < 0.05:
                found.append(
                    f"{kind} clips that never reach the goal earn as much as expert clips "
                    f"({self.rewards[kind].mean():.2f} against {self.rewards['expert'].mean():.2f}): "
                    "watch for high reward without success"
                )
        return found

    def table(self) -> list[tuple[str, float, float, int]]:
        """(kind, mean, standard deviation, clips) for each kind."""
        return [(k, float(v.mean()), float(v.std()), len(v)) for k, v in self.rewards.items()]


class PictureFrames:
    """Stands for an environment whose compact frames are already pictures."""

    on_device = True

    def render(self, frame: Array) -> Array:
        """The picture itself."""
        return frame


PICTURES = PictureFrames()


def clip_rollout(
    frames: PyTree, lengths: Array, env_rewards: Array | None = None, reached: Array | None = None
) -> Rollout:
    """Lays clips out as one rollout in which each environment plays one episode.

    Args:
      frames: [V, S, ...] compact frames or pictures, S the longest.
      lengths: int32 [V], frames of each clip (at least 2).
      env_rewards: float32 [S - 1, V], the environment's own reward; None: zeros.
      reached: bool [S - 1, V], the steps that reached the goal; None: none.

    Returns:
      A rollout of S - 1 steps of V environments; what follows a clip's end is a frozen second episode.
    """
    by_time = jax.tree.map(lambda x: jnp.swapaxes(jnp.asarray(x), 0, 1), frames)
    steps, count = jax.tree.leaves(by_time)[0].shape[0] - 1, lengths.shape[0]
    after = jnp.arange(1, steps + 1)[:, None]  # frames seen after the first
    last = lengths[None] - 1
    done = after == last
    zeros = jnp.zeros((steps, count), jnp.float32)
    env_rewards = zeros if env_rewards is None else jnp.asarray(env_rewards)
    reached = zeros > 0 if reached is None else jnp.asarray(reached)
    following = jax.tree.map(lambda x: x[1:], by_time)

    def make(frame, first, episode_step, reward, terminated, reached):
        return TimeStep(
            observation=frame,
            frame=frame,
            final_observation=frame,
            final_frame=frame,
            first=first,
            episode_step=episode_step.astype(jnp.int32),
            env_reward=reward,
            terminated=terminated,
            truncated=jnp.zeros_like(terminated),
            info={"success": reached},
        )

    nothing = jnp.zeros(count, bool)
    start = make(
        jax.tree.map(lambda x: x[0], by_time), ~nothing, jnp.zeros(count), zeros[0], nothing, nothing
    )
    step = jnp.where(after >= last, after - last, after)
    steps_taken = make(following, done, step, env_rewards, done, reached)
    return Rollout(start, (), jnp.zeros((steps, count), jnp.int32), steps_taken, {})


def episode_rewards(
    reward,
    scorer,
    params: PyTree,
    context: PyTree,
    frames: PyTree,
    lengths: Array,
    key: Array,
    *,
    env_rewards: np.ndarray | None = None,
    reached: np.ndarray | None = None,
    render_with=None,
    chunk: int = 32,
) -> np.ndarray:
    """The reward of every step of recorded episodes, by the same code that pays the agent.

    Args:
      reward: the reward.
      scorer: the scorer, or None if the reward needs none.
      params: the scorer's parameters.
      context: what its `prepare` returned.
      frames: [V, S, ...] pictures uint8 [V, S, H, W, 3], or compact frames with `render_with`.
      lengths: int32 [V], frames of each episode.
      key: a typed key.
      env_rewards: float32 [S - 1, V], the environment's own reward, for rewards that read it.
      reached: bool [S - 1, V], the steps that reached the goal, for rewards that read it.
      render_with: the environment that renders compact frames.
      chunk: queries in one call of the scorer.

    Returns:
      float32 [S - 1, V]; zero after an episode's end.
    """
    lengths = jnp.asarray(lengths)
    renderer = render_with or PICTURES
    if scorer is None or scorer.jittable:
        pay = _jitted_pay(reward, scorer, renderer, chunk)
    else:
        pay = functools.partial(_pay, reward, scorer, renderer, chunk)
    return np.asarray(pay(params, context, frames, lengths, key, env_rewards, reached))


@functools.lru_cache(maxsize=8)  # clips of one shape are paid by one program, whatever their kind
def _jitted_pay(reward, scorer, renderer, chunk: int):
    return jax.jit(functools.partial(_pay, reward, scorer, renderer, chunk))


def _pay(
    reward, scorer, renderer, chunk, params, context, frames, lengths, key, env_rewards, reached
) -> Array:
    """`episode_rewards` as a pure function of its last seven arguments."""
    count, size = jax.tree.leaves(frames)[0].shape[:2]
    frame_spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), frames)
    spec = EnvironmentSpec(count, size - 1, "", frame_spec, frame_spec, (0, 0, 3), None)
    init_key, propose_key, score_key, settle_key = jax.random.split(key, 4)
    rollout = clip_rollout(frames, lengths, env_rewards, reached)
    state, queries = reward.propose(reward.init(init_key, spec), rollout, propose_key)
    scores = None
    if queries is not None:
        ask = score_queries if scorer.jittable else score_queries_on_host
        scores = ask(renderer, scorer, params, context, queries, score_key, chunk=chunk)
    _, rewards, _ = reward.settle(state, rollout, queries, scores, settle_key)
    inside = jnp.arange(1, size)[:, None] < lengths[None]
    return jnp.where(inside, sum(rewards.values()), 0.0)


def clip_kinds(
    frames: np.ndarray, lengths: np.ndarray, max_episode_steps: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Makes the clips that a good reward must tell from the expert's.

    Args:
      frames: uint8 [V, S, H, W, 3] expert videos; those longer than an episode lose frames evenly.
      lengths: int [V], their frames.
      max_episode_steps: the environment's time limit, which the slow and frozen clips use up.

    Returns:
      {kind: (uint8 [V, max_episode_steps + 1, H, W, 3], lengths)} for expert, reversed (the expert's
      frames backwards), frozen (the first 60 % of the solution, then no change) and slow (the first
      60 % spread over the whole episode).
    """
    size = max_episode_steps + 1
    clock = np.arange(size)
    last = np.minimum(lengths, size) - 1
    pace = np.maximum(lengths - 1, 1) / np.maximum(last, 1)  # above 1 for a video longer than an episode

    def at(steps: np.ndarray, video: int) -> np.ndarray:
        return np.round(steps * pace[video]).astype(int)

    videos = list(enumerate(last))
    index = {
        "expert": [at(np.minimum(clock, n), i) for i, n in videos],
        "reversed": [at(np.maximum(n - clock, 0), i) for i, n in videos],
        "frozen": [at(np.minimum(clock, round(PARTIAL * n)), i) for i, n in videos],
        "slow": [at(clock * PARTIAL * n / (size - 1), i) for i, n in videos],
    }
    full = np.full(len(lengths), size, np.int32)
    ends = {"expert": last + 1, "reversed": last + 1, "frozen": full, "slow": full}
    return {
        kind: (np.stack([f[i] for f, i in zip(frames, rows, strict=True)]), ends[kind].astype(np.int32))
        for kind, rows in index.items()
    }
