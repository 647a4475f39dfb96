"""Anchor + shuffle clips from videos that lie on the device (RTA, section 3.2).

A clip is K frames of one video: the earliest is the anchor and comes first, the others follow in random
order, so that where a frame stands says nothing about when it was.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.errors import ConfigError
from jaxreward.types import Array

STRIDES = ("mixed", "consecutive", "whole", "between")


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """How clips are cut from videos.

    Attributes:
      length: K, frames in a clip, the anchor included.
      stride: how far apart the frames are.
        'consecutive': neighbours, from a random place (the paper's clips, appendix A.3).
        'whole': evenly from the first to the last frame of the video.
        'between': evenly over a random part of the video, from consecutive to whole.
        'mixed': one of these three for each clip, with equal chances. A reward's windows are as short
          as a few frames early in an episode and as long as the episode at its end.
    """

    length: int = 15
    stride: Literal["mixed", "consecutive", "whole", "between"] = "mixed"

    def __post_init__(self):
        """Refuses values out of range with ConfigError."""
        if self.length < 2:
            raise ConfigError(f"length {self.length}: a clip needs an anchor and at least one other frame.")
        if self.stride not in STRIDES:
            raise ConfigError(f"stride {self.stride!r}: expected one of {', '.join(STRIDES)}.")


@struct.dataclass
class Clips:
    """Q clips of K frames; slot 0 is the anchor, empty slots are the last."""

    frames: Array  # uint8 [Q, K, H, W, C], zero where there is no frame
    position: Array  # int32 [Q, K], index of each frame in its video; -1 where there is no frame
    where: Array  # bool [Q, K], False where there is no frame (videos shorter than K)
    video: Array  # int32 [Q], which video


def sample_clips(
    key: Array, frames: Array, lengths: Array, weights: Array, batch: int, config: ClipConfig
) -> Clips:
    """Draws clips at random; jittable with `batch` and `config` static.

    Args:
      key: a typed key.
      frames: uint8 [V, T, H, W, C], padded videos.
      lengths: int32 [V], frames in each video, at least 1.
      weights: float32 [V], how often each video is drawn, relative to the others; not negative.
      batch: Q, how many clips.
      config: see ClipConfig.

    Returns:
      Clips of min(K, length) different frames of one video each; the other slots are empty.
    """
    video_key, clip_key = jax.random.split(key)
    video = jax.random.choice(video_key, len(frames), (batch,), p=weights / weights.sum()).astype(jnp.int32)
    chances = jax.random.uniform(clip_key, (batch, config.length + 3))
    position = jax.vmap(lambda chance, length: _positions(chance, length, config))(chances, lengths[video])
    where = position >= 0
    chosen = frames[video[:, None], jnp.maximum(position, 0)]
    chosen = jnp.where(where[..., None, None, None], chosen, jnp.zeros((), frames.dtype))
    return Clips(frames=chosen, position=position, where=where, video=video)


def _positions(chance: Array, length: Array, config: ClipConfig) -> Array:
    """The frames of one clip.

    Args:
      chance: float32 [K + 3], uniform in [0, 1): K for the order, then one each for the kind of
        stride, the span and the start.
      length: int32 [], frames in the video.

    Returns:
      int32 [K], indices of frames, anchor first and the others shuffled; -1 in empty slots.
    """
    order_chance, (kind, span_chance, start_chance) = chance[: config.length], chance[config.length :]
    slot = jnp.arange(config.length, dtype=jnp.int32)
    count = jnp.minimum(length, config.length)
    shortest, longest = count - 1, length - 1
    spans = jnp.stack([shortest, longest, shortest + _integer_below(span_chance, longest - shortest + 1)])
    if config.stride == "mixed":
        span = spans[_integer_below(kind, len(spans))]
    else:
        span = spans[("consecutive", "whole", "between").index(config.stride)]
    start = _integer_below(start_chance, length - span)
    # Evenly spaced and all different, since the span has at least as many steps as the clip has gaps.
    ordered = start + slot * span // jnp.maximum(count - 1, 1)
    # The anchor sorts before all others and an empty slot after them.
    rank = jnp.where(slot == 0, -1.0, jnp.where(slot < count, order_chance, 2.0))
    return jnp.where(slot < count, ordered[jnp.argsort(rank)], -1)


def _integer_below(chance: Array, limit: Array | int) -> Array:
    """int32: turns a uniform number in [0, 1) into a uniform integer in [0, limit), limit < 2**23."""
    return jnp.floor(chance * limit).astype(jnp.int32)
