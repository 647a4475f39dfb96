"""The structure of Qwen2.5-VL and Qwen3-VL, read from a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxreward.errors import ModelError
from jaxreward.models.decoder import DecoderConfig
from jaxreward.models.hub_config import Fields
from jaxreward.models.layers import ACTIVATIONS

QWEN2_5, QWEN3 = "qwen2_5_vl", "qwen3_vl"


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig:
    """Structure of a vision tower.

    Attributes:
      width: D of the residual stream.
      mlp_width: inner width of the MLPs.
      layers: depth.
      heads: attention heads.
      output_width: width of an image token, which is that of the text decoder.
      patch: side of a patch in pixels.
      temporal_patch: frames that one patch spans; a still image is repeated.
      channels: of a pixel.
      merge: side of the square of patches that becomes one image token.
      activation: of the MLPs, a key of `layers.ACTIVATIONS`.
      gated: the layers of Qwen2.5-VL (RMS norms, gated MLP, patch embedding without bias) instead of
        Qwen3-VL's (layer norms, plain MLP, patch embedding with bias).
      window: side in patches of the windows that attention is confined to (Qwen2.5-VL); 0: no windows.
      full_layers: the layers that attend within the whole frame, where there are windows.
      table: side of the square table of learned positions (Qwen3-VL); 0: no table.
      deepstack_layers: the layers, ascending, whose results enter the decoder as well (Qwen3-VL).
      rope_theta: base of the rotary frequencies.
      dtype: of the computation, 'float32' or 'bfloat16'.
      remat: recompute a layer's activations in the backward pass.
    """

    width: int
    mlp_width: int
    layers: int
    heads: int
    output_width: int
    patch: int
    temporal_patch: int = 2
    channels: int = 3
    merge: int = 2
    activation: str = "silu"
    gated: bool = True
    window: int = 0
    full_layers: tuple[int, ...] = ()
    table: int = 0
    deepstack_layers: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        """Checks the fields against one another."""
        if self.width % (4 * self.heads):
            raise ModelError(
                f"a vision tower of width {self.width} with {self.heads} heads found; rotary positions in "
                "two dimensions need heads whose width is a multiple of 4"
            )
        if self.window % self.merge:
            raise ModelError(
                f"windows of {self.window} patches found; expected a multiple of {self.merge}, the side of "
                "the patches that become one token"
            )
        for name in ("full_layers", "deepstack_layers"):
            numbers = getattr(self, name)
            if list(numbers) != sorted(set(numbers)) or any(n >= self.layers for n in numbers):
                raise ModelError(
                    f"{name} {numbers} found; expected ascending layer numbers below {self.layers}"
                )

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def patches_per_token(self) -> int:
        """Patches that become one image token."""
        return self.merge**2

    @classmethod
    def from_fields(cls, fields: Fields, family: str, dtype: str) -> QwenVisionConfig:
        """Reads a `vision_config` of a family, 'qwen2_5_vl' or 'qwen3_vl'."""
        patch, merge = fields.integer("patch_size"), fields.integer("spatial_merge_size")
        structure: dict[str, Any] = {}
        if family == QWEN2_5:
            # transformers counts whole tokens in a window, too
            window = fields.integer("window_size") // merge // patch * merge
            if not window:
                raise fields.refuse("window_size", f"at least one token, {merge * patch} pixels,")
            structure = {"window": window, "full_layers": fields.integers("fullatt_block_indexes")}
        else:
            positions = fields.integer("num_position_embeddings")
            if math.isqrt(positions) ** 2 != positions:
                raise fields.refuse("num_position_embeddings", "the square of a number")
            structure = {
                "table": math.isqrt(positions),
                "deepstack_layers": fields.integers("deepstack_visual_indexes"),
            }
        return cls(
            width=fields.integer("hidden_size"),
            mlp_width=fields.integer("intermediate_size"),
            layers=fields.integer("depth"),
            heads=fields.integer("num_heads"),
            output_width=fields.integer("out_hidden_size"),
            patch=patch,
            temporal_patch=fields.integer("temporal_patch_size", 2),
            # the files that came with Qwen2.5-VL say in_chans
            channels=fields.integer("in_chans" if fields.has("in_chans") else "in_channels", 3),
            merge=merge,
            activation=fields.choice("hidden_act", ACTIVATIONS),
            gated=family == QWEN2_5,
            rope_theta=fields.section("rope_parameters", optional=True).number("rope_theta", 10000.0),
            dtype=dtype,
            **structure,
        )


def decoder_config(fields: Fields, family: str, *, tied: bool, dtype: str) -> DecoderConfig:
    """Reads the text decoder's fields: a `text_config`, or the top of a flat config.json."""
    fields.choice("hidden_act", ("silu",), "silu")
    for name in ("use_sliding_window", "attention_bias"):
        if fields.flag(name, False):
            raise fields.refuse(name, "false")
    # what transformers 5 calls rope_parameters
    legacy = fields.has("rope_scaling") and not fields.has("rope_parameters")
    rope = fields.section("rope_scaling" if legacy else "rope_parameters", optional=True)
    for name in ("type", "rope_type"):
        rope.choice(name, ("default", "mrope"), "default")
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if family == QWEN2_5:
        if width % heads:
            raise fields.refuse("num_attention_heads", f"a divisor of hidden_size {width}")
        head_width, sections, theta, epsilon = width // heads, (16, 24, 24), 1e6, 1e-5
    else:
        head_width, sections, theta, epsilon = fields.integer("head_dim", 128), (24, 20, 20), 5e5, 1e-6
    sections = rope.integers("mrope_section", sections)
    if len(sections) != 3:
        raise rope.refuse("mrope_section", "three numbers, for time, height and width,")
    return DecoderConfig(
        vocabulary=fields.integer("vocab_size"),
        width=width,
        mlp_width=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_width=head_width,
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", theta)),
        rope_sections=sections,
        rope_interleaved=family == QWEN3,
        query_norm=family == QWEN3,
        qkv_bias=family == QWEN2_5,
        norm_epsilon=fields.number("rms_norm_eps", epsilon),
        tied=tied,
        dtype=dtype,
    )


