"""Statistics over episodes and runs: intervals, robust means, pass@k, Crafter's score. NumPy, float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success probability (Wilson 1927), without continuity correction.

    Args:
      successes: how many of the trials succeeded, 0 .. trials.
      trials: at least 0; no trial gives (0, 1).
      confidence: the two-sided level, in (0, 1).

    Returns:
      (low, high), within [0, 1].

    Raises:
      ValueError: an argument is out of its range.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes: found {successes}, expected 0 .. trials = {trials}")
    _check_confidence(confidence)
    if trials == 0:
        return 0.0, 1.0
    z = float(stats.norm.ppf((1 + confidence) / 2))
    rate, squared = successes / trials, z * z / trials
    centre = (rate + squared / 2) / (1 + squared)
    half = z * math.sqrt(rate * (1 - rate) / trials + squared / (4 * trials)) / (1 + squared)
    low = 0.0 if successes == 0 else max(centre - half, 0.0)
    high = 1.0 if successes == trials else min(centre + half, 1.0)
    return low, high


def bootstrap_interval(
    scores: ArrayLike,
    statistic: Callable[[np.ndarray], float],
    generator: np.random.Generator,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile bootstrap interval, stratified: runs are drawn anew within each task.

    Source: Agarwal et al. 2021, "Deep RL at the edge of the statistical precipice", section 4.1.

    Args:
      scores: [runs] of one task, or [runs, tasks]; finite.
      statistic: from an array of the shape of `scores` to a number, such as `interquartile_mean`.
      generator: the source of the resamples; an equally seeded one gives the same interval.
      confidence: the two-sided level, in (0, 1).
      resamples: how many bootstrap samples.

    Returns:
      (low, high).

    Raises:
      ValueError: there is no score, one is not finite, or the array has more than two axes.
    """
    scores = _finite("scores", scores)
    if scores.ndim not in (1, 2):
        raise ValueError(f"scores: found shape {scores.shape}, expected [runs] or [runs, tasks]")
    _check_confidence(confidence)
    table = scores if scores.ndim == 2 else scores[:, None]
    tasks = np.arange(table.shape[1])
    values = np.empty(resamples)
    for sample in range(resamples):
        rows = generator.integers(table.shape[0], size=table.shape)
        values[sample] = statistic(table[rows, tasks].reshape(scores.shape))
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def interquartile_mean(scores: ArrayLike) -> float:
    """The mean of the middle half of all scores, over runs and tasks together (Agarwal et al. 2021).

    A quarter of the scores, rounded down, is cut off at either end.

    Args:
      scores: of any shape, at least one, finite.

    Raises:
      ValueError: there is no score, or one is not finite.
    """
    return float(stats.trim_mean(_finite("scores", scores), 0.25, axis=None))


def optimality_gap(scores: ArrayLike, target: float = 1.0) -> float:
    """By how much scores fall short of a target on average; more than the target counts as the target.

    target - mean(min(score, target)), in the scores' units (Agarwal et al. 2021).

    Args:
      scores: of any shape, at least one, finite.
      target: the score that is good enough.

    Raises:
      ValueError: there is no score, or one is not finite.
    """
    return float(target - np.minimum(_finite("scores", scores), target).mean())


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """The chance that at least one of k trials, drawn from those made without putting back, succeeded.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (equation 1).

    Args:
      trials: n, at least k.
      successes: c, 0 .. n.
      k: at least 1.

    Raises:
      ValueError: an argument is out of its range; fewer than k trials say nothing about k.
    """
    if not 1 <= k <= trials:
        raise ValueError(f"k: found {k}, expected 1 .. trials = {trials}; run at least k episodes")
    if not 0 <= successes <= trials:
        raise ValueError(f"successes: found {successes}, expected 0 .. trials = {trials}")
    return 1 - math.comb(trials - successes, k) / math.comb(trials, k)


def pearson(first: ArrayLike, second: ArrayLike) -> float:
    """Pearson's correlation of two series; NaN where it is not defined.

    Pairs in which either number is not finite are left out. Fewer than two pairs, or a series that is
    constant over the remaining ones, have no correlation: NaN, never 0 (which would be a finding).

    Args:
      first: [n] numbers.
      second: [n] numbers.

    Returns:
      A number in [-1, 1], or NaN.

    Raises:
      ValueError: the series are no vectors of one length.
    """
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"series: found shapes {x.shape} and {y.shape}, expected two vectors of one length")
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    x, y = (
        x / np.abs(x).max(),
        y / np.abs(y).max(),
    )  # squares of tiny or huge numbers would vanish or overflow
    return float(np.clip(x @ y / math.sqrt((x @ x) * (y @ y)), -1, 1))


def crafter_score(success_rates: ArrayLike) -> float | np.ndarray:
    """Crafter's score: the geometric mean of success rates in percent, shifted by one.

    exp(mean_i ln(1 + 100 p_i)) - 1 (Hafner 2022, section 3.3); compute it for each seed, then average.

    Args:
      success_rates: [..., achievements], p_i in [0, 1]: the share of episodes in which achievement i was
        unlocked at least once.

    Returns:
      [...] in [0, 100], in percent; a float for a single vector.

    Raises:
      ValueError: a rate is outside [0, 1] (percentages must be divided by 100 first).
    """
    rates = _finite("success rates", success_rates)
    if rates.ndim == 0 or rates.min() < 0 or rates.max() > 1:
        raise ValueError(
            f"success rates: found shape {rates.shape} in {rates.min()} .. {rates.max()}, expected "
            "[..., achievements] in 0 .. 1"
        )
    score = np.expm1(np.log1p(100 * rates).mean(-1))
    return float(score) if score.ndim == 0 else score


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: found {confidence}, expected between 0 and 1, such as 0.95")


def _finite(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.size == 0:
        raise ValueError(f"{name}: found none, expected at least one")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: found {np.count_nonzero(~np.isfinite(array))} that are not finite")
    return array
