"""How alike two embeddings are, and the threshold above which a pair counts as matched."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxreward.errors import DataError
from jaxreward.types import Array


def cosine_similarity(x: Array, y: Array) -> Array:
    """The cosine of the angle between vectors, over the last axis.

    Args:
      x: [..., D]; leading axes are broadcast against those of `y`.
      y: [..., D].

    Returns:
      float32 [...] in [-1, 1]; 0 where a vector is zero or not finite. Its gradient is finite everywhere.
    """
    x, y = (jnp.asarray(vector, jnp.float32) for vector in (x, y))
    return jnp.clip(jnp.sum(_unit(x) * _unit(y), axis=-1), -1.0, 1.0)


def _unit(x: Array) -> Array:
    """Vectors of length 1; zero for those that have no direction."""
    x = jnp.where(jnp.all(jnp.isfinite(x), axis=-1, keepdims=True), x, 0.0)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # Squares of tiny or huge numbers would vanish or overflow.
    x = x / jnp.where(largest > 0, largest, 1.0)
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.where(square > 0, square, 1.0))


def conformal_threshold(similarities: ArrayLike, *, miscoverage: float = 0.1) -> float:
    """The threshold that a further true pair reaches with a probability of at least 1 - miscoverage.

    Split conformal prediction (Sadinle et al., 2019) on s = 1 - similarity: with
    level = ceil((n + 1) (1 - miscoverage)) / n, the threshold is 1 - quantile(s, level, 'higher'). This is
    what BiMI's published code computes; Algorithm 1 of its paper (appendix A.5), read to the letter, is
    `literal_threshold`, which lets 10 % of true pairs pass where the paper's table 3 reports 95 %.

    Args:
      similarities: [n], of true pairs that nothing was fitted to.
      miscoverage: alpha in (0, 1), the share of true pairs that may fall below.

    Returns:
      One of the similarities.

    Raises:
      DataError: too few pairs for the promise (fewer than 9 at 0.1), or numbers that are not finite.
    """
    scores = _checked(similarities, miscoverage)
    # Rounding must not turn an exact whole number into the next one.
    rank = math.ceil(round((len(scores) + 1) * (1.0 - miscoverage), 9))
    if rank > len(scores):
        least = math.ceil(round(1.0 / miscoverage, 9)) - 1
        raise DataError(
            f"{len(scores)} calibration pairs found; at least {least} are needed for a share of "
            f"{miscoverage:g} of true pairs below the threshold"
        )
    # NumPy's 'higher' takes the next place after rank (n - 1) / n of 0 .. n - 1. Sorting returns the number
    # itself, which 1 - (1 - similarity) need not be.
    return float(np.sort(scores)[max(len(scores) - 1 - rank, 0)])


def literal_threshold(similarities: ArrayLike, *, miscoverage: float = 0.1) -> float:
    """Algorithm 1 of BiMI's appendix A.5 to the letter, for study: about `miscoverage` of true pairs pass.

    q = quantile(similarities, ceil((n - 1) (1 - miscoverage)) / n, 'lower').

    Args:
      similarities: [n].
      miscoverage: alpha in (0, 1).

    Raises:
      DataError: no pairs, or numbers that are not finite.
    """
    scores = _checked(similarities, miscoverage)
    level = math.ceil(round((len(scores) - 1) * (1.0 - miscoverage), 9)) / len(scores)
    return float(np.quantile(scores, level, method="lower"))


def _checked(similarities: ArrayLike, miscoverage: float) -> np.ndarray:
    if not 0 < miscoverage < 1:
        raise DataError(f"miscoverage {miscoverage} found; expected a share between 0 and 1, such as 0.1")
    scores = np.asarray(similarities, np.float64)
    if scores.ndim != 1 or not len(scores):
        raise DataError(f"similarities of shape {scores.shape} found; expected one number for each pair")
    if not np.isfinite(scores).all():
        raise DataError(
            f"{np.count_nonzero(~np.isfinite(scores))} of {len(scores)} similarities are not finite; "
            "expected numbers in [-1, 1]"
        )
    return scores
