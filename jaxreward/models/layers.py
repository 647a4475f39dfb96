"""What the transformers here share: linear maps with optional LoRA, norms, rotary positions, attention."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.types import Array

KERNEL_INIT = nn.initializers.normal(0.02)

# Attention logits that exist at once, 256 MiB in float32.
MAX_LOGITS = 2**26


def product(x: Array, kernel: Array, dtype: str) -> Array:
    """x @ kernel, summed and returned in `dtype`.

    Two bfloat16 operands are multiplied as they are even where the result is float32: their products are
    exact in float32, and the kernel, in an output layer the largest of all, is never copied to float32.

    Args:
      x: [..., inputs].
      kernel: [inputs, outputs].
      dtype: of the result; operands of other dtypes are cast to it.

    Returns:
      `dtype` [..., outputs].
    """
    if x.dtype == kernel.dtype == jnp.bfloat16:
        return jnp.matmul(x, kernel, preferred_element_type=dtype)
    return x.astype(dtype) @ kernel.astype(dtype)


class Linear(nn.Module):
    """y = x W + b, plus (x A) B where the variables hold a LoRA for this layer (Hu et al., 2022, eq. 3).

    The LoRA lives in a collection of its own, `lora` (see `jaxreward.models.lora`), so that the base stays
    untouched and the reference model is the same call without that collection.

    Attributes:
      features: width of the output.
      use_bias: adds b.
      dtype: of the computation; parameters of another dtype are cast.
      kernel_init: initialiser of W [inputs, features].
    """

    features: int
    use_bias: bool = True
    dtype: str = "float32"
    kernel_init: Callable[..., Array] = KERNEL_INIT

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [..., inputs] to `dtype` [..., features]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.dtype)
        y = product(x, kernel, self.dtype)
        if self.has_variable("lora", "a"):
            a, b = self.get_variable("lora", "a"), self.get_variable("lora", "b")
            y = y + (x.astype(self.dtype) @ a.astype(self.dtype)) @ b.astype(self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), self.dtype)
            y = y + bias.astype(self.dtype)
        return y


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis (Zhang and Sennrich, 2019), in float32.

    Attributes:
      epsilon: added to the mean square.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [..., D] to the same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],), x.dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.epsilon)
        return scale.astype(x.dtype) * wide.astype(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis, in float32.

    Attributes:
      epsilon: added to the variance.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [..., D] to the same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],), x.dtype)
        bias = self.param("bias", nn.initializers.zeros_init(), (x.shape[-1],), x.dtype)
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, -1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.epsilon)
        return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def quick_gelu(x: Array) -> Array:
    """x sigmoid(1.702 x), the GELU of OpenAI's CLIP."""
    return x * jax.nn.sigmoid(1.702 * x)


# Keyed by the name that a Hugging Face config gives as `hidden_act`.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": quick_gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def inverse_frequencies(width: int, theta: float) -> np.ndarray:
    """theta^(-2 j / width) for j = 0 .. width / 2 - 1, float32 (Su et al., 2021, section 3.2.2)."""
    return (1.0 / theta ** (np.arange(0, width, 2, dtype=np.float32) / width)).astype(np.float32)


def rotate(x: Array, angles: Array) -> Array:
    """Rotates the pairs (j, j + D / 2) of the last axis, as Llama and Qwen store them.

    Args:
      x: [..., H, D], heads and head width.
      angles: float32 [..., D / 2] in radians, one set for all heads.

    Returns:
      The shape and dtype of `x`; the rotation is computed in float32.
    """
    cosine, sine = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1).astype(x.dtype)


def attend(
    query: Array, key: Array, value: Array, where: Array | None, *, scale: float | None = None
) -> Array:
    """Scaled dot-product attention with grouped queries; logits and softmax in float32.

    A query that may see nothing (padding) gets the mean of all values; never NaN. Where there would be more
    than `MAX_LOGITS` logits at once, some queries go after others, and again so in the backward pass.

    Args:
      query: [B, T, H, D].
      key: [B, S, G, D]; G divides H.
      value: [B, S, G, D].
      where: bool, broadcastable to [B, H, T, S]; True where a query sees a key. None: it sees all.
      scale: of the logits; 1 / sqrt(D) if None.

    Returns:
      [B, T, H * D], the dtype of `query`.
    """
    batch, length, heads, width = query.shape
    parts = min(-(-batch * heads * length * key.shape[1] // MAX_LOGITS), length)
    if parts == 1:
        out = jax.nn.dot_product_attention(query, key, value, mask=where, scale=scale)
        return out.reshape(batch, length, -1)

    missing = -length % parts

    def split(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :]), axis, 0)

    own_masks = where is not None and where.shape[2] == length

    @jax.checkpoint
    def one(part: tuple[Array, Array | None]) -> Array:
        mask = part[1] if own_masks else where
        return jax.nn.dot_product_attention(part[0], key, value, mask=mask, scale=scale)

    out = jax.lax.map(one, (split(query, 1), split(where, 2) if own_masks else None))
    return jnp.moveaxis(out, 0, 1).reshape(batch, length + missing, heads * width)[:, :length]


def attend_in_branches(query: Array, key: Array, value: Array, where: tuple[Array, Array]) -> Array:
    """Attention of a text and n continuations of it that stand side by side and do not see one another.

    The logits between continuations, of which there would be most, are never made.

    Args:
      query: [B, P + n * N, H, D].
      key: [B, P + n * N, G, D].
      value: [B, P + n * N, G, D].
      where: bool [B, 1, P, P], what the text sees of itself, and [B * n, 1, N, P + N], what a continuation
        sees of the text and of itself.

    Returns:
      [B, P + n * N, H * D].
    """
    text, length, batch = where[0].shape[-1], where[1].shape[2], query.shape[0]
    samples = where[1].shape[0] // batch

    def own(x: Array) -> Array:
        return x[:, text:].reshape(batch * samples, length, *x.shape[2:])

    def shown(x: Array) -> Array:
        return jnp.concatenate([jnp.repeat(x[:, :text], samples, axis=0), own(x)], axis=1)

    of_text = attend(query[:, :text], key[:, :text], value[:, :text], where[0])
    of_branches = attend(own(query), shown(key), shown(value), where[1])
    return jnp.concatenate([of_text, of_branches.reshape(batch, samples * length, -1)], axis=1)
