"""What every vision-language model here offers, and the batch of prompts that it reads."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from jaxreward.models.decoder import Cache, DecoderConfig
from jaxreward.types import Array, PyTree


@struct.dataclass
class ImageFeatures:
    """A table of image tokens, one row each; prompts refer to rows, so that frames are encoded once."""

    rows: Array  # dtype [N, D], what takes the place of a token's embedding
    extra: Array | None = None  # dtype [n, N, D], added after decoder layers 0 .. n - 1 (DeepStack)


@struct.dataclass
class Prompts:
    """A batch of tokenised prompts, padded on the left to one length."""

    tokens: Array  # int32 [B, T]
    where: Array  # bool [B, T], False for padding
    positions: Array  # int32 [3, B, T], rotary positions by (time, height, width); 0 for padding
    next_position: Array  # int32 [B], the position of the first token after the prompt
    image_rows: Array  # int32 [B, T], the row of `ImageFeatures` at an image token, -1 elsewhere


@runtime_checkable
class VisionLanguageModel(Protocol):
    """Methods of the Flax modules in `qwen_vl.py` and `smolvlm.py`; call them through `apply(method=...)`."""

    @property
    def decoder_config(self) -> DecoderConfig:
        """Structure of the text decoder; `decoder.empty_cache` makes a cache from it."""
        ...

    def encode_images(self, images: PyTree) -> ImageFeatures:
        """Encodes what the model's `preprocess_images` returned, padded to a bucket."""
        ...

    def embed(
        self, tokens: Array, image_rows: Array, features: ImageFeatures | None
    ) -> tuple[Array, Array | None]:
        """Embeds tokens and puts image features in their places.

        Args:
          tokens: int32 [B, T].
          image_rows: int32 [B, T], -1 where the token is text.
          features: the table that `image_rows` refers to; None for text alone.

        Returns:
          (embeddings [B, T, D], extra [n, B, T, D] or None), which `__call__` takes.
        """
        ...

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
        """Runs the decoder: see `jaxreward.models.decoder.Decoder`."""
        ...

    def logits(self, hidden: Array) -> Array:
        """Maps hidden states [..., D] to float32 [..., vocabulary]."""
        ...


class DecoderModel(nn.Module):
    """What the models here share: `config.decoder` is the structure of `decoder`, which `setup` declares."""

    @property
    def decoder_config(self) -> DecoderConfig:
        """Structure of the text decoder."""
        return self.config.decoder

    def embed(
        self, tokens: Array, image_rows: Array, features: ImageFeatures | None
    ) -> tuple[Array, Array | None]:
        """Embeds tokens and puts image features in their places: see `VisionLanguageModel.embed`."""
        embeddings = self.decoder.embed(tokens)
        if features is None:
            return embeddings, None
        is_image, at = (image_rows >= 0)[..., None], jnp.maximum(image_rows, 0)
        embeddings = jnp.where(is_image, features.rows[at].astype(embeddings.dtype), embeddings)
        extra = None if features.extra is None else jnp.where(is_image, features.extra[:, at], 0)
        return embeddings, extra

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
        """Runs the decoder: see `jaxreward.models.decoder.Decoder`."""
        return self.decoder(embeddings, positions, where, cache, empty=empty, extra=extra, branches=branches)

    def logits(self, hidden: Array) -> Array:
        """Maps hidden states [..., D] to float32 [..., vocabulary]."""
        return self.decoder.logits(hidden)


def with_remat(module: nn.Module) -> nn.Module:
    """The same model, whose decoder computes each layer's activations again in the backward pass."""
    decoder = dataclasses.replace(module.decoder_config, remat=True)
    return module.clone(config=dataclasses.replace(module.config, decoder=decoder))
