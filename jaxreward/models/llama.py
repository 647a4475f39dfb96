"""Llama and SmolLM2: text only, with the interface of the vision-language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxreward.models.decoder import Decoder, DecoderConfig, decoder_tensors
from jaxreward.models.hub_config import Fields
from jaxreward.models.vision_language import DecoderModel, ImageFeatures
from jaxreward.models.weights import Architecture
from jaxreward.types import Array, PyTree


def read_decoder(fields: Fields, *, tied: bool, dtype: str) -> DecoderConfig:
    """Reads the structure of a Llama decoder; what is absent has the default of transformers' LlamaConfig.

    Args:
      fields: config.json of a text model, or `text_config` of a vision-language model.
      tied: the output layer is the transposed embedding.
      dtype: of the computation, 'float32' or 'bfloat16'.

    Returns:
      The structure.

    Raises:
      ModelError: for a field that is missing, of the wrong type, or asks for what this decoder lacks (scaled
        rotary frequencies, biases, another activation).
    """
    fields.choice("hidden_act", ("silu",), "silu")
    for bias in ("attention_bias", "mlp_bias"):
        if fields.flag(bias, False):
            raise fields.refuse(bias, "false (Llama checkpoints with biases are not supported)")
    # transformers 5 keeps all that concerns rotation in rope_parameters; before, rope_theta stood alone and
    # rope_scaling beside it, with 'type' as the older name of 'rope_type'.
    rope = fields.section("rope_parameters", optional=True)
    theta = rope if rope.has("rope_theta") else fields
    for section in (rope, fields.section("rope_scaling", optional=True)):
        for name in ("rope_type", "type"):
            section.choice(name, ("default",), "default")
    width = fields.integer("hidden_size", 4096)
    heads = fields.integer("num_attention_heads", 32)
    if not fields.has("head_dim") and width % heads:
        raise fields.refuse("num_attention_heads", f"a divisor of the width {width}")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads},")
    return DecoderConfig(
        vocabulary=fields.integer("vocab_size", 32000),
        width=width,
        mlp_width=fields.integer("intermediate_size", 11008),
        layers=fields.integer("num_hidden_layers", 32),
        heads=heads,
        kv_heads=kv_heads,
        head_width=fields.integer("head_dim", width // heads),
        rope_theta=theta.number("rope_theta", 10000.0),
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        tied=tied,
        dtype=dtype,
    )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Structure of a Llama.

    Attributes:
      decoder: all of it.
    """

    decoder: DecoderConfig

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> LlamaConfig:
        """Reads a config.json of `model_type` llama.

        Args:
          config: the parsed file.
          dtype: of the computation, 'float32' or 'bfloat16'.

        Returns:
          The structure.

        Raises:
          ModelError: naming the field, what was found and what was expected.
        """
        fields = Fields(config)
        fields.choice("model_type", ("llama",))
        return cls(read_decoder(fields, tied=fields.flag("tie_word_embeddings", False), dtype=dtype))


class Llama(DecoderModel):
    """A text-only `VisionLanguageModel`: there is nothing to encode, and `features` are None.

    Attributes:
      config: structure.
    """

    config: LlamaConfig

    def setup(self) -> None:
        """Declares the decoder."""
        self.decoder = Decoder(self.config.decoder)

    def encode_images(self, images: PyTree) -> ImageFeatures:
        """Raises TypeError: this model reads text alone, so a call is a mistake of the caller."""
        raise TypeError("Llama reads text alone; images were given")

    def embed(
        self, tokens: Array, image_rows: Array | None = None, features: ImageFeatures | None = None
    ) -> tuple[Array, None]:
        """Embeds int32 [B, T] token ids; returns (`dtype` [B, T, D], None).

        `image_rows` has no effect.

        Raises:
          TypeError: if `features` is not None.
        """
        del image_rows
        if features is not None:
            raise TypeError("Llama reads text alone; image features were given")
        return self.decoder.embed(tokens), None

    def read(self, tokens: Array) -> Array:
        """Maps int32 [B, T] tokens without padding to float32 [B, T, vocabulary]; touches every parameter."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), (3, *tokens.shape))
        embeddings, _ = self.embed(tokens)
        hidden, _ = self(embeddings, positions, jnp.ones(tokens.shape, bool))
        return self.logits(hidden)


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """The module for a config.json of `model_type` llama, and where its parameters are stored.

    Args:
      config: the parsed file.
      dtype: of parameters and computation, 'float32' or 'bfloat16'.

    Returns:
      See `Architecture`.

    Raises:
      ModelError: as `LlamaConfig.from_dict`.
    """
    structure = LlamaConfig.from_dict(config, dtype=dtype)
    module = Llama(structure)
    # Writers before 2023 stored the rotary frequencies; some store a tied output layer twice.
    ignored = (r"\.rotary_emb\.inv_freq$",)
    if structure.decoder.tied:
        ignored += (r"^lm_head\.weight$",)
    return Architecture(
        module=module,
        tensors=decoder_tensors(structure.decoder, model="model.", head="lm_head.weight", into="decoder/"),
        initialise=lambda key: module.init(key, jnp.zeros((1, 2), jnp.int32), method="read"),
        ignored=ignored,
    )
