"""A whole experiment: rank a scorer from videos, check the reward, act on it, evaluate, report.

Every phase leaves its result in the run folder and is skipped when the result is already there, which
is what makes a run resumable that was killed at any moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxreward.agents.ppo import PPO, PPOConfig
from jaxreward.checkpoints.store import CheckpointStore
from jaxreward.envs import registry
from jaxreward.envs.brax import BraxConfig
from jaxreward.envs.catrap.environment import CatrapConfig
from jaxreward.envs.catrap.levels import load_level
from jaxreward.envs.gymnasium import GymnasiumConfig
from jaxreward.envs.gymnax import GymnaxConfig
from jaxreward.envs.pyboy import CartridgeConfig
from jaxreward.errors import ConfigError, StorageError
from jaxreward.evaluation.policies import UniformRandom, evaluate, pad_frames
from jaxreward.evaluation.preflight import PreflightResult, clip_kinds, episode_rewards
from jaxreward.evaluation.report import write_report
from jaxreward.evaluation.showcase import write_showcase
from jaxreward.files import write_atomically
from jaxreward.metrics.recorder import Recorder, read_metrics
from jaxreward.metrics.statistics import bootstrap_interval, pass_at_k, pearson
from jaxreward.models import weights
from jaxreward.models.frame_ranker import FrameRankerConfig
from jaxreward.rewards.constant import Constant, ConstantConfig
from jaxreward.rewards.environment_reward import EnvironmentReward, EnvironmentRewardConfig
from jaxreward.rewards.rank_then_act import RankThenAct, RankThenActConfig
from jaxreward.rewards.success import Success, SuccessConfig
from jaxreward.scorers.base import Scorer, Scores
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.scorers.vlm_ranker import VLMRankerConfig
from jaxreward.training.act import ActConfig, Interrupted, act, hacking_warning
from jaxreward.training.loop import Loop, LoopConfig
from jaxreward.training.plan import announce, describe_plan
from jaxreward.training.prepare_scorer import (
    PreparedScorer,
    VideoConfig,
    load_prepared,
    prepare_scorer,
    vlm_folder,
)
from jaxreward.training.rank import RankConfig
from jaxreward.training.rank_vlm import VLMRankConfig
from jaxreward.training.run_folder import SECONDS_FILE, RunFolder, to_json

REWARDS = {
    RankThenActConfig: RankThenAct,
    SuccessConfig: Success,
    EnvironmentRewardConfig: EnvironmentReward,
    ConstantConfig: Constant,
}
PREFLIGHT_CHUNK = 32  # queries in one call of the scorer, unless `loop.score_chunk` is less
RewardConfig = RankThenActConfig | SuccessConfig | EnvironmentRewardConfig | ConstantConfig
EnvironmentConfig = CatrapConfig | CartridgeConfig | GymnaxConfig | BraxConfig | GymnasiumConfig


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Everything that a run is made of.

    Attributes:
      description: what the experiment shows, in one line.
      env: the environment.
      reward: the reward.
      agent: the learner.
      scorer: 'train' ranks one from videos first (Stage 1), 'pretrained' takes the shipped general
        ranker, 'untrained' a random one (the control); otherwise the path of a run or scorer folder, or of
        a Hugging Face folder with a vision-language model, which is then asked for ranks.
      vlm: which vision-language model Stage 1 teaches, if any, and how such a model is asked.
      vlm_rank: Stage 1 on a vision-language model.
      model: the structure of a scorer that is trained here.
      videos: where Stage 1's videos come from.
      rank: Stage 1 on the compact ranker.
      loop: how the parts are driven.
      act: Stage 2.
      seed: the first seed; it decides everything that is random.
      seeds: how many policies are trained, with seeds `seed`, `seed` + 1, ...
      eval_episodes: episodes of the sampled and of the greedy evaluation.
      preflight: check the reward on expert, reversed, frozen, slow and random clips before acting.
      wandb_project: also record to this project of Weights & Biases (needs the extra 'wandb').
    """

    description: str
    env: EnvironmentConfig
    reward: RewardConfig = dataclasses.field(default_factory=RankThenActConfig)
    agent: PPOConfig = dataclasses.field(default_factory=PPOConfig)
    scorer: str = "train"
    vlm: VLMRankerConfig = dataclasses.field(default_factory=VLMRankerConfig)
    model: FrameRankerConfig = dataclasses.field(default_factory=FrameRankerConfig)
    videos: VideoConfig = dataclasses.field(default_factory=VideoConfig)
    rank: RankConfig = dataclasses.field(default_factory=RankConfig)
    vlm_rank: VLMRankConfig = dataclasses.field(default_factory=VLMRankConfig)
    loop: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    act: ActConfig = dataclasses.field(default_factory=ActConfig)
    seed: int = 0
    seeds: int = 1
    eval_episodes: int = 256
    preflight: bool = True
    wandb_project: str | None = None

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        for field, least in (("seed", 0), ("seeds", 1), ("eval_episodes", 1)):
            found = getattr(self, field)
            if found < least:
                raise ConfigError(f"{field} is {found}; expected at least {least}")


