"""Advantages against hand-computed numbers and a float64 reference written from the definition."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.agents.advantages import episode_totals, generalised_advantages, standardise

jitted_standardise = jax.jit(standardise, static_argnames="per")


def reference(rewards, values, next_values, terminated, truncated, discount, trace, horizon):
    """Each advantage as the explicit sum over the rest of its episode, in float64."""
    steps, num_envs = rewards.shape
    advantages = np.zeros((steps, num_envs))
    for b in range(num_envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                ends = terminated[k, b] or (horizon == "terminal" and truncated[k, b])
                future = 0.0 if ends else discount * float(next_values[k, b])
                advantages[t, b] += weight * (float(rewards[k, b]) + future - float(values[k, b]))
                if terminated[k, b] or truncated[k, b]:
                    break
                weight *= discount * trace
    return advantages


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    discount=st.floats(0.0, 1.0),
    trace=st.floats(0.0, 1.0),
    horizon=st.sampled_from(["terminal", "bootstrap"]),
)
def test_advantages_equal_the_definition(seed, discount, trace, horizon):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, 9, 4)).astype(np.float32)
    terminated = rng.random((9, 4)) < 0.2
    truncated = (rng.random((9, 4)) < 0.2) & ~terminated
    expected = reference(rewards, values, next_values, terminated, truncated, discount, trace, horizon)
    found = generalised_advantages(
        rewards, values, next_values, terminated, truncated, discount, trace, horizon
    )
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def column(*numbers, dtype=np.float32):
    return np.array(numbers, dtype)[:, None]


@pytest.mark.parametrize(
    ("end", "horizon", "expected"),
    [
        # γ = λ = 1/2. No end: δ = 1 + 1/2·4 - 2 = 1 and 2 + 1/2·8 - 4 = 2; A₀ = 1 + 1/4·2.
        ("none", "terminal", [1.5, 2.0]),
        ("none", "bootstrap", [1.5, 2.0]),
        # Step 1 ends for good: δ₁ = 2 - 4 = -2.
        ("terminated", "terminal", [0.5, -2.0]),
        ("terminated", "bootstrap", [0.5, -2.0]),
        # Step 1 is cut by the time limit: an end for one horizon, none for the other.
        ("truncated", "terminal", [0.5, -2.0]),
        ("truncated", "bootstrap", [1.5, 2.0]),
    ],
)
def test_ends_by_hand(end, horizon, expected):
    ends = column(False, True, dtype=bool)
    never = np.zeros_like(ends)
    found = generalised_advantages(
        column(1, 2),
        column(2, 4),
        column(4, 8),
        ends if end == "terminated" else never,
        ends if end == "truncated" else never,
        0.5,
        0.5,
        horizon,
    )
    np.testing.assert_array_equal(found[:, 0], np.array(expected, np.float32))


@pytest.mark.parametrize("horizon", ["terminal", "bootstrap"])
@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_two_episodes_in_one_column_are_two_separate_sequences(horizon, how):
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 7, 2)).astype(np.float32)
    ends, never = np.zeros((7, 2), bool), np.zeros((7, 2), bool)
    ends[2] = True
    flags = (ends, never) if how == "terminated" else (never, ends)

    def estimate(rows):
        parts = [x[rows] for x in (rewards, values, next_values, *flags)]
        return generalised_advantages(*parts, 0.9, 0.8, horizon)

    together = estimate(slice(None))
    np.testing.assert_array_equal(together[:3], estimate(slice(0, 3)))
    np.testing.assert_array_equal(together[3:], estimate(slice(3, None)))


def test_values_beyond_an_end_do_not_matter_even_if_they_are_not_finite():
    ends = column(False, True, dtype=bool)
    found = generalised_advantages(
        column(1, 1), column(0, 0), column(0, np.nan), ends, np.zeros_like(ends), 0.5, 1.0
    )
    np.testing.assert_array_equal(found[:, 0], [1.5, 1.0])


def test_jit_and_vmap_over_settings_with_one_trace():
    rewards = jnp.ones((3, 2))
    never = jnp.zeros((3, 2), bool)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def estimate(discounts):
        one = functools.partial(generalised_advantages, rewards, 0 * rewards, rewards, never, never)
        return jax.vmap(lambda discount: one(discount, 1.0))(discounts)

    # λ = 1, no end, v = 0 and v' = 1: δ = 1 + γ and Aₜ = δ + γ Aₜ₊₁.
    np.testing.assert_array_equal(estimate(jnp.array([0.0, 1.0]))[:, :, 0], [[1, 1, 1], [6, 4, 2]])
    np.testing.assert_array_equal(estimate(jnp.array([0.5, 0.0]))[:, :, 0], [[2.625, 2.25, 1.5], [1, 1, 1]])


def test_totals_of_episodes_by_hand():
    values = jnp.array([[1, 10], [2, 20], [3, 30], [4, 40]], jnp.float32)
    done = jnp.array([[False, True], [True, False], [False, False], [False, True]])
    np.testing.assert_array_equal(episode_totals(values, done), [[3, 10], [3, 90], [7, 90], [7, 90]])


def episodes_of(done):
    """(environment, [steps]) of each episode in a rollout."""
    for b in range(done.shape[1]):
        steps = []
        for t in range(done.shape[0]):
            steps.append(t)
            if done[t, b] or t == done.shape[0] - 1:
                yield b, steps
                steps = []


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), per=st.sampled_from(["batch", "episode"]), masked=st.booleans())
def test_standardised_groups_equal_numpy(seed, per, masked):
    rng = np.random.default_rng(seed)
    advantages = (rng.normal(size=(11, 3)) * 3 + 1).astype(np.float32)
    done = rng.random((11, 3)) < 0.3
    where = rng.random((11, 3)) < 0.7 if masked else np.ones((11, 3), bool)
    poisoned = np.where(where, advantages, np.nan).astype(np.float32)
    found = np.asarray(jitted_standardise(poisoned, done, per=per, where=where if masked else None))

    expected = np.zeros((11, 3))
    if per == "batch":
        groups = [np.argwhere(where)]
    else:
        groups = [np.array([[t, b] for t in steps if where[t, b]]) for b, steps in episodes_of(done)]
    for group in groups:
        if len(group) > 1:
            rows, columns = group.T
            numbers = advantages[rows, columns].astype(np.float64)
            expected[rows, columns] = (numbers - numbers.mean()) / numbers.std()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per", ["batch", "episode"])
def test_groups_without_spread_become_zero(per):
    # 0.1 is not exact in float32: a mean of 7 of them differs from it by rounding, and must not be scaled up.
    done = jnp.zeros((7, 1), bool)
    np.testing.assert_array_equal(standardise(jnp.full((7, 1), 0.1), done, per=per), np.zeros((7, 1)))
    nothing = standardise(jnp.ones((7, 1)), done, per=per, where=jnp.zeros((7, 1), bool))
    np.testing.assert_array_equal(nothing, np.zeros((7, 1)))


def test_an_episode_of_a_single_step_becomes_zero():
    done = jnp.array([[True], [False], [True]])
    found = standardise(jnp.array([[5.0], [1.0], [3.0]]), done, per="episode")
    np.testing.assert_allclose(found[:, 0], [0.0, -1.0, 1.0], atol=1e-6)
