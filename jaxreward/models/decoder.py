"""The decoder-only transformer of Llama, SmolLM2, Qwen2.5-VL and Qwen3-VL: one module with flags.

Layers are scanned: parameters carry a leading layer axis, and compilation time does not grow with depth.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreward.errors import ModelError
from jaxreward.models.layers import (
    KERNEL_INIT,
    Linear,
    RMSNorm,
    attend,
    attend_in_branches,
    inverse_frequencies,
    product,
    rotate,
)
from jaxreward.models.weights import Stored
from jaxreward.types import Array


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Structure of a decoder.

    Attributes:
      vocabulary: number of token ids.
      width: of the residual stream.
      mlp_width: inner width of the gated MLP.
      layers: depth.
      heads: query heads.
      kv_heads: key and value heads; divides `heads`.
      head_width: width of a head.
      rope_theta: base of the rotary frequencies.
      rope_sections: M-RoPE: how many frequencies turn with (time, height, width); () for one axis.
      rope_interleaved: M-RoPE of Qwen3-VL, where the axes alternate, instead of Qwen2.5-VL's chunks.
      query_norm: RMS norm of each query and key head before the rotation (Qwen3).
      qkv_bias: queries, keys and values have a bias (Qwen2.5).
      norm_epsilon: of all RMS norms.
      tied: the output layer is the transposed embedding.
      dtype: of the computation, 'float32' or 'bfloat16'; norms, softmax and logits are float32.
      remat: recompute a layer's activations in the backward pass.
    """

    vocabulary: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rope_theta: float = 10000.0
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False
    query_norm: bool = False
    qkv_bias: bool = False
    norm_epsilon: float = 1e-6
    tied: bool = False
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        """Checks the shapes against one another."""
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads and {self.kv_heads} key heads found; the latter must divide"
            )
        if self.head_width % 2:
            raise ModelError(f"a head of width {self.head_width} found; rotary positions need an even width")
        if self.rope_sections and sum(self.rope_sections) != self.head_width // 2:
            raise ModelError(
                f"M-RoPE sections {self.rope_sections} found; their sum must be half a head, "
                f"{self.head_width // 2}"
            )


@struct.dataclass
class Cache:
    """Keys and values of the tokens so far; slot s holds the s-th token of every row, padding included.

    Heads come before slots: the products of attention then read the cache as it lies.
    """

    keys: Array  # dtype [L, B, G, S, D]
    values: Array  # dtype [L, B, G, S, D]
    where: Array  # bool [B, S], False for padding and for slots not yet written
    length: Array  # int32 [], slots written


def empty_cache(config: DecoderConfig, batch: int, slots: int) -> Cache:
    """A cache with room for `slots` tokens in each of `batch` rows."""
    shape = (config.layers, batch, config.kv_heads, slots, config.head_width)
    return Cache(
        keys=jnp.zeros(shape, config.dtype),
        values=jnp.zeros(shape, config.dtype),
        where=jnp.zeros((batch, slots), bool),
        length=jnp.zeros((), jnp.int32),
    )


