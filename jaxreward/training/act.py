"""Stage 2, act: train an agent on a frozen scorer's reward, with metrics, checkpoints and resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxreward.errors import ConfigError
from jaxreward.training.loop import Loop, TrainingState
from jaxreward.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class ActConfig:
    """Settings of Stage 2.

    Attributes:
      updates: rollouts that are acted and learned from.
      checkpoint_every: updates between checkpoints.
      keep_checkpoints: how many of them are kept.
    """

    updates: int = 60
    checkpoint_every: int = 10
    keep_checkpoints: int = 3

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        for field in ("updates", "checkpoint_every", "keep_checkpoints"):
            found = getattr(self, field)
            if found < 1:
                raise ConfigError(f"act.{field} is {found}; expected at least 1")


class Interrupted(Exception):  # noqa: N818  (it is no error: the state is saved)
    """The user interrupted the run; everything is saved."""


@contextlib.contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a flag that the training loop asks for; a second one kills."""
    asked = []
    former = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def note(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        # print would not be safe here: the signal may strike inside another print
        os.write(2, b"\nstopping at the next safe point; once more stops at once\n")

    for s in former:
        signal.signal(s, note)
    try:
        yield lambda: bool(asked)
    finally:
        for s, handler in former.items():
            signal.signal(s, handler)


def act(
    loop: Loop,
    key: Array,
    config: ActConfig,
    *,
    store,
    record: Callable[[dict[str, float]], None],
    resume: Callable[[int], None],
    params: PyTree = None,
    context: PyTree = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> TrainingState:
    """Runs updates until `config.updates`, from the last checkpoint if there is one.

    A checkpoint is a boundary for an environment that cannot be saved: new episodes start there in
    every run, killed or not, so that a resumed run equals an uninterrupted one bit for bit (on CPU). The
    checkpoint that an interruption adds is a boundary that an uninterrupted run has not.

    Args:
      loop: the wired parts.
      key: the run's key; ignored when a checkpoint exists.
      config: the settings.
      store: a CheckpointStore.
      record: called once an update with its metrics as Python numbers.
      resume: called with the update that a resumed run starts from, before anything is recorded.
      params: the scorer's parameters.
      context: what the scorer's `prepare` returned.
      interrupted: asked after each update; when True the state is saved and Interrupted is raised.

    Returns:
      The final training state.

    Raises:
      Interrupted: after saving.
      StorageError: a checkpoint could not be written; the former ones are kept.
    """
    state, seconds = loop.init(key), 0.0
    if store.latest_step() is not None:
        state, metadata = store.restore(state)
        seconds = float(metadata["seconds"])
        state = _boundary(loop, state)
        resume(int(state.update))
    update, start, pending = int(state.update), time.perf_counter() - seconds, None
    while update < config.updates:
        state, metrics, phases = loop.update(state, params, context)
        update += 1
        if pending is not None:
            record(_numbers(*pending))
        elapsed = time.perf_counter() - start
        pending = (update, update * loop.steps_per_update, elapsed, metrics, phases)
        stop = interrupted() and update < config.updates
        if update % config.checkpoint_every == 0 or update == config.updates or stop:
            record(_numbers(*pending))
            pending = None
            store.save(update, state, {"update": update, "seconds": time.perf_counter() - start})
            if stop:
                raise Interrupted
            if update < config.updates:
                state = _boundary(loop, state)
    return state


def _boundary(loop: Loop, state: TrainingState) -> TrainingState:
    return state if loop.environment.can_save else loop.restart_episodes(state)


def _numbers(
    update: int, env_steps: int, elapsed: float, metrics: dict[str, Array], phases: dict[str, float]
) -> dict[str, float]:
    """One record of metrics.jsonl; waits for the device."""
    values = {name: np.asarray(value).item() for name, value in jax.device_get(metrics).items()}
    phases = {f"seconds/{name}": value for name, value in phases.items()}
    return {"update": update, "env_steps": env_steps, "seconds": elapsed, **values, **phases}


def hacking_warning(records: list[dict[str, float]], expert_reward: float, window: int = 10) -> str | None:
    """Says so when the reward is high and success is zero: the signature of a hacked reward.

    Args:
      records: the run's metrics, oldest first.
      expert_reward: what expert clips earn (preflight).
      window: how many of the last updates are averaged.

    Returns:
      One line, or None.
    """
    tail = [r for r in records[-window:] if r.get("return") is not None and not math.isnan(r["return"])]
    if not tail:
        return None
    reward = float(np.mean([r["return"] for r in tail]))
    success = float(np.mean([r["success"] for r in tail]))
    if success < 0.05 and expert_reward > 0 and reward > 0.8 * expert_reward:
        return (
            f"the reward is {reward:.2f} (an expert earns {expert_reward:.2f}) while success is "
            f"{success:.2f}: the policy has found a way to earn it without solving the task"
        )
    return None
