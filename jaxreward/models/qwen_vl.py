"""Qwen2.5-VL (Bai et al., 2025, arXiv:2502.13923) and Qwen3-VL (Bai et al., 2025, arXiv:2511.21631).

A vision tower turns frames of any size into image tokens, and a decoder reads them among the text. Images
come from `qwen_inputs.vision_inputs`, positions of tokens from `qwen_inputs.rope_positions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.models.decoder import Decoder, decoder_tensors
from jaxreward.models.encoder_layers import linear_tensors, mlp_tensors, norm_tensors
from jaxreward.models.layers import (
    ACTIVATIONS,
    KERNEL_INIT,
    MAX_LOGITS,
    LayerNorm,
    Linear,
    RMSNorm,
    attend,
    inverse_frequencies,
    rotate,
)
from jaxreward.models.qwen_config import QWEN2_5, QwenVisionConfig, QwenVLConfig
from jaxreward.models.qwen_inputs import QwenImages, vision_inputs
from jaxreward.models.vision_language import DecoderModel, ImageFeatures
from jaxreward.models.weights import Architecture, Stored
from jaxreward.types import Array, PyTree

# All norms of both vision towers; the files do not say it.
VISION_EPSILON = 1e-6


def _by_parts(function: Callable[..., Array], batches: tuple[Array, ...], logits: int) -> Array:
    """function(*batches), in equal parts of the leading axis if the `logits` of its items need it.

    The parts are computed again in the backward pass, which else would keep the logits of all. Each part
    takes items from the whole axis, so that devices that share the axis share each part, too.
    """
    total = batches[0].shape[0]
    parts = 1
    while total % parts or (total // parts * logits > MAX_LOGITS and parts < total):
        parts += 1
    if parts == 1:
        return function(*batches)

    def split(batch: Array) -> Array:
        return jnp.swapaxes(batch.reshape(-1, parts, *batch.shape[1:]), 0, 1)

    one = jax.checkpoint(lambda items: function(*items))
    out = jax.lax.map(one, tuple(split(batch) for batch in batches))
    return jnp.swapaxes(out, 0, 1).reshape(total, *out.shape[2:])


def attend_in_segments(query: Array, key: Array, value: Array, segments: Array) -> Array:
    """Attention of each slot to the slots of its own frame, in bounded memory.

    Args:
      query: [R, S, H, D].
      key: [R, S, H, D].
      value: [R, S, H, D].
      segments: int32 [R, S], the frame of each slot.

    Returns:
      [R, S, H * D].
    """
    _, length, heads, width = query.shape
    block = length
    while heads * block * length > MAX_LOGITS and block % 2 == 0:
        block //= 2

    def attend_rows(query: Array, key: Array, value: Array, own: Array, others: Array) -> Array:
        return attend(query, key, value, own[:, None, :, None] == others[:, None, None, :])

    if block == length:
        operands = (query, key, value, segments, segments)
        return _by_parts(attend_rows, operands, heads * length * length)

    def attend_blocks(query: Array, key: Array, value: Array, segments: Array) -> Array:
        """One row, some queries at a time."""
        blocks = (query.reshape(-1, block, heads, width), segments.reshape(-1, block))

        @jax.checkpoint
        def one(items: tuple[Array, Array]) -> Array:
            return attend_rows(items[0][None], key[None], value[None], items[1][None], segments[None])[0]

        return jax.lax.map(one, blocks).reshape(length, heads * width)

    return jax.lax.map(lambda row: attend_blocks(*row), (query, key, value, segments))


def attend_in_windows(query: Array, key: Array, value: Array, windows: Array, in_window: Array) -> Array:
    """Attention of each slot to the slots of its own window.

    Args:
      query: [R, S, H, D].
      key: [R, S, H, D].
      value: [R, S, H, D].
      windows: int32 [R, W, n], the slots of each window, -1 for none.
      in_window: int32 [R, S], where each slot stands in the windows of its row, flattened.

    Returns:
      [R, S, H * D]; empty slots get the result of another one.
    """
    rows, _, heads, width = query.shape
    number, size = windows.shape[1:]
    take = jax.vmap(lambda values, at: values[at])

    def gathered(values: Array) -> Array:
        return take(values, jnp.maximum(windows, 0)).reshape(rows * number, size, heads, width)

    def attend_windows(query: Array, key: Array, value: Array, where: Array) -> Array:
        return attend(query, key, value, where[:, None, None, :])

    operands = (gathered(query), gathered(key), gathered(value), windows.reshape(-1, size) >= 0)
    attended = _by_parts(attend_windows, operands, heads * size * size)
    return take(attended.reshape(rows, number * size, heads * width), in_window)


class VisionLayer(nn.Module):
    """Pre-norm attention and MLP of one layer of the tower.

    Attributes:
      config: structure.
    """

    config: QwenVisionConfig

    @nn.compact
    def __call__(
        self, carry: tuple[Array, Array | None], layer: tuple[Array, Array], angles: Array, images: QwenImages
    ) -> tuple[tuple[Array, Array | None], None]:
        """One layer of the scan.

        Args:
          carry: (hidden [R, S, D], kept [n + 1, R, S, D] or None).
          layer: (bool [], whether the layer attends within the whole frame; int32 [], where in `kept` its
            result goes).
          angles: float32 [R, S, head_width / 2].
          images: the layout.

        Returns:
          (carry, None).
        """
        config = self.config
        hidden, kept = carry
        full, keep_at = layer
        norm = RMSNorm if config.gated else LayerNorm
        linear = functools.partial(Linear, dtype=config.dtype)

        normed = norm(VISION_EPSILON, name="attention_norm")(hidden)
        heads = linear(3 * config.width, name="qkv")(normed)
        heads = heads.reshape(*hidden.shape[:2], 3, config.heads, -1)
        query, key, value = (heads[:, :, i] for i in range(3))
        query, key = rotate(query, angles), rotate(key, angles)
        if config.window:
            attended = jax.lax.cond(
                full,
                lambda *qkv: attend_in_segments(*qkv, images.segments),
                lambda *qkv: attend_in_windows(*qkv, images.windows, images.in_window),
                query,
                key,
                value,
            )
        else:
            attended = attend_in_segments(query, key, value, images.segments)
        hidden = hidden + linear(config.width, name="attention_out")(attended)

        normed = norm(VISION_EPSILON, name="mlp_norm")(hidden)
        activation = ACTIVATIONS[config.activation]
        up = linear(config.mlp_width, name="up")(normed)
        if config.gated:
            inner = activation(linear(config.mlp_width, name="gate")(normed)) * up
        else:
            inner = activation(up)
        hidden = hidden + linear(config.width, name="down")(inner)
        if kept is not None:
            kept = jax.lax.dynamic_update_index_in_dim(kept, hidden, keep_at, 0)
        return (hidden, kept), None


class Merger(nn.Module):
    """Merges neighbouring patches into one token of the decoder's width.

    Attributes:
      config: structure.
      norm_merged: the norm runs over the merged patches (DeepStack) instead of each patch.
    """

    config: QwenVisionConfig
    norm_merged: bool = False

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Maps [R, S, D] to [R, S / merge^2, output_width]."""
        config = self.config
        merged = (*hidden.shape[:-2], -1, config.patches_per_token * config.width)
        if self.norm_merged:
            hidden = hidden.reshape(merged)
        hidden = (RMSNorm if config.gated else LayerNorm)(VISION_EPSILON, name="norm")(hidden).reshape(merged)
        hidden = Linear(merged[-1], dtype=config.dtype, name="up")(hidden)
        hidden = jax.nn.gelu(hidden, approximate=False)
        return Linear(config.output_width, dtype=config.dtype, name="down")(hidden)


