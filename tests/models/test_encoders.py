"""Encoders against flax.linen.Conv, hand-computed numbers, and their own contract on axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.errors import ConfigError
from jaxreward.models.encoders import CNN, IMPALA, MLP, Convolution, extract_patches, normalise_pixels


@settings(max_examples=8, deadline=None)
@given(
    kernel_and_stride=st.sampled_from([(1, 1), (2, 2), (4, 4), (5, 5), (3, 1), (3, 2), (8, 4)]),
    height=st.integers(3, 11),
    width=st.integers(3, 11),
    channels=st.integers(1, 3),
)
def test_convolution_equals_flax_in_values_and_gradients(kernel_and_stride, height, width, channels):
    kernel, stride = kernel_and_stride
    images = jax.random.normal(jax.random.key(height * 100 + width), (2, height, width, channels))
    reference = nn.Conv(5, (kernel, kernel), (stride, stride), padding="SAME")
    ours = Convolution(5, kernel, stride)
    params = reference.init(jax.random.key(0), images)
    params = jax.tree.map(lambda p: p + 0.1, params)
    assert jax.tree.structure(params) == jax.tree.structure(ours.init(jax.random.key(1), images))

    def loss(module, params, images):
        return jnp.sum(jnp.sin(module.apply(params, images)))

    expected = reference.apply(params, images)
    np.testing.assert_allclose(ours.apply(params, images), expected, rtol=1e-5, atol=1e-5)
    ours_gradients = jax.grad(loss, argnums=(1, 2))(ours, params, images)
    expected_gradients = jax.grad(loss, argnums=(1, 2))(reference, params, images)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        ours_gradients,
        expected_gradients,
    )


def test_patches_of_a_padded_image_by_hand():
    image = jnp.arange(1.0, 10.0).reshape(1, 3, 3, 1)
    # One row and one column are missing; SAME padding puts the odd one at the end.
    expected = [[[1, 2, 4, 5], [3, 0, 6, 0]], [[7, 8, 0, 0], [9, 0, 0, 0]]]
    np.testing.assert_array_equal(extract_patches(image, 2)[0], expected)


def test_a_convolution_without_overlap_compiles_to_no_convolution():
    images = jnp.zeros((2, 8, 8, 1))
    module = Convolution(4, 4, 4)
    params = module.init(jax.random.key(0), images)
    assert "conv_general_dilated" not in str(
        jax.make_jaxpr(jax.grad(lambda p: module.apply(p, images).sum()))(params)
    )


def test_pixels_are_normalised_to_one_minus_x_over_255():
    pixels = jnp.array([0, 51, 255], jnp.uint8).reshape(1, 3, 1)
    np.testing.assert_allclose(normalise_pixels(pixels).ravel(), [1.0, 0.8, 0.0], atol=1e-7)
    planes = jnp.array([0.0, 0.5, 1.0], jnp.float32)
    np.testing.assert_array_equal(normalise_pixels(planes), planes)


@pytest.mark.parametrize("module", [CNN(), CNN(layers=((8, 8, 4), (8, 4, 2))), IMPALA(sections=(4, 8))])
def test_leading_axes_are_kept_and_independent(module):
    pixels = jax.random.randint(jax.random.key(0), (2, 3, 13, 17, 3), 0, 256).astype(jnp.uint8)
    params = module.init(jax.random.key(1), pixels)
    features = module.apply(params, pixels)
    assert features.dtype == jnp.float32 and features.shape[:2] == (2, 3) and features.ndim == 3
    np.testing.assert_allclose(module.apply(params, pixels[1, 2]), features[1, 2], rtol=1e-5, atol=1e-5)


def test_shapes_of_the_bodies():
    pixels = jnp.zeros((30, 40, 1), jnp.uint8)
    features, variables = CNN().init_with_output(jax.random.key(0), pixels)
    assert features.shape == (8 * 10 * 16,)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes["Convolution_0"] == {"kernel": (4, 4, 1, 16), "bias": (16,)}
    assert shapes["Convolution_1"] == {"kernel": (3, 3, 16, 16), "bias": (16,)}
    features, _ = IMPALA().init_with_output(jax.random.key(0), jnp.zeros((2, 64, 64, 3), jnp.uint8))
    assert features.shape == (2, 8 * 8 * 32)
    features, _ = MLP((7, 5)).init_with_output(jax.random.key(0), jnp.zeros((4, 2, 3)))
    assert features.shape == (4, 2, 5)


def test_wrong_input_is_named():
    with pytest.raises(ConfigError, match=r"int8.*one-hot"):
        CNN().init(jax.random.key(0), jnp.zeros((8, 8, 1), jnp.int8))
    with pytest.raises(ConfigError, match="mlp"):
        CNN().init(jax.random.key(0), jnp.zeros((8,), jnp.float32))
