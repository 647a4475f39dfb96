"""Cosines against NumPy in float64; thresholds against the quantile formula, by coverage and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxreward.errors import DataError
from jaxreward.similarity import conformal_threshold, cosine_similarity, literal_threshold

numbers = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
similarities = arrays.arrays(np.float64, st.integers(9, 60), elements=st.floats(-1, 1))


@settings(deadline=None)
@given(arrays.arrays(np.float32, (2, 3, 5), elements=numbers))
def test_cosines_equal_numpy_in_float64(pair):
    x, y = pair.astype(np.float64)
    length = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    expected = np.divide((x * y).sum(-1), length, out=np.zeros(3), where=length > 0)
    np.testing.assert_allclose(cosine_similarity(*pair), expected, atol=1e-6)


def test_cosines_at_the_limits():
    x = jnp.array([1e-30, 0, 0]), jnp.array([1e30, 1e30, 0]), jnp.zeros(3), jnp.array([jnp.nan, 1, 0])
    found = cosine_similarity(jnp.stack(x)[:, None], jnp.array([[2e30, 0, 0], [0, 0, -1]]))
    np.testing.assert_allclose(found, [[1, 0], [0.5**0.5, 0], [0, 0], [0, 0]], atol=1e-6)


def test_cosines_jit_vmap_and_differentiate():
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 6))
    found = jax.jit(jax.vmap(cosine_similarity))(x, y)
    np.testing.assert_allclose(found, cosine_similarity(x, y), atol=1e-7)
    gradient = jax.grad(lambda v: cosine_similarity(v, y[0]))(x[0])
    a, b, step = np.float64(x[0]), np.float64(y[0]), 1e-6

    def cosine(v):
        return v @ b / np.linalg.norm(v) / np.linalg.norm(b)

    expected = [(cosine(a + step * e) - cosine(a - step * e)) / (2 * step) for e in np.eye(6)]
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert np.isfinite(jax.grad(lambda v: cosine_similarity(v, y[0]))(jnp.zeros(6))).all()


@given(similarities, st.sampled_from([0.1, 0.2, 0.25, 0.5]))
def test_the_threshold_is_the_published_code_s_quantile(found, miscoverage):
    level = min(np.ceil(round((len(found) + 1) * (1 - miscoverage), 9)) / len(found), 1)
    expected = 1 - np.quantile(1 - found, level, method="higher")
    np.testing.assert_allclose(conformal_threshold(found, miscoverage=miscoverage), expected, atol=1e-12)


def test_the_threshold_by_hand():
    ten = np.arange(1, 11) / 10
    # Level ceil(11 * 0.9) / 10 = 1: the largest of s. Level ceil(11 * 0.7) / 10 = 0.8: place 7.2 of 0 .. 9,
    # so the ninth of s, of the similarities the second.
    assert conformal_threshold(ten) == 0.1
    assert conformal_threshold(ten, miscoverage=0.3) == 0.2
    # ceil(9 * 0.9) / 10 = 0.9: the ninth of ten, counted from the lowest, after 0.9 * 9 = 8.1 steps.
    assert literal_threshold(ten) == 0.9


def test_nine_tenths_of_true_pairs_pass_and_one_tenth_by_the_letter():
    rng = np.random.default_rng(0)
    passed, by_the_letter = [], []
    for _ in range(200):
        pairs, further = rng.beta(4, 2, (2, 500))
        passed.append((further >= conformal_threshold(pairs)).mean())
        by_the_letter.append((further >= literal_threshold(pairs)).mean())
    assert abs(np.mean(passed) - 0.9) < 0.01
    assert abs(np.mean(by_the_letter) - 0.1) < 0.01


def test_too_few_pairs_and_other_bad_input():
    assert conformal_threshold(np.linspace(0.1, 0.9, 9)) == 0.1
    with pytest.raises(DataError, match="8 calibration pairs found; at least 9"):
        conformal_threshold(np.linspace(0.1, 0.9, 8))
    with pytest.raises(DataError, match="3 calibration pairs found; at least 4"):
        conformal_threshold([0.1, 0.2, 0.3], miscoverage=0.2)
    for compute in (conformal_threshold, literal_threshold):
        with pytest.raises(DataError, match=r"shape \(0,\)"):
            compute([])
        with pytest.raises(DataError, match="1 of 10 similarities are not finite"):
            compute([float("nan"), *np.linspace(0, 1, 9)])
        with pytest.raises(DataError, match=r"miscoverage 1\.0 found"):
            compute([0.5] * 20, miscoverage=1.0)