class QwenVision(nn.Module):
    """The vision tower.

    Attributes:
      config: structure.
    """

    config: QwenVisionConfig

    @nn.compact
    def __call__(self, images: QwenImages) -> ImageFeatures:
        """Encodes images.

        Args:
          images: R rows of S slots that hold N image tokens, see `qwen_inputs.vision_inputs`.

        Returns:
          `dtype` [N, output_width], and [n, N, output_width] of the DeepStack layers if there are any.
        """
        config = self.config
        hidden = Linear(config.width, not config.gated, config.dtype, name="patch_embedding")(images.patches)
        if config.table:
            table = self.param("position_table", KERNEL_INIT, (config.table**2, config.width), config.dtype)
            weights = images.table_weights[..., None]
            positions = jnp.sum(table[images.table_rows].astype(jnp.float32) * weights, axis=-2)
            hidden = hidden + positions.astype(hidden.dtype)
        half = config.width // config.heads // 2
        frequencies = inverse_frequencies(half, config.rope_theta)
        angles = images.positions[..., None].astype(jnp.float32) * frequencies
        angles = angles.reshape(*angles.shape[:2], half)

        numbers = np.arange(config.layers)
        full = np.isin(numbers, config.full_layers)
        # A layer whose result is not asked for writes where the next one that is asked for will.
        keep_at = np.searchsorted(config.deepstack_layers, numbers).astype(np.int32)
        count = len(config.deepstack_layers)
        kept = jnp.zeros((count + 1, *hidden.shape), hidden.dtype) if count else None
        layer = nn.remat(VisionLayer, prevent_cse=False) if config.remat else VisionLayer
        layers = nn.scan(
            layer,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=config.layers,
        )(config, name="layers")
        (hidden, kept), _ = layers((hidden, kept), (full, keep_at), angles, images)

        def tokens(merged: Array) -> Array:
            return merged.reshape(-1, merged.shape[-1])[images.order]

        rows = tokens(Merger(config, name="merger")(hidden))
        if not count:
            return ImageFeatures(rows)
        deepstack = nn.vmap(Merger, variable_axes={"params": 0, "lora": 0}, split_rngs={"params": True})(
            config, norm_merged=True, name="deepstack"
        )
        return ImageFeatures(rows, jax.vmap(tokens)(deepstack(kept[:count])))


