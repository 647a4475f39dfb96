import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.metrics.statistics import (
    bootstrap_interval,
    crafter_score,
    interquartile_mean,
    optimality_gap,
    pass_at_k,
    pearson,
    wilson_interval,
)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (0, 20), (7, 20), (20, 20), (499, 1000)])
def test_wilson_equals_scipy(successes, trials, confidence):
    expected = scipy.stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, trials, confidence) == pytest.approx(tuple(expected), abs=1e-12)


def test_wilson_of_nothing_is_everything_and_nonsense_is_refused():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for arguments in [(3, 2), (-1, 2), (1, 2, 1.0), (1, 2, 0.0)]:
        with pytest.raises(ValueError, match="expected"):
            wilson_interval(*arguments)


def test_bootstrap_equals_scipy_within_its_resampling_error():
    scores = np.random.default_rng(0).normal(3, 2, 40)
    low, high = bootstrap_interval(scores, np.mean, np.random.default_rng(1), resamples=6000)
    scipys = scipy.stats.bootstrap(
        (scores,), np.mean, n_resamples=6000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert (low, high) == pytest.approx(tuple(scipys), abs=0.05)


def test_bootstrap_draws_runs_within_each_task():
    # two runs; a task's resampled mean is 0, 1/2, 1 (1/4, 1/2, 1/4) times its spread: tasks never mix
    scores = np.array([[0.0, 100.0, 7.0], [1.0, 102.0, 7.0]])
    seen = []

    def statistic(sample):
        assert sample.shape == (2, 3)
        seen.append(sample)
        return sample.mean()

    low, high = bootstrap_interval(scores, statistic, np.random.default_rng(0), resamples=1000)
    seen = np.array(seen)
    assert set(seen[:, :, 0].ravel()) == {0.0, 1.0}
    assert set(seen[:, :, 1].ravel()) == {100.0, 102.0}
    assert set(seen[:, :, 2].ravel()) == {7.0}
    # both extremes have a chance of 1/16 > 2.5 %: the interval's ends are the extreme means
    assert low == pytest.approx((0 + 100 + 7) / 3)
    assert high == pytest.approx((1 + 102 + 7) / 3)
    # tasks are drawn independently of one another
    assert scipy.stats.pearsonr(seen[:, :, 0].mean(1), seen[:, :, 1].mean(1)).statistic < 0.15


def test_bootstrap_is_repeatable_and_covers_the_truth():
    scores = np.random.default_rng(3).random((5, 4))
    first = bootstrap_interval(scores, interquartile_mean, np.random.default_rng(7), resamples=50)
    assert first == bootstrap_interval(scores, interquartile_mean, np.random.default_rng(7), resamples=50)
    truth = np.random.default_rng(4)
    covered = 0
    for _ in range(100):
        low, high = bootstrap_interval(truth.normal(0, 1, 30), np.mean, truth, resamples=200)
        covered += low <= 0 <= high
    assert 86 <= covered <= 100  # 95 % nominal; 30 runs cover about 93 %


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], np.zeros((2, 2, 2))])
def test_bootstrap_refuses(bad):
    with pytest.raises(ValueError, match="scores"):
        bootstrap_interval(bad, np.mean, np.random.default_rng(0))


def test_interquartile_mean_by_hand():
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -50]) == 3.5  # drops -50, 1 and 6, 100
    assert interquartile_mean([[1, 2, 3], [4, 5, 600]]) == 3.5  # drops 1 and 600 of both tasks together
    assert interquartile_mean([7]) == 7
    with pytest.raises(ValueError, match="found none"):
        interquartile_mean([])
    with pytest.raises(ValueError, match="found 1 that are not finite"):
        interquartile_mean([1, math.inf])


def test_optimality_gap_by_hand():
    assert optimality_gap([0.5, 1.5, 0.0, 1.0]) == pytest.approx(1 - (0.5 + 1 + 0 + 1) / 4)
    assert optimality_gap([[2.0, 4.0]], target=3.0) == pytest.approx(3 - (2 + 3) / 2)


@given(st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_counts_subsets(trials, data):
    successes = data.draw(st.integers(0, trials))
    k = data.draw(st.integers(1, trials))
    outcomes = [True] * successes + [False] * (trials - successes)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(trials, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_edges():
    assert pass_at_k(200, 0, 5) == 0.0
    assert pass_at_k(200, 200, 5) == 1.0
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(1000, 1, 1000) == 1.0
    for arguments in [(4, 2, 5), (4, 5, 2), (4, -1, 2), (4, 2, 0)]:
        with pytest.raises(ValueError, match="expected"):
            pass_at_k(*arguments)


@given(st.integers(0, 2**32 - 1), st.integers(3, 30), st.sampled_from([1.0, 1e-200, 1e150]))
@settings(max_examples=50, deadline=None)
def test_pearson_equals_scipy(seed, count, scale):
    x, y = np.random.default_rng(seed).normal(size=(2, count))
    expected = scipy.stats.pearsonr(x, y).statistic
    assert pearson(scale * x, y - 5) == pytest.approx(expected, abs=1e-10)


def test_pearson_leaves_out_pairs_that_are_not_finite():
    x = [1, 2, math.nan, 4, 5, math.inf]
    y = [2, 1, 9, 7, math.nan, 3]
    assert pearson(x, y) == pytest.approx(scipy.stats.pearsonr([1, 2, 4], [2, 1, 7]).statistic)


@pytest.mark.parametrize(
    ("x", "y"), [([], []), ([1], [2]), ([1, 1, 1], [1, 2, 3]), ([1, 2], [3, 3]), ([1, math.nan], [1, 2])]
)
def test_pearson_without_a_meaning_is_nan(x, y):
    assert math.isnan(pearson(x, y))


def test_pearson_refuses_series_of_different_lengths():
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        pearson([1, 2], [1, 2, 3])


def test_crafter_score_by_hand():
    assert crafter_score(np.full(22, 0.5)) == pytest.approx(50)
    assert crafter_score([1.0] + 21 * [0.0]) == pytest.approx(101 ** (1 / 22) - 1)
    assert crafter_score([1.0] + 21 * [0.0]) == pytest.approx(0.2334, abs=5e-5)
    np.testing.assert_allclose(crafter_score([[0.0, 0.0], [1.0, 1.0]]), [0, 100])
    with pytest.raises(ValueError, match=r"in 0 \.\. 1"):
        crafter_score([50.0, 20.0])
