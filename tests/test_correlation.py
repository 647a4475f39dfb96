"""Correlations against SciPy, float64 NumPy, full enumeration and hand-computed numbers."""

import functools
import itertools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from scipy import stats

from jaxreward import correlation
from jaxreward.errors import ConfigError

LENGTHS = (2, 15, 32, 33, 130)  # both sides of PAIRWISE_LENGTH
METHODS = ("isotonic", "sigmoid")

# The same compiled programs serve all tests; eager calls would compile every scan anew.
rank = jax.jit(correlation.rank)
spearman = jax.jit(correlation.spearman_with_validity, static_argnames="ties")
kendall = jax.jit(correlation.kendall_with_validity, static_argnames="variant")
pearson = jax.jit(correlation.pearson_with_validity)
soft_rank = jax.jit(correlation.soft_rank, static_argnames=("method", "relative"))
soft_spearman = jax.jit(correlation.soft_spearman_with_validity, static_argnames=("method", "relative"))


@functools.partial(jax.jit, static_argnames=("method", "relative"))
def soft_rank_vjp(x, cotangent, strength, method="isotonic", relative=False):
    ranks, vjp = jax.vjp(
        lambda x: correlation.soft_rank(x, strength=strength, method=method, relative=relative), x
    )
    return ranks, vjp(cotangent)[0]


@functools.partial(jax.jit, static_argnames=("method", "relative"))
def soft_spearman_grad(x, y, strength, method="isotonic", relative=False):
    """Values, and the gradient of their sum in x."""

    def total(x):
        values = correlation.soft_spearman(x, y, strength=strength, method=method, relative=relative)
        return jnp.sum(values), values

    gradient, values = jax.grad(total, has_aux=True)(x)
    return values, gradient


CORRELATIONS = {
    "spearman-expected": lambda x, y, where=None: spearman(x, y, where=where),
    "spearman-average": lambda x, y, where=None: spearman(x, y, ties="average", where=where),
    "spearman-random": lambda x, y, where=None: spearman(
        x, y, ties="random", where=where, key=jax.random.key(0)
    ),
    "kendall-a": lambda x, y, where=None: kendall(x, y, variant="a", where=where),
    "kendall-b": lambda x, y, where=None: kendall(x, y, where=where),
    "pearson": lambda x, y, where=None: pearson(x, y, where=where),
    "soft-isotonic": lambda x, y, where=None: soft_spearman(x, y, strength=0.3, where=where),
    "soft-sigmoid": lambda x, y, where=None: soft_spearman(x, y, strength=0.3, method="sigmoid", where=where),
}
ROWS = 6


def correlate(name, x, y, where=None):
    """Value and validity of at most ROWS rows, filled up to ROWS so that one length compiles once."""
    x, y, where = np.broadcast_arrays(x, y, True if where is None else where)
    rows = len(x) if x.ndim == 2 else 1
    length = x.shape[-1]
    filled = [np.resize(a, (ROWS, length)) for a in (x.astype(np.float32), y.astype(np.float32), where)]
    value, defined = (np.asarray(a) for a in CORRELATIONS[name](*filled))
    return (value[:rows], defined[:rows]) if x.ndim == 2 else (value[0], defined[0])


every_correlation = pytest.mark.parametrize("name", CORRELATIONS)


def sample(length, rows=ROWS, ties=False, seed=0):
    rng = np.random.default_rng(seed + length)
    x, y = rng.standard_normal((2, rows, length)).astype(np.float32)
    return (np.round(x), np.round(2 * y)) if ties else (x, y)


def nan_to_zero(value):
    return 0.0 if np.isnan(value) else float(value)


