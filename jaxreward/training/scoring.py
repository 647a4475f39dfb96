"""Has a scorer judge the windows that are due, in chunks of a static size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.rewards.base import Queries
from jaxreward.scorers.base import Scores
from jaxreward.types import Array, PyTree


def render_rows(environment, queries: Queries, rows: Array) -> tuple[Array, Array]:
    """Renders the frames of some queries.

    Args:
      environment: its `render` turns compact frames into pictures.
      queries: Q queries of K slots.
      rows: int32 [C]; rows beyond Q are clipped (their result is not used).

    Returns:
      uint8 [C, K, H, W, 3] and the mask [C, K].
    """
    take = lambda x: jnp.take(x, rows, axis=0, mode="clip")  # noqa: E731
    index, column, where = take(queries.index), take(queries.environment), take(queries.where)
    frames = jax.tree.map(lambda table: table[index, column[:, None]], queries.table)
    return environment.render(frames), where


def score_queries(
    environment, scorer, params: PyTree, context: PyTree, queries: Queries, key: Array, *, chunk: int
) -> Scores:
    """Scores every due query, `chunk` at a time; jittable for a jittable scorer.

    The number of chunks follows from `queries.count` at run time, so that nothing overflows and
    nothing is computed for rows that are not due (beyond the last chunk's padding).

    Args:
      environment: renders the frames.
      scorer: a jittable scorer.
      params: its parameters.
      context: what its `prepare` returned.
      queries: Q queries, the first `count` of them due.
      key: chunk i uses `fold_in(key, i)`.
      chunk: queries in one call of the scorer.

    Returns:
      Scores with Q rows; rows that are not due hold zeros.
    """
    total = queries.step.shape[0]
    chunk = min(chunk, total)
    padded = -(-total // chunk) * chunk

    def call(i):
        frames, where = render_rows(environment, queries, i * chunk + jnp.arange(chunk))
        return scorer.score(params, context, frames, where, jax.random.fold_in(key, i))

    shapes = jax.eval_shape(call, jnp.int32(0))
    empty = jax.tree.map(lambda s: jnp.zeros((padded, *s.shape[1:]), s.dtype), shapes)

    def body(carry):
        i, scores = carry
        update = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, i * chunk, 0)  # noqa: E731
        return i + 1, jax.tree.map(update, scores, call(i))

    _, scores = jax.lax.while_loop(
        lambda carry: carry[0] * chunk < queries.count, body, (jnp.int32(0), empty)
    )
    return jax.tree.map(lambda x: x[:total], scores)


def score_queries_on_host(
    environment, scorer, params: PyTree, context: PyTree, queries: Queries, key: Array, *, chunk: int
) -> Scores:
    """Equal to `score_queries`, for scorers that cannot be called inside jit (remote, generative)."""
    total, count = queries.step.shape[0], int(queries.count)
    parts = []
    for i in range(-(-count // chunk)):
        rows = i * chunk + np.arange(chunk)
        frames, where = render_rows(environment, queries, jnp.asarray(rows))
        parts.append(scorer.score(params, context, frames, where, jax.random.fold_in(key, i)))
    if not parts:
        empty = jnp.zeros((total, queries.index.shape[1]))
        return Scores(empty, jnp.zeros(total, bool), jnp.zeros(total, jnp.int32))
    scores = jax.tree.map(lambda *x: jnp.concatenate(x)[:total], *parts)
    missing = total - scores.valid.shape[0]
    return jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), scores)
