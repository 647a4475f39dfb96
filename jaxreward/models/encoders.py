"""Encoders of observations and frames: MLP, CNN and IMPALA bodies, shared by agents, scorers and rewards.

Every body maps its input to one float32 feature vector and leaves any leading axes as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxreward.errors import ConfigError
from jaxreward.types import Array

# Keeps the variance of activations through ReLU layers (Saxe et al., 2014; He et al., 2015).
RELU_INIT = nn.initializers.orthogonal(math.sqrt(2.0))


def normalise_pixels(pixels: Array) -> Array:
    """Maps uint8 pixels to 1 - x / 255 in [0, 1]: white is 0 and black is 1.

    A light background becomes 0, the value with which convolutions pad; floating-point input is taken
    to be features already and passes unchanged.

    Args:
      pixels: uint8 or floating [..., H, W, C].

    Returns:
      float32 [..., H, W, C].

    Raises:
      ConfigError: for any other dtype.
    """
    if pixels.dtype == jnp.uint8:
        return 1.0 - pixels.astype(jnp.float32) / 255.0
    if jnp.issubdtype(pixels.dtype, jnp.floating):
        return pixels.astype(jnp.float32)
    raise ConfigError(
        f"a pixel encoder was given {pixels.dtype} input of shape {pixels.shape}; it reads uint8 pixels or "
        "floating-point planes. Encode symbols as one-hot planes first."
    )


def extract_patches(images: Array, size: int) -> Array:
    """Cuts images into non-overlapping patches, padded with zeros as convolutions with 'SAME' padding are.

    Args:
      images: [N, H, W, C].
      size: the side of a patch.

    Returns:
      [N, ceil(H / size), ceil(W / size), size * size * C], row-major within a patch.
    """
    batch, height, width, channels = images.shape
    rows, columns = -(-height // size), -(-width // size)
    missing_rows, missing_columns = rows * size - height, columns * size - width
    if missing_rows or missing_columns:
        top, left = missing_rows // 2, missing_columns // 2
        images = jnp.pad(images, ((0, 0), (top, missing_rows - top), (left, missing_columns - left), (0, 0)))
    images = images.reshape(batch, rows, size, columns, size, channels).swapaxes(2, 3)
    return images.reshape(batch, rows, columns, size * size * channels)


class Convolution(nn.Module):
    """A square convolution with 'SAME' padding; parameters and results are those of `flax.linen.Conv`.

    Where the kernel is as large as the stride, patches do not overlap and the convolution is one matrix
    product. It is computed as one, because the gradient of a convolution inside `lax.scan` is several
    times slower on CPU than that of a matrix product.

    Attributes:
      features: number of output channels.
      kernel: side of the kernel in pixels.
      stride: distance between outputs in pixels.
      kernel_init: initialiser of the kernel [kernel, kernel, C, features].
    """

    features: int
    kernel: int
    stride: int = 1
    kernel_init: Callable[..., Array] = RELU_INIT

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Maps float32 [N, H, W, C] to float32 [N, ceil(H / stride), ceil(W / stride), features]."""
        shape = (self.kernel, self.kernel, images.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        if self.kernel == self.stride:
            return extract_patches(images, self.kernel) @ kernel.reshape(-1, self.features) + bias
        strides = (self.stride, self.stride)
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(images, kernel, strides, "SAME", None, None, dimensions) + bias


def merge_leading_axes(array: Array, trailing: int) -> tuple[Array, tuple[int, ...]]:
    """Reshapes [..., *trailing axes] to [N, *trailing axes]; also returns the leading shape."""
    leading = array.shape[: array.ndim - trailing]
    return array.reshape((math.prod(leading), *array.shape[array.ndim - trailing :])), leading


class CNN(nn.Module):
    """Convolutions with ReLU, flattened.

    Attributes:
      layers: (features, kernel, stride) of each convolution. The default reads 4x4 blocks, then 3x3
        neighbourhoods of blocks: enough for small pictures of tiles.
    """

    layers: tuple[tuple[int, int, int], ...] = ((16, 4, 4), (16, 3, 1))

    @nn.compact
    def __call__(self, pixels: Array) -> Array:
        """Maps uint8 pixels (or floating planes) [..., H, W, C] to float32 [..., features].

        Raises:
          ConfigError: if the input is neither uint8 nor floating-point, or has fewer than three axes.
        """
        images, leading = merge_leading_axes(_pixels(pixels), 3)
        for features, kernel, stride in self.layers:
            images = nn.relu(Convolution(features, kernel, stride)(images))
        return images.reshape((*leading, -1))


class ResidualBlock(nn.Module):
    """ReLU, 3x3 convolution, ReLU, 3x3 convolution, added to the input."""

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Maps float32 [N, H, W, C] to the same shape."""
        channels = images.shape[-1]
        hidden = Convolution(channels, 3)(nn.relu(images))
        return images + Convolution(channels, 3)(nn.relu(hidden))


class IMPALA(nn.Module):
    """The residual network of IMPALA (Espeholt et al., 2018, figure 3, right), flattened.

    Each section is a 3x3 convolution, 3x3 max pooling of stride 2, and residual blocks.

    Attributes:
      sections: number of channels of each section.
      blocks: residual blocks in a section.
    """

    sections: tuple[int, ...] = (16, 32, 32)
    blocks: int = 2

    @nn.compact
    def __call__(self, pixels: Array) -> Array:
        """Maps uint8 pixels (or floating planes) [..., H, W, C] to float32 [..., features].

        Raises:
          ConfigError: if the input is neither uint8 nor floating-point, or has fewer than three axes.
        """
        images, leading = merge_leading_axes(_pixels(pixels), 3)
        for channels in self.sections:
            images = Convolution(channels, 3)(images)
            images = nn.max_pool(images, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(self.blocks):
                images = ResidualBlock()(images)
        return nn.relu(images).reshape((*leading, -1))


class MLP(nn.Module):
    """Dense layers, each with an activation.

    Attributes:
      layers: width of each layer.
      activation: the activation after every layer, the last one too.
    """

    layers: tuple[int, ...] = (128,)
    activation: Callable[[Array], Array] = nn.relu

    @nn.compact
    def __call__(self, features: Array) -> Array:
        """Maps float32 [..., F] to float32 [..., layers[-1]]."""
        for width in self.layers:
            features = self.activation(nn.Dense(width, kernel_init=RELU_INIT)(features))
        return features


def _pixels(pixels: Array) -> Array:
    if pixels.ndim < 3:
        raise ConfigError(
            f"a pixel encoder was given input of shape {pixels.shape}; it reads [..., H, W, C]. "
            "Use the body 'mlp' for vectors."
        )
    return normalise_pixels(pixels)
