"""SigLIP and SigLIP 2: image and text encoders trained with a sigmoid loss.

Zhai et al., 2023, and Tschannen et al., 2025. The fixed-resolution checkpoints of both have model_type
'siglip'; model_type 'siglip2' is NaFlex, which reads images of any shape as lists of patches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxreward.errors import ModelError
from jaxreward.models.clip import IGNORED
from jaxreward.models.encoder_layers import (
    MLP,
    Encoder,
    EncoderConfig,
    TokenEmbedding,
    check_images,
    encoder_tensors,
    image_to_patches,
    linear_tensors,
    mlp_tensors,
    norm_tensors,
    text_mask,
    token_tensors,
    unit_length,
)
from jaxreward.models.hub_config import Fields
from jaxreward.models.layers import KERNEL_INIT, LayerNorm, Linear, attend
from jaxreward.models.weights import Architecture, Stored
from jaxreward.types import Array, PyTree

# What the classes of transformers take for absent fields; the hub's configs leave many out.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


@dataclasses.dataclass(frozen=True)
class SigLIPTextConfig:
    """Structure of the text encoder.

    Attributes:
      encoder: the layers.
      vocabulary: number of token ids.
      positions: to which texts are padded.
      projection: P, the width of the embedding.
    """

    encoder: EncoderConfig
    vocabulary: int
    positions: int
    projection: int


@dataclasses.dataclass(frozen=True)
class SigLIPVisionConfig:
    """Structure of the image encoder.

    Attributes:
      encoder: the layers.
      patch: side of a patch in pixels.
      grid: side of the table of positions in patches.
      resolution: side of an image in pixels; None for NaFlex, where images come as lists of patches and the
        table is resampled to each image's shape.
    """

    encoder: EncoderConfig
    patch: int
    grid: int
    resolution: int | None


@dataclasses.dataclass(frozen=True)
class SigLIPConfig:
    """Structure of SigLIP.

    Attributes:
      text: its text encoder.
      vision: its image encoder.
    """

    text: SigLIPTextConfig
    vision: SigLIPVisionConfig

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> SigLIPConfig:
        """Reads a Hugging Face config.json of model_type 'siglip' or 'siglip2'.

        Args:
          config: the JSON object.
          dtype: of the computation, 'float32' or 'bfloat16'.

        Raises:
          ModelError: for a field that is of the wrong type or does not fit the others.
        """
        fields = Fields(config)
        naflex = fields.choice("model_type", ("siglip", "siglip2"), "siglip") == "siglip2"
        text, vision = (fields.section(f"{tower}_config", optional=True) for tower in ("text", "vision"))
        text_encoder = EncoderConfig.from_fields(text, dtype, **DEFAULTS)
        vision_encoder = EncoderConfig.from_fields(vision, dtype, **DEFAULTS)
        projection = text.integer("projection_size", text_encoder.width)
        if projection != vision_encoder.width:
            raise text.refuse("projection_size", f"the width of the image encoder, {vision_encoder.width},")
        if not vision.flag("vision_use_head", True):
            raise vision.refuse("vision_use_head", "true: without its head the tower embeds no image,")
        if vision.integer("num_channels", 3) != 3:
            raise vision.refuse("num_channels", "3")
        return cls(
            text=SigLIPTextConfig(
                encoder=text_encoder,
                vocabulary=text.integer("vocab_size", 32000),
                positions=text.integer("max_position_embeddings", 64),
                projection=projection,
            ),
            vision=SigLIPVisionConfig(vision_encoder, *_image_sizes(vision, naflex)),
        )


def _image_sizes(vision: Fields, naflex: bool) -> tuple[int, int, int | None]:
    """Reads (patch, grid, resolution), as SigLIPVisionConfig has them."""
    patch = vision.integer("patch_size", 16)
    if naflex:
        patches = vision.integer("num_patches", 256)
        if math.isqrt(patches) ** 2 != patches:
            raise vision.refuse("num_patches", "a square number")
        return patch, math.isqrt(patches), None
    resolution = vision.integer("image_size", 224)
    if resolution < patch:
        raise vision.refuse("image_size", f"at least patch_size {patch}")
    return patch, resolution // patch, resolution


def resampling_weights(size: Array, index: Array, grid: int) -> Array:
    """Weights of bilinear resampling with antialiasing, corners not aligned, along one axis.

    Args:
      size: int32 [...], the length that the axis is resampled to, at least 1.
      index: int32 [..., L], positions on the resampled axis.
      grid: length of the axis that is resampled.

    Returns:
      float32 [..., L, grid]; each row sums to 1.
    """
    scale = grid / size.astype(jnp.float32)[..., None]
    centre = (index + 0.5) * scale - 0.5
    # the triangle widens where the axis shrinks: that is the antialiasing
    support = jnp.maximum(scale, 1.0)
    weights = jnp.maximum(1 - jnp.abs(jnp.arange(grid) - centre[..., None]) / support[..., None], 0)
    return weights / jnp.sum(weights, -1, keepdims=True)


def resample_positions(table: Array, shapes: Array, length: int) -> Array:
    """Resamples a square table of positions to the shapes of images.

    Equals PyTorch's `interpolate(mode='bilinear', antialias=True, align_corners=False)` per image. The shapes
    are data: images of new shapes compile nothing anew.

    Args:
      table: [grid, grid, D].
      shapes: int32 [N, 2], rows and columns of patches of each image; 0 is taken as 1.
      length: L, of the lists of patches.

    Returns:
      float32 [N, L, D], row-major; past an image's last patch the position of its first.
    """
    rows, columns = jnp.maximum(shapes[:, 0], 1), jnp.maximum(shapes[:, 1], 1)
    index = jnp.arange(length)
    index = jnp.where(index < (rows * columns)[:, None], index, 0)
    row_weights = resampling_weights(rows, index // columns[:, None], table.shape[0])
    column_weights = resampling_weights(columns, index % columns[:, None], table.shape[1])
    return jnp.einsum("nli,nlj,ijd->nld", row_weights, column_weights, table.astype(jnp.float32))


class PatchEmbedding(nn.Module):
    """Patches of images with learned positions.

    Attributes:
      config: structure.
    """

    config: SigLIPVisionConfig

    @nn.compact
    def __call__(self, patches: Array, shapes: Array | None) -> Array:
        """Embeds patches.

        Args:
          patches: [N, L, 3 patch^2].
          shapes: int32 [N, 2], rows and columns of each image; None where all have the shape of the table.

        Returns:
          `dtype` [N, L, D].
        """
        config, dtype, width = self.config, self.config.encoder.dtype, self.config.encoder.width
        embedded = Linear(width, dtype=dtype, name="patch")(patches)
        table = self.param("positions", KERNEL_INIT, (config.grid**2, width), dtype)
        if shapes is None:
            return embedded + table.astype(dtype)
        square = table.reshape(config.grid, config.grid, width)
        return embedded + resample_positions(square, shapes, patches.shape[1]).astype(dtype)


class AttentionPooling(nn.Module):
    """Pools a sequence by attention from one learned query, and an MLP (Zhai et al., 2022, section 3.3).

    Attributes:
      config: structure of the encoder whose output is pooled.
    """

    config: EncoderConfig

    @nn.compact
    def __call__(self, hidden: Array, where: Array | None) -> Array:
        """Pools.

        Args:
          hidden: [N, L, D].
          where: bool [N, L], False for padding; None: no padding.

        Returns:
          `dtype` [N, D].
        """
        config = self.config
        batch, width = hidden.shape[0], config.width
        probe = self.param("probe", KERNEL_INIT, (width,), config.dtype).astype(config.dtype)
        # one packed kernel, since checkpoints store it so
        packed = Linear(3 * width, dtype=config.dtype, name="query_key_value")
        heads = (config.heads, width // config.heads)
        query = packed(probe)[:width].reshape(1, 1, *heads)
        key, value = jnp.split(packed(hidden)[..., width:], 2, axis=-1)
        pooled = attend(
            jnp.broadcast_to(query, (batch, *query.shape[1:])),
            key.reshape(batch, -1, *heads),
            value.reshape(batch, -1, *heads),
            None if where is None else where[:, None, None, :],
        )
        pooled = Linear(width, dtype=config.dtype, name="out")(pooled[:, 0])
        normed = LayerNorm(config.norm_epsilon, name="norm")(pooled)
        return pooled + MLP(config.mlp_width, config.activation, config.dtype, name="mlp")(normed)


class SigLIPImageEncoder(nn.Module):
    """The vision transformer and its pooling head.

    Attributes:
      config: structure.
    """

    config: SigLIPVisionConfig

    @nn.compact
    def __call__(self, patches: Array, where: Array | None = None, shapes: Array | None = None) -> Array:
        """Embeds images.

        Args:
          patches: [N, L, 3 patch^2].
          where: bool [N, L], False for padding; None: no padding.
          shapes: int32 [N, 2], rows and columns of each image; None where all have the shape of the table.

        Returns:
          `dtype` [N, D].
        """
        config = self.config.encoder
        hidden = PatchEmbedding(self.config, name="embedding")(patches, shapes)
        mask = None if where is None else where[:, None, None, :]
        hidden = Encoder(config, name="encoder")(hidden, mask)
        hidden = LayerNorm(config.norm_epsilon, name="final_norm")(hidden)
        return AttentionPooling(config, name="head")(hidden, where)


class SigLIPTextEncoder(nn.Module):
    """The bidirectional text transformer, which pools its last position.

    Attributes:
      config: structure.
    """

    config: SigLIPTextConfig

    @nn.compact
    def __call__(self, tokens: Array, where: Array | None = None) -> Array:
        """Embeds texts: see `SigLIP.encode_text`."""
        config, encoder = self.config, self.config.encoder
        if tokens.shape[-1] != config.positions:
            raise ModelError(
                f"texts of {tokens.shape[-1]} tokens found; SigLIP embeds the last of exactly "
                f"{config.positions} positions, as in its training: pad or shorten them to {config.positions}"
            )
        embedding = TokenEmbedding(
            config.vocabulary, config.positions, encoder.width, encoder.dtype, name="embedding"
        )
        mask = text_mask(where, tokens.shape[1], causal=False)
        hidden = Encoder(encoder, name="encoder")(embedding(tokens), mask)
        last = LayerNorm(encoder.norm_epsilon, name="final_norm")(hidden[:, -1])
        return Linear(config.projection, dtype=encoder.dtype, name="projection")(last)


class SigLIP(nn.Module):
    """Image and text encoder with a common embedding.

    Attributes:
      config: structure.
    """

    config: SigLIPConfig

    def setup(self) -> None:
        """Declares the encoders, the temperature and the bias."""
        self.vision = SigLIPImageEncoder(self.config.vision)
        self.text = SigLIPTextEncoder(self.config.text)
        # where training starts (Zhai et al., 2023, section 3.2)
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(math.log(10)), (), jnp.float32)
        self.logit_bias = self.param("logit_bias", nn.initializers.constant(-10.0), (), jnp.float32)

    def encode_image(self, images: Array, where: Array | None = None, shapes: Array | None = None) -> Array:
        """Embeds images, normalised as preprocessor_config.json says.

        Args:
          images: float32 [N, H, W, 3] of the model's resolution; for NaFlex [N, L, 3 patch^2], patches in
            row-major order, each flattened with its channels last.
          where: NaFlex only: bool [N, L], False for padding.
          shapes: NaFlex only: int32 [N, 2], rows and columns of patches of each image.

        Returns:
          `dtype` [N, P], not of unit length.

        Raises:
          ModelError: if the input is not of the model's kind or size.
        """
        config = self.config.vision
        if config.resolution is not None:
            if where is not None or shapes is not None:
                raise ModelError(
                    "patches with their shapes found; this SigLIP has one resolution: give images "
                    f"[N, {config.resolution}, {config.resolution}, 3] alone"
                )
            check_images(images, config.resolution)
            return self.vision(image_to_patches(images, config.patch))
        width = 3 * config.patch**2
        if where is None or shapes is None or images.ndim != 3 or images.shape[-1] != width:
            raise ModelError(
                f"images of shape {images.shape} found; SigLIP 2 NaFlex reads patches [N, L, {width}], which "
                "of them are there, and the shape of each image"
            )
        return self.vision(images, where, shapes)

    def encode_text(self, tokens: Array, where: Array | None = None) -> Array:
        """Embeds texts.

        Args:
          tokens: int32 [N, T], padded to exactly the number of positions (64), with no mask in training.
          where: bool [N, T], False for positions that no other sees; None: padding is seen, as in training.

        Returns:
          `dtype` [N, P], not of unit length.

        Raises:
          ModelError: if T is not the number of positions.
        """
        return self.text(tokens, where)

    def logits(self, images: Array, texts: Array) -> Array:
        """exp(logit_scale) cos + logit_bias of every image and text: [N, P], [K, P] to float32 [N, K].

        Their sigmoid is the probability that the two belong together.
        """
        scale = jnp.exp(self.logit_scale.astype(jnp.float32))
        return scale * (unit_length(images) @ unit_length(texts).T) + self.logit_bias.astype(jnp.float32)

    def __call__(
        self, images: Array, tokens: Array, where: Array | None = None, shapes: Array | None = None
    ) -> Array:
        """Logits of every image and text, float32 [N, K]; see `encode_image` and `encode_text`."""
        return self.logits(self.encode_image(images, where, shapes), self.encode_text(tokens))


def _vision_tensors(config: SigLIPVisionConfig) -> dict[str, Stored]:
    """Where a checkpoint keeps a `SigLIPImageEncoder`."""
    width, head = config.encoder.width, "vision_model.head."
    patch = linear_tensors("vision/embedding/patch", "vision_model.embeddings.patch_embedding", None, "embed")
    if config.resolution is not None:
        patch["vision/embedding/patch/kernel"] = Stored(
            "vision_model.embeddings.patch_embedding.weight",
            (None, "embed"),
            "convolution",
            shape=(width, 3, config.patch, config.patch),
        )
    attention = head + "attention.in_proj_"
    return (
        patch
        | {
            "vision/embedding/positions": Stored(
                "vision_model.embeddings.position_embedding.weight", (None, "embed")
            )
        }
        | encoder_tensors(
            config.encoder.layers, model="vision_model.encoder.layers.{}.", into="vision/encoder/layers/"
        )
        | norm_tensors("vision/final_norm", "vision_model.post_layernorm")
        | {
            "vision/head/probe": Stored(head + "probe", ("embed",), shape=(1, 1, width)),
            # the packed axis is no axis of heads: queries, keys and values follow one another
            "vision/head/query_key_value/kernel": Stored(attention + "weight", ("embed", None), "linear"),
            "vision/head/query_key_value/bias": Stored(attention + "bias", (None,)),
        }
        | linear_tensors("vision/head/out", head + "attention.out_proj", "heads", "embed")
        | norm_tensors("vision/head/norm", head + "layernorm")
        | mlp_tensors("vision/head/mlp", head + "mlp.fc1", head + "mlp.fc2")
    )


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """SigLIP with the structure of a config.json, and where a checkpoint keeps its parameters.

    Args:
      config: the JSON object.
      dtype: of parameters and computation, 'float32' or 'bfloat16'.

    Raises:
      ModelError: for a config that cannot be used.
    """
    structure = SigLIPConfig.from_dict(config, dtype=dtype)
    module = SigLIP(structure)
    text, vision = structure.text, structure.vision

    def initialise(key: Any) -> PyTree:
        tokens = jnp.zeros((1, text.positions), jnp.int32)
        if vision.resolution is None:
            patches, where = jnp.zeros((1, 1, 3 * vision.patch**2)), jnp.ones((1, 1), bool)
            return module.init(key, patches, tokens, where, jnp.ones((1, 2), jnp.int32))
        return module.init(key, jnp.zeros((1, vision.resolution, vision.resolution, 3)), tokens)

    tensors = (
        token_tensors("text/embedding", "text_model.embeddings.")
        | encoder_tensors(
            text.encoder.layers, model="text_model.encoder.layers.{}.", into="text/encoder/layers/"
        )
        | norm_tensors("text/final_norm", "text_model.final_layer_norm")
        | linear_tensors("text/projection", "text_model.head", "embed", None)
        | _vision_tensors(vision)
        | {name: Stored(name, (), shape=(1,)) for name in ("logit_scale", "logit_bias")}
    )
    return Architecture(module, tensors, initialise, ignored=IGNORED)