def run_experiment(
    config: ExperimentConfig, run: RunFolder, console: Console, interrupted: Callable[[], bool]
) -> dict[str, Any]:
    """Runs or goes on with an experiment.

    Args:
      config: the experiment.
      run: its folder; whatever a former process finished there is not done again.
      console: where progress and results are printed.
      interrupted: asked at safe points; when True everything is saved and Interrupted is raised.

    Returns:
      The summary, as written to summary.json: `heldout_rho`, `success_rate`, `success_interval`,
      `env_steps`, `wall_seconds`, `cpu_seconds`, `run_dir`, ...

    Raises:
      Interrupted: after saving.
      JaxrewardError: whatever the user can mend.
    """
    clock, scorer, preflight = Clock(run), None, None
    environment = registry.make(config.env)
    try:
        check_parts(config, environment, run)
        clock.work()
        console.print(f"run folder: {run.path}")
        announce(config, environment, run, console)
        if getattr(config.env, "rom", ""):
            console.print(f"ROM {config.env.rom}, SHA-256 {environment.host.rom_sha256}")
        if needs_scorer(config):
            scorer = prepare_scorer(config, environment, run, console, interrupted)
        reward = make_reward(config.reward, None if scorer is None else scorer.scorer)
        if reward.uses_env_reward:
            console.print("[yellow]This reward reads the environment's own reward or success flag.[/yellow]")
        if scorer is not None and config.preflight and scorer.clips is not None:
            preflight = run_preflight(config, environment, reward, scorer, run, console)
        _stop_if(interrupted)
        seeds = [
            _train_seed(config, environment, reward, scorer, preflight, run, seed, console, interrupted)
            for seed in range(config.seed, config.seed + config.seeds)
        ]
    finally:
        if not environment.on_device:
            environment.close()
        clock.stop()
    summary = _summarise(config, run, scorer, seeds)
    summary |= clock.read()
    run.write_json("summary.json", summary)
    write_report(run, to_json(config), summary, preflight)
    return summary


def needs_scorer(config: ExperimentConfig) -> bool:
    """Whether the experiment's reward asks a scorer."""
    return REWARDS[type(config.reward)].needs_scorer


def make_reward(config: RewardConfig, scorer: Scorer | None):
    """Builds a reward from its config, for the scorer that it will ask."""
    if isinstance(config, RankThenActConfig):
        return RankThenAct(config, permutation_equivariant=scorer.permutation_equivariant)
    return REWARDS[type(config)](config)


def make_loop(config: ExperimentConfig, environment, reward, scorer: Scorer | None) -> Loop:
    """Wires the experiment's five parts."""
    agent = PPO(config.agent)
    return Loop(config.loop, environment, agent, reward, scorer, total_updates=config.act.updates)