def scipy_rows(function, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return np.array([nan_to_zero(function(a, b).statistic) for a, b in zip(x, y, strict=True)])


def isotonic_ranks(x, strength):
    """Ascending soft ranks by the pool-adjacent-violators algorithm in float64, one row."""
    x = np.asarray(x, np.float64)
    order = np.argsort(x, kind="stable")
    scaled = x[order] / strength
    blocks = []
    for value in scaled - np.arange(1, len(x) + 1):
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            (total, size), (more, extra) = blocks[-2:]
            blocks[-2:] = [(total + more, size + extra)]
    fit = np.concatenate([np.full(size, total / size) for total, size in blocks])
    ranks = np.empty(len(x))
    ranks[order] = scaled - fit
    return ranks


def sigmoid_ranks(x, strength):
    x = np.asarray(x, np.float64)
    return 0.5 + np.sum(1 / (1 + np.exp(-(x[:, None] - x[None, :]) / strength)), axis=1)


SOFT_RANKS = {"isotonic": isotonic_ranks, "sigmoid": sigmoid_ranks}


def soft_spearman_reference(x, y, strength, method):
    return np.corrcoef(SOFT_RANKS[method](x, strength), stats.rankdata(y))[0, 1]


def expected_spearman_reference(x, y):
    covariance = np.cov(stats.rankdata(x), stats.rankdata(y), ddof=0)
    return covariance[0, 1] / np.sqrt((len(x) ** 2 - 1) / 12 * covariance[1, 1])


def tau_a_reference(x, y):
    pairs = list(itertools.combinations(range(len(x)), 2))
    return np.mean([np.sign((x[i] - x[j]) * (y[i] - y[j])) for i, j in pairs])


REFERENCES = {
    "spearman-expected": expected_spearman_reference,
    "spearman-average": lambda x, y: stats.spearmanr(x, y).statistic,
    "kendall-a": tau_a_reference,
    "kendall-b": lambda x, y: stats.kendalltau(x, y).statistic,
    "pearson": lambda x, y: stats.pearsonr(x, y).statistic,
    "soft-isotonic": lambda x, y: soft_spearman_reference(x, y, 0.3, "isotonic"),
    "soft-sigmoid": lambda x, y: soft_spearman_reference(x, y, 0.3, "sigmoid"),
}


def finite_differences(function, x, step=1e-6):
    x = np.asarray(x, np.float64)
    unit = np.eye(len(x)) * step
    return np.array([(function(x + e) - function(x - e)) / (2 * step) for e in unit])


# --- Hard ranks and correlations against SciPy ---


@pytest.mark.parametrize("length", (1, *LENGTHS))
@pytest.mark.parametrize("ties", (False, True))
def test_rank_equals_scipy(length, ties):
    x, _ = sample(length, ties=ties)
    np.testing.assert_array_equal(rank(x), stats.rankdata(x, axis=-1))


def test_rank_of_nan_infinity_and_masked_slots():
    x = np.array([np.inf, np.nan, 3.0, -np.inf, 3.0, 7.0], np.float32)
    where = np.array([True, True, True, True, True, False])
    np.testing.assert_array_equal(rank(x, where=where), [4, 0, 2.5, 1, 2.5, 0])


def test_rank_is_exact_for_integers_that_float32_cannot_hold():
    x = np.array([2**24 + 1, 2**24, 2**31 - 1, 2**31 - 2, -(2**31)], np.int32)
    np.testing.assert_array_equal(rank(x), [3, 2, 5, 4, 1])
    np.testing.assert_array_equal(rank(np.array([True, False, True])), [2.5, 1, 2.5])
    np.testing.assert_array_equal(rank(jnp.array([3, 1, 2], jnp.bfloat16)), [3, 1, 2])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("ties", (False, True))
def test_correlations_equal_scipy(length, ties):
    x, y = sample(length, ties=ties)
    x[0], y[1] = y[0], -x[1]
    expected = scipy_rows(stats.spearmanr, x, y)
    np.testing.assert_allclose(spearman(x, y, ties="average")[0], expected, atol=3e-7)
    np.testing.assert_allclose(kendall(x, y)[0], scipy_rows(stats.kendalltau, x, y), atol=3e-7)
    np.testing.assert_allclose(pearson(x, y)[0], scipy_rows(stats.pearsonr, x, y), atol=2e-6)
    if not ties:
        np.testing.assert_allclose(spearman(x, y)[0], expected, atol=3e-7)
        np.testing.assert_allclose(kendall(x, y, variant="a")[0], kendall(x, y)[0], atol=1e-7)


def test_hand_computed_values():
    # Pairs of (1, 2, 2, 4) and (1, 3, 2, 2): 3 concordant, 1 discordant, 1 tied in each.
    x, y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0, 2.0])
    assert kendall(x, y, variant="a")[0] == pytest.approx(2 / 6)
    assert kendall(x, y, variant="b")[0] == pytest.approx(2 / 5)
    # Ranks (1.5, 1.5, 3) and (1, 2, 3): covariance 1.5, untied variance 2, tied variance 1.5.
    x, y = np.array([2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])
    assert spearman(x, y)[0] == pytest.approx(0.75)
    assert spearman(x, y, ties="average")[0] == pytest.approx(1.5 / np.sqrt(3))
    # Deviations (-1, 0, 1) and (-2, -1, 3): 5 / sqrt(2 * 14).
    assert pearson(np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 5.0]))[0] == pytest.approx(5 / np.sqrt(28))


