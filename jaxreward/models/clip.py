"""CLIP: an image encoder and a text encoder whose embeddings agree (Radford et al., 2021)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxreward.models.encoder_layers import (
    Encoder,
    EncoderConfig,
    TokenEmbedding,
    check_images,
    encoder_tensors,
    image_to_patches,
    linear_tensors,
    norm_tensors,
    text_mask,
    token_tensors,
    unit_length,
)
from jaxreward.models.hub_config import Fields
from jaxreward.models.layers import KERNEL_INIT, LayerNorm, Linear
from jaxreward.models.weights import Architecture, Stored
from jaxreward.types import Array, PyTree

# Buffers that transformers 4 stored with the weights.
IGNORED = (r".*\.position_ids",)

# What the classes of transformers take for absent fields; the hub's configs leave many out.
TEXT_DEFAULTS = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
VISION_DEFAULTS = TEXT_DEFAULTS | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Structure of CLIP's text encoder.

    Attributes:
      encoder: the layers.
      vocabulary: number of token ids.
      positions: the longest text in tokens.
      end_token: id of the token whose hidden state stands for the text; None: the highest id of the text.
    """

    encoder: EncoderConfig
    vocabulary: int
    positions: int
    end_token: int | None

    @classmethod
    def from_fields(cls, fields: Fields, dtype: str) -> TextConfig:
        """Reads a `text_config`.

        An eos_token_id of 2, which all of OpenAI's configs give, is wrong: their end token is 49407, the
        highest id, and transformers takes that one instead.
        """
        end_token = fields.integer("eos_token_id", 49407, least=0)
        return cls(
            encoder=EncoderConfig.from_fields(fields, dtype, **TEXT_DEFAULTS),
            vocabulary=fields.integer("vocab_size", 49408),
            positions=fields.integer("max_position_embeddings", 77),
            end_token=None if end_token == 2 else end_token,
        )


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Structure of CLIP's image encoder.

    Attributes:
      encoder: the layers.
      resolution: side of an image in pixels.
      patch: side of a patch in pixels; what is left of an image at the right and at the bottom is not seen.
    """

    encoder: EncoderConfig
    resolution: int
    patch: int

    @classmethod
    def from_fields(cls, fields: Fields, dtype: str) -> VisionConfig:
        """Reads a `vision_config`."""
        resolution, patch = fields.integer("image_size", 224), fields.integer("patch_size", 32)
        if resolution < patch:
            raise fields.refuse("image_size", f"at least patch_size {patch}")
        if fields.integer("num_channels", 3) != 3:
            raise fields.refuse("num_channels", "3")
        return cls(EncoderConfig.from_fields(fields, dtype, **VISION_DEFAULTS), resolution, patch)


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
    """Structure of CLIP.

    Attributes:
      text: its text encoder.
      vision: its image encoder.
      projection: P, the width of the common embedding.
    """

    text: TextConfig
    vision: VisionConfig
    projection: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> CLIPConfig:
        """Reads a Hugging Face config.json of model_type 'clip'.

        Args:
          config: the JSON object.
          dtype: of the computation, 'float32' or 'bfloat16'.

        Raises:
          ModelError: for a field that is of the wrong type or does not fit the others.
        """
        fields = Fields(config)
        return cls(
            text=TextConfig.from_fields(tower_fields(fields, "text"), dtype),
            vision=VisionConfig.from_fields(tower_fields(fields, "vision"), dtype),
            projection=fields.integer("projection_dim", 512),
        )


def tower_fields(fields: Fields, tower: str) -> Fields:
    """The config of one tower, which old configs hold twice; the one named '..._config_dict' then counts."""
    legacy = f"{tower}_config_dict"
    return fields.section(legacy if fields.has(legacy) else f"{tower}_config", optional=True)


class ImageEmbedding(nn.Module):
    """Patches, a class token before them, and learned positions.

    Attributes:
      config: structure.
    """

    config: VisionConfig

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Maps normalised images [N, H, W, 3] to `dtype` [N, 1 + patches, D].

        Raises:
          ModelError: if the images have another size than the model's.
        """
        config, dtype, width = self.config, self.config.encoder.dtype, self.config.encoder.width
        check_images(images, config.resolution)
        patches = Linear(width, False, dtype, name="patch")(image_to_patches(images, config.patch))
        token = self.param("class", KERNEL_INIT, (width,), dtype).astype(dtype)
        positions = self.param("positions", KERNEL_INIT, (patches.shape[1] + 1, width), dtype).astype(dtype)
        tokens = jnp.broadcast_to(token, (patches.shape[0], 1, width))
        return jnp.concatenate([tokens, patches], axis=1) + positions


class TextEncoder(nn.Module):
    """CLIP's causal text encoder.

    Attributes:
      config: structure.
    """

    config: TextConfig

    @nn.compact
    def __call__(self, tokens: Array, where: Array | None = None) -> Array:
        """Encodes texts.

        Args:
          tokens: int32 [N, T]; every row holds the end token.
          where: bool [N, T], False for padding; None: no padding.

        Returns:
          `dtype` [N, D], the normed hidden state of the first end token.

        Raises:
          ModelError: if T exceeds the number of positions.
        """
        config = self.config
        embedding = TokenEmbedding(
            config.vocabulary, config.positions, config.encoder.width, config.encoder.dtype, name="embedding"
        )
        mask = text_mask(where, tokens.shape[1], causal=True)
        hidden = Encoder(config.encoder, name="encoder")(embedding(tokens), mask)
        hidden = LayerNorm(config.encoder.norm_epsilon, name="final_norm")(hidden)
        end = jnp.argmax(tokens if config.end_token is None else tokens == config.end_token, axis=1)
        return jnp.take_along_axis(hidden, end[:, None, None], axis=1)[:, 0]


