"""The transformer encoder that CLIP, X-CLIP, SigLIP, SmolVLM's vision tower and MiniLM share.

Layers are scanned: parameters carry a leading layer axis, and compilation time does not grow with depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxreward.errors import ModelError
from jaxreward.models.hub_config import Fields
from jaxreward.models.layers import ACTIVATIONS, KERNEL_INIT, LayerNorm, Linear, attend
from jaxreward.models.weights import Stored
from jaxreward.types import Array


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Structure of an encoder.

    Attributes:
      width: of the residual stream.
      mlp_width: inner width of the MLP.
      layers: depth.
      heads: attention heads; divides `width`.
      activation: of the MLP, a key of `ACTIVATIONS`.
      norm_epsilon: of all layer norms.
      norm_first: norms before attention and MLP (pre-norm: CLIP, SigLIP), or after each sum (BERT).
      dtype: of the computation, 'float32' or 'bfloat16'; norms and softmax are float32.
    """

    width: int
    mlp_width: int
    layers: int
    heads: int
    activation: str
    norm_epsilon: float
    norm_first: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Checks what would fail later with a less clear message."""
        if self.width % self.heads:
            raise ModelError(
                f"an encoder of width {self.width} with {self.heads} attention heads found; the number of "
                "heads must divide the width"
            )
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f"activation {self.activation!r} found; one of {', '.join(ACTIVATIONS)} was expected"
            )

    @classmethod
    def from_fields(
        cls, fields: Fields, dtype: str, prefix: str = "", **defaults: float | str
    ) -> EncoderConfig:
        """Reads the fields of a tower: hidden_size, intermediate_size, num_hidden_layers and so on.

        Args:
          fields: of the tower's config.
          dtype: of the computation.
          prefix: before the names of the fields that hold widths, depth and heads, such as 'mit_'.
          **defaults: for absent fields, by their names without the prefix.

        Returns:
          The structure of a pre-norm encoder.

        Raises:
          ModelError: for a field that is missing, of the wrong type or does not fit the others.
        """

        def integer(name: str) -> int:
            return fields.integer(prefix + name, *([defaults[name]] if name in defaults else []))

        width, heads = integer("hidden_size"), integer("num_attention_heads")
        if width % heads:
            raise fields.refuse(prefix + "num_attention_heads", f"a divisor of the width {width}")
        return cls(
            width=width,
            mlp_width=integer("intermediate_size"),
            layers=integer("num_hidden_layers"),
            heads=heads,
            activation=fields.choice("hidden_act", ACTIVATIONS, defaults["hidden_act"]),
            norm_epsilon=fields.number("layer_norm_eps", defaults["layer_norm_eps"]),
            dtype=dtype,
        )


class Attention(nn.Module):
    """Multi-head attention with linear maps in and out (Vaswani et al., 2017, section 3.2.2).

    Attributes:
      heads: number of heads; divides the width of the queries.
      dtype: of the computation.
      use_bias: queries, keys and values have a bias; the output always has one.
    """

    heads: int
    dtype: str = "float32"
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Array, context: Array, where: Array | None = None) -> Array:
        """Attends from one sequence to another.

        Args:
          x: [N, T, D], what the queries are made of.
          context: [N, S, D], what the keys and values are made of; `x` itself for self-attention.
          where: bool, broadcastable to [N, heads, T, S]; True where a query sees a key. None: it sees all.

        Returns:
          `dtype` [N, T, D].
        """
        width = x.shape[-1]

        def project(name: str, of: Array) -> Array:
            linear = Linear(width, self.use_bias, self.dtype, name=name)
            return linear(of).reshape(*of.shape[:2], self.heads, width // self.heads)

        attended = attend(project("query", x), project("key", context), project("value", context), where)
        return Linear(width, dtype=self.dtype, name="out")(attended)


class MLP(nn.Module):
    """Two linear maps with an activation between them.

    Attributes:
      width: inner width.
      activation: a key of `ACTIVATIONS`.
      dtype: of the computation.
    """

    width: int
    activation: str
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [..., D] to `dtype` [..., D]."""
        inner = ACTIVATIONS[self.activation](Linear(self.width, dtype=self.dtype, name="up")(x))
        return Linear(x.shape[-1], dtype=self.dtype, name="down")(inner)


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each added to the residual stream.

    Attributes:
      config: structure.
    """

    config: EncoderConfig

    @nn.compact
    def __call__(self, hidden: Array, where: Array | None) -> tuple[Array, None]:
        """One layer of the scan.

        Args:
          hidden: `dtype` [N, T, D].
          where: bool, broadcastable to [N, heads, T, T]; True where a query sees a key. None: it sees all.

        Returns:
          (hidden, None).
        """
        config = self.config
        attention_norm = LayerNorm(config.norm_epsilon, name="attention_norm")
        attention = Attention(config.heads, config.dtype, name="attention")
        mlp_norm = LayerNorm(config.norm_epsilon, name="mlp_norm")
        mlp = MLP(config.mlp_width, config.activation, config.dtype, name="mlp")
        if config.norm_first:
            normed = attention_norm(hidden)
            hidden = hidden + attention(normed, normed, where)
            return hidden + mlp(mlp_norm(hidden)), None
        hidden = attention_norm(hidden + attention(hidden, hidden, where))
        return mlp_norm(hidden + mlp(hidden)), None


class Encoder(nn.Module):
    """Scanned encoder layers, with no embedding before them and no norm after them.

    Attributes:
      config: structure.
      layer: the module of one layer, called as `EncoderLayer`.
    """

    config: EncoderConfig
    layer: type[nn.Module] = EncoderLayer

    @nn.compact
    def __call__(self, hidden: Array, where: Array | None = None) -> Array:
        """Runs the layers.

        Args:
          hidden: [N, T, D], embeddings with their positions.
          where: bool, broadcastable to [N, heads, T, T]; True where a query sees a key. None: it sees all.

        Returns:
          `dtype` [N, T, D].
        """
        layers = nn.scan(
            self.layer,
            variable_axes={"params": 0, "lora": 0, "intermediates": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.config.layers,
        )
        hidden, _ = layers(self.config, name="layers")(hidden.astype(self.config.dtype), where)
        return hidden


class TokenEmbedding(nn.Module):
    """Embeds token ids and adds learned absolute positions.

    Attributes:
      vocabulary: number of token ids.
      positions: the longest text.
      width: of an embedding.
      dtype: of the computation.
    """

    vocabulary: int
    positions: int
    width: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        """Maps int32 [N, T] to `dtype` [N, T, D].

        Raises:
          ModelError: if T exceeds the number of positions.
        """
        length = tokens.shape[-1]
        if length > self.positions:
            raise ModelError(
                f"a text of {length} tokens found; this model reads {self.positions} at most: shorten it"
            )
        table = self.param("tokens", KERNEL_INIT, (self.vocabulary, self.width), self.dtype)
        positions = self.param("positions", KERNEL_INIT, (self.positions, self.width), self.dtype)
        return table[tokens].astype(self.dtype) + positions[:length].astype(self.dtype)


def image_to_patches(images: Array, size: int) -> Array:
    """Cuts images into patches, each flattened channel first, as a convolution's weight is stored.

    Args:
      images: [N, H, W, C]; rows and columns past the last whole patch are dropped.
      size: the side of a patch in pixels.

    Returns:
      [N, (H // size) (W // size), C size^2], patches in row-major order.
    """
    batch, height, width, channels = images.shape
    rows, columns = height // size, width // size
    patches = (
        images[:, : rows * size, : columns * size]
        .reshape(batch, rows, size, columns, size, channels)
        .transpose(0, 1, 3, 5, 2, 4)
    )
    return patches.reshape(batch, rows * columns, channels * size * size)


def check_images(images: Array, resolution: int) -> None:
    """Raises ModelError unless `images` is [N, resolution, resolution, 3]."""
    if images.ndim != 4 or images.shape[1:] != (resolution, resolution, 3):
        raise ModelError(
            f"images of shape {images.shape} found; this model reads [N, {resolution}, {resolution}, 3]: "
            "resize and crop them as its preprocessor_config.json says"
        )


def unit_length(x: Array) -> Array:
    """x / |x| over the last axis, float32 [..., D]; 0, with a gradient of 0, where |x| < 1e-12."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(wide), -1, keepdims=True), 1e-24))


# Names of the parts of a layer in checkpoints of CLIP, X-CLIP, SigLIP and Idefics3's vision tower.
CLIP_NAMES: Mapping[str, str] = {
    "attention_norm": "layer_norm1",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}


def norm_tensors(ours: str, theirs: str, layers: int = 0) -> dict[str, Stored]:
    """Where a checkpoint keeps the scale and bias of a `LayerNorm`; names without their last part."""
    axes = ("layers", "norm") if layers else ("norm",)
    return {
        f"{ours}/scale": Stored(f"{theirs}.weight", axes, layers=layers),
        f"{ours}/bias": Stored(f"{theirs}.bias", axes, layers=layers),
    }


def linear_tensors(
    ours: str,
    theirs: str,
    inputs: str | None,
    outputs: str | None,
    layers: int = 0,
    *,
    use_bias: bool = True,
) -> dict[str, Stored]:
    """Where a checkpoint keeps the kernel and bias of a `Linear`.

    Args:
      ours: path of the module.
      theirs: name without '.weight'; '{}' stands for the layer number.
      inputs: logical name of the kernel's axis 0.
      outputs: logical name of the kernel's axis 1.
      layers: number of scanned layers; 0 outside a scan.
      use_bias: there is a bias.

    Returns:
      {our path: how it is stored}.
    """
    depth = ("layers",) if layers else ()
    tensors = {f"{ours}/kernel": Stored(f"{theirs}.weight", (*depth, inputs, outputs), "linear", layers)}
    if use_bias:
        tensors[f"{ours}/bias"] = Stored(f"{theirs}.bias", (*depth, outputs), layers=layers)
    return tensors


def attention_tensors(
    ours: str, names: Mapping[str, str], layers: int = 0, *, use_bias: bool = True
) -> dict[str, Stored]:
    """Where a checkpoint keeps an `Attention`.

    Args:
      ours: path of the module.
      names: the names for 'query', 'key', 'value' and 'out', without '.weight'.
      layers: number of scanned layers; 0 outside a scan.
      use_bias: queries, keys and values have a bias.

    Returns:
      {our path: how it is stored}.
    """
    tensors: dict[str, Stored] = {}
    for part in ("query", "key", "value"):
        tensors |= linear_tensors(f"{ours}/{part}", names[part], "embed", "heads", layers, use_bias=use_bias)
    return tensors | linear_tensors(f"{ours}/out", names["out"], "heads", "embed", layers)


def mlp_tensors(ours: str, up: str, down: str, layers: int = 0) -> dict[str, Stored]:
    """Where a checkpoint keeps an `MLP`; names without '.weight'."""
    return linear_tensors(f"{ours}/up", up, "embed", "mlp", layers) | linear_tensors(
        f"{ours}/down", down, "mlp", "embed", layers
    )


def encoder_tensors(
    layers: int, *, model: str, into: str, names: Mapping[str, str] = CLIP_NAMES
) -> dict[str, Stored]:
    """Where a checkpoint keeps the parameters of an `Encoder` of `EncoderLayer`s.

    Args:
      layers: depth.
      model: prefix of the names there, '{}' for the layer number, such as 'encoder.layers.{}.'.
      into: path of a layer's parameters among ours, such as 'text/encoder/layers/'.
      names: of the parts of a layer there.

    Returns:
      {our path: how it is stored}.
    """
    attention = {part: model + names[f"attention/{part}"] for part in ("query", "key", "value", "out")}
    return (
        norm_tensors(into + "attention_norm", model + names["attention_norm"], layers)
        | attention_tensors(into + "attention", attention, layers)
        | norm_tensors(into + "mlp_norm", model + names["mlp_norm"], layers)
        | mlp_tensors(into + "mlp", model + names["mlp/up"], model + names["mlp/down"], layers)
    )


def token_tensors(ours: str, theirs: str) -> dict[str, Stored]:
    """Where a checkpoint of CLIP's kind keeps a `TokenEmbedding`; `theirs` ends with a dot."""
    return {
        f"{ours}/tokens": Stored(f"{theirs}token_embedding.weight", ("vocabulary", "embed")),
        f"{ours}/positions": Stored(f"{theirs}position_embedding.weight", (None, "embed")),
    }


def text_mask(where: Array | None, length: int, *, causal: bool) -> Array | None:
    """The mask of self-attention over texts with padding.

    Args:
      where: bool [N, T], False for padding; None: no padding.
      length: T.
      causal: no token sees a later one.

    Returns:
      bool [N or 1, 1, T or 1, T], or None if every token sees every other.
    """
    mask = None if where is None else where[:, None, None, :]
    if causal:
        earlier = jnp.tril(jnp.ones((length, length), bool))[None, None]
        mask = earlier if mask is None else mask & earlier
    return mask