def check_parts(config: ExperimentConfig, environment, run: RunFolder) -> None:
    """Refuses, before long work, a config whose parts do not fit each other or the run's checkpoints.

    Traces one update on shapes alone, so that the agent, the scorer and the reward say now what they
    would say after Stage 1.

    Args:
      config: the experiment.
      environment: its environment.
      run: its folder, with the checkpoints of a former process, if there are any.

    Raises:
      ConfigError: the parts do not fit each other.
      DataError: a level of the transfer matrix that cannot be used.
      ModelError: the scorer or a checkpoint is missing or damaged or does not fit.
    """
    for level in config.videos.transfer:
        load_level(level)
    scorer, load = None, lambda key: (None, None)
    model_folder = vlm_folder(config, run) if needs_scorer(config) else None
    if model_folder is not None:
        # Reading the weights twice would take minutes; their headers say whether they are all there.
        found = weights.read_config(model_folder)
        weights.build(found, dtype=config.vlm.dtype, source=str(model_folder))
        weights.read_headers(model_folder)
        scorer = _AnyScorer()
    elif needs_scorer(config) and config.scorer == "train":
        shape = environment.spec.image_shape[:2]
        scorer = CompactRanker(dataclasses.replace(config.model, frame_shape=shape))

        def load(key):
            params = scorer.init(key, (*shape, config.model.channels))
            return params, scorer.prepare(params, environment.spec.task)
    elif needs_scorer(config):
        ready = load_prepared(config, environment, run)
        scorer, load = ready.scorer, lambda key: (ready.params, ready.context)
    loop = make_loop(config, environment, make_reward(config.reward, scorer), scorer)

    def first_update(key):
        state = loop.init(key)
        return state, loop.update_program(state, *load(key))

    state, _ = jax.eval_shape(first_update, jax.random.key(0))
    for seed in range(config.seed, config.seed + config.seeds):
        folder = seed_folder(config, run, seed)
        store = CheckpointStore(folder / "checkpoints")
        if store.latest_step() is not None and not (folder / "result.json").exists():
            store.restore(state)


class _AnyScorer:
    """Stands for a scorer that is not traced, where only shapes are asked for."""

    jittable = True
    permutation_equivariant = False

    def score(self, params, context, frames, where, key) -> Scores:
        """Zeros of the right shapes."""
        none = jnp.zeros(where.shape[0], jnp.int32)
        return Scores(jnp.zeros(where.shape, jnp.float32), jnp.ones(where.shape[0], bool), none)


def seed_folder(config: ExperimentConfig, run: RunFolder, seed: int) -> pathlib.Path:
    """Where a seed's files are: the run folder itself if there is only one seed."""
    return run.path if config.seeds == 1 else run.path / f"seed_{seed}"


def run_preflight(
    config: ExperimentConfig, environment, reward, scorer: PreparedScorer, run: RunFolder, console: Console
) -> PreflightResult:
    """Rewards held-out expert clips and their spoilt versions, and prints the table."""
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    random_key, key = jax.random.split(key)
    frames, lengths = scorer.clips
    spec = environment.spec
    rewards = {}
    for number, (kind, (clip, ends)) in enumerate(
        clip_kinds(frames, lengths, spec.max_episode_steps).items()
    ):
        rewards[kind] = episode_rewards(
            reward,
            scorer.scorer,
            scorer.params,
            scorer.context,
            clip,
            ends,
            jax.random.fold_in(key, number),
            chunk=min(config.loop.score_chunk, PREFLIGHT_CHUNK),
        ).sum(0)
    played = evaluate(environment, UniformRandom(spec), (), random_key, episodes=len(lengths)).episodes
    clip, ends = pad_frames(played[: max(len(lengths), 1)], spec.max_episode_steps)
    rewards["random"] = episode_rewards(
        reward,
        scorer.scorer,
        scorer.params,
        scorer.context,
        clip,
        ends,
        jax.random.fold_in(key, len(rewards)),
        render_with=environment,
        chunk=min(config.loop.score_chunk, PREFLIGHT_CHUNK),
    ).sum(0)
    result = PreflightResult(rewards)
    table = Table(title="Preflight: reward of an episode", title_justify="left")
    for heading in ("clips", "mean", "std", "number"):
        table.add_column(heading, justify="left" if heading == "clips" else "right")
    for kind, mean, std, count in result.table():
        table.add_row(kind, f"{mean:.3f}", f"{std:.3f}", str(count))
    console.print(table)
    for warning in result.warnings():
        console.print(f"[yellow]warning:[/yellow] {warning}")
    kinds = {kind: {"mean": mean, "std": std, "clips": n} for kind, mean, std, n in result.table()}
    run.write_json("preflight.json", {"kinds": kinds, "warnings": result.warnings()})
    return result


