"""GRPO and Plackett-Luce against enumeration, hand computation and closed forms."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.agents import grpo


def brute_force_probability(logits, order):
    """Product of the softmax of each choice among what is left, in float64."""
    weights, left, probability = np.exp(np.float64(logits)), list(order), 1.0
    for item in order:
        probability *= weights[item] / sum(weights[other] for other in left)
        left.remove(item)
    return probability


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=4))
def test_log_prob_equals_enumeration_and_sums_to_one(logits):
    orders = np.array(list(itertools.permutations(range(len(logits)))), np.int32)
    where = jnp.ones(len(logits), bool)
    found = np.exp(np.asarray(grpo.log_prob(jnp.array(logits, jnp.float32), orders, where), np.float64))
    expected = [brute_force_probability(logits, order) for order in orders]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-5)


def test_masked_items_are_as_if_deleted():
    logits = jnp.array([0.3, 50.0, -1.0, 2.0])
    where = jnp.array([True, False, True, True])
    masked = grpo.log_prob(logits, jnp.array([3, 0, 2, 1]), where)
    deleted = brute_force_probability([0.3, -1.0, 2.0], [2, 0, 1])
    np.testing.assert_allclose(masked, math.log(deleted), rtol=1e-6)
    gradient = jax.grad(grpo.log_prob)(logits, jnp.array([3, 0, 2, 1]), where)
    assert gradient[1] == 0 and np.isfinite(gradient).all()


def test_nothing_to_rank_has_probability_one():
    where = jnp.zeros(3, bool)
    assert grpo.log_prob(jnp.ones(3), jnp.arange(3), where) == 0
    assert (jax.grad(grpo.log_prob)(jnp.ones(3), jnp.arange(3), where) == 0).all()


def test_samples_follow_the_distribution():
    logits = jnp.array([1.0, 0.0, -0.5])
    draws = 40_000
    rankings = grpo.sample_ranking(
        jax.random.key(0), jnp.broadcast_to(logits, (draws, 3)), jnp.ones((draws, 3), bool)
    )
    for order in itertools.permutations(range(3)):
        share = (np.asarray(rankings) == order).all(1).mean()
        expected = brute_force_probability([1.0, 0.0, -0.5], order)
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_masked_items_are_sampled_last_and_have_rank_zero():
    where = jnp.array([False, True, True, False, True])
    ranking = grpo.sample_ranking(jax.random.key(1), jnp.array([9.0, 0, 40, 9, 20]), where)
    assert ranking[:3].tolist() == [2, 4, 1]
    assert grpo.progress_ranks(ranking, where).tolist() == [0, 1, 3, 0, 2]
    assert ranking.dtype == jnp.int32


def test_advantages_of_a_hand_computed_group():
    # Group 0 has rewards 1, 2, 6: mean 3, population variance (4 + 1 + 9) / 3. Group 1 never varies.
    rewards = jnp.array([[1.0, 0.7], [2.0, 0.7], [6.0, 0.7]])
    advantages, varies = grpo.group_advantages(rewards)
    np.testing.assert_allclose(advantages[:, 0], np.array([-2, -1, 3]) / math.sqrt(14 / 3), rtol=1e-6)
    assert (advantages[:, 1] == 0).all() and varies.tolist() == [True, False]
    advantages, _ = grpo.group_advantages(rewards, divide_by_std=False)
    np.testing.assert_allclose(advantages[:, 0], [-2, -1, 3], rtol=1e-6)


def test_clipped_objective_by_hand():
    # Ratios 1.5 (above 1.2) and 0.5 (below 0.8) under advantages +2 and -2.
    log_probs = jnp.log(jnp.array([[1.5, 0.5, 9.0], [1.5, 0.5, 9.0]]))
    where = jnp.array([[True, True, False]] * 2)
    objective, clipped = grpo.clipped_objective(
        log_probs, jnp.zeros((2, 3)), jnp.array([2.0, -2.0]), where, clip=0.2
    )
    # min(3, 2.4) and min(1, 1.6); min(-3, -2.4) and min(-1, -1.6): one of two tokens is clipped each time.
    np.testing.assert_allclose(objective, [(2.4 + 1.0) / 2, (-3.0 - 1.6) / 2], rtol=1e-6)
    np.testing.assert_allclose(clipped, [0.5, 0.5])


def test_gradient_of_the_loss_on_the_first_epoch_by_hand():
    # Two items, logits (a, 0), p = sigmoid(a) of the ranking (0, 1). Group: both rankings, rewards 1 and -1,
    # so the advantages are 1 and -1. Each answer has two choices, the second forced, so |a| = 2 and
    # d objective / da = 1/2 [ (1 - p) / 2 + p / 2 ] = 1/4 at ratio 1, for every a.
    where = jnp.ones((2, 1, 2), bool)
    rankings = jnp.array([[[0, 1]], [[1, 0]]])
    advantages, varies = grpo.group_advantages(jnp.array([[1.0], [-1.0]]))

    def loss(a, coefficient=0.0):
        log_probs = grpo.choice_log_probs(jnp.stack([a, 0.0])[None], rankings, where)
        old = jax.lax.stop_gradient(log_probs)
        value, _ = grpo.grpo_loss(
            log_probs, old, old, advantages, varies, where, clip=0.2, kl_coefficient=coefficient
        )
        return value

    for a in (-1.5, 0.0, 2.0):
        np.testing.assert_allclose(jax.grad(loss)(jnp.float32(a)), -0.25, rtol=1e-5)
        np.testing.assert_allclose(jax.grad(loss)(jnp.float32(a), 3.0), -0.25, rtol=1e-5)


def test_groups_without_variance_do_not_dilute_the_loss():
    log_probs = jnp.log(jnp.full((2, 2, 1), 1.1))
    old, where = jnp.zeros((2, 2, 1)), jnp.ones((2, 2, 1), bool)
    advantages, varies = grpo.group_advantages(jnp.array([[3.0, 1.0], [1.0, 1.0]]), divide_by_std=False)
    _, metrics = grpo.grpo_loss(log_probs, old, old, advantages, varies, where, clip=0.05, kl_coefficient=0.0)
    assert metrics["zero_variance_groups"] == 0.5
    # In the group that varies, the answer with the positive advantage is clipped and the other is not.
    assert metrics["clip_fraction"] == 0.5


def test_kl_estimate_is_unbiased():
    logits, reference = jnp.array([0.8, 0.1, -0.6]), jnp.array([0.0, 0.5, 0.2])
    orders = jnp.array(list(itertools.permutations(range(3))), jnp.int32)
    where = jnp.ones((6, 3), bool)
    log_p = grpo.choice_log_probs(logits, orders, where)
    log_q = grpo.choice_log_probs(reference, orders, where)
    p, q = np.exp(np.float64(log_p.sum(-1))), np.exp(np.float64(log_q.sum(-1)))
    exact = (p * np.log(p / q)).sum() / 3  # per item, over three items
    np.testing.assert_allclose(
        (p * np.asarray(grpo.kl_estimate(log_p, log_q, where))).sum(), exact, rtol=1e-4
    )


@pytest.mark.parametrize(("start", "kl", "rises"), [(1.0, 0.3, True), (1.0, 0.01, False)])
def test_kl_coefficient_moves_towards_its_target(start, kl, rises):
    moved = grpo.adapt_kl_coefficient(jnp.float32(start), jnp.float32(kl), 0.1)
    assert (moved > start) == rises and abs(moved / start - 1) <= 0.1 + 1e-6
    assert grpo.adapt_kl_coefficient(jnp.float32(start), jnp.float32(0.1), 0.1) == start


def test_kl_coefficient_never_dies():
    coefficient = jnp.float32(1.0)
    for _ in range(200):
        coefficient = grpo.adapt_kl_coefficient(coefficient, jnp.float32(0.0), 0.1)
    np.testing.assert_allclose(coefficient, 1e-4)


def test_extreme_log_ratios_keep_the_gradient_finite():
    def loss(x):
        log_probs = x * jnp.array([[[-300.0]], [[300.0]]])
        zeros, where = jnp.zeros_like(log_probs), jnp.ones(log_probs.shape, bool)
        return grpo.grpo_loss(
            log_probs, zeros, zeros, jnp.array([[1.0], [-1.0]]), jnp.array([True]), where,
            clip=0.2, kl_coefficient=0.1,
        )[0]  # fmt: skip

    assert np.isfinite(loss(1.0)) and np.isfinite(jax.grad(loss)(1.0))
