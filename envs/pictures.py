"""Pictures of observations, for environments that draw none themselves.

Scorers judge pictures. An environment without a renderer is given the plainest picture that its
observation determines, so that every scorer can run on every environment; how much such a picture
tells a model is another matter, and a task that has a real renderer should use it.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.types import Array, PyTree

MINIMUM_SIZE = 84  # pixels


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: its fields hold arrays and trees
class ObservationPicture:
    """Draws one environment's observation as a uint8 RGB picture; pure and jittable.

    The shape of the observation decides what is drawn:
      * uint8 [H, W, 3]: the observation itself, which is a picture already;
      * [H, W] with H, W > 1: a grid of grey cells, black at `low` and white at `high`;
      * [H, W, C] with H, W > 1: a grid of grey cells; the last channel above zero decides, channel c of
        C has the grey level (c + 1) / C, an empty cell is black (the layers of MinAtar's games);
      * anything else, pytrees too: its D numbers as D bars from left to right, a bar's height being
        the number's place between `low` and `high`, or 1/2 + x / (2 + 2|x|) where these are not finite.

    Attributes:
      observation: shape and dtype of one environment's observation (a pytree of ShapeDtypeStruct).
      low: the lowest values, broadcastable to the raveled observation [D]; not finite where unknown.
      high: the highest values, likewise.
    """

    observation: PyTree
    low: np.ndarray | float = -math.inf
    high: np.ndarray | float = math.inf

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, 3): whole pixels for every cell or bar, at least 84 unless it is a picture already."""
        kind, shape = self._kind()
        if kind == "picture":
            return shape
        if kind == "bars":
            return (MINIMUM_SIZE, max(MINIMUM_SIZE, self._size()), 3)
        scale = self._scale(shape)
        return (shape[0] * scale, shape[1] * scale, 3)

    def __call__(self, observation: PyTree) -> Array:
        """Draws observations of any leading axes.

        Args:
          observation: [..., *shape], shaped as `self.observation` after the leading axes.

        Returns:
          uint8 [..., H, W, 3].
        """
        kind, shape = self._kind()
        if kind == "picture":
            return jax.tree.leaves(observation)[0]
        if kind == "bars":
            levels = self._draw_bars(self._fractions(observation))
        elif kind == "matrix":
            fractions = self._fractions(observation)
            levels = self._enlarge(fractions.reshape(*fractions.shape[:-1], *shape), self._scale(shape))
        else:
            levels = self._enlarge(self._grey_layers(jax.tree.leaves(observation)[0]), self._scale(shape))
        grey = jnp.round(levels * 255).astype(jnp.uint8)
        return jnp.broadcast_to(grey[..., None], (*grey.shape, 3))

    def _kind(self) -> tuple[str, tuple[int, ...]]:
        leaves = jax.tree.leaves(self.observation)
        shape = tuple(leaves[0].shape)
        if len(leaves) > 1 or len(shape) not in (2, 3) or min(shape[:2]) == 1:
            return "bars", shape
        if len(shape) == 2:
            return "matrix", shape
        if shape[-1] == 3 and leaves[0].dtype == np.uint8:
            return "picture", shape
        return "layers", shape

    def _size(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.observation))

    def _fractions(self, observation: PyTree) -> Array:
        """Each number's place between the bounds: float32 [..., D] in [0, 1]."""
        leaves, specs = jax.tree.leaves(observation), jax.tree.leaves(self.observation)
        leading = leaves[0].shape[: leaves[0].ndim - len(specs[0].shape)]
        values = jnp.concatenate([leaf.reshape(*leading, -1).astype(jnp.float32) for leaf in leaves], axis=-1)
        low = np.broadcast_to(np.asarray(self.low, np.float64), (self._size(),))
        high = np.broadcast_to(np.asarray(self.high, np.float64), (self._size(),))
        # Spaces write "no bound" as an infinity or as the largest float; the width catches both.
        with np.errstate(over="ignore", invalid="ignore"):
            width = high - low
        bounded = np.isfinite(width) & (width > 0) & (width < 1e9)
        linear = (values - np.where(bounded, low, 0)) / np.where(bounded, width, 1)
        squashed = 0.5 + values / (2 + 2 * jnp.abs(values))
        return jnp.clip(jnp.where(bounded, linear, squashed), 0, 1).astype(jnp.float32)

    def _draw_bars(self, fractions: Array) -> Array:
        height, width, _ = self.image_shape
        bar = np.arange(width) * self._size() // width
        tops = jnp.round(fractions[..., bar] * height)
        from_below = height - np.arange(height, dtype=np.float32)[:, None]
        return (from_below <= tops[..., None, :]).astype(jnp.float32)

    @staticmethod
    def _grey_layers(cells: Array) -> Array:
        channels = cells.shape[-1]
        grey = np.arange(1, channels + 1, dtype=np.float32) / channels
        return jnp.max(jnp.where(cells > 0, grey, 0), axis=-1)

    @staticmethod
    def _scale(shape: tuple[int, ...]) -> int:
        return -(-MINIMUM_SIZE // min(shape[:2]))

    @staticmethod
    def _enlarge(cells: Array, scale: int) -> Array:
        return jnp.repeat(jnp.repeat(cells, scale, axis=-2), scale, axis=-1)
