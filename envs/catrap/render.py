"""Pictures of Catrap: the compact frame of sprites, and its exact rendering at several sizes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxreward.envs.catrap import art
from jaxreward.envs.catrap.rules import INDEX, State
from jaxreward.errors import ConfigError
from jaxreward.types import Array

SCALES = (1, 2, 4)  # by how much the 144 x 160 picture is reduced
CROP_PIXELS = 12  # cut off the top and the bottom of the full picture: 120 x 160 are left


def picture_shape(scale: int, *, crop: bool = False) -> tuple[int, int]:
    """(height, width) of a picture at a scale; raises ConfigError if the scale is not in SCALES."""
    _check_scale(scale)
    rows = art.ROWS * art.CELL_PIXELS - (2 * CROP_PIXELS if crop else 0)
    return rows // scale, art.COLUMNS * art.CELL_PIXELS // scale


def sprites(state: State) -> Array:
    """Turns one game into its compact frame.

    Args:
      state: one game (batch with `jax.vmap`).

    Returns:
      int8 [9, 10], what each cell shows: 0 .. 6 the cells EMPTY .. FLYER, 7 / 8 / 9 the cat that obeys
      looking right / looking left / climbing, 10 / 11 / 12 the same for a cat that waits.
    """
    now = state.now
    picture = now.cells
    for cat in range(2):
        here = (now.positions[cat].astype(jnp.uint8) == INDEX) & (cat < state.num_cats)
        ground = jnp.where(now.facing_left[cat], art.ACTIVE_LEFT, art.ACTIVE_RIGHT)
        ground = ground + jnp.where(now.active == cat, 0, art.INACTIVE_RIGHT - art.ACTIVE_RIGHT)
        climbing = jnp.where(now.active == cat, art.ACTIVE_LADDER, art.INACTIVE_LADDER)
        sprite = jnp.where(now.cells == art.LADDER, climbing, ground).astype(jnp.int8)
        picture = jnp.where(here, sprite, picture)
    return picture[1:-1, 1:-1]


def render(frame: Array, scale: int = 1) -> Array:
    """Draws compact frames in RGB.

    Args:
      frame: int8 [..., 9, 10], what `sprites` gives.
      scale: 1 (144 x 160 pixels), 2 (72 x 80) or 4 (36 x 40); the reduced pictures are the floor of the
        mean over blocks of scale x scale pixels, exactly.

    Returns:
      uint8 [..., 144 / scale, 160 / scale, 3].

    Raises:
      ConfigError: a scale that is not in SCALES.
    """
    picture = _draw(frame, scale)
    return jnp.broadcast_to(picture[..., None], (*picture.shape, 3))


def grey(frame: Array, scale: int = 1, *, crop: bool = True) -> Array:
    """Draws compact frames in grey, as an agent sees them.

    Args:
      frame: int8 [..., 9, 10], what `sprites` gives.
      scale: as in `render`.
      crop: whether to cut the centre of 120 x 160 out of the full 144 x 160 pixels.

    Returns:
      uint8 [..., H, W, 1]; 30 x 40 at scale 4 with the crop.

    Raises:
      ConfigError: a scale that is not in SCALES.
    """
    picture = _draw(frame, scale)
    if crop:
        picture = picture[..., CROP_PIXELS // scale : -CROP_PIXELS // scale, :]
    return picture[..., None]


def _draw(frame: Array, scale: int) -> Array:
    """Draws compact frames [..., 9, 10] in grey, uint8 [..., 144 / scale, 160 / scale]."""
    height, width = picture_shape(scale)
    tiles = jnp.asarray(_tiles(scale))[frame.astype(jnp.int32)]  # [..., 9, 10, size, size]
    return jnp.swapaxes(tiles, -3, -2).reshape(*frame.shape[:-2], height, width)


def _tiles(scale: int) -> np.ndarray:
    """The sprites reduced by block means, uint8 [13, 16 / scale, 16 / scale]."""
    size = art.CELL_PIXELS // scale
    blocks = art.SPRITES.reshape(art.NUM_SPRITES, size, scale, size, scale).astype(np.int32)
    return (blocks.sum((2, 4)) // scale**2).astype(np.uint8)


def _check_scale(scale: int) -> None:
    if scale not in SCALES:
        raise ConfigError(f"Catrap's picture scale is {scale!r}: expected one of {SCALES} (1 is 144 x 160)")
