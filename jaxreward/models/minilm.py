"""MiniLM sentence embeddings: BERT, mean pooling, unit length (Reimers and Gurevych, 2019)."""

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
    encoder_tensors,
    norm_tensors,
    text_mask,
    unit_length,
)
from jaxreward.models.hub_config import Fields
from jaxreward.models.layers import KERNEL_INIT, LayerNorm
from jaxreward.models.weights import Architecture, Stored
from jaxreward.types import Array, PyTree

# What BertConfig of transformers takes for absent fields.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}

BERT_NAMES = {
    "attention_norm": "attention.output.LayerNorm",
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "mlp_norm": "output.LayerNorm",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
}


@dataclasses.dataclass(frozen=True)
class MiniLMConfig:
    """Structure of a BERT encoder.

    Attributes:
      encoder: the layers; norms after each sum.
      vocabulary: number of token ids.
      positions: the longest text in tokens.
      token_types: number of segments that a text may tell apart.
    """

    encoder: EncoderConfig
    vocabulary: int
    positions: int
    token_types: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> MiniLMConfig:
        """Reads a Hugging Face config.json of model_type 'bert'.

        Args:
          config: the JSON object.
          dtype: of the computation, 'float32' or 'bfloat16'.

        Raises:
          ModelError: for a field that is of the wrong type or that this encoder does not support.
        """
        fields = Fields(config)
        fields.choice("position_embedding_type", ("absolute",), "absolute")
        encoder = EncoderConfig.from_fields(fields, dtype, **DEFAULTS)
        return cls(
            encoder=dataclasses.replace(encoder, norm_first=False),
            vocabulary=fields.integer("vocab_size", 30522),
            positions=fields.integer("max_position_embeddings", 512),
            token_types=fields.integer("type_vocab_size", 2),
        )


class MiniLM(nn.Module):
    """Sentence encoder.

    Attributes:
      config: structure.
    """

    config: MiniLMConfig

    def setup(self) -> None:
        """Declares the embeddings and the layers."""
        config, encoder = self.config, self.config.encoder
        self.embedding = TokenEmbedding(config.vocabulary, config.positions, encoder.width, encoder.dtype)
        shape = (config.token_types, encoder.width)
        self.token_types = self.param("token_types", KERNEL_INIT, shape, encoder.dtype)
        self.embedding_norm = LayerNorm(encoder.norm_epsilon)
        self.encoder = Encoder(encoder)

    def hidden_states(self, tokens: Array, where: Array, token_types: Array | None = None) -> Array:
        """Runs the encoder.

        Args:
          tokens: int32 [N, T].
          where: bool [N, T], False for padding.
          token_types: int32 [N, T], the segment of each token; None: all 0.

        Returns:
          `dtype` [N, T, D].

        Raises:
          ModelError: if T exceeds the number of positions.
        """
        types = self.token_types.astype(self.config.encoder.dtype)
        embedded = self.embedding(tokens) + (types[0] if token_types is None else types[token_types])
        mask = text_mask(where, tokens.shape[1], causal=False)
        return self.encoder(self.embedding_norm(embedded), mask)

    def encode(self, tokens: Array, where: Array, token_types: Array | None = None) -> Array:
        """Embeds sentences.

        Args:
          tokens: int32 [N, T].
          where: bool [N, T], False for padding.
          token_types: int32 [N, T], the segment of each token; None: all 0.

        Returns:
          float32 [N, D] of unit length: the mean of the hidden states of each sentence's tokens. 0 for a row
          that is all padding.

        Raises:
          ModelError: if T exceeds the number of positions.
        """
        hidden = self.hidden_states(tokens, where, token_types).astype(jnp.float32)
        total = jnp.sum(hidden * where[..., None], axis=1)
        return unit_length(total / jnp.maximum(jnp.sum(where, axis=1, keepdims=True), 1))

    def __call__(self, tokens: Array, where: Array, token_types: Array | None = None) -> Array:
        """Embeds sentences: see `encode`."""
        return self.encode(tokens, where, token_types)


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """MiniLM with the structure of a config.json, and where a checkpoint keeps its parameters.

    Args:
      config: the JSON object.
      dtype: of parameters and computation, 'float32' or 'bfloat16'.

    Raises:
      ModelError: for a config that cannot be used.
    """
    structure = MiniLMConfig.from_dict(config, dtype=dtype)
    module = MiniLM(structure)

    def initialise(key: Any) -> PyTree:
        return module.init(key, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))

    tensors = {
        "embedding/tokens": Stored("embeddings.word_embeddings.weight", ("vocabulary", "embed")),
        "embedding/positions": Stored("embeddings.position_embeddings.weight", (None, "embed")),
        "token_types": Stored("embeddings.token_type_embeddings.weight", (None, "embed")),
        **norm_tensors("embedding_norm", "embeddings.LayerNorm"),
        **encoder_tensors(
            structure.encoder.layers, model="encoder.layer.{}.", into="encoder/layers/", names=BERT_NAMES
        ),
    }
    # BERT's own pooler and its language-model head play no part in the sentence embedding
    ignored = (r".*\.(position|token_type)_ids", r"(bert\.)?pooler\..*", r"cls\..*")
    return Architecture(module, tensors, initialise, aliases={"bert.": ""}, ignored=ignored)
