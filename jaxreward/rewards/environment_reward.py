"""The environment's own reward, for baselines."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxreward.rewards.base import STREAM, FrozenReward
from jaxreward.types import Array, EnvironmentSpec, PyTree, Rollout


@dataclasses.dataclass(frozen=True)
class EnvironmentRewardConfig:
    """Settings of the baseline.

    Attributes:
      scale: the environment's reward is multiplied by this.
    """

    scale: float = 1.0


class EnvironmentReward(FrozenReward):
    """Passes the environment's reward on; privileged."""

    uses_env_reward = True

    def __init__(self, config: EnvironmentRewardConfig):
        """Binds the settings."""
        self.config = config

    def init(self, key: Array, spec: EnvironmentSpec) -> PyTree:
        """`scale` as data, float32 [], so that runs can be vmapped over it."""
        del key, spec
        return jnp.float32(self.config.scale)

    def settle(self, state: PyTree, rollout: Rollout, queries, scores, key: Array):
        """({'reward': float32 [T, B]}: `scale` times the environment's reward)."""
        del queries, scores, key
        return state, {STREAM: state * rollout.timestep.env_reward}, {}
