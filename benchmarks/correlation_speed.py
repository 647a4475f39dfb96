"""Times correlations and soft ranks against a SciPy loop over the same rows, in one run.

    python benchmarks/correlation_speed.py

Prints, for three sizes, process-CPU milliseconds (minimum of repeats, compiled and warm) and how many
times faster than SciPy's `spearmanr` on each row that is. Both are measured in the same process, so the
ratio is little affected by what else the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxreward import correlation

SIZES = ((15, 4096), (64, 1024), (1000, 64))  # (n, rows)
REPEATS = 10
SCIPY_ROWS = 128  # enough to time one row; the loop's time is proportional to the rows
STRENGTH = 0.1


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """The least process-CPU time of one call, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(function())
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def soft_rank_and_gradient(x, cotangent, method: str):
    """Soft ranks of x and the gradient of their product with the cotangent."""
    ranks, vjp = jax.vjp(lambda x: correlation.soft_rank(x, strength=STRENGTH, method=method), x)
    return ranks, vjp(cotangent)


def programs() -> dict[str, Callable]:
    """What is timed: functions of x and y, both float32 [rows, n]."""
    return {
        "rank": lambda x, y: correlation.rank(x),
        "spearman": correlation.spearman,
        "kendall b": correlation.kendall,
        "pearson": correlation.pearson,
        "soft_rank isotonic": lambda x, y: correlation.soft_rank(x, strength=STRENGTH),
        "soft_rank isotonic + vjp": lambda x, y: soft_rank_and_gradient(x, y, "isotonic"),
        "soft_rank sigmoid": lambda x, y: correlation.soft_rank(x, strength=STRENGTH, method="sigmoid"),
        "soft_rank sigmoid + vjp": lambda x, y: soft_rank_and_gradient(x, y, "sigmoid"),
    }


def main() -> None:
    """Prints one table per size."""
    rng = np.random.default_rng(0)
    for length, rows in SIZES:
        x, y = rng.standard_normal((2, rows, length)).astype(np.float32)
        timed_rows = min(rows, SCIPY_ROWS)

        def scipy_loop(x=x[:timed_rows], y=y[:timed_rows]):
            return [stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]

        reference = milliseconds(scipy_loop, 3) * rows / timed_rows
        print(f"n = {length}, {rows} rows: SciPy spearmanr loop {reference:.0f} ms")
        x, y = jnp.asarray(x), jnp.asarray(y)
        for name, program in programs().items():
            compiled = jax.jit(program).lower(x, y).compile()
            compiled(x, y)
            taken = milliseconds(lambda compiled=compiled, x=x, y=y: compiled(x, y), REPEATS)
            print(f"  {name:26s} {taken:8.2f} ms   {reference / taken:8.1f} x")


if __name__ == "__main__":
    main()