@pytest.mark.parametrize("length", (correlation.EXACT_LENGTH, correlation.EXACT_LENGTH + 1, 1_900, 2_600))
def test_lengths_about_the_int32_bound(length):
    rng = np.random.default_rng(length)
    x = rng.permutation(length).astype(np.float32)
    y = np.stack([x, -x, x + 0.4 * length * rng.standard_normal(length), np.floor(x / 9)])
    x = np.broadcast_to(x, y.shape)
    for ties in ("expected", "average"):
        value, defined = spearman(x, y, ties=ties)
        np.testing.assert_allclose(value, scipy_rows(stats.spearmanr, x, y), atol=2e-6)
        assert defined.all()
    np.testing.assert_allclose(kendall(x, y)[0], scipy_rows(stats.kendalltau, x, y), atol=2e-6)


def test_the_int32_bound_is_the_largest():
    largest = correlation.EXACT_LENGTH
    assert largest * (largest**2 - 1) // 3 <= np.iinfo(np.int32).max
    assert (largest + 1) * ((largest + 1) ** 2 - 1) // 3 > np.iinfo(np.int32).max


# --- Ties ---


@pytest.mark.parametrize(
    "x", ([1, 1, 2, 2, 3], [5, 5, 5, 5, 5], [1, 2, 3, 4, 5], [2, 2, 2, 1, 9], [0, 7, 0, 7, 0])
)
@pytest.mark.parametrize("y", ([1, 2, 3, 4, 5], [3, 1, 1, 2, 3], [5, 1, 4, 2, 3]))
def test_expected_spearman_is_the_mean_over_all_orders_of_ties(x, y):
    x, y = np.array(x), np.array(y)
    values = []
    for breaker in itertools.permutations(range(len(x))):
        places = stats.rankdata(x * len(x) + np.array(breaker))
        values.append(np.corrcoef(places, stats.rankdata(y))[0, 1])
    value, defined = spearman(x.astype(np.float32), y.astype(np.float32))
    assert float(value) == pytest.approx(np.mean(values), abs=1e-6)
    assert defined


def test_random_ties_have_the_expected_mean_and_follow_every_order_equally():
    x = np.array([2.0, 2.0, 1.0, 2.0], np.float32)
    y = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    draws = 12_000
    batch = np.broadcast_to(x, (draws, 4))
    values, defined = spearman(batch, y, ties="random", key=jax.random.key(3))
    assert defined.all()
    orders = [stats.spearmanr([*p[:2], 1, p[2]], y).statistic for p in itertools.permutations((2, 3, 4))]
    possible, ways = np.unique(np.round(orders, 5), return_counts=True)
    seen, counts = np.unique(np.round(np.asarray(values, np.float64), 5), return_counts=True)
    np.testing.assert_allclose(seen, possible, atol=2e-5)
    assert stats.chisquare(counts, draws * ways / ways.sum()).pvalue > 1e-3
    assert np.mean(values) == pytest.approx(float(spearman(x, y)[0]), abs=0.02)


