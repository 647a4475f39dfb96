"""A small network that ranks the frames of a clip by progress, from pixels and without any order cue."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models.encoders import CNN
from jaxreward.types import Array


@dataclasses.dataclass(frozen=True)
class FrameRankerConfig:
    """The structure of a `FrameRanker`.

    Attributes:
      convolutions: (features, kernel, stride) of each convolution of the frame encoder.
      width: features of a frame's token.
      blocks: transformer blocks.
      heads: attention heads; divides `width`.
      hidden: hidden features of each block's two-layer perceptron.
      channels: colour channels that the encoder reads, 1 or 3. RGB frames are averaged to 1; grey frames
        are repeated to 3.
      frame_shape: (height, width) in pixels that the encoder works at. Frames that are a whole multiple
        of it are reduced by block means, other sizes are refused. None takes frames as they come; the
        parameters then fix the size.
    """

    convolutions: tuple[tuple[int, int, int], ...] = ((16, 4, 4), (16, 3, 1))
    width: int = 64
    blocks: int = 2
    heads: int = 4
    hidden: int = 128
    channels: int = 1
    frame_shape: tuple[int, int] | None = None

    def __post_init__(self):
        """Refuses structures that cannot be built (ConfigError)."""
        if self.heads < 1 or self.width % self.heads:
            raise ConfigError(
                f"frame ranker: width {self.width} with {self.heads} heads found; heads must divide width"
            )
        if self.channels not in (1, 3):
            raise ConfigError(f"frame ranker: {self.channels} channels found, 1 (grey) or 3 (RGB) expected")


def to_grey(frames: Array) -> Array:
    """Averages the colour channels; exact where they are equal, else rounded to the nearest integer.

    Args:
      frames: uint8 [..., C], C = 1 or 3.

    Returns:
      uint8 [..., 1].
    """
    channels = frames.shape[-1]
    total = frames.astype(jnp.uint16).sum(-1, keepdims=True, dtype=jnp.uint16)
    return ((total + channels // 2) // channels).astype(jnp.uint8)


def block_mean(frames: Array, shape: tuple[int, int]) -> Array:
    """Shrinks frames to `shape` by the mean of equal blocks, rounded down.

    Args:
      frames: uint8 [..., H, W, C].
      shape: (height, width); H and W are whole multiples of them, by the same factor or not.

    Returns:
      uint8 [..., height, width, C].

    Raises:
      ModelError: where H or W is no whole multiple.
    """
    height, width, channels = frames.shape[-3:]
    rows, columns = height // shape[0], width // shape[1]
    if (rows * shape[0], columns * shape[1]) != (height, width) or rows == 0 or columns == 0:
        raise ModelError(
            f"frame ranker: frames of {height}x{width} pixels found, {shape[0]}x{shape[1]} or a whole "
            "multiple expected; resize the frames or use a ranker that was trained on this size"
        )
    if rows == columns == 1:
        return frames
    blocks = frames.reshape(*frames.shape[:-3], shape[0], rows, shape[1], columns, channels)
    total = blocks.astype(jnp.int32).sum((-4, -2))
    area = rows * columns
    return (total // area).astype(jnp.uint8)


class TransformerBlock(nn.Module):
    """A pre-layer-norm transformer block over a set: no positions, so permutation equivariant.

    Attributes:
      heads: attention heads.
      hidden: hidden features of the perceptron.
    """

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, tokens: Array, where: Array) -> Array:
        """Lets every token attend to the tokens that exist.

        Args:
          tokens: float32 [Q, K, D].
          where: bool [Q, K], False for tokens that nobody may attend to.

        Returns:
          float32 [Q, K, D].
        """
        normed = nn.LayerNorm(name="attention_norm")(tokens)
        attention = nn.MultiHeadDotProductAttention(self.heads, name="attention")
        tokens = tokens + attention(normed, mask=where[:, None, None, :])
        normed = nn.LayerNorm(name="perceptron_norm")(tokens)
        hidden = nn.relu(nn.Dense(self.hidden, name="perceptron_hidden")(normed))
        return tokens + nn.Dense(tokens.shape[-1], name="perceptron_out")(hidden)


class FrameRanker(nn.Module):
    """Scores the frames of each clip by progress: anchor first, the others in any order.

    The network sees a set: frames carry no position, only an embedding that tells the anchor from the
    others. Shuffling the non-anchor frames therefore shuffles the scores and changes nothing else, and
    time can leak only through what the pixels show (the aim of anchor and shuffle, RTA section 3.2).
    """

    config: FrameRankerConfig = FrameRankerConfig()

    @nn.compact
    def __call__(self, frames: Array, where: Array) -> Array:
        """Gives each frame a score; higher means later.

        Args:
          frames: uint8 [Q, K, H, W, C], C = 1 or 3; frame 0 of each clip is the anchor.
          where: bool [Q, K], False for slots that hold no frame.

        Returns:
          float32 [Q, K] logits of a Plackett-Luce ranking. Column 0, the anchor's own, and columns where
          `where` is False are finite but mean nothing: leave them out.

        Raises:
          ModelError: where the frames have another rank, dtype, number of channels or size.
        """
        config = self.config
        features = CNN(config.convolutions, name="encoder")(self._adapt(frames, where))
        tokens = nn.LayerNorm(name="token_norm")(nn.Dense(config.width, name="token")(features))
        kinds = self.param("kinds", nn.initializers.normal(0.5), (2, config.width))
        is_anchor = jnp.arange(frames.shape[1]) == 0
        tokens = tokens + jnp.where(is_anchor[:, None], kinds[0], kinds[1])
        for block in range(config.blocks):
            tokens = TransformerBlock(config.heads, config.hidden, name=f"block_{block}")(tokens, where)
        tokens = nn.LayerNorm(name="head_norm")(tokens)
        anchor = jnp.broadcast_to(tokens[:, :1], tokens.shape)
        pairs = jnp.concatenate([tokens, anchor], -1)
        hidden = nn.relu(nn.Dense(config.width, name="head_hidden")(pairs))
        return nn.Dense(1, name="head_out")(hidden)[..., 0]

    def _adapt(self, frames: Array, where: Array) -> Array:
        """Checks frames and brings them to the encoder's channels and size; uint8 [Q, K, h, w, c]."""
        if frames.ndim != 5 or frames.shape[-1] not in (1, 3) or frames.dtype != jnp.uint8:
            raise ModelError(
                f"frame ranker: frames {frames.dtype}{list(frames.shape)} found, "
                "uint8 [Q, K, H, W, 1 or 3] expected"
            )
        if where.shape != frames.shape[:2] or where.dtype != jnp.bool_:
            raise ModelError(
                f"frame ranker: where {where.dtype}{list(where.shape)} found, "
                f"bool{list(frames.shape[:2])} expected"
            )
        if self.config.channels == 1:
            frames = to_grey(frames)
        elif frames.shape[-1] == 1:
            frames = jnp.repeat(frames, 3, axis=-1)
        if self.config.frame_shape is not None:
            frames = block_mean(frames, self.config.frame_shape)
        return frames
