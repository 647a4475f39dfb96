"""A constant reward: the control that a learned reward must beat."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jaxreward.rewards.base import STREAM, FrozenReward
from jaxreward.types import Array, EnvironmentSpec, PyTree, Rollout


@dataclasses.dataclass(frozen=True)
class ConstantConfig:
    """Settings of the control.

    Attributes:
      value: what is paid.
      when: 'end' pays once, on the last step of an episode, however it ends; 'step' pays on every step.
    """

    value: float = 1.0
    when: Literal["end", "step"] = "end"


class Constant(FrozenReward):
    """Pays the same whatever the agent does."""

    def __init__(self, config: ConstantConfig):
        """Binds the settings."""
        self.config = config

    def init(self, key: Array, spec: EnvironmentSpec) -> PyTree:
        """`value` as data, float32 [], so that runs can be vmapped over it."""
        del key, spec
        return jnp.float32(self.config.value)

    def settle(self, state: PyTree, rollout: Rollout, queries, scores, key: Array):
        """({'reward': float32 [T, B]}: `value` on the chosen steps)."""
        del queries, scores, key
        done = rollout.timestep.done
        paid = done if self.config.when == "end" else jnp.ones_like(done)
        return state, {STREAM: state * paid.astype(jnp.float32)}, {}
