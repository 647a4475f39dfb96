"""Ranks, soft ranks and rank correlations on the last axis, for batches, masks, ties and bad numbers.

Every function works on the last axis and broadcasts all leading axes of its arguments; each can be
jitted, vmapped, sharded and differentiated in reverse. `where` is a boolean mask that broadcasts
against the values; slots where it is False count as absent: the result equals that of an array from
which they were deleted. Results are float32 and never NaN.

Three rules hold for all correlations:

- *Undefined.* With fewer than two unmasked slots, or a NaN or an infinity in an unmasked slot of x or y,
  the value is 0, its gradient is 0 and `is_defined` is False.
- *Constants.* A constant truth has no order to agree with, and is undefined. A constant prediction is
  undefined too wherever the textbook formula divides by its spread; each function says so.
- *Order only.* Hard ranks are piecewise constant, so `rank`, `spearman` and `kendall` have gradient 0.
  `pearson` and the soft functions carry useful gradients.

The rank functions count pairs instead of sorting. With S_i = sum_j sign(x_i - x_j), the average rank
of x_i among n is (S_i + n + 1) / 2, so S is twice the centred rank, and it is an exact integer. Up to
`EXACT_LENGTH` slots all of Spearman's sums are exact in int32; above it they are float32 sums of exact
ranks. Time grows with n**2, memory with n above `PAIRWISE_LENGTH`. Where the hardware flushes subnormal
numbers (as XLA does on CPUs), they equal zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.errors import ConfigError

Array = jax.Array
Ties = Literal["expected", "average", "random"]
SoftMethod = Literal["isotonic", "sigmoid"]

# The largest n with n (n^2 - 1) / 3, the largest sum of squared pair signs, within int32.
EXACT_LENGTH = 1860
# Up to here all n * n pairs form one fused kernel; above, XLA's CPU backend stops vectorising that
# kernel (25 times slower at n = 1,000) and a scan over the n partners, with the batch in lanes, wins.
PAIRWISE_LENGTH = 32

_TIES = ("expected", "average", "random")
_VARIANTS = ("a", "b")
_SOFT_METHODS = ("isotonic", "sigmoid")

# Limits of isotonic soft ranks, which keep every intermediate sum finite in float32 for n < 2**20.
_MIN_STRENGTH = 1e-30
_LARGE = 2.0**64
_BEYOND = 2.0**100


def rank(x, *, where=None) -> Array:
    """Average ranks: 1 for the smallest, n for the largest, ties share the mean of their places.

    Infinities are ordinary ends of the order. A NaN has no place in it and is treated as masked.

    Args:
      x: real [..., n].
      where: bool, broadcastable against x; None for all True.

    Returns:
      float32 [..., n] in [1, count of ranked slots], and 0 in slots that are masked or NaN.

    Raises:
      ConfigError: a scalar or complex x, or a mask that is not boolean.
    """
    x, where = _values_and_mask("x", x, where)
    signs = _pair_signs(x, where)  # a NaN is neither less nor greater than anything
    ranked = where & (x == x)
    return jnp.where(ranked, 0.5 * (signs + _count(ranked)[..., None] + 1).astype(jnp.float32), 0.0)


def spearman(x, y, *, ties: Ties = "expected", where=None, key=None) -> Array:
    """Spearman's rank correlation of predictions x with the truth y; see `spearman_with_validity`.

    Returns:
      float32 [...] in [-1, 1]; 0 where undefined.
    """
    return spearman_with_validity(x, y, ties=ties, where=where, key=key)[0]


def spearman_with_validity(x, y, *, ties: Ties = "expected", where=None, key=None) -> tuple[Array, Array]:
    """Spearman's rank correlation of predictions x with the truth y, and where it is defined.

    Ties within y always share their average rank. Ties within x are treated as `ties` says:

    - 'expected': the exact mean of the correlation over all equally likely orders of tied predictions,
      S.T / sqrt(n (n^2 - 1) / 3 * T.T) with pair signs S of x and T of y. It has no variance, and a
      constant x is defined: 0. Without ties it equals 'average'.
    - 'average': the Pearson correlation of average ranks, as `scipy.stats.spearmanr`; a constant x,
      for which SciPy returns NaN, is undefined.
    - 'random': one such order, drawn with `key` independently for each row. A constant x is defined and
      its value is noise (standard deviation 1 / sqrt(n - 1)).

    Args:
      x: real [..., n], predictions.
      y: real [..., n], truth.
      ties: 'expected', 'average' or 'random'.
      where: bool, broadcastable against both; None for all True.
      key: a `jax.random.key`, needed by 'random' and by nothing else. Devices that hold different rows
        of a batch must be given different keys.

    Returns:
      float32 [...] in [-1, 1] and bool [...].

    Raises:
      ConfigError: an unknown `ties`, a missing or needless key, unequal lengths, a wrong dtype.
    """
    _check_choice("ties", ties, _TIES)
    if ties == "random" and key is None:
        raise ConfigError("ties='random' found key=None, expected a jax.random.key; pass one.")
    if ties != "random" and key is not None:
        raise ConfigError(f"ties={ties!r} found a key, expected none: it draws nothing; remove `key`.")
    x, y, where = _pair_and_mask(x, y, where)
    usable = _usable(x, y, where)

    tie_breaker = None
    if ties == "random":
        shape = jnp.broadcast_shapes(x.shape, y.shape, where.shape)
        tie_breaker = jax.random.bits(key, shape, jnp.uint32)
    x_signs = _pair_signs(x, where, tie_breaker)
    y_signs = _pair_signs(y, where)
    if ties == "expected":
        x_square = _untied_square(_count(where), x.shape[-1])
    else:
        x_square = _inner_product(x_signs, x_signs)
    y_square = _inner_product(y_signs, y_signs)
    return _cosine(_inner_product(x_signs, y_signs), x_square, y_square, usable)


def kendall(x, y, *, variant: Literal["a", "b"] = "b", where=None) -> Array:
    """Kendall's rank correlation tau; see `kendall_with_validity`.

    Returns:
      float32 [...] in [-1, 1]; 0 where undefined.
    """
    return kendall_with_validity(x, y, variant=variant, where=where)[0]


def kendall_with_validity(x, y, *, variant: Literal["a", "b"] = "b", where=None) -> tuple[Array, Array]:
    """Kendall's rank correlation tau, and where it is defined.

    With C concordant and D discordant pairs among the n0 = n (n - 1) / 2 pairs, n1 of them tied in x and
    n2 tied in y: tau-a = (C - D) / n0 and tau-b = (C - D) / sqrt((n0 - n1) (n0 - n2)) (Kendall 1945).
    Counts are exact int32 up to n = 46,341.

    Args:
      x: real [..., n].
      y: real [..., n].
      variant: 'a' divides by all pairs, so ties shrink it, and a constant is defined: 0. 'b' corrects
        for ties, as `scipy.stats.kendalltau`; a constant x or y is undefined.
      where: bool, broadcastable against both; None for all True.

    Returns:
      float32 [...] in [-1, 1] and bool [...].

    Raises:
      ConfigError: an unknown variant, unequal lengths, a wrong dtype.
    """
    _check_choice("variant", variant, _VARIANTS)
    x, y, where = _pair_and_mask(x, y, where)
    usable = _usable(x, y, where)

    def compare(mine, theirs):
        in_x = _order(mine[0], theirs[0])
        in_y = _order(mine[1], theirs[1])
        both = mine[2] & theirs[2]
        agreement, untied_x, untied_y = in_x * in_y, jnp.abs(in_x), jnp.abs(in_y)
        return tuple(jnp.where(both, term, 0) for term in (agreement, untied_x, untied_y))

    # Each unordered pair is met twice, in all three counts.
    agreement, untied_x, untied_y = (
        jnp.sum(term, axis=-1).astype(jnp.float32) for term in _count_over_partners(compare, x, y, where)
    )
    if variant == "a":
        count = _count(where)
        untied_x = untied_y = (count * (count - 1)).astype(jnp.float32)
    return _cosine(agreement, untied_x, untied_y, usable)


def pearson(x, y, *, where=None) -> Array:
    """Pearson's linear correlation; see `pearson_with_validity`.

    Returns:
      float32 [...] in [-1, 1]; 0 where undefined.
    """
    return pearson_with_validity(x, y, where=where)[0]


def pearson_with_validity(x, y, *, where=None) -> tuple[Array, Array]:
    """Pearson's linear correlation, and where it is defined; differentiable in both x and y.

    Offsets and scales are removed before anything is squared, so that any finite float32 numbers work.
    A constant x or y is undefined, with value 0 and gradient 0.

    Args:
      x: real [..., n].
      y: real [..., n].
      where: bool, broadcastable against both; None for all True.

    Returns:
      float32 [...] in [-1, 1] and bool [...].

    Raises:
      ConfigError: unequal lengths, a wrong dtype.
    """
    x, y, where = _pair_and_mask(x, y, where)
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    usable = _usable(x, y, where)
    where = where & usable[..., None]
    x_deviations, _ = _deviations(x, where)
    y_deviations, _ = _deviations(y, where)
    # Elementwise products, not a matrix product, which accelerators would round to 8 or 11 bits.
    return _cosine(
        jnp.sum(x_deviations * y_deviations, axis=-1),
        jnp.sum(jnp.square(x_deviations), axis=-1),
        jnp.sum(jnp.square(y_deviations), axis=-1),
        usable,
    )


def soft_rank(x, *, strength, method: SoftMethod = "isotonic", where=None, relative: bool = False) -> Array:
    """Differentiable ranks in ascending order, between average ranks and nearly equal ones.

    - 'isotonic': the Euclidean projection of x / strength onto the convex hull of all permutations of
      1 .. n (Blondel et al. 2020, Fast Differentiable Sorting and Ranking, eq. 6 and prop. 3, here in
      ascending order). Exact, and piecewise linear: where neighbours in the order differ by `strength` or
      more, the ranks are the hard ones and the gradient is exactly 0.
    - 'sigmoid': 1/2 + sum_j sigmoid((x_i - x_j) / strength), the j-sum including i (Qin et al. 2010, A
      General Approximation Framework for Direct Optimization of Information Retrieval Measures). Smooth
      everywhere; it tends to the average ranks as the strength falls.

    Tied values get equal ranks by either method. Reverse-mode differentiation only; no gradient flows to
    `strength`.

    Args:
      x: real [..., n], taken as float32.
      strength: the smoothing, in the units of x and > 0 (raised to 1e-30 if less): a number, or an array
        that broadcasts against x with last axis 1.
      method: 'isotonic' or 'sigmoid'.
      where: bool, broadcastable against x; None for all True.
      relative: True measures `strength` in standard deviations of each row's unmasked x (held constant
        under differentiation; 1 where they are all equal), which makes the ranks independent of the
        scale of x, and the gradient inversely proportional to it.

    Returns:
      float32 [..., n] in [1, n], 0 in masked slots, and 0 in a whole row that has a NaN or an infinity in
      an unmasked slot.

    Raises:
      ConfigError: an unknown method, a number `strength` that is not positive and finite, a scalar x.
    """
    x, where = _values_and_mask("x", x, where)
    x = x.astype(jnp.float32)
    where = where & _all_finite(x, where)[..., None]
    centred = _centred_soft_ranks(x, where, strength, method, relative)
    middle = 0.5 * (_count(where)[..., None] + 1).astype(jnp.float32)
    return jnp.where(where, centred + middle, 0.0)


def soft_spearman(
    x, y, *, strength, method: SoftMethod = "isotonic", where=None, relative: bool = False
) -> Array:
    """Differentiable Spearman correlation; see `soft_spearman_with_validity`.

    Returns:
      float32 [...] in [-1, 1]; 0 where undefined.
    """
    return soft_spearman_with_validity(
        x, y, strength=strength, method=method, where=where, relative=relative
    )[0]


def soft_spearman_with_validity(
    x, y, *, strength, method: SoftMethod = "isotonic", where=None, relative: bool = False
) -> tuple[Array, Array]:
    """Pearson correlation of the soft ranks of x with the average ranks of y, and where it is defined.

    It is differentiable in x; y is the truth and gets no gradient. As `strength` falls it tends to
    `spearman(..., ties='average')`; as it grows, to the Pearson correlation of x with the ranks of y. A
    constant x or y is undefined, with value 0 and gradient 0.

    Args:
      x: real [..., n], predictions, taken as float32.
      y: real [..., n], truth.
      strength: as for `soft_rank`.
      method: as for `soft_rank`.
      where: bool, broadcastable against both; None for all True.
      relative: as for `soft_rank`.

    Returns:
      float32 [...] in [-1, 1] and bool [...].

    Raises:
      ConfigError: as `soft_rank`, and unequal lengths.
    """
    x, y, where = _pair_and_mask(x, y, where)
    x = x.astype(jnp.float32)
    usable = _usable(x, y, where)
    where = where & usable[..., None]
    x_ranks = _centred_soft_ranks(x, where, strength, method, relative)
    y_ranks = _pair_signs(y, where).astype(jnp.float32)
    value, defined = pearson_with_validity(x_ranks, y_ranks, where=where)
    return value, defined & usable


# --- Arguments ---


def _check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} found {value!r}, expected one of {', '.join(choices)}; choose one of them."
        )


def _real_array(name: str, value) -> Array:
    value = jnp.asarray(value)
    if value.ndim == 0:
        raise ConfigError(f"{name} found a scalar, expected an array [..., n]; add the axis that is ranked.")
    if value.dtype == jnp.bool_:
        return value.astype(jnp.int32)
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise ConfigError(f"{name} found dtype {value.dtype}, expected real numbers; convert it first.")
    return value


def _mask_array(where, length: int) -> Array:
    where = jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise ConfigError(f"where found dtype {where.dtype}, expected bool; pass e.g. `mask > 0`.")
    if where.ndim == 0 or where.shape[-1] == 1:
        return jnp.broadcast_to(where, (*where.shape[:-1], length))
    if where.shape[-1] != length:
        raise ConfigError(
            f"where found last axis {where.shape[-1]}, expected {length} as in the values; align the two."
        )
    return where


def _values_and_mask(name: str, x, where) -> tuple[Array, Array]:
    """Both as arrays of one shape."""
    x = _real_array(name, x)
    where = jnp.ones(x.shape[-1:], jnp.bool_) if where is None else _mask_array(where, x.shape[-1])
    x, where = _broadcast(x, where)
    return x, where


def _pair_and_mask(x, y, where) -> tuple[Array, Array, Array]:
    """The three as arrays that broadcast, with last axis n in each."""
    x, y = _real_array("x", x), _real_array("y", y)
    if x.shape[-1] != y.shape[-1]:
        raise ConfigError(
            f"y found last axis {y.shape[-1]}, expected {x.shape[-1]} as in x; pass equally many of both."
        )
    where = jnp.ones(x.shape[-1:], jnp.bool_) if where is None else _mask_array(where, x.shape[-1])
    _broadcast(x, y, where)
    return x, y, where


def _broadcast(*arrays: Array) -> list[Array]:
    try:
        return jnp.broadcast_arrays(*arrays)
    except ValueError as error:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ConfigError(
            f"arguments found shapes {shapes}, expected ones that broadcast; add or repeat leading axes."
        ) from error


def _strength_array(strength) -> Array:
    """Float32, positive and constant under differentiation; numbers are checked, tracers are clamped."""
    if isinstance(strength, (int, float, np.number)) and not (0 < strength < math.inf):
        raise ConfigError(f"strength found {strength}, expected a finite number > 0; try 0.1.")
    strength = jax.lax.stop_gradient(jnp.asarray(strength, jnp.float32))
    if strength.ndim > 0 and strength.shape[-1] != 1:
        raise ConfigError(
            f"strength found shape {strength.shape}, expected one number per row; add a last axis of size 1."
        )
    return _bounded_strength(strength)


def _bounded_strength(strength: Array) -> Array:
    largest = float(np.finfo(np.float32).max)
    return jnp.where(strength >= _MIN_STRENGTH, jnp.minimum(strength, largest), _MIN_STRENGTH)


# --- Validity ---


def _count(where: Array) -> Array:
    return jnp.sum(where, axis=-1, dtype=jnp.int32)


def _all_finite(x: Array, where: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.ones(jnp.broadcast_shapes(x.shape, where.shape)[:-1], jnp.bool_)
    return jnp.all(jnp.isfinite(x) | ~where, axis=-1)


def _usable(x: Array, y: Array, where: Array) -> Array:
    """bool [...]: two slots or more, all finite."""
    return _all_finite(x, where) & _all_finite(y, where) & (_count(where) >= 2)


def _cosine(product: Array, x_square: Array, y_square: Array, usable: Array) -> tuple[Array, Array]:
    """product / sqrt(x_square * y_square) where it is defined, else 0, and where it is.

    Both the quotient and its divisor are chosen, so that neither value nor gradient is ever NaN.
    """
    square = x_square * y_square
    defined = usable & (square > 0)
    value = jnp.where(defined, product / jnp.sqrt(jnp.where(defined, square, 1.0)), 0.0)
    return jnp.clip(value, -1.0, 1.0), jnp.broadcast_to(defined, value.shape)


# --- Pairs ---


def _order(mine: Array, theirs: Array) -> Array:
    """int32 sign of mine - theirs, by comparison: exact for integers, and without inf - inf."""
    return (theirs < mine).astype(jnp.int32) - (theirs > mine).astype(jnp.int32)


def _count_over_partners(term: Callable, *values: Array):
    """For each slot i the sum over all slots j of the integers term(values at i, values at j).

    Args:
      term: maps two tuples of broadcastable arrays, one per value, to a pytree of int32 arrays.
      *values: arrays [..., n] that broadcast.

    Returns:
      The pytree of sums, each int32 [..., n].
    """
    if values[0].shape[-1] > PAIRWISE_LENGTH:
        return _scan_over_partners(term, *values)
    mine = tuple(value[..., :, None] for value in values)
    theirs = tuple(value[..., None, :] for value in values)
    return jax.tree.map(lambda t: jnp.sum(t, axis=-1, dtype=jnp.int32), term(mine, theirs))


def _scan_over_partners(term: Callable, *values: Array):
    """As `_count_over_partners`, for n >= 1 and any dtype.

    The batch lies in lanes, so that float sums, which may not be reordered, are vectorised as well.
    """
    mine = tuple(jnp.moveaxis(value, -1, 0) for value in jnp.broadcast_arrays(*values))

    def add(total, theirs):
        return jax.tree.map(jnp.add, total, term(mine, theirs)), None

    # The first term, not zeros, starts the sum: it varies over the same mesh axes as the others, which
    # shard_map asks of a carry.
    first = term(mine, tuple(value[0] for value in mine))
    total, _ = jax.lax.scan(add, first, tuple(value[1:] for value in mine))
    return jax.tree.map(lambda t: jnp.moveaxis(t, 0, -1), total)


def _pair_signs(x: Array, where: Array, tie_breaker: Array | None = None) -> Array:
    """int32 [..., n]: how many unmasked slots are less than each, minus how many are greater; 0 if masked.

    Slots with equal x are compared by `tie_breaker`, where there is one.
    """
    x = jax.lax.stop_gradient(x)

    def compare(mine, theirs):
        order = _order(mine[0], theirs[0])
        if tie_breaker is not None:
            order = jnp.where(order == 0, _order(mine[2], theirs[2]), order)
        return jnp.where(theirs[1], order, 0)

    values = (x, where) if tie_breaker is None else (x, where, tie_breaker)
    return jnp.where(where, _count_over_partners(compare, *values), 0)


def _inner_product(x: Array, y: Array) -> Array:
    """float32 [...]: the sum of x y over the last axis, exact before rounding up to EXACT_LENGTH."""
    if x.shape[-1] <= EXACT_LENGTH:
        return jnp.sum(x * y, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)


def _untied_square(count: Array, length: int) -> Array:
    """float32 [...]: count (count^2 - 1) / 3, the sum of squared pair signs where there are no ties."""
    if length <= EXACT_LENGTH:
        # Three divides one of the factors; dividing that one first keeps the product within int32.
        square = count * count - 1
        exact = jnp.where(count % 3 == 0, (count // 3) * square, count * (square // 3))
        return exact.astype(jnp.float32)
    count = count.astype(jnp.float32)
    return count * (count * count - 1) / 3


# --- Spread ---


def _deviations(x: Array, where: Array) -> tuple[Array, Array]:
    """Deviations from the mean in units of the range [..., n], and a sixteenth of the range [..., 1].

    Both are exactly 0 where all values are equal: a rounded mean would leave noise there. A correlation
    does not depend on the offset and the scale that are removed, so holding them constant leaves its
    gradient exact.
    """
    # Sixteenths: the range of finite numbers may overflow, and its inverse must not be subnormal.
    small = jnp.where(where, x / 16, 0.0)
    fixed = jax.lax.stop_gradient(small)
    low = jnp.min(fixed, axis=-1, keepdims=True, where=where, initial=jnp.inf)
    high = jnp.max(fixed, axis=-1, keepdims=True, where=where, initial=-jnp.inf)
    extent = jnp.where(high > low, high - low, 0.0)
    spreads = extent > 0
    inside = where & spreads
    unit = jnp.where(inside, (small - jnp.where(spreads, low, 0.0)) / jnp.where(spreads, extent, 1.0), 0.0)
    count = jnp.maximum(_count(where), 1)[..., None].astype(jnp.float32)
    mean = jnp.sum(unit, axis=-1, keepdims=True) / count
    return jnp.where(inside, unit - mean, 0.0), extent


def _standard_deviation(x: Array, where: Array) -> Array:
    """float32 [..., 1]: the population standard deviation of unmasked x; 1 where all are equal."""
    deviations, extent = _deviations(jax.lax.stop_gradient(x), where)
    count = jnp.maximum(_count(where), 1)[..., None].astype(jnp.float32)
    in_ranges = jnp.sqrt(jnp.sum(jnp.square(deviations), axis=-1, keepdims=True) / count)
    return jnp.where(extent > 0, 16 * (in_ranges * extent), 1.0)


# --- Soft ranks ---


def _centred_soft_ranks(x: Array, where: Array, strength, method: SoftMethod, relative: bool) -> Array:
    """float32 [..., n]: soft ranks minus (count + 1) / 2, 0 where masked.

    Centred, since nearly equal ranks differ by less than what float32 keeps beside their mean. `where`
    must already exclude all that is not finite.
    """
    _check_choice("method", method, _SOFT_METHODS)
    strength = _strength_array(strength)
    if relative:
        strength = _bounded_strength(strength * _standard_deviation(jnp.where(where, x, 0.0), where))
    x, where, strength = _broadcast(x, where, jnp.atleast_1d(strength))
    strength = strength[..., :1]
    if x.shape[-1] == 0:
        return x
    # The strength is positive; asking makes x vary over every mesh axis over which the result does, as
    # shard_map demands of the cotangent of a custom_vjp.
    x = jnp.where(where & (strength > 0), x, 0.0)
    return (_isotonic_ranks if method == "isotonic" else _sigmoid_ranks)(x, where, strength)


@jax.custom_vjp
def _sigmoid_ranks(x: Array, where: Array, strength: Array) -> Array:
    """Half the sum over j of tanh((x_i - x_j) / (2 strength))."""
    return _sigmoid_forward(x, where, strength)[0]


def _half_differences(mine: Array, theirs: Array, inverse: Array) -> Array:
    # Halves before the difference: that of two finite numbers may overflow, and inf * 0 is NaN.
    return (0.5 * mine - 0.5 * theirs) * inverse


def _sigmoid_forward(x: Array, where: Array, strength: Array):
    inverse = jnp.broadcast_to(1.0 / strength, x.shape)

    def compare(mine, theirs):
        return jnp.where(theirs[1], jnp.tanh(_half_differences(mine[0], theirs[0], mine[2])), 0.0)

    ranks = 0.5 * _scan_over_partners(compare, x, where, inverse)
    return jnp.where(where, ranks, 0.0), (x, where, inverse)


def _sigmoid_backward(residuals, cotangent: Array):
    x, where, inverse = residuals

    def compare(mine, theirs):
        slope = 1.0 - jnp.square(jnp.tanh(_half_differences(mine[0], theirs[0], mine[2])))
        return jnp.where(theirs[1], slope * (mine[3] - theirs[3]), 0.0)

    total = _scan_over_partners(compare, x, where, inverse, cotangent)
    return jnp.where(where, 0.25 * inverse * total, 0.0), None, None


_sigmoid_ranks.defvjp(_sigmoid_forward, _sigmoid_backward)


@jax.custom_vjp
def _isotonic_ranks(x: Array, where: Array, strength: Array) -> Array:
    """Centred projection of x / strength onto the permutahedron of 1 .. count.

    With s = sorted x / strength and w = 1 .. n, it is s - v, v the increasing isotonic regression of
    s - w (Blondel et al. 2020, prop. 3 and lemma 1). v is constant within blocks of neighbours, so the
    rank is the block's mean place plus (x - the block's mean x) / strength. This form keeps the digits
    that s - v loses in float32, and every hard rank, whose block has one member, is exact.
    """
    return _isotonic_forward(x, where, strength)[0]


def _isotonic_forward(x: Array, where: Array, strength: Array):
    place = _places(x, where)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    shrink = jnp.where(largest > _LARGE, 1.0 / _LARGE, 1.0)  # a power of two: rounds nothing
    ordered = _to_order(jnp.where(where, x * shrink, _BEYOND), place)
    step = jnp.maximum(strength * shrink, _MIN_STRENGTH)
    first, last = _block_ends(ordered, step)
    count = _count(where)[..., None]
    block_centre = 0.5 * (first + last - (count - 1)).astype(jnp.float32)
    ranks = _from_order(block_centre + _block_deviations(ordered, first, last) / step, place)
    return jnp.where(where, ranks, 0.0), (place, first, last, where, strength)


def _isotonic_backward(residuals, cotangent: Array):
    """(g - mean of g over the block) / strength."""
    place, first, last, where, strength = residuals
    ordered = _to_order(jnp.where(where, cotangent, 0.0), place)
    gradient = _from_order(_block_deviations(ordered, first, last), place) / strength
    return jnp.where(where, gradient, 0.0), None, None


_isotonic_ranks.defvjp(_isotonic_forward, _isotonic_backward)


def _places(x: Array, where: Array) -> Array:
    """int32 [..., n]: where each slot goes in ascending order, ties by index, masked slots last."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)

    def precede(mine, theirs):
        earlier = theirs[2] < mine[2]
        smaller = (theirs[0] < mine[0]) | ((theirs[0] == mine[0]) & earlier)
        # Masking the outcome and not x: a choice among inputs keeps XLA from vectorising the kernel.
        return jnp.where(mine[1], theirs[1] & smaller, theirs[1] | earlier).astype(jnp.int32)

    return _count_over_partners(precede, x, where, index)