@pytest.mark.parametrize("length", (15, 40))
def test_random_ties_of_a_constant_spread_as_permutations_do(length):
    x, y = np.zeros((3_000, length), np.float32), np.arange(length)
    values = np.asarray(spearman(x, y, ties="random", key=jax.random.key(1))[0])
    assert values.mean() == pytest.approx(0.0, abs=0.03)
    assert values.std() == pytest.approx(1 / np.sqrt(length - 1), rel=0.06)


@pytest.mark.parametrize("length", (15, 40))
def test_random_ties_change_nothing_without_ties_and_depend_on_the_key_alone(length):
    x, y = sample(length)
    key = jax.random.key(0)
    np.testing.assert_allclose(spearman(x, y, ties="random", key=key)[0], spearman(x, y)[0], atol=1e-7)
    tied, _ = sample(length, ties=True)
    again = [spearman(tied, y, ties="random", key=jax.random.key(seed))[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(again[0], again[1])
    assert np.any(again[0] != again[2])


# --- Constants, masks, bad numbers, short inputs ---


@every_correlation
@pytest.mark.parametrize("length", (15, 40))
def test_constant_input(name, length):
    constant, rising = np.full(length, 0.1, np.float32), np.arange(length, dtype=np.float32)
    value, defined = correlate(name, constant, rising)
    if name == "spearman-random":
        assert bool(defined)
    else:
        assert float(value) == 0.0
        assert bool(defined) == (name in ("spearman-expected", "kendall-a"))
    value, defined = correlate(name, rising, constant)
    assert float(value) == 0.0
    assert bool(defined) == (name == "kendall-a")


@every_correlation
@pytest.mark.parametrize("length", (0, 1, 2))
def test_short_inputs(name, length):
    x = np.arange(length, dtype=np.float32)
    value, defined = CORRELATIONS[name](x, -x)
    assert value.shape == defined.shape == ()
    assert float(value) == pytest.approx(-1.0 if length == 2 else 0.0)
    assert bool(defined) == (length == 2)
    batch = np.zeros((3, length), np.float32)
    assert CORRELATIONS[name](batch, x)[0].shape == (3,)


@pytest.mark.parametrize("method", METHODS)
def test_short_soft_ranks(method):
    assert soft_rank(np.zeros((3, 0), np.float32), strength=0.1, method=method).shape == (3, 0)
    np.testing.assert_array_equal(soft_rank(np.array([4.0]), strength=0.1, method=method), [1.0])
    np.testing.assert_allclose(soft_rank(np.array([4.0, -9.0]), strength=0.1, method=method), [2.0, 1.0])
    grad = jax.grad(lambda x: jnp.sum(correlation.soft_rank(x, strength=0.1, method=method)))
    assert grad(jnp.zeros(0)).shape == (0,)
    np.testing.assert_array_equal(grad(jnp.zeros(1)), [0.0])


@every_correlation
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("length", (15, 40))
def test_bad_numbers_make_only_their_row_undefined_and_masks_hide_them(name, bad, length):
    x, y = sample(length, rows=3)
    broken = x.copy()
    broken[1, 2] = bad
    where = np.ones((3, length), bool)
    where[:, 2] = False
    for first, second in ((broken, y), (y, broken)):
        value, defined = correlate(name, first, second)
        assert np.isfinite(value).all()
        assert np.asarray(value)[1] == 0.0
        np.testing.assert_array_equal(defined, [True, False, True])
        assert correlate(name, first, second, where)[1].all()


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("length", (15, 40))
def test_a_mask_equals_deletion(name, length):
    x, y = sample(length, ties=True)
    where = np.random.default_rng(5).random(x.shape) < 0.6
    value, defined = correlate(name, np.where(where, x, np.nan), np.where(where, y, np.inf), where)
    expected = [REFERENCES[name](a[kept], b[kept]) for a, b, kept in zip(x, y, where, strict=True)]
    np.testing.assert_allclose(value, np.nan_to_num(expected), atol=3e-6)
    np.testing.assert_array_equal(defined, np.isfinite(expected))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", (15, 40))
def test_a_mask_equals_deletion_for_ranks(method, length):
    x, _ = sample(length, ties=True)
    where = np.random.default_rng(5).random(x.shape) < 0.6
    where[0] = False
    hard = np.asarray(rank(x, where=where))
    soft = np.asarray(soft_rank(np.where(where, x, np.nan), strength=0.4, method=method, where=where))
    for row in range(len(x)):
        kept = where[row]
        np.testing.assert_array_equal(hard[row][kept], stats.rankdata(x[row][kept]))
        assert not hard[row][~kept].any()
        assert not soft[row][~kept].any()
        if not kept.any():
            continue
        np.testing.assert_allclose(soft[row][kept], SOFT_RANKS[method](x[row][kept], 0.4), atol=1e-5)


@every_correlation
@pytest.mark.parametrize("length", (15, 40))
def test_the_largest_and_smallest_finite_numbers(name, length):
    rising = np.linspace(-1, 1, length)
    for scale in (3.4e38, 1e30, 1e-30, 1e-34):
        value, defined = correlate(name, (rising * scale).astype(np.float32), np.arange(length))
        assert bool(defined)
        assert float(value) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("relative", (False, True))
def test_soft_functions_stay_finite_at_every_scale(method, relative):
    x = np.array([-3.4e38, -1e30, -1.0, -1e-30, 0.0, 0.0, 1e-30, 1.0, 1e30, 3.4e38], np.float32)
    rows, y = np.stack([x, x * 1e-10, x * 1e-30, x * 0]), np.arange(10)
    for strength in np.array([0, 1e-38, 1e-30, 1e-3, 1, 1e20, 1e38, np.inf, np.nan], np.float32):
        ranks = soft_rank(rows, strength=strength, method=method, relative=relative)
        assert np.isfinite(ranks).all()
        assert np.min(ranks) >= 1 - 1e-5
        assert np.max(ranks) <= 10 + 1e-5
        values, gradient = soft_spearman_grad(rows, y, strength, method, relative)
        assert np.isfinite(values).all()
        assert np.isfinite(gradient).all()


def test_pearson_keeps_its_digits_beside_a_large_offset():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 64, (2, 40)).astype(np.float64) / 16
    expected = stats.pearsonr(x, y).statistic
    assert pearson((x + 2**19).astype(np.float32), y)[0] == pytest.approx(expected, abs=1e-6)


# --- Soft ranks ---


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strength", (1e-6, 1e-3, 0.03, 0.3, 3.0, 1e4))
@pytest.mark.parametrize("length", (1, 2, 15, 40))
def test_soft_ranks_equal_float64(method, strength, length):
    with np.errstate(over="ignore"):
        for x in (sample(length)[0], sample(length, ties=True)[0], 50 + sample(length)[0]):
            expected = np.stack([SOFT_RANKS[method](row, strength) for row in x])
            actual = soft_rank(x, strength=strength, method=method)
            np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_soft_ranks_of_a_thousand_values():
    x = sample(1_000, rows=3)[0]
    for strength in (1e-7, 1e-3, 0.1, 1.0):
        expected = np.stack([isotonic_ranks(row, strength) for row in x])
        np.testing.assert_allclose(soft_rank(x, strength=strength), expected, atol=3e-4)


@pytest.mark.parametrize("length", (15, 40))
def test_isotonic_ranks_are_hard_where_gaps_reach_the_strength(length):
    x = np.random.default_rng(0).permutation(length).astype(np.float32)
    for strength in (1.0, 0.5, 1e-3, 1e-30):
        ranks, gradient = soft_rank_vjp(x, jnp.arange(length, dtype=jnp.float32), strength)
        np.testing.assert_array_equal(ranks, stats.rankdata(x))
        np.testing.assert_array_equal(gradient, np.zeros(length))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strength", (0.05, 0.3, 2.0))
@pytest.mark.parametrize("length", (2, 15, 40))
def test_soft_rank_gradients_equal_finite_differences(method, strength, length):
    x = sample(length, rows=1)[0][0]
    weights = np.random.default_rng(1).standard_normal(length).astype(np.float32)
    _, gradient = soft_rank_vjp(x, weights, strength, method)
    expected = finite_differences(lambda x: weights @ SOFT_RANKS[method](x, strength), x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strength", (0.2, 1.0, 5.0))
@pytest.mark.parametrize("length", (15, 40))
def test_soft_spearman_and_its_gradient_equal_float64(method, strength, length):
    x, y = (values[0] for values in sample(length, rows=1, seed=7))
    value, grad = soft_spearman_grad(x, y, strength, method)
    assert float(value) == pytest.approx(soft_spearman_reference(x, y, strength, method), abs=2e-6)
    expected = finite_differences(lambda x: soft_spearman_reference(x, y, strength, method), x)
    np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_soft_spearman_lies_between_spearman_and_pearson(method):
    x, y = sample(20)
    hard = soft_spearman(x, y, strength=1e-6, method=method)[0]
    np.testing.assert_allclose(hard, spearman(x, y, ties="average")[0], atol=1e-6)
    linear = soft_spearman(x, y, strength=1e6, method=method)[0]
    np.testing.assert_allclose(linear, pearson(x, stats.rankdata(y, axis=-1))[0], atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_relative_strength_is_in_standard_deviations(method):
    x, y = sample(15)
    options = {"strength": 0.3, "method": method, "relative": True}
    expected = soft_rank(x, strength=0.3 * x.std(-1, keepdims=True, dtype=np.float64), method=method)
    np.testing.assert_allclose(soft_rank(x, **options), expected, atol=1e-4)
    np.testing.assert_allclose(soft_rank(1e4 * x + 3, **options), expected, atol=2e-2)
    np.testing.assert_allclose(soft_rank(x * 2.0**-30, **options), expected, atol=1e-4)
    value, defined = soft_spearman(x * 2.0**60, y, **options)
    np.testing.assert_allclose(value, soft_spearman(x, y, **options)[0], atol=1e-5)
    assert defined.all()


# --- Gradients where they must vanish ---


GRADIENTS = {
    "spearman": lambda x, y, where: correlation.spearman(x, y, where=where),
    "spearman-average": lambda x, y, where: correlation.spearman(x, y, ties="average", where=where),
    "kendall": lambda x, y, where: correlation.kendall(x, y, where=where),
    "pearson": lambda x, y, where: correlation.pearson(x, y, where=where),
    "isotonic": lambda x, y, where: correlation.soft_spearman(x, y, strength=0.5, where=where),
    "sigmoid": lambda x, y, where: correlation.soft_spearman(
        x, y, strength=0.5, method="sigmoid", where=where
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("length", (6, 40))
def test_gradients_are_zero_where_undefined_masked_or_hard(name, length):
    x, y = sample(length, rows=4)
    x[1], x[2, 3] = 0.1, np.nan
    where = np.ones((4, length), bool)
    where[0, ::3], x[0, ::3] = False, np.nan
    where[3] = np.arange(length) < 1

    grad = jax.jit(jax.grad(lambda x, y: jnp.sum(GRADIENTS[name](x, y, where)), argnums=(0, 1)))
    in_x, in_y = (np.asarray(g) for g in grad(x, y))
    assert np.isfinite(in_x).all()
    assert np.isfinite(in_y).all()
    assert not in_x[1:].any()
    assert not in_x[~where].any()
    assert not in_y[~where].any()
    assert in_x[0].any() == (name in ("pearson", "isotonic", "sigmoid"))
    assert not in_y[1:].any()
    assert in_y[0].any() == (name == "pearson")


@pytest.mark.parametrize("length", (15,))
def test_pearson_gradients_equal_finite_differences(length):
    x, y = (values[0] for values in sample(length, rows=1))
    grad = jax.jit(jax.grad(correlation.pearson, argnums=(0, 1)))(x, y)
    reference = [
        finite_differences(lambda x: np.corrcoef(x, y)[0, 1], x),
        finite_differences(lambda y: np.corrcoef(x, y)[0, 1], y),
    ]
    np.testing.assert_allclose(grad, reference, rtol=1e-3, atol=1e-5)


# --- Properties ---

small_integers = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=15, max_size=15)


@settings(max_examples=40, deadline=None)
@given(small_integers, st.permutations(range(15)), st.lists(st.booleans(), min_size=15, max_size=15))
def test_range_permutation_monotone_and_mask_invariance(pairs, order, kept):
    x, y = np.array(pairs, np.float32).T
    where, order = np.array(kept), np.array(order)
    transformed = (
        (x, y, where),
        (x[order], y[order], where[order]),
        (np.where(where, x, 77.0), np.where(where, y, -77.0), where),
        (x**3 + 5, np.exp(y), where),
        (-x, y, where),
    )
    batch = [np.stack(arrays) for arrays in zip(*transformed, strict=True)]
    for name in CORRELATIONS:
        values, defined = correlate(name, *batch)
        assert np.all(np.abs(values) <= 1.0)
        assert np.all(defined | (values == 0.0))
        assert np.all(defined == defined[0])
        if name == "spearman-random":
            continue
        np.testing.assert_allclose(values[1], values[0], atol=2e-6)
        assert values[2] == values[0]
        if name.startswith(("spearman", "kendall")):
            np.testing.assert_allclose(values[3:], [values[0], -values[0]], atol=1e-6)


finite = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)


@settings(max_examples=40, deadline=None)
@given(st.lists(finite, min_size=15, max_size=15), st.floats(0.01, 100.0))
def test_soft_ranks_keep_the_order_the_sum_and_the_majorisation(values, strength):
    x = np.array(values, np.float32)
    for method in METHODS:
        ranks = np.asarray(soft_rank(x, strength=strength, method=method), np.float64)
        assert ranks.sum() == pytest.approx(120.0, abs=1e-3)
        assert np.all(np.diff(ranks[np.argsort(x, kind="stable")]) >= -1e-4)
        # Within the permutahedron: the k smallest sum to no less than 1 + ... + k.
        assert np.all(np.cumsum(np.sort(ranks)) >= np.cumsum(np.arange(1, 16)) - 1e-3)


# --- Transformations ---


@pytest.mark.parametrize(
    ("name", "length"),
    [(name, 15) for name in ("spearman-expected", "kendall-b")]
    + [(name, 40) for name in ("spearman-expected", "kendall-b", "pearson", "soft-isotonic", "soft-sigmoid")],
)
def test_leading_axes_broadcast_and_vmap_agrees(name, length):
    x, y = sample(length, rows=6, ties=True)
    x, where = x.reshape(2, 3, length), np.random.default_rng(0).random((3, length)) < 0.8
    value, defined = CORRELATIONS[name](x, y[0], where)
    assert value.shape == defined.shape == (2, 3)
    assert value.dtype == jnp.float32
    assert defined.dtype == jnp.bool_
    where = np.broadcast_to(where, x.shape)
    mapped = jax.jit(jax.vmap(jax.vmap(lambda x, where: CORRELATIONS[name](x, y[0], where)[0])))(x, where)
    np.testing.assert_allclose(mapped, value, atol=1e-6)
    for place in np.ndindex(2, 3):
        kept = where[place]
        expected = REFERENCES[name](x[place][kept], y[0][kept])
        assert float(value[place]) == pytest.approx(expected, abs=3e-6)


def assert_sharded_equals_whole(devices, length, swap):
    """Values and gradients under shard_map over rows are those of the whole batch.

    Args:
      devices: how many hold rows.
      length: n.
      swap: False gives every device the same truth; True the same predictions.
    """
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, every = (jnp.asarray(values) for values in sample(length, rows=4, ties=True))
    where = jnp.asarray(np.random.default_rng(0).random((4, length)) < 0.8)

    def soft(x, y, where):
        options = {"strength": 0.5, "where": where}
        return (
            correlation.pearson(x, y, where=where),
            correlation.soft_spearman(x, y, **options),
            correlation.soft_spearman(x, y, method="sigmoid", relative=True, **options),
        )

    def everything(rows, every, where):
        x, y = (every, rows) if swap else (rows, every)
        hard = (
            correlation.spearman(x, y, where=where),
            correlation.kendall(x, y, where=where),
            correlation.rank(x, where=where),
        )
        values, vjp = jax.vjp(lambda x: soft(x, y, where), x)
        # The gradient of predictions that all devices share is summed over the devices.
        return (hard, values), vjp(jax.tree.map(jnp.ones_like, values))[0]

    by_row = P("data")
    sharded = jax.shard_map(
        everything,
        mesh=mesh,
        in_specs=(by_row, P(), by_row),
        out_specs=(by_row, P() if swap else by_row),
    )
    arguments = (rows, every[0], where)
    actual, expected = jax.jit(sharded)(*arguments), jax.jit(everything)(*arguments)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_shard_map_on_one_device():
    assert_sharded_equals_whole(1, 15, swap=False)


def test_shard_map_on_two_devices():
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('correlation_tests', sys.argv[1])\n"
        "tests = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(tests)\n"
        "for swap in (False, True):\n"
        "    tests.assert_sharded_equals_whole(2, 40, swap)\n"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2",
    }
    result = subprocess.run(
        [sys.executable, "-c", program, __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_strength_may_be_traced_or_one_per_row():
    x, _ = sample(15)
    strengths = np.linspace(0.1, 2, len(x), dtype=np.float32)[:, None]
    for method in METHODS:
        ranks = soft_rank(x, strength=strengths, method=method)
        for row in range(len(x)):
            expected = SOFT_RANKS[method](x[row], float(strengths[row, 0]))
            np.testing.assert_allclose(ranks[row], expected, atol=1e-5)
        grad = jax.grad(lambda s, m=method: jnp.sum(correlation.soft_rank(x, strength=s, method=m) ** 2))
        assert grad(0.3) == 0.0


# --- Arguments ---


@pytest.mark.parametrize(
    "call",
    (
        lambda: correlation.spearman(np.ones(3), np.ones(3), ties="first"),
        lambda: correlation.spearman(np.ones(3), np.ones(3), ties="random"),
        lambda: correlation.spearman(np.ones(3), np.ones(3), key=jax.random.key(0)),
        lambda: correlation.spearman(np.ones(3), np.ones(4)),
        lambda: correlation.spearman(np.ones((2, 3)), np.ones((3, 3))),
        lambda: correlation.spearman(np.ones(3), np.ones(1)),
        lambda: correlation.spearman(np.ones(3), np.ones(3), where=np.ones(3)),
        lambda: correlation.spearman(np.ones(3), np.ones(3), where=np.ones(2, bool)),
        lambda: correlation.kendall(np.ones(3), np.ones(3), variant="c"),
        lambda: correlation.rank(1.0),
        lambda: correlation.rank(np.ones(3, np.complex64)),
        lambda: correlation.soft_rank(np.ones(3), strength=0.0),
        lambda: correlation.soft_rank(np.ones(3), strength=float("nan")),
        lambda: correlation.soft_rank(np.ones(3), strength=1.0, method="neural"),
        lambda: correlation.soft_rank(np.ones((2, 3)), strength=np.ones(3, np.float32)),
        lambda: correlation.soft_rank(np.ones((2, 3)), strength=np.ones((5, 1), np.float32)),
    ),
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ConfigError, match=r"found .* expected "):
        call()
