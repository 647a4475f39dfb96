"""Acting: T steps of B environments, as one scan or as a plain loop around a host simulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.types import Array, PyTree, Rollout, TimeStep


def unroll(
    environment,
    agent,
    agent_state: PyTree,
    environment_state: PyTree,
    timestep: TimeStep,
    memory: PyTree,
    key: Array,
    *,
    length: int,
    greedy: bool = False,
) -> tuple[PyTree, TimeStep, PyTree, Rollout]:
    """Acts for `length` steps in one scan; jittable, host environments included (by their callback).

    Args:
      environment: the environment.
      agent: the agent.
      agent_state: its state; not changed by acting.
      environment_state: the environment's state.
      timestep: the latest [B, ...] time step.
      memory: the agent's memory, [B, ...].
      key: a typed key; step t uses `fold_in(key, t)`.
      length: T.
      greedy: take the most likely action.

    Returns:
      The environment's state, the latest time step, the memory, and the rollout [T, B, ...].
    """

    def step(carry, t):
        environment_state, timestep, memory = carry
        memory, action, extras = agent.act(
            agent_state, memory, timestep, jax.random.fold_in(key, t), greedy=greedy
        )
        environment_state, timestep = environment.step(environment_state, action)
        return (environment_state, timestep, memory), (action, timestep, extras)

    carry = (environment_state, timestep, memory)
    (environment_state, latest, latest_memory), (action, timesteps, extras) = jax.lax.scan(
        step, carry, jnp.arange(length)
    )
    return environment_state, latest, latest_memory, Rollout(timestep, memory, action, timesteps, extras)


def make_host_unroll(environment, agent, *, length: int, greedy: bool = False):
    """Makes `unroll` for a host environment as a plain loop around the jitted `act`.

    The same keys give the same rollout as `unroll`; it saves the callback machinery and lets the
    compiled policy be cached.

    Returns:
      A function of (agent_state, environment_state, timestep, memory, key), as `unroll`.
    """

    @jax.jit
    def act(agent_state, memory, timestep, key, t):
        return agent.act(agent_state, memory, timestep, jax.random.fold_in(key, t), greedy=greedy)

    def run(agent_state, environment_state, timestep, memory, key):
        del environment_state  # the simulators hold it; `host_state` gives it back at the end
        first_timestep, first_memory = timestep, memory
        actions, timesteps, extras = [], [], []
        for t in range(length):
            memory, action, extra = act(agent_state, memory, timestep, key, jnp.int32(t))
            timestep = environment.host_step(np.asarray(action))
            actions.append(action)
            timesteps.append(timestep)
            extras.append(extra)
        rollout = Rollout(first_timestep, first_memory, *stack((actions, timesteps, extras)))
        return environment.host_state(), timestep, memory, rollout

    return run


@jax.jit
def stack(parts: PyTree) -> PyTree:
    """Stacks lists of equal pytrees along a new leading time axis."""
    return jax.tree.map(
        _stack_leaves,
        parts,
        is_leaf=lambda x: isinstance(x, list),
    )


def _stack_leaves(items: list) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)
