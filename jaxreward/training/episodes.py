"""Episode statistics of training rollouts: success, length, and reward on wins and on failures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.types import Array, Rollout, previous


@struct.dataclass
class EpisodeTally:
    """The unfinished episodes' returns, carried over rollout boundaries."""

    episode_return: Array  # float32 [B], reward so far in the current episode
    episode_env_return: Array  # float32 [B], environment reward so far
    reached: Array  # bool [B], success so far in the current episode


def empty_tally(num_envs: int) -> EpisodeTally:
    """A tally of B episodes that have just begun."""
    zeros = jnp.zeros(num_envs, jnp.float32)
    return EpisodeTally(zeros, zeros, jnp.zeros(num_envs, bool))


def tally_episodes(
    tally: EpisodeTally, rollout: Rollout, reward: Array
) -> tuple[EpisodeTally, dict[str, Array]]:
    """Adds a rollout and summarises the episodes that ended in it.

    Args:
      tally: what the former rollouts left unfinished.
      rollout: T steps of B environments.
      reward: float32 [T, B], the sum of the reward's streams.

    Returns:
      The new tally, and scalars over the ended episodes: `episodes`, `successes`, `success`, `return`,
      `return_on_wins`, `return_on_failures`, `env_return`, `length`. Means over no episode are NaN.
    """
    steps = rollout.timestep
    length = previous(rollout.first_timestep.episode_step, steps.episode_step) + 1

    def step(carry, inputs):
        value, env_value, success, done = inputs
        carry = EpisodeTally(
            carry.episode_return + value, carry.episode_env_return + env_value, carry.reached | success
        )
        keep = jax.tree.map(lambda x: jnp.where(done, jnp.zeros_like(x), x), carry)
        return keep, carry

    inputs = (reward, steps.env_reward, steps.info["success"], steps.done)
    tally, at_step = jax.lax.scan(step, tally, inputs)
    done = steps.done
    won, lost = done & at_step.reached, done & ~at_step.reached

    def mean(x, where):
        return jnp.where(where, x, 0.0).sum() / where.sum()

    return tally, {
        "episodes": done.sum(),
        "successes": won.sum(),
        "success": mean(at_step.reached.astype(jnp.float32), done),
        "return": mean(at_step.episode_return, done),
        "return_on_wins": mean(at_step.episode_return, won),
        "return_on_failures": mean(at_step.episode_return, lost),
        "env_return": mean(at_step.episode_env_return, done),
        "length": mean(length.astype(jnp.float32), done),
    }
