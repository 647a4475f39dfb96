"""Windows of frames that reach back over rollout boundaries and never over episode boundaries."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxreward.rewards.base import Queries
from jaxreward.types import Array, EnvironmentSpec, PyTree, Rollout, previous


def elapsed_steps(rollout: Rollout) -> Array:
    """int32 [T, B]: t after each step; the states of its episode so far are s_0 .. s_t."""
    return previous(rollout.first_timestep.episode_step, rollout.timestep.episode_step) + 1


def empty_history(spec: EnvironmentSpec, length: int) -> PyTree:
    """Room for `length` compact frames of each environment before a rollout, [length, B, ...]."""
    return jax.tree.map(lambda s: jnp.zeros((length, spec.num_envs, *s.shape), s.dtype), spec.frame)


def due_windows(
    history: PyTree,
    rollout: Rollout,
    due: Array,
    positions: Callable[[Array], tuple[Array, Array]],
) -> tuple[PyTree, Queries]:
    """Collects the windows of the steps that are due, in chronological order.

    Args:
      history: [M, B, ...] compact frames before the rollout, newest last; what a window needs of them.
      rollout: T steps of B environments.
      due: bool [T, B].
      positions: from t int32 [Q], how many steps old each window's episode is, to the positions in the
        episode of its frames, int32 [Q, K] in 0 .. t, and where there is one, bool [Q, K].

    Returns:
      (the history before the next rollout, queries): Q = T * B, the first `count` of them due.
    """
    steps, num_envs = due.shape
    before = previous(rollout.first_timestep.frame, rollout.timestep.frame)
    timeline = jax.tree.map(lambda h, f: jnp.concatenate([h, f]), history, before)
    table = jax.tree.map(
        lambda line, last: jnp.concatenate([line, last]), timeline, rollout.timestep.final_frame
    )
    length = jax.tree.leaves(history)[0].shape[0]
    flat = jnp.nonzero(due.reshape(-1), size=steps * num_envs, fill_value=steps * num_envs)[0]
    row = jnp.minimum(flat, steps * num_envs - 1)
    moment, environment = row // num_envs, row % num_envs
    elapsed = elapsed_steps(rollout).reshape(-1)[row]
    position, where = positions(elapsed)

    age = elapsed[:, None] - position  # steps between a frame and the newest one
    newest = length + steps + moment[:, None]
    index = jnp.where(age == 0, newest, length + moment[:, None] + 1 - age)
    queries = Queries(
        table=table,
        index=jnp.clip(index, 0, length + 2 * steps - 1).astype(jnp.int32),
        environment=environment.astype(jnp.int32),
        time=position.astype(jnp.int32),
        where=where & (flat < steps * num_envs)[:, None],
        step=flat.astype(jnp.int32),
        count=due.sum(dtype=jnp.int32),
        shape=(steps, num_envs),
    )
    return jax.tree.map(lambda line: line[line.shape[0] - length :], timeline), queries