class ImageEncoder(nn.Module):
    """CLIP's vision transformer.

    Attributes:
      config: structure.
    """

    config: VisionConfig

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Maps normalised images [N, H, W, 3] to `dtype` [N, D], the normed state of the class token."""
        epsilon = self.config.encoder.norm_epsilon
        hidden = ImageEmbedding(self.config, name="embedding")(images)
        hidden = LayerNorm(epsilon, name="embedding_norm")(hidden)
        hidden = Encoder(self.config.encoder, name="encoder")(hidden)
        return LayerNorm(epsilon, name="final_norm")(hidden[:, 0])


class CLIP(nn.Module):
    """Image and text encoder with a common embedding.

    Attributes:
      config: structure.
    """

    config: CLIPConfig

    def setup(self) -> None:
        """Declares the encoders, their projections and the temperature."""
        config = self.config
        self.vision = ImageEncoder(config.vision)
        self.text = TextEncoder(config.text)
        self.image_projection = Linear(config.projection, False, config.vision.encoder.dtype)
        self.text_projection = Linear(config.projection, False, config.text.encoder.dtype)
        # 1 / 0.07, where training starts (Radford et al., 2021, section 2.5)
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(2.6592), (), jnp.float32)

    def encode_image(self, images: Array) -> Array:
        """Embeds images.

        Args:
          images: float32 [N, H, W, 3], resized and normalised as preprocessor_config.json says.

        Returns:
          `dtype` [N, P], not of unit length.

        Raises:
          ModelError: if the images have another size than the model's.
        """
        return self.image_projection(self.vision(images))

    def encode_text(self, tokens: Array, where: Array | None = None) -> Array:
        """Embeds texts.

        Args:
          tokens: int32 [N, T]; every row holds the end token.
          where: bool [N, T], False for padding; None: no padding.

        Returns:
          `dtype` [N, P], not of unit length.

        Raises:
          ModelError: if T exceeds the number of positions.
        """
        return self.text_projection(self.text(tokens, where))

    def logits(self, images: Array, texts: Array) -> Array:
        """exp(logit_scale) times the cosine of every image and text: [N, P] and [K, P] to float32 [N, K]."""
        return jnp.exp(self.logit_scale.astype(jnp.float32)) * (unit_length(images) @ unit_length(texts).T)

    def __call__(self, images: Array, tokens: Array, where: Array | None = None) -> Array:
        """Logits of every image and text, float32 [N, K]; see `encode_image` and `encode_text`."""
        return self.logits(self.encode_image(images), self.encode_text(tokens, where))


def text_tensors(config: TextConfig) -> dict[str, Stored]:
    """Where a checkpoint keeps a `TextEncoder`, at the path 'text' among ours."""
    return (
        token_tensors("text/embedding", "text_model.embeddings.")
        | encoder_tensors(
            config.encoder.layers, model="text_model.encoder.layers.{}.", into="text/encoder/layers/"
        )
        | norm_tensors("text/final_norm", "text_model.final_layer_norm")
    )


def image_embedding_tensors(config: VisionConfig) -> dict[str, Stored]:
    """Where a checkpoint keeps an `ImageEmbedding`, at the path 'vision/embedding' among ours."""
    ours, theirs = "vision/embedding/", "vision_model.embeddings."
    return {
        ours + "class": Stored(theirs + "class_embedding", ("embed",)),
        ours + "patch/kernel": Stored(
            theirs + "patch_embedding.weight",
            (None, "embed"),
            "convolution",
            shape=(config.encoder.width, 3, config.patch, config.patch),
        ),
        ours + "positions": Stored(theirs + "position_embedding.weight", (None, "embed")),
    }


def projection_tensors() -> dict[str, Stored]:
    """Where a checkpoint keeps the projections and the temperature."""
    return {
        **linear_tensors("image_projection", "visual_projection", "embed", None, use_bias=False),
        **linear_tensors("text_projection", "text_projection", "embed", None, use_bias=False),
        "logit_scale": Stored("logit_scale", ()),
    }


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """CLIP with the structure of a config.json, and where a checkpoint keeps its parameters.

    Args:
      config: the JSON object.
      dtype: of parameters and computation, 'float32' or 'bfloat16'.

    Raises:
      ModelError: for a config that cannot be used.
    """
    structure = CLIPConfig.from_dict(config, dtype=dtype)
    module = CLIP(structure)

    def initialise(key: Any) -> PyTree:
        resolution = structure.vision.resolution
        return module.init(key, jnp.zeros((1, resolution, resolution, 3)), jnp.zeros((1, 1), jnp.int32))

    tensors = (
        text_tensors(structure.text)
        | image_embedding_tensors(structure.vision)
        # the misspelling is the checkpoints'
        | norm_tensors("vision/embedding_norm", "vision_model.pre_layrnorm")
        | encoder_tensors(
            structure.vision.encoder.layers,
            model="vision_model.encoder.layers.{}.",
            into="vision/encoder/layers/",
        )
        | norm_tensors("vision/final_norm", "vision_model.post_layernorm")
        | projection_tensors()
    )
    return Architecture(module, tensors, initialise, ignored=IGNORED)
