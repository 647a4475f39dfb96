"""What a run is about to do: steps, scorer calls, time and memory, before it does it."""

from __future__ import annotations

import math
import time

import jax
from rich.console import Console

from jaxreward.training.loop import Loop
from jaxreward.types import PyTree


def announce(config, environment, run, console: Console) -> None:
    """Prints what a run will do, as far as it is known before anything has been measured.

    Args:
      config: an ExperimentConfig.
      environment: its environment.
      run: its RunFolder.
      console: where to print.
    """
    steps = config.act.updates * config.loop.rollout_length * environment.spec.num_envs
    ready = (run.path / "scorer").exists()
    if config.scorer == "train" and not ready:
        rank = config.vlm_rank if config.vlm.model else config.rank
        console.print(
            f"to do: Stage 1, {rank.steps} steps of {rank.batch_size} clips of {rank.clips.length} frames; "
            f"Stage 2, {config.seeds} x {steps:,} environment steps; 2 evaluations of {config.eval_episodes} "
            "episodes each"
        )
    else:
        console.print(
            f"to do: {config.seeds} x {steps:,} environment steps; 2 evaluations of {config.eval_episodes} "
            "episodes each"
        )


def describe_plan(
    config, loop: Loop, params: PyTree, context: PyTree, console: Console, *, seed: int, done: int
) -> None:
    """Prints the plan of Stage 2; the time is measured on two trial updates of a throw-away state.

    Args:
      config: an ExperimentConfig.
      loop: the wired parts.
      params: the scorer's parameters.
      context: the scorer's context.
      console: where to print.
      seed: the seed that is about to be trained.
      done: updates that a former process finished.
    """
    spec, updates = loop.environment.spec, config.act.updates
    steps = updates * loop.steps_per_update
    state = loop.init(jax.random.key(0))
    memory = sum(x.nbytes for x in jax.tree.leaves((state.replace(key=None), params)))
    started = time.perf_counter()
    state, metrics, _ = loop.update(state, params, context)
    jax.block_until_ready(metrics)
    first = time.perf_counter() - started
    started = time.perf_counter()
    state, metrics, _ = loop.update(state, params, context)
    jax.block_until_ready(metrics)
    each = time.perf_counter() - started
    queries = int(metrics.get("reward/queries", 0))
    frame_bytes = sum(
        x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves((spec.frame, spec.observation))
    )
    rollout = 2 * frame_bytes * loop.steps_per_update
    left = updates - done
    console.print(
        f"Stage 2 (act), seed {seed}: {spec.task}\n"
        f"  {updates} updates of {loop.config.rollout_length} steps in {spec.num_envs} environments = "
        f"{steps:,} environment steps"
        + (f"; {done} updates are done" if done else "")
        + f"\n  scorer calls: about {queries} windows an update, {queries * updates:,} in all"
        f"\n  time: about {left * each:.0f} s ({each:.2f} s an update, after {max(first - each, 0):.0f} s of "
        f"compilation); memory: {(memory + 2 * rollout) / 1e6:.0f} MB of states and rollouts"
    )
