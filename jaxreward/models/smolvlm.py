"""SmolVLM and Idefics3: a SigLIP vision tower, pixel shuffle, one linear map, and a Llama decoder.

Sources: Laurencon et al., "Building and better understanding vision-language models" (2024, Idefics3);
Marafioti et al., "SmolVLM" (2025). Images arrive as square tiles, see `jaxreward.models.preprocess`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from jaxreward.errors import ModelError
from jaxreward.models.decoder import Decoder, DecoderConfig, decoder_tensors
from jaxreward.models.encoder_layers import (
    Encoder,
    EncoderConfig,
    encoder_tensors,
    image_to_patches,
    linear_tensors,
    norm_tensors,
)
from jaxreward.models.hub_config import Fields
from jaxreward.models.layers import KERNEL_INIT, LayerNorm, Linear
from jaxreward.models.llama import read_decoder
from jaxreward.models.vision_language import DecoderModel, ImageFeatures
from jaxreward.models.weights import Architecture, Stored
from jaxreward.types import Array


@struct.dataclass
class Tiles:
    """Square pieces of images, all of one size, in the order of their tokens in the prompts."""

    pixels: Array  # float32 [M, H, H, 3], normalised, 0 where padded
    where: Array | None = (
        None  # bool [M, H, H], False for padding right of or below the image; None: no padding
    )


@dataclasses.dataclass(frozen=True)
class SmolVLMConfig:
    """Structure of a SmolVLM or Idefics3.

    Attributes:
      vision: of the vision tower.
      decoder: of the text decoder.
      resolution: side in pixels of the tiles that the position table was made for.
      patch: side of a patch in pixels.
      shuffle: `shuffle` x `shuffle` patches become one image token.
      image_token: id of the token that stands for an image token.
    """

    vision: EncoderConfig
    decoder: DecoderConfig
    resolution: int
    patch: int
    shuffle: int
    image_token: int

    @property
    def side(self) -> int:
        """Patches along a side of a tile of `resolution`; what is left over is cut off."""
        return self.resolution // self.patch

    @property
    def tokens_per_tile(self) -> int:
        """Image tokens of a tile of `resolution`."""
        return (self.side // self.shuffle) ** 2

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> SmolVLMConfig:
        """Reads a config.json of `model_type` smolvlm or idefics3; what is absent has transformers' default.

        Args:
          config: the parsed file.
          dtype: of the computation, 'float32' or 'bfloat16'.

        Returns:
          The structure.

        Raises:
          ModelError: naming the field, what was found and what was expected.
        """
        fields = Fields(config)
        fields.choice("model_type", ("smolvlm", "idefics3"))
        text = fields.section("text_config")
        text.choice("model_type", ("llama",), "llama")
        tied = fields.flag("tie_word_embeddings", False)
        tower = fields.section("vision_config", optional=True)
        if tower.integer("num_channels", 3) != 3:
            raise tower.refuse("num_channels", "3")
        resolution = tower.integer("image_size", 224)
        patch = tower.integer("patch_size", 32)
        shuffle = fields.integer("scale_factor", 2)
        if resolution // patch < 1 or (resolution // patch) % shuffle:
            raise fields.refuse("scale_factor", f"a divisor of the {resolution // patch} patches of a side")
        return cls(
            vision=EncoderConfig.from_fields(
                tower,
                dtype,
                hidden_size=1152,
                intermediate_size=3072,
                num_hidden_layers=12,
                num_attention_heads=16,
                hidden_act="gelu_pytorch_tanh",
                layer_norm_eps=1e-6,
            ),
            decoder=read_decoder(text, tied=tied, dtype=dtype),
            resolution=resolution,
            patch=patch,
            shuffle=shuffle,
            image_token=fields.integer("image_token_id", 128257, least=0),
        )


def patch_positions(where: Array, side: int) -> Array:
    """Rows of the position table for the patches of partly padded tiles (NaViT, Dehghani et al., 2023).

    Patch i of n along an axis has the place i / n of the whole, and takes the row floor(side i / n) of the
    `side` learned ones; padding takes row 0. PyTorch transformers computes i / n in float32: rounding moves
    single patches there for some sides, but for none that released checkpoints have (16, 26, 27, 32).

    Args:
      where: bool [M, h, w], False for padding, which lies right of and below the image.
      side: rows of the table along each axis.

    Returns:
      int32 [M, h, w], below side^2.
    """

    def along(count: Array, length: int) -> Array:
        return jnp.minimum(jnp.arange(length) * side // jnp.maximum(count, 1)[:, None], side - 1)

    rows = along(jnp.sum(where[:, :, 0], 1, dtype=jnp.int32), where.shape[1])
    columns = along(jnp.sum(where[:, 0, :], 1, dtype=jnp.int32), where.shape[2])
    return jnp.where(where, rows[:, :, None] * side + columns[:, None, :], 0)


def pixel_shuffle(patches: Array, factor: int) -> Array:
    """Joins squares of factor x factor patches: [M, h, w, D] to [M, h w / factor^2, factor^2 D], row-major.

    Within the result, patches of a square stand row by row (Shi et al., 2016, turned round).
    """
    tiles, height, width, channels = patches.shape
    split = patches.reshape(tiles, height // factor, factor, width // factor, factor, channels)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(tiles, -1, factor * factor * channels)


class VisionTower(nn.Module):
    """SigLIP's vision transformer without its pooling head.

    Attributes:
      config: structure of the whole model.
    """

    config: SmolVLMConfig

    @nn.compact
    def __call__(self, tiles: Tiles) -> Array:
        """Maps tiles to `dtype` [M, H / patch, H / patch, D]."""
        config, width = self.config, self.config.vision.width
        count = tiles.pixels.shape[1] // config.patch
        edge = count * config.patch
        hidden = Linear(width, dtype=config.vision.dtype, name="patch")(
            image_to_patches(tiles.pixels[:, :edge, :edge], config.patch)
        )
        pieces = (len(tiles.pixels), count, count)
        if tiles.where is None:
            where = jnp.ones(pieces, bool)
        else:
            cut = tiles.where[:, :edge, :edge].reshape(-1, count, config.patch, count, config.patch)
            where = cut.any((2, 4))
        table = self.param("positions", KERNEL_INIT, (config.side**2, width), config.vision.dtype)
        places = patch_positions(where, config.side).reshape(len(where), -1)
        hidden = hidden + table[places].astype(hidden.dtype)
        mask = None if tiles.where is None else where.reshape(len(where), 1, 1, -1)
        hidden = Encoder(config.vision, name="encoder")(hidden, mask)
        return LayerNorm(config.vision.norm_epsilon, name="final_norm")(hidden).reshape(*pieces, width)


class SmolVLM(DecoderModel):
    """A `VisionLanguageModel` that reads tiles.

    Attributes:
      config: structure.
    """

    config: SmolVLMConfig

    def setup(self) -> None:
        """Declares the parts."""
        self.vision = VisionTower(self.config)
        self.projection = Linear(self.config.decoder.width, False, self.config.decoder.dtype)
        self.decoder = Decoder(self.config.decoder)

    def encode_images(self, images: Tiles) -> ImageFeatures:
        """Encodes tiles; each gives (H / patch / shuffle)^2 rows, row-major, tile after tile.

        Args:
          images: tiles, those that only fill a bucket included: they change no other tile's rows.

        Returns:
          `dtype` [M * rows per tile, D].

        Raises:
          ModelError: if the tiles are not square or their patches cannot be shuffled.
        """
        shape, config = images.pixels.shape, self.config
        count = shape[1] // config.patch if len(shape) == 4 else 0
        if len(shape) != 4 or shape[1] != shape[2] or shape[3] != 3 or not count or count % config.shuffle:
            raise ModelError(
                f"tiles of shape {shape} found; [M, H, H, 3] was expected, where H holds a multiple of "
                f"{config.shuffle} patches of {config.patch} pixels, such as {config.resolution}: cut images "
                "with the folder's preprocessor_config.json"
            )
        rows = self.projection(pixel_shuffle(self.vision(images), config.shuffle))
        return ImageFeatures(rows.reshape(-1, config.decoder.width))

    def read(self, images: Tiles) -> Array:
        """Logits float32 [1, T, vocabulary] of a prompt of these tiles alone; touches every parameter."""
        features = self.encode_images(images)
        rows = jnp.arange(len(features.rows))[None]
        positions = jnp.broadcast_to(rows, (3, *rows.shape))
        embeddings, _ = self.embed(jnp.full_like(rows, self.config.image_token), rows, features)
        hidden, _ = self(embeddings, positions, jnp.ones(rows.shape, bool))
        return self.logits(hidden)


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """The module for a config.json of `model_type` smolvlm or idefics3, and where its parameters are stored.

    Args:
      config: the parsed file.
      dtype: of parameters and computation, 'float32' or 'bfloat16'.

    Returns:
      See `Architecture`.

    Raises:
      ModelError: as `SmolVLMConfig.from_dict`.
    """
    structure = SmolVLMConfig.from_dict(config, dtype=dtype)
    module = SmolVLM(structure)
    tower, patch, width = "model.vision_model.", structure.patch, structure.vision.width
    tensors = {
        "vision/patch/kernel": Stored(
            tower + "embeddings.patch_embedding.weight",
            (None, "embed"),
            "convolution",
            shape=(width, 3, patch, patch),
        ),
        "vision/patch/bias": Stored(tower + "embeddings.patch_embedding.bias", ("embed",)),
        "vision/positions": Stored(tower + "embeddings.position_embedding.weight", (None, "embed")),
        **encoder_tensors(
            structure.vision.layers, model=tower + "encoder.layers.{}.", into="vision/encoder/layers/"
        ),
        **norm_tensors("vision/final_norm", tower + "post_layernorm"),
        **linear_tensors(
            "projection", "model.connector.modality_projection.proj", None, "embed", use_bias=False
        ),
        **decoder_tensors(
            structure.decoder, model="model.text_model.", head="lm_head.weight", into="decoder/"
        ),
    }
    tile = patch * structure.shuffle
    return Architecture(
        module=module,
        tensors=tensors,
        initialise=lambda key: module.init(key, Tiles(jnp.zeros((1, tile, tile, 3))), method="read"),
        ignored=(r"^lm_head\.weight$",) if structure.decoder.tied else (),
    )