class QwenVL(DecoderModel):
    """Vision tower and decoder; fulfils `vision_language.VisionLanguageModel`.

    Attributes:
      config: structure.
    """

    config: QwenVLConfig

    def setup(self) -> None:
        """Declares both parts."""
        self.vision = QwenVision(self.config.vision)
        self.decoder = Decoder(self.config.decoder)

    def encode_images(self, images: QwenImages) -> ImageFeatures:
        """Encodes what `qwen_inputs.vision_inputs` laid out."""
        return self.vision(images)


# {our name in a layer: theirs}
NORMS = {"attention_norm": "norm1", "mlp_norm": "norm2"}
# {our name in a layer: (theirs in Qwen2.5-VL, theirs in Qwen3-VL, the kernel's logical axes)}. Heads are not
# split over devices: they are fused, and in the tower it is the images that devices share out.
LINEARS = {
    "qkv": ("attn.qkv", "attn.qkv", "embed", None),
    "attention_out": ("attn.proj", "attn.proj", None, "embed"),
    "gate": ("mlp.gate_proj", None, "embed", "mlp"),
    "up": ("mlp.up_proj", "mlp.linear_fc1", "embed", "mlp"),
    "down": ("mlp.down_proj", "mlp.linear_fc2", "mlp", "embed"),
}
MERGER = {"norm": ("ln_q", "norm"), "up": ("mlp.0", "linear_fc1"), "down": ("mlp.2", "linear_fc2")}