def rotary_axes(config: DecoderConfig) -> np.ndarray:
    """Which position axis turns each frequency: int [head_width / 2] of 0 (time), 1 (height), 2 (width).

    Chunked (Qwen2.5-VL): the sections one after another. Interleaved (Qwen3-VL): t, h, w, t, h, w, ..., and
    time for what is left over.
    """
    axes = np.zeros(config.head_width // 2, np.int32)
    if not config.rope_sections:
        return axes
    if not config.rope_interleaved:
        return np.repeat(np.arange(len(config.rope_sections)) % 3, config.rope_sections).astype(np.int32)
    for axis in (1, 2):
        axes[axis : 3 * config.rope_sections[axis] : 3] = axis
    return axes


def rotary_angles(config: DecoderConfig, positions: Array) -> Array:
    """Angles in radians of each frequency: int32 [3, B, T] positions to float32 [B, T, head_width / 2]."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(
        config.head_width, config.rope_theta
    )
    choose = jax.nn.one_hot(rotary_axes(config), 3, axis=0)
    return jnp.sum(angles * choose[:, None, None, :], axis=0)


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP (Llama).

    Attributes:
      config: structure.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple,
        layer: Array,
        angles: Array,
        mask: Array | tuple[Array, Array],
        extra: Array | None,
    ) -> tuple:
        """One layer of the scan.

        Args:
          carry: (hidden [B, T, D], cache or None).
          layer: int32 [], the number of this layer.
          angles: float32 [B, T, head_width / 2].
          mask: bool [B, 1, T, S]. S = T: the tokens at hand see one another (no cache, or an empty one, which
            they fill); S = slots of the cache: they see what it holds, themselves included. Or two masks, as
            `attend_in_branches` takes them.
          extra: [n, B, T, D] added to the result of layers 0 .. n - 1 (DeepStack), or None.

        Returns:
          (carry, None).
        """
        config = self.config
        hidden, cache = carry
        batch, length, _ = hidden.shape

        def project(name: str, heads: int) -> Array:
            linear = Linear(heads * config.head_width, config.qkv_bias, config.dtype, name=name)
            return linear(normed).reshape(batch, length, heads, config.head_width)

        normed = RMSNorm(config.norm_epsilon, name="attention_norm")(hidden)
        query = project("query", config.heads)
        key = project("key", config.kv_heads)
        value = project("value", config.kv_heads)
        if config.query_norm:
            query = RMSNorm(config.norm_epsilon, name="query_norm")(query)
            key = RMSNorm(config.norm_epsilon, name="key_norm")(key)
        query, key = rotate(query, angles), rotate(key, angles)
        if cache is not None:
            at = (layer, 0, 0, cache.length, 0)
            cache = cache.replace(
                keys=jax.lax.dynamic_update_slice(cache.keys, key.swapaxes(1, 2)[None], at),
                values=jax.lax.dynamic_update_slice(cache.values, value.swapaxes(1, 2)[None], at),
            )
            if mask.shape[-1] != length:
                held = (cache.keys, cache.values)
                key, value = (jax.lax.dynamic_index_in_dim(x, layer, 0, False).swapaxes(1, 2) for x in held)
        attended = (attend_in_branches if isinstance(mask, tuple) else attend)(query, key, value, mask)
        hidden = hidden + Linear(config.width, False, config.dtype, name="attention_out")(attended)

        normed = RMSNorm(config.norm_epsilon, name="mlp_norm")(hidden)
        gate = Linear(config.mlp_width, False, config.dtype, name="gate")(normed)
        up = Linear(config.mlp_width, False, config.dtype, name="up")(normed)
        hidden = hidden + Linear(config.width, False, config.dtype, name="down")(jax.nn.silu(gate) * up)
        if extra is not None:
            added = extra[jnp.minimum(layer, extra.shape[0] - 1)]
            hidden = hidden + jnp.where(layer < extra.shape[0], added, 0).astype(hidden.dtype)
        return (hidden, cache), None


class Decoder(nn.Module):
    """Token embedding, scanned layers, final norm, output layer.

    Attributes:
      config: structure.
    """

    config: DecoderConfig

    def setup(self) -> None:
        """Declares the parameters outside the layers."""
        config = self.config
        shape = (config.vocabulary, config.width)
        self.embedding = self.param("embedding", KERNEL_INIT, shape, config.dtype)
        self.final_norm = RMSNorm(config.norm_epsilon)
        if not config.tied:
            self.output = Linear(config.vocabulary, False, "float32")
        layer = nn.remat(DecoderLayer, prevent_cse=False) if config.remat else DecoderLayer
        self.layers = nn.scan(
            layer,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=config.layers,
        )(config)

    def embed(self, tokens: Array) -> Array:
        """Maps int32 [B, T] token ids to `dtype` [B, T, D]."""
        return self.embedding[tokens].astype(self.config.dtype)

    def __call__(
        self,
        embeddings: Array,
        positions: Array,
        where: Array,
        cache: Cache | None = None,
        *,
        empty: bool = True,
        extra: Array | None = None,
        branches: tuple[int, int] | None = None,
    ) -> tuple[Array, Cache | None]:
        """Runs the layers over new tokens.

        Args:
          embeddings: [B, T, D].
          positions: int32 [3, B, T], (time, height, width); text has the same number three times.
          where: bool [B, T], False for padding, which no token sees; padding may be left, right or between.
          cache: what came before, with room for T more slots; or None.
          empty: the cache holds nothing yet (a static promise that saves attention over its free slots).
          extra: [n, B, T, D] added to the result of layers 0 .. n - 1 (DeepStack), or None.
          branches: (n, N) where several continuations of one text share a row: the last n * N tokens are n
            continuations of N tokens each, which see the text and not one another. Without a cache only.

        Returns:
          (hidden, cache): `dtype` [B, T, D] after the final norm, and the cache with the new tokens.
        """
        config = self.config
        length = embeddings.shape[1]
        if cache is None or empty:
            seen, start = where, 0
        else:
            seen = jax.lax.dynamic_update_slice(cache.where, where, (0, cache.length))
            start = cache.length
        slots = jnp.arange(seen.shape[1])
        causal = slots[None, :] <= start + jnp.arange(length)[:, None]
        mask = (seen[:, None, :] & causal)[:, None]
        if branches is not None:
            mask = _branch_masks(where, *branches)
        carry = (embeddings.astype(config.dtype), cache)
        angles = rotary_angles(config, positions)
        (hidden, cache), _ = self.layers(carry, jnp.arange(config.layers), angles, mask, extra)
        if cache is not None:
            at = (0, cache.length)
            cache = cache.replace(
                where=jax.lax.dynamic_update_slice(cache.where, where, at), length=cache.length + length
            )
        return self.final_norm(hidden), cache

    def logits(self, hidden: Array) -> Array:
        """Maps hidden states [..., D] to float32 [..., vocabulary]."""
        if self.config.tied:
            return product(hidden, self.embedding.T, "float32")
        return self.output(hidden)


def _branch_masks(where: Array, samples: int, length: int) -> tuple[Array, Array]:
    """Masks for `attend_in_branches` of rows whose last samples * length tokens are continuations."""
    text = where.shape[1] - samples * length
    causal = jnp.tril(jnp.ones((text, text), bool))
    seen = jnp.repeat(where[:, :text], samples, axis=0)[:, None]
    own = where[:, text:].reshape(-1, 1, length) & jnp.tril(jnp.ones((length, length), bool))
    of_branches = jnp.concatenate([jnp.broadcast_to(seen, (*own.shape[:2], text)), own], axis=2)
    return (where[:, None, :text] & causal)[:, None], of_branches[:, None]


def decoder_tensors(config: DecoderConfig, *, model: str, head: str, into: str) -> dict[str, Stored]:
    """Where a Hugging Face checkpoint of the Llama kind keeps the parameters of a `Decoder`.

    Args:
      config: structure.
      model: prefix of the names in the checkpoint, such as 'model.' or 'model.language_model.'.
      head: name of the output layer's weight there; not used when tied.
      into: path of the decoder among our parameters, such as 'decoder/', or ''.

    Returns:
      {our path: how it is stored}.
    """
    layer = model + "layers.{}."
    depth = config.layers
    tensors = {
        "embedding": Stored(model + "embed_tokens.weight", ("vocabulary", "embed")),
        "final_norm/scale": Stored(model + "norm.weight", ("norm",)),
        "layers/attention_norm/scale": Stored(
            layer + "input_layernorm.weight", ("layers", "norm"), layers=depth
        ),
        "layers/mlp_norm/scale": Stored(
            layer + "post_attention_layernorm.weight", ("layers", "norm"), layers=depth
        ),
    }
    linear = {
        "query": ("self_attn.q_proj", "embed", "heads"),
        "key": ("self_attn.k_proj", "embed", "kv_heads"),
        "value": ("self_attn.v_proj", "embed", "kv_heads"),
        "attention_out": ("self_attn.o_proj", "heads", "embed"),
        "gate": ("mlp.gate_proj", "embed", "mlp"),
        "up": ("mlp.up_proj", "embed", "mlp"),
        "down": ("mlp.down_proj", "mlp", "embed"),
    }
    heads = dict.fromkeys(("query", "attention_out"), config.heads)
    heads |= dict.fromkeys(("key", "value"), config.kv_heads)
    for ours, (theirs, inputs, outputs) in linear.items():
        name = layer + theirs
        split = heads.get(ours, 0)
        tensors[f"layers/{ours}/kernel"] = Stored(
            name + ".weight", ("layers", inputs, outputs), "linear", layers=depth, heads=split
        )
        if config.qkv_bias and ours in ("query", "key", "value"):
            tensors[f"layers/{ours}/bias"] = Stored(
                name + ".bias", ("layers", outputs), layers=depth, heads=split
            )
    if config.query_norm:
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            name = layer + f"self_attn.{theirs}.weight"
            tensors[f"layers/{ours}/scale"] = Stored(name, ("layers", "norm"), layers=depth)
    if not config.tied:
        tensors["output/kernel"] = Stored(head, ("embed", "vocabulary"), "linear")
    return {into + path: stored for path, stored in tensors.items()}
