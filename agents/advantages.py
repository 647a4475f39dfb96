"""Advantage estimation and standardisation on [T, B] rollouts with same-step auto-reset."""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from jaxreward.types import Array

Horizon = Literal["terminal", "bootstrap"]


def generalised_advantages(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    discount: Array | float,
    trace: Array | float,
    horizon: Horizon = "terminal",
) -> Array:
    """Estimates advantages by GAE(γ, λ), with termination and truncation apart.

    For t = T - 1, ..., 0, with s'ₜ₊₁ the state that action t led to, before any reset:

        δₜ = rₜ₊₁ + γ cₜ₊₁ v(s'ₜ₊₁) - v(sₜ)
        Aₜ = δₜ + γ λ (1 - dₜ₊₁) Aₜ₊₁,      A_T = 0

    dₜ₊₁ is 1 where the episode ended in step t, for whichever reason: the trace never crosses into the
    next episode. cₜ₊₁ is 0 where the future is worth nothing:

    - horizon 'terminal': at both kinds of end. The time limit is part of the task and the critic must
      know the time.
    - horizon 'bootstrap': where the episode terminated. A truncated episode would have gone on.

    Args:
      rewards: float32 [T, B], rₜ₊₁, the reward of action t.
      values: float32 [T, B], v(sₜ).
      next_values: float32 [T, B], v(s'ₜ₊₁): of the final observation where an episode ended, else of the
        next one. Ignored where cₜ₊₁ is 0.
      terminated: bool [T, B], the episode ended by itself in step t.
      truncated: bool [T, B], the episode was cut by its time limit in step t.
      discount: γ in [0, 1].
      trace: λ in [0, 1]; 0 is one-step TD, 1 is Monte Carlo.
      horizon: 'terminal' or 'bootstrap'.

    Returns:
      float32 [T, B]; advantages + values are the TD(λ) returns.

    Source: Schulman et al., 2016, equation (16); Pardo et al., 2018, for time limits.
    """
    chex.assert_rank([rewards, values, next_values, terminated, truncated], 2)
    chex.assert_equal_shape([rewards, values, next_values, terminated, truncated])
    chex.assert_type([rewards, values, next_values, terminated, truncated], [float, float, float, bool, bool])
    done = terminated | truncated
    worthless = done if horizon == "terminal" else terminated
    errors = rewards + discount * jnp.where(worthless, 0.0, next_values) - values
    decay = discount * trace * (1.0 - done.astype(errors.dtype))

    def backwards(advantage, step):
        error, decay = step
        advantage = error + decay * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(backwards, jnp.zeros_like(errors[0]), (errors, decay), reverse=True)
    return advantages


def episode_totals(values: Array, done: Array) -> Array:
    """Sums values over the part of each episode that lies in the rollout.

    Args:
      values: float32 [T, B].
      done: bool [T, B], the episode ended in step t; step t + 1 is of the next episode.

    Returns:
      float32 [T, B], at every step the sum over all steps of the same episode and environment.
    """
    # Two scans instead of a segment sum: no scatter-add, so the result is the same in every run on GPU.
    starts = jnp.concatenate([jnp.ones_like(done[:1]), done[:-1]])
    ends = jnp.concatenate([done[:-1], jnp.ones_like(done[:1])])

    def accumulate(total, step):
        value, start = step
        total = jnp.where(start, 0.0, total) + value
        return total, total

    def spread(total, step):
        running, end = step
        total = jnp.where(end, running, total)
        return total, total

    zeros = jnp.zeros_like(values[0])
    _, running = jax.lax.scan(accumulate, zeros, (values, starts))
    _, totals = jax.lax.scan(spread, zeros, (running, ends), reverse=True)
    return totals


def standardise(
    advantages: Array,
    done: Array,
    *,
    per: Literal["batch", "episode"] = "batch",
    floor: float | Array = 0.0,
    where: Array | None = None,
) -> Array:
    """Shifts and scales advantages to mean 0 and (population) standard deviation 1, or less under `floor`.

    A group without spread, such as an episode of a single step, becomes 0: it says nothing about which
    action was better. An episode that is only partly in the rollout is standardised over that part.

    Args:
      advantages: float32 [T, B].
      done: bool [T, B], the episode ended in step t.
      per: 'batch' (one mean and deviation for all steps) or 'episode' (one for each episode; Rank-Then-Act,
        appendix A.4).
      floor: the smallest deviation that is scaled up to 1, in units of the reward. Once every episode
        earns the same, what is left is noise of the value estimates; blown up to 1 it drives a policy
        away from a solved task.
      where: bool [T, B], the steps that count; the others become 0. All by default.

    Returns:
      float32 [T, B].
    """
    chex.assert_rank([advantages, done], 2)
    chex.assert_equal_shape([advantages, done])
    weights = jnp.ones_like(advantages) if where is None else where.astype(advantages.dtype)
    advantages = jnp.where(weights > 0, advantages, 0.0)
    total = jnp.sum if per == "batch" else lambda values: episode_totals(values, done)
    count = jnp.maximum(total(weights), 1.0)
    mean = total(advantages) / count
    centred = (advantages - mean) * weights
    variance = total(jnp.square(centred)) / count
    mean_square = total(jnp.square(advantages)) / count
    # Below this the deviation is float32 rounding error of the mean, not a difference between steps.
    has_spread = variance > 1e-10 * mean_square
    deviation = jnp.maximum(jnp.sqrt(jnp.where(has_spread, variance, 1.0)), floor)
    scale = jnp.where(has_spread, 1.0 / deviation, 0.0)
    return centred * scale