def _train_seed(
    config: ExperimentConfig,
    environment,
    reward,
    scorer: PreparedScorer | None,
    preflight: PreflightResult | None,
    run: RunFolder,
    seed: int,
    console: Console,
    interrupted: Callable[[], bool],
) -> dict[str, Any]:
    """Acts, evaluates and records one seed; returns its summary."""
    folder = seed_folder(config, run, seed)
    finished = folder / "result.json"
    if finished.exists():
        return json.loads(finished.read_text())
    key = jax.random.fold_in(jax.random.key(seed), 2)
    act_key, sampled_key, greedy_key, show_key = jax.random.split(key, 4)
    params, context = (None, None) if scorer is None else (scorer.params, scorer.context)
    loop = make_loop(config, environment, reward, None if scorer is None else scorer.scorer)
    store = CheckpointStore(folder / "checkpoints", config.act.keep_checkpoints)
    done = store.latest_step() or 0
    if done < config.act.updates:
        describe_plan(config, loop, params, context, console, seed=seed, done=done)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}: it cannot be made ({error.strerror}); choose a folder with room"
        ) from error
    with Recorder(
        folder,
        console=console,
        total_updates=config.act.updates,
        wandb_project=config.wandb_project,
        name=run.path.name if config.seeds == 1 else f"{run.path.name}-{folder.name}",
    ) as recorder:
        state = act(
            loop,
            act_key,
            config.act,
            store=store,
            record=recorder.record,
            resume=recorder.truncate_after,
            params=params,
            context=context,
            interrupted=interrupted,
        )
    records = read_metrics(folder)
    _stop_if(interrupted)
    sampled = evaluate(environment, loop.agent, state.agent, sampled_key, episodes=config.eval_episodes)
    _stop_if(interrupted)
    greedy = evaluate(
        environment, loop.agent, state.agent, greedy_key, episodes=config.eval_episodes, greedy=True
    )
    expert = None if preflight is None else float(preflight.rewards["expert"].mean())
    if expert is None:
        expert = _most_paid(config.reward)
    result = {
        "seed": seed,
        "sampled": sampled.summary(),
        "greedy": greedy.summary(),
        "env_steps": config.act.updates * loop.steps_per_update,
        "train_seconds": float(store.read_metadata()["seconds"]),
        "phase_seconds": _phase_totals(records),
        "return_pass_at_5_pearson": reward_success_correlation(records),
        "hacking": None if expert is None else hacking_warning(records, expert),
    }
    if result["hacking"]:
        console.print(f"[yellow]warning:[/yellow] {result['hacking']}")
    shown = write_showcase(environment, reward, scorer, sampled, show_key, folder / "videos")
    result["videos"] = {name: str(pathlib.Path(path).relative_to(run.path)) for name, path in shown.items()}
    write_atomically(finished, json.dumps(result, indent=2) + "\n")
    return result


def _most_paid(config: RewardConfig) -> float | None:
    """The most that an episode can be paid, for rewards that are a single correlation or a mean of some."""
    ranks = isinstance(config, RankThenActConfig)
    return 1.0 if ranks and (config.mode == "episode" or config.aggregate == "mean") else None


def _stop_if(interrupted: Callable[[], bool]) -> None:
    """Between phases, where everything so far is saved or quickly done again."""
    if interrupted():
        raise Interrupted


