"""The Reward protocol and the queries that a reward asks of a scorer.

A reward is settled on whole rollouts, after acting and before learning, in three pure steps:
`propose` says which frames a scorer must judge, the training loop has them judged in large batches,
`settle` turns the answers into a reward for each step.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct

from jaxreward.scorers.base import Scores
from jaxreward.types import Array, EnvironmentSpec, Experience, PyTree, Rollout

STREAM = "reward"


@struct.dataclass
class Queries:
    """The windows of a rollout that are due, as references into one table of compact frames.

    There is a row for every step and environment (Q = T * B), so nothing can overflow; the first
    `count` rows are due, the others are padding. A row costs a few integers: pictures are rendered
    only for the rows that are being scored.
    """

    table: PyTree  # [R, B, ...] compact frames
    index: Array  # int32 [Q, K], rows of `table`, in the order in which the scorer sees them
    environment: Array  # int32 [Q], column of `table`
    time: Array  # int32 [Q, K], chronological position of each frame within its window
    where: Array  # bool [Q, K], False for slots that hold no frame; slot 0 is the anchor
    step: Array  # int32 [Q], t * B + b of the step that is rewarded; T * B for padding
    count: Array  # int32 [], how many rows are due
    shape: tuple[int, int] = struct.field(pytree_node=False)  # (T, B)


@runtime_checkable
class Reward(Protocol):
    """A reward; numeric settings are leaves of its state, so that states can be vmapped over settings."""

    needs_scorer: bool  # False: `propose` returns no queries and no scorer is called
    uses_env_reward: bool  # True: reads env_reward or success, and the run's header says so

    def init(self, key: Array, spec: EnvironmentSpec) -> PyTree:
        """Makes the reward's state for B environments."""
        ...

    def start(self, state: PyTree, timestep) -> PyTree:
        """Forgets unfinished episodes: all environments were just reset to `timestep`."""
        ...

    def propose(self, state: PyTree, rollout: Rollout, key: Array) -> tuple[PyTree, Queries | None]:
        """Says which windows of the rollout are due; never waits for scores."""
        ...

    def settle(
        self, state: PyTree, rollout: Rollout, queries: Queries | None, scores: Scores | None, key: Array
    ) -> tuple[PyTree, dict[str, Array], dict[str, Array]]:
        """Turns scores into rewards: (state, {stream: float32 [T, B]}, scalar metrics).

        It changes no part of the state that `propose` reads, so that the next rollout can be proposed
        while this one is being scored.
        """
        ...

    def learn(self, state: PyTree, experience: Experience, key: Array) -> tuple[PyTree, dict[str, Array]]:
        """Trains the reward's own model, if it has one."""
        ...


class FrozenReward:
    """Defaults for rewards that never learn; to ask a scorer, override `needs_scorer` and `propose`."""

    needs_scorer = False
    uses_env_reward = False

    def init(self, key: Array, spec: EnvironmentSpec) -> PyTree:
        """No state."""
        return ()

    def start(self, state: PyTree, timestep) -> PyTree:
        """Nothing to forget."""
        return state

    def propose(self, state: PyTree, rollout: Rollout, key: Array) -> tuple[PyTree, Queries | None]:
        """No queries."""
        return state, None

    def learn(self, state: PyTree, experience: Experience, key: Array) -> tuple[PyTree, dict[str, Array]]:
        """Nothing to learn."""
        return state, {}


def scatter_steps(queries: Queries, values: Array) -> Array:
    """Adds one value a query to the step that it rewards.

    Args:
      queries: Q queries of a rollout of T steps and B environments.
      values: float32 [Q].

    Returns:
      float32 [T, B], zero where no query is due.
    """
    steps, num_envs = queries.shape
    flat = jnp.zeros(steps * num_envs, values.dtype).at[queries.step].add(values, mode="drop")
    return flat.reshape(steps, num_envs)
