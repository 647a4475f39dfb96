import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.models import layers
from jaxreward.models.layers import product

RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE = (
    RANDOM.normal(size=(2, length, heads, 8)).astype(np.float32) for length, heads in ((7, 4), (9, 2), (9, 2))
)
MASKS = {
    "none": None,
    "of each query": RANDOM.random((2, 1, 7, 9)) < 0.6,
    "of all queries": RANDOM.random((2, 1, 1, 9)) < 0.6,
    "of each head": RANDOM.random((2, 4, 7, 9)) < 0.6,
}


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_bfloat16_is_exact_to_float32(transposed):
    """Rounding the result to bfloat16 would err by 2^-9; float64 on the same operands is the truth."""
    x = jax.random.normal(jax.random.key(0), (3, 5, 64), jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(1), (64, 32), jnp.bfloat16)

    def logits(x, kernel):
        return product(x, kernel.T.copy().T if transposed else kernel, "float32")

    wide, square = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    found = jax.jit(logits)(x, kernel)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wide @ square, atol=1e-5)

    weight = jax.random.normal(jax.random.key(2), found.shape)
    of_x, of_kernel = jax.jit(jax.grad(lambda x, k: jnp.sum(logits(x, k) * weight), (0, 1)))(x, kernel)
    assert of_x.dtype == of_kernel.dtype == jnp.bfloat16
    expected = np.asarray(weight, np.float64) @ square.T
    np.testing.assert_allclose(np.asarray(of_x, np.float64), expected, rtol=2**-7, atol=0.02)
    expected = np.einsum("bti,bto->io", wide, np.asarray(weight, np.float64))
    np.testing.assert_allclose(np.asarray(of_kernel, np.float64), expected, rtol=2**-7, atol=0.02)


def test_operands_of_two_dtypes_are_cast():
    x, kernel = jnp.ones((2, 4), jnp.bfloat16), jnp.full((4, 3), 1.01, jnp.float32)
    np.testing.assert_allclose(product(x, kernel, "float32"), np.full((2, 3), 4.04), rtol=1e-6)
    assert product(x, kernel, "bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("limit", [1, 2 * 4 * 9 * 2, 2 * 4 * 9 * 3])
def test_queries_one_after_another_attend_as_all_at_once(monkeypatch, mask, limit):
    def result(query, key, value):
        return layers.attend(query, key, value, MASKS[mask])

    def everything():
        value, pull = jax.vjp(result, QUERY, KEY, VALUE)
        return value, pull(np.arange(value.size, dtype=np.float32).reshape(value.shape) / value.size)

    whole = everything()
    monkeypatch.setattr(layers, "MAX_LOGITS", limit)
    assert "scan" in str(jax.make_jaxpr(result)(QUERY, KEY, VALUE))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), whole, everything())


def test_one_query_is_never_split(monkeypatch):
    monkeypatch.setattr(layers, "MAX_LOGITS", 1)
    assert "scan" not in str(jax.make_jaxpr(layers.attend)(QUERY[:, :1], KEY, VALUE, None))
