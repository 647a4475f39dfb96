"""A list of instructions with a pointer for each environment, and the soft reward of Pixl2R and ELLM-.

BiMI's paper, appendix A.3, "Instruction-Guide Procedure": one instruction is active at a time. A soft reward
pays similarity that exceeds the best so far, up to a cap, and then goes on to the next instruction; a binary
one goes on when it fires (`jaxreward.rewards.bimi`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.errors import ConfigError
from jaxreward.rewards.base import STREAM, FrozenReward, Queries
from jaxreward.rewards.windows import due_windows, empty_history
from jaxreward.scorers.base import Scores
from jaxreward.types import Array, EnvironmentSpec, PyTree, Rollout, TimeStep

# Of a query that could not be scored: it pays nothing and fires nothing.
NO_SIMILARITY = -jnp.inf


@struct.dataclass
class Progress:
    """Where each environment is in its list of instructions."""

    pointer: Array  # int32 [B], the active instruction; L when all of them are behind
    paid: Array  # float32 [B], soft rewards for the active instruction so far
    best: Array  # float32 [B], its largest similarity so far


def no_progress(num_envs: int) -> Progress:
    """The start of an episode in B environments."""
    return Progress(
        pointer=jnp.zeros(num_envs, jnp.int32),
        paid=jnp.zeros(num_envs, jnp.float32),
        best=jnp.zeros(num_envs, jnp.float32),
    )


def active_similarity(similarity: Array, pointer: Array) -> Array:
    """The similarity of each environment's active instruction.

    Args:
      similarity: float32 [B, L].
      pointer: int32 [B] in 0 .. L.

    Returns:
      float32 [B]; -inf where no instruction is left.
    """
    count = similarity.shape[-1]
    at = jnp.minimum(pointer, count - 1)[:, None]
    found = jnp.take_along_axis(similarity, at, axis=-1)[:, 0]
    return jnp.where(pointer < count, found, NO_SIMILARITY)


@struct.dataclass
class SoftSettings:
    """Numeric settings as data."""

    floor: Array  # float32 []
    decay: Array  # float32 []
    cap: Array  # float32 []


def soft_step(progress: Progress, similarity: Array, settings: SoftSettings) -> tuple[Progress, Array]:
    """Pays what exceeds the best so far; the published code of BiMI for its soft baselines.

    A similarity above `floor` pays max(similarity - decay * best, 0). When more than `cap` has been paid for
    an instruction, the next one is active.

    Args:
      progress: before the step.
      similarity: float32 [B, L].
      settings: the numbers.

    Returns:
      (progress, reward float32 [B], at least 0).
    """
    now = active_similarity(similarity, progress.pointer)
    counts = now > settings.floor
    reward = jnp.where(counts, jnp.maximum(now - settings.decay * progress.best, 0.0), 0.0)
    paid = progress.paid + reward
    best = jnp.where(counts, jnp.maximum(progress.best, now), progress.best)
    full = paid > settings.cap
    return (
        Progress(
            pointer=progress.pointer + full,
            paid=jnp.where(full, 0.0, paid),
            best=jnp.where(full, 0.0, best),
        ),
        reward,
    )


def binary_step(
    progress: Progress, similarity: Array, threshold: Array, *, strict: bool = False
) -> tuple[Progress, Array]:
    """Pays 1 once when the active instruction's similarity reaches the threshold (section 5.1).

    Args:
      progress: before the step.
      similarity: float32 [B, L].
      threshold: float32 [], q of section 5.1.
      strict: it must be exceeded, as in the published code.

    Returns:
      (progress, reward float32 [B], 0 or 1).
    """
    now = active_similarity(similarity, progress.pointer)
    fired = now > threshold if strict else now >= threshold
    return progress.replace(pointer=progress.pointer + fired), fired.astype(jnp.float32)


def similarities(queries: Queries, scores: Scores) -> Array:
    """Scores of a query for every step, as float32 [T, B, L]; -inf where there is none.

    Args:
      queries: of all steps of a rollout.
      scores: values [Q, L], a similarity to each of L instructions.
    """
    asked = (jnp.arange(scores.valid.shape[0]) < queries.count) & scores.valid
    values = jnp.where(asked[:, None] & ~jnp.isnan(scores.values), scores.values, NO_SIMILARITY)
    return values.reshape(*queries.shape, -1)


def walk(
    progress: Progress,
    similarity: Array,
    done: Array,
    step: Callable[[Progress, Array], tuple[Progress, Array]],
) -> tuple[Progress, Array, Array]:
    """Takes a step of the pointer at each step of a rollout; an episode's end starts the list anew.

    Args:
      progress: before the rollout.
      similarity: float32 [T, B, L].
      done: bool [T, B].
      step: `soft_step` or `binary_step` with its settings.

    Returns:
      (progress, reward float32 [T, B], int32 [T, B], the instruction that was active in each step).
    """
    fresh = no_progress(done.shape[1])

    def advance(before: Progress, inputs: tuple[Array, Array]):
        now, ended = inputs
        after, reward = step(before, now)
        after = jax.tree.map(lambda a, b: jnp.where(ended, a, b), fresh, after)
        return after, (reward, before.pointer)

    progress, (reward, active) = jax.lax.scan(advance, progress, (similarity, done))
    return progress, reward, active


@dataclasses.dataclass(frozen=True)
class InstructionConfig:
    """What every reward from instructions needs.

    Attributes:
      instructions: L sentences, in the order in which they are to be fulfilled.
      frames: K, the newest frames of the episode that are compared with them.
    """

    instructions: tuple[str, ...] = ()
    frames: int = 10

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        if self.frames < 1:
            raise ConfigError(f"reward.frames is {self.frames}; expected at least 1")
        for number, sentence in enumerate(self.instructions):
            if not sentence.strip():
                raise ConfigError(f"reward.instructions[{number}] is empty; expected a sentence")


@dataclasses.dataclass(frozen=True)
class SoftInstructionConfig(InstructionConfig):
    """Settings of the soft reward.

    Attributes:
      floor: similarities up to this pay nothing.
      decay: how much of the best similarity so far is subtracted.
      cap: the most that is paid for an instruction before the next one is active.
    """

    floor: float = 0.1
    decay: float = 0.5
    cap: float = 2.0

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        super().__post_init__()
        for name in ("floor", "decay", "cap"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"reward.{name} is {getattr(self, name)}; expected a number of at least 0")


@struct.dataclass
class InstructionState:
    """What reaches from one rollout into the next."""

    settings: PyTree  # numbers of the reward
    history: PyTree  # [M, B, ...] the compact frames before the rollout, newest last
    progress: Progress


class InstructionReward(FrozenReward):
    """Asks for the similarity of each step's newest frames to every instruction; subclasses pay for it."""

    needs_scorer = True

    def __init__(self, config: InstructionConfig):
        """Binds the settings.

        Raises:
          ConfigError: no instructions.
        """
        if not config.instructions:
            raise ConfigError("reward.instructions is empty; expected at least one sentence")
        self.config = config

    @property
    def slots(self) -> int:
        """K, the static number of frames in a query."""
        return self.config.frames

    def settings(self) -> PyTree:
        """The numbers of the config as data."""
        raise NotImplementedError

    def init(self, key: Array, spec: EnvironmentSpec) -> InstructionState:
        """Starts all lists in B environments."""
        del key
        # The frame before the rollout and the newest one come with the rollout itself.
        history = empty_history(spec, max(self.config.frames - 2, 1))
        return InstructionState(self.settings(), history, no_progress(spec.num_envs))

    def start(self, state: InstructionState, timestep: TimeStep) -> InstructionState:
        """Starts all lists anew."""
        del timestep
        return state.replace(progress=jax.tree.map(jnp.zeros_like, state.progress))

    def propose(
        self, state: InstructionState, rollout: Rollout, key: Array
    ) -> tuple[InstructionState, Queries]:
        """A query for every step, in the order of time, of the newest K frames of its episode."""
        del key
        slot = jnp.arange(self.config.frames)

        def positions(elapsed: Array) -> tuple[Array, Array]:
            size = jnp.minimum(self.config.frames, elapsed + 1)[:, None]
            where = slot < size
            return jnp.where(where, elapsed[:, None] + 1 - size + slot, elapsed[:, None]), where

        due = jnp.ones_like(rollout.timestep.done)
        history, queries = due_windows(state.history, rollout, due, positions)
        return state.replace(history=history), queries


class SoftInstructionReward(InstructionReward):
    """Similarity above the best so far, up to a cap: Pixl2R and ELLM- differ in what they look at."""

    def settings(self) -> SoftSettings:
        """The numbers of the config as data, float32 []."""
        config = self.config
        return SoftSettings(jnp.float32(config.floor), jnp.float32(config.decay), jnp.float32(config.cap))

    def settle(
        self, state: InstructionState, rollout: Rollout, queries: Queries, scores: Scores, key: Array
    ) -> tuple[InstructionState, dict[str, Array], dict[str, Array]]:
        """Pays `soft_step` at every step; see `Reward.settle`."""
        del key
        similarity = similarities(queries, scores)
        progress, reward, active = walk(
            state.progress, similarity, rollout.timestep.done,
            lambda before, now: soft_step(before, now, state.settings),
        )  # fmt: skip
        metrics = {
            "reward/queries": queries.count,
            "reward/paid_share": (reward > 0).mean(),
            "reward/instruction": active.mean(),
        }
        return state.replace(progress=progress), {STREAM: reward}, metrics