def vision_tensors(config: QwenVisionConfig, *, prefix: str, into: str) -> dict[str, Stored]:
    """Where a checkpoint keeps the parameters of a `QwenVision`.

    Args:
      config: structure.
      prefix: of the names in the checkpoint, such as 'model.visual.'.
      into: path of the tower among our parameters, such as 'vision/', or ''.

    Returns:
      {our path: how it is stored}.
    """
    family = 0 if config.gated else 1
    kernel = (config.width, config.channels, config.temporal_patch, config.patch, config.patch)
    patch = prefix + "patch_embed.proj"
    tensors = {
        "patch_embedding/kernel": Stored(f"{patch}.weight", (None, "embed"), "convolution", shape=kernel)
    }
    if not config.gated:
        tensors["patch_embedding/bias"] = Stored(f"{patch}.bias", ("embed",))
    if config.table:
        tensors["position_table"] = Stored(prefix + "pos_embed.weight", (None, "embed"))

    def norm(ours: str, theirs: str, layers: int) -> None:
        both = norm_tensors(ours, theirs, layers)
        tensors.update({path: stored for path, stored in both.items() if stored.name.endswith(kinds)})

    kinds = (".weight",) if config.gated else (".weight", ".bias")
    layer, depth = prefix + "blocks.{}.", config.layers
    for ours, theirs in NORMS.items():
        norm(f"layers/{ours}", layer + theirs, depth)
    for ours, (*theirs, inputs, outputs) in LINEARS.items():
        if theirs[family]:
            tensors |= linear_tensors(f"layers/{ours}", layer + theirs[family], inputs, outputs, depth)
    mergers = {"merger": ("merger", 0)}
    if config.deepstack_layers:
        mergers["deepstack"] = ("deepstack_merger_list.{}", len(config.deepstack_layers))
    for ours, (theirs, count) in mergers.items():
        names = {part: f"{prefix}{theirs}.{both[family]}" for part, both in MERGER.items()}
        norm(f"{ours}/norm", names["norm"], count)
        tensors |= mlp_tensors(ours, names["up"], names["down"], count)
    return {into + path: stored for path, stored in tensors.items()}


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """The model that a config.json describes.

    Args:
      config: the JSON object, of model_type 'qwen2_5_vl' or 'qwen3_vl'.
      dtype: of computation and parameters, 'float32' or 'bfloat16'.

    Returns:
      The module `QwenVL`, where its parameters are stored, and its initialiser.

    Raises:
      ModelError: for a config that is not supported.
    """
    structure = QwenVLConfig.from_dict(config, dtype=dtype)
    module = QwenVL(structure)
    if structure.family == QWEN2_5:
        text, vision = "model.", "visual."
        aliases = {"model.language_model.": text, "model.visual.": vision}
    else:
        text, vision = "model.language_model.", "model.visual."
        aliases = {"language_model.": text, "visual.": vision}
    ignored = (r".*rotary_(pos_)?emb\.inv_freq",)
    if structure.decoder.tied:
        ignored += (r"lm_head\.weight",)

    def everything(module: QwenVL, images: QwenImages, tokens: Array) -> Array:
        features = module.encode_images(images)
        embeddings, extra = module.embed(tokens, jnp.zeros_like(tokens), features)
        positions = jnp.zeros((3, *tokens.shape), jnp.int32)
        hidden, _ = module(embeddings, positions, jnp.ones(tokens.shape, bool), extra=extra)
        return module.logits(hidden)

    def initialise(key: Array) -> PyTree:
        patches = np.zeros((structure.vision.patches_per_token, structure.vision.patch_values), np.float32)
        grid = np.asarray([[1, structure.vision.merge, structure.vision.merge]])
        images = vision_inputs(structure, patches, grid)
        return module.init(key, images, jnp.zeros((1, 1), jnp.int32), method=everything)

    return Architecture(
        module=module,
        tensors=vision_tensors(structure.vision, prefix=vision, into="vision/")
        | decoder_tensors(structure.decoder, model=text, head="lm_head.weight", into="decoder/"),
        initialise=initialise,
        aliases=aliases,
        ignored=ignored,
    )
