"""The sparse oracle: 1 on the step that reaches the goal (the paper's 'oracle reward', table 1)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxreward.rewards.base import STREAM, FrozenReward
from jaxreward.types import Array, EnvironmentSpec, PyTree, Rollout


@dataclasses.dataclass(frozen=True)
class SuccessConfig:
    """Settings of the oracle.

    Attributes:
      value: what the successful step pays.
    """

    value: float = 1.0


class Success(FrozenReward):
    """Pays on success; privileged, for comparison only."""

    uses_env_reward = True

    def __init__(self, config: SuccessConfig):
        """Binds the settings."""
        self.config = config

    def init(self, key: Array, spec: EnvironmentSpec) -> PyTree:
        """`value` as data, float32 [], so that runs can be vmapped over it."""
        del key, spec
        return jnp.float32(self.config.value)

    def settle(self, state: PyTree, rollout: Rollout, queries, scores, key: Array):
        """({'reward': float32 [T, B]}: `value` where `info['success']`, otherwise 0)."""
        del queries, scores, key
        reached = rollout.timestep.info["success"].astype(jnp.float32)
        return state, {STREAM: state * reached}, {}