def reward_success_correlation(records: list[dict[str, float]], k: int = 5) -> float | None:
    """Pearson correlation over updates of the mean return with pass@k (paper table 8).

    Args:
      records: metrics of the updates; those in which fewer than k episodes ended are left out.
      k: attempts.

    Returns:
      A value in [-1, 1], or None where it is undefined (fewer than two updates, or a constant).
    """
    usable = [r for r in records if r["episodes"] >= k]
    attempts = [pass_at_k(int(r["episodes"]), int(r["successes"]), k) for r in usable]
    value = pearson([r["return"] for r in usable], attempts)
    return None if np.isnan(value) else float(value)


def _phase_totals(records: list[dict[str, float]]) -> dict[str, float]:
    """Wall seconds by phase, summed over updates; empty for a fused run, which has no phases."""
    names = [name for name in (records[-1] if records else ()) if name.startswith("seconds/")]
    return {name.removeprefix("seconds/"): sum(r[name] for r in records) for name in names}


def _summarise(
    config: ExperimentConfig, run: RunFolder, scorer: PreparedScorer | None, seeds: list[dict[str, Any]]
) -> dict[str, Any]:
    rates = [s["sampled"]["success_rate"] for s in seeds]
    first = seeds[0]
    return {
        "config": run.config_name,
        "description": config.description,
        "heldout_rho": None if scorer is None else scorer.heldout_rho,
        "heldout": None if scorer is None else scorer.heldout,
        "success_rate": float(np.mean(rates)),
        "success_interval": first["sampled"]["success_interval"] if len(seeds) == 1 else _over_seeds(rates),
        "greedy_success_rate": float(np.mean([s["greedy"]["success_rate"] for s in seeds])),
        "pass_at_5": first["sampled"]["pass_at_5"] if len(seeds) == 1 else None,
        "env_steps": sum(s["env_steps"] for s in seeds),
        "seeds": seeds,
        "run_dir": str(run.path),
    }


def _over_seeds(rates: list[float]) -> list[float]:
    """Mean of the seeds' rates with a 95 % bootstrap interval over seeds."""
    low, high = bootstrap_interval(rates, np.mean, np.random.default_rng(0))
    return [float(low), float(high)]


class Clock:
    """Wall and CPU seconds of a run, over all processes that worked on it; a killed one is not counted."""

    def __init__(self, run: RunFolder):
        """Starts; reads what former processes took."""
        self._run, self._started, self._works = run, time.perf_counter(), False
        try:
            self._former = json.loads((run.path / SECONDS_FILE).read_text())
        except (OSError, ValueError):
            self._former = {}

    def read(self) -> dict[str, float]:
        """'wall_seconds' and 'cpu_seconds', the latter with ended children (the simulator's workers)."""
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        spent = {
            "wall_seconds": time.perf_counter() - self._started,
            "cpu_seconds": float(sum(u.ru_utime + u.ru_stime for u in usage)),
        }
        return {name: seconds + self._former.get(name, 0.0) for name, seconds in spent.items()}

    def work(self) -> None:
        """Says that the checks are over: from here on the folder may change."""
        self._works = True

    def stop(self) -> None:
        """Leaves the seconds for the next process, if work began and the folder can still be written."""
        if self._works:
            with contextlib.suppress(StorageError):
                self._run.write_json(SECONDS_FILE, self.read())


def latest_state(config: ExperimentConfig, environment, folder: pathlib.Path):
    """The agent and its state from a run's newest checkpoint, for playing.

    Args:
      config: the run's experiment.
      environment: the environment that it will play in.
      folder: the run folder, or a seed's folder inside of it.

    Returns:
      (agent, agent_state, update).

    Raises:
      ConfigError: the run has no checkpoint yet.
      ModelError: the checkpoint is damaged or was made by another config.
    """
    store = CheckpointStore(folder / "checkpoints")
    run_folder = folder if config.seeds == 1 else folder.parent
    if store.latest_step() is None:
        raise ConfigError(f"{folder} has no checkpoint yet; train it first (--resume {run_folder})")
    # The agent alone: the state of another environment than the run's has other shapes.
    agent = PPO(config.agent)
    begin = functools.partial(agent.init, spec=environment.spec, total_updates=config.act.updates)
    state, metadata = store.restore(jax.eval_shape(begin, jax.random.key(0)), within=".agent")
    return agent, state, metadata["update"]
