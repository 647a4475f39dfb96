"""BiMI: a binary reward above a threshold, scaled down where its instruction fires often (section 5)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.errors import ConfigError
from jaxreward.rewards.base import STREAM, Queries
from jaxreward.rewards.instructions import (
    InstructionConfig,
    InstructionReward,
    InstructionState,
    binary_step,
    similarities,
    walk,
)
from jaxreward.scorers.base import Scores
from jaxreward.types import Array, EnvironmentSpec, Rollout, TimeStep

# Below this frequency the logarithmic form grows no further.
LEAST_FREQUENCY = 1e-6


@dataclasses.dataclass(frozen=True)
class BiMIConfig(InstructionConfig):
    """Settings of the reward.

    Attributes:
      threshold: q of section 5.1, from `jaxreward.similarity.conformal_threshold`.
      strict: similarity must exceed it, as in the published code; else reach it, as in the paper.
      information: how the frequency p(l) scales a reward of 1. 'linear': max(1 - p, 0) (equation 3);
        'log': max(-log p, 0) (equation 1); 'none': the binary reward alone (Bi).
      frequency: where p(l) comes from. 'iteration': all trajectories of the previous rollout (equation 2);
        'episode': the previous episode of the same environment, over its steps in which l was not the active
        instruction (the published code).
      coefficient: multiplies p(l); 0.95 in the published code.
    """

    threshold: float = 0.5
    strict: bool = False
    information: Literal["linear", "log", "none"] = "linear"
    frequency: Literal["iteration", "episode"] = "iteration"
    coefficient: float = 1.0

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        super().__post_init__()
        if not -1 <= self.threshold <= 1:
            raise ConfigError(f"reward.threshold is {self.threshold}; expected a similarity in -1 .. 1")
        if not 0 < self.coefficient < float("inf"):
            raise ConfigError(f"reward.coefficient is {self.coefficient}; expected a number above 0")


@struct.dataclass
class BiMISettings:
    """Numeric settings as data."""

    threshold: Array  # float32 []
    coefficient: Array  # float32 []


@struct.dataclass
class Frequency:
    """How often each instruction has fired; B or 1 rows, as it is kept by environment or for all."""

    known: Array  # float32 [B or 1, L], p(l)
    fired: Array  # int32 [B, L], steps of the unfinished episode in which l fired (and was not active)
    steps: Array  # int32 [B], steps of the unfinished episode


@struct.dataclass
class BiMIState(InstructionState):
    """What reaches from one rollout into the next."""

    frequency: Frequency


def trajectory_frequency(fires: Array, done: Array) -> Array:
    """p(l) of equation (2): over trajectories, the mean share of steps in which an instruction fires.

    A trajectory is an episode, or the part of one that lies in the rollout.

    Args:
      fires: bool [T, B, L].
      done: bool [T, B], the episode ends with this step.

    Returns:
      float32 [L] in [0, 1].
    """
    ends = done.at[-1].set(True)

    def step(carry, inputs):
        count, length, total = carry
        fired, ended = inputs
        count, length = count + fired, length + 1
        share = count / length[:, None]
        total = total + jnp.where(ended[:, None], share, 0.0)
        return (
            jnp.where(ended[:, None], 0, count),
            jnp.where(ended, 0, length),
            total,
        ), None

    shape = fires.shape[1:]
    start = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape[0], jnp.int32), jnp.zeros(shape, jnp.float32))
    (_, _, total), _ = jax.lax.scan(step, start, (fires, ends))
    return total.sum(0) / ends.sum()


def informed(reward: Array, frequency: Array, information: str) -> Array:
    """Scales a binary reward by the frequency of its instruction.

    Args:
      reward: float32 [...], 0 or 1.
      frequency: float32 [...], p(l) times the coefficient; 0 for an instruction that never fired, whose
        reward stays as it is.
      information: 'linear', 'log' or 'none'.

    Returns:
      float32 [...], at least 0.
    """
    if information == "linear":
        return jnp.maximum(reward - frequency, 0.0)
    if information == "log":
        scaled = jnp.maximum(-jnp.log(jnp.maximum(frequency, LEAST_FREQUENCY)), 0.0)
        return reward * jnp.where(frequency > 0, scaled, 1.0)
    return reward


class BiMI(InstructionReward):
    """Binary, once for each instruction, and less for one that fires all the time."""

    def settings(self) -> BiMISettings:
        """The numbers of the config as data, float32 []."""
        return BiMISettings(jnp.float32(self.config.threshold), jnp.float32(self.config.coefficient))

    def init(self, key: Array, spec: EnvironmentSpec) -> BiMIState:
        """Starts all lists in B environments, with nothing known of frequencies."""
        instructions = len(self.config.instructions)
        base = super().init(key, spec)
        rows = spec.num_envs if self.config.frequency == "episode" else 1
        return BiMIState(
            base.settings,
            base.history,
            base.progress,
            Frequency(
                known=jnp.zeros((rows, instructions), jnp.float32),
                fired=jnp.zeros((spec.num_envs, instructions), jnp.int32),
                steps=jnp.zeros(spec.num_envs, jnp.int32),
            ),
        )

    def start(self, state: BiMIState, timestep: TimeStep) -> BiMIState:
        """Starts all lists anew; what is known of frequencies stays."""
        frequency = state.frequency
        return (
            super()
            .start(state, timestep)
            .replace(
                frequency=frequency.replace(
                    fired=jnp.zeros_like(frequency.fired), steps=jnp.zeros_like(frequency.steps)
                )
            )
        )

    def settle(
        self, state: BiMIState, rollout: Rollout, queries: Queries, scores: Scores, key: Array
    ) -> tuple[BiMIState, dict[str, Array], dict[str, Array]]:
        """Pays equation (3) for the active instruction of each step; see `Reward.settle`."""
        del key
        config, settings = self.config, state.settings
        similarity, done = similarities(queries, scores), rollout.timestep.done
        progress, binary, active = walk(
            state.progress, similarity, done,
            lambda before, now: binary_step(before, now, settings.threshold, strict=config.strict),
        )  # fmt: skip
        reaches = similarity > settings.threshold if config.strict else similarity >= settings.threshold
        if config.frequency == "iteration":
            known = jnp.broadcast_to(state.frequency.known, similarity.shape)
            frequency = state.frequency.replace(known=trajectory_frequency(reaches, done)[None])
        else:
            is_active = active[..., None] == jnp.arange(similarity.shape[-1])
            frequency, known = _previous_episodes(state.frequency, reaches & ~is_active, done)
        at = jnp.minimum(active, similarity.shape[-1] - 1)[..., None]
        own = jnp.take_along_axis(known, at, axis=-1)[..., 0]
        reward = informed(binary, settings.coefficient * own, config.information)
        metrics = {
            "reward/queries": queries.count,
            "reward/fired_share": binary.mean(),
            "reward/instruction": active.mean(),
            "reward/frequency": own.mean(),
        }
        return state.replace(progress=progress, frequency=frequency), {STREAM: reward}, metrics


def _previous_episodes(frequency: Frequency, fires: Array, done: Array) -> tuple[Frequency, Array]:
    """(frequencies after a rollout, those of the previous episode in each step, float32 [T, B, L])."""

    def step(before: Frequency, inputs):
        fired, ended = inputs
        count, steps = before.fired + fired, before.steps + 1
        after = Frequency(
            known=jnp.where(ended[:, None], count / steps[:, None], before.known),
            fired=jnp.where(ended[:, None], 0, count),
            steps=jnp.where(ended, 0, steps),
        )
        return after, before.known

    return jax.lax.scan(step, frequency, (fires, done))