@dataclasses.dataclass(frozen=True)
class QwenVLConfig:
    """Structure of Qwen2.5-VL or Qwen3-VL.

    Attributes:
      family: 'qwen2_5_vl' or 'qwen3_vl', the model_type.
      decoder: the text decoder.
      vision: the vision tower.
      image_token: id of the token that stands for one token of an image.
      video_token: id of the token that stands for one token of a video.
      tokens_per_second: steps of the time position in one second of video (Qwen2.5-VL).
    """

    family: str
    decoder: DecoderConfig
    vision: QwenVisionConfig
    image_token: int = 151655
    video_token: int = 151656
    tokens_per_second: int = 2

    def __post_init__(self) -> None:
        """Checks that tower and decoder fit each other."""
        if self.vision.output_width != self.decoder.width:
            raise ModelError(
                f"image tokens of width {self.vision.output_width} and a decoder of width "
                f"{self.decoder.width} found; they must be equal"
            )
        if len(self.vision.deepstack_layers) > self.decoder.layers:
            raise ModelError(
                f"{len(self.vision.deepstack_layers)} DeepStack layers and {self.decoder.layers} decoder "
                "layers found; each of the former enters one of the latter"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> QwenVLConfig:
        """Reads a config.json: the flat layout of Qwen2.5-VL's own files, or that of transformers 5.

        Args:
          config: the JSON object.
          dtype: of the computation, 'float32' or 'bfloat16'.

        Raises:
          ModelError: for a field that is missing, of the wrong type, or says what is not supported.
        """
        fields = Fields(config)
        family = fields.choice("model_type", (QWEN2_5, QWEN3))
        flat = family == QWEN2_5 and not fields.has("text_config")
        text = fields if flat else fields.section("text_config")
        vision = fields.section("vision_config")
        # transformers 4 kept the flag in text_config, transformers 5 keeps it at the top
        tied = fields.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
        return cls(
            family=family,
            decoder=decoder_config(text, family, tied=tied, dtype=dtype),
            vision=QwenVisionConfig.from_fields(vision, family, dtype),
            image_token=fields.integer("image_token_id", 151655, least=0),
            video_token=fields.integer("video_token_id", 151656, least=0),
            tokens_per_second=vision.integer("tokens_per_second", 4) if family == QWEN2_5 else 1,
        )
