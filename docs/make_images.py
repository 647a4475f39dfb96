"""Draws the pictures of the documentation: `python docs/make_images.py`."""

from __future__ import annotations

import pathlib

import numpy as np
from PIL import Image

from jaxreward.envs.catrap import levels, solver
from jaxreward.envs.pyboy_worker import Emulator

IMAGES = pathlib.Path(__file__).parent / "images"
LEVEL = "02"
ZOOM = 3
GAP = 16  # white pixels between two pictures


def solution_pictures(name: str) -> list[np.ndarray]:
    """Screens uint8 [144, 160, 3] of the cartridge at rest, along a shortest solution of a level."""
    cells = levels.load_level(name).cells
    emulator = Emulator(level=cells)
    try:
        emulator.reset()
        pictures = [emulator.picture()]
        for action in solver.solve(cells):
            emulator.step(action)
            pictures.append(emulator.picture())
    finally:
        emulator.close()
    return pictures


def side_by_side(pictures: list[np.ndarray]) -> np.ndarray:
    """Enlarges pictures uint8 [H, W, 3] of one size and puts them in a row."""
    large = [picture.repeat(ZOOM, 0).repeat(ZOOM, 1) for picture in pictures]
    gap = np.full((large[0].shape[0], GAP, 3), 255, np.uint8)
    parts = [part for picture in large for part in (gap, picture)]
    return np.concatenate(parts[1:], axis=1)


def main() -> None:
    """Writes images/catrap.png: level 02 at the start, halfway and solved."""
    pictures = solution_pictures(LEVEL)
    chosen = [pictures[0], pictures[len(pictures) // 2], pictures[-1]]
    Image.fromarray(side_by_side(chosen)).save(IMAGES / "catrap.png", optimize=True)


if __name__ == "__main__":
    main()