def _to_order(values: Array, place: Array) -> Array:
    return jnp.put_along_axis(jnp.zeros_like(values), place, values, axis=-1, inplace=False)


def _from_order(ordered: Array, place: Array) -> Array:
    return jnp.take_along_axis(ordered, place, axis=-1)


def _block_deviations(ordered: Array, first: Array, last: Array) -> Array:
    """Each value minus the mean of its block; exactly 0 for a block of one."""
    # Sums of differences from the block's first value, which is thereby left out of them.
    excess = ordered - jnp.take_along_axis(ordered, first, axis=-1)
    total = jnp.cumsum(excess, axis=-1)
    in_block = jnp.take_along_axis(total, last, axis=-1) - jnp.take_along_axis(total, first, axis=-1)
    return excess - in_block / (last - first + 1).astype(jnp.float32)


def _block_ends(ordered: Array, step: Array) -> tuple[Array, Array]:
    """Where the constant blocks of the increasing isotonic regression of ordered_i - step * i lie.

    A block ends between i and i + 1 exactly where no run of values that ends at i has a higher mean than
    some run that starts at i + 1, which is when both are vertices of the greatest convex minorant of the
    cumulative sums. All runs are widened together, one slot at a time, and measured from y_i itself:
    short runs then keep their digits, and nothing is sorted, stacked or branched on.

    Args:
      ordered: float32 [..., n], ascending, at most `_BEYOND`.
      step: float32 [..., 1], positive.

    Returns:
      For each i the first and the last index of its block, both int32 [..., n].
    """
    s = jnp.moveaxis(ordered, -1, 0)
    step = jnp.moveaxis(jnp.minimum(step, 4 * _LARGE), -1, 0)  # already one block; keeps the sums finite
    length = s.shape[0]
    beyond = jnp.full_like(s, _BEYOND)
    before, after = jnp.concatenate([-beyond, s]), jnp.concatenate([s, beyond])

    def widen(carry, width):
        sum_before, sum_after, highest_before, lowest_after = carry
        reach = width.astype(jnp.float32) * step
        share = 1.0 / (width + 1).astype(jnp.float32)
        sum_before += jax.lax.dynamic_slice_in_dim(before, length - width, length) - s + reach
        sum_after += jax.lax.dynamic_slice_in_dim(after, width, length) - s - reach
        highest_before = jnp.maximum(highest_before, sum_before * share)
        lowest_after = jnp.minimum(lowest_after, sum_after * share)
        return (sum_before, sum_after, highest_before, lowest_after), None

    zero = s - s  # not a constant, since shard_map asks a carry to vary over the axes of its updates
    widths = jnp.arange(1, length, dtype=jnp.int32)
    (_, _, highest_before, lowest_after), _ = jax.lax.scan(widen, (zero, zero, zero, zero), widths)
    splits = (s[1:] - s[:-1]) - step >= highest_before[:-1] - lowest_after[1:]
    edge = jnp.ones_like(splits, shape=(1, *splits.shape[1:]))
    index = jnp.arange(length, dtype=jnp.int32).reshape(-1, *[1] * (s.ndim - 1))
    starts, ends = jnp.concatenate([edge, splits]), jnp.concatenate([splits, edge])
    first = jax.lax.cummax(jnp.where(starts, index, 0), axis=0)
    last = jax.lax.cummin(jnp.where(ends, index, length), axis=0, reverse=True)
    return jnp.moveaxis(first, 0, -1), jnp.moveaxis(last, 0, -1)
