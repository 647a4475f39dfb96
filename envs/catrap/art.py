"""The look of Catrap: cells, the characters of level files, and 16 x 16 pictures in four shades.

NumPy only, so that tools without JAX (the cartridge's build, drawing programs) can read the same
tables. The screen is 144 x 160 pixels, which is 9 x 10 cells of 16 pixels.
"""

from __future__ import annotations

import numpy as np

ROWS, COLUMNS = 9, 10
CELL_PIXELS = 16

# What a cell of a level holds. Cats stand on cells and are no cell of their own once a level is loaded.
EMPTY, WALL, SAND, LADDER, BOULDER, WALKER, FLYER, CAT = range(8)

CHARACTERS = {
    ".": EMPTY,
    "#": WALL,
    ":": SAND,
    "H": LADDER,
    "O": BOULDER,
    "m": WALKER,
    "f": FLYER,
    "@": CAT,
}

# What a picture of a cell shows (the compact frame): 0 .. 6 are the cells EMPTY .. FLYER.
ACTIVE_RIGHT, ACTIVE_LEFT, ACTIVE_LADDER, INACTIVE_RIGHT, INACTIVE_LEFT, INACTIVE_LADDER = range(7, 13)
NUM_SPRITES = 13

SHADES = (255, 153, 85, 0)  # grey of the shades 0 .. 3 on screen

# Game Boy palettes: bits 2i and 2i + 1 are the shade of colour i. Colour 0 of a cat is transparent.
BACKGROUND_PALETTE = 0xE4  # each colour is its own shade
ACTIVE_PALETTE = 0xE4
INACTIVE_PALETTE = 0xD0  # colours 1, 2, 3 become shades 0, 1, 3: the waiting cat is paler

# Colours 0 (drawn as a point) to 3.
ART: dict[str, tuple[str, ...]] = {
    "empty": ("................",) * 16,
    "wall": (
        "2222222322222223",
        "2111111321111113",
        "2111111321111113",
        "3333333333333333",
        "2223222222232222",
        "1113211111132111",
        "1113211111132111",
        "3333333333333333",
    )
    * 2,
    "sand": (
        "11.1211.111.1121",
        "1211111.12111111",
        ".1111211111.1211",
        "1112111111211111",
        "111.11121.111.11",
        "2111.1111111211.",
        "1121111.21111112",
        "11111211111.1211",
        "1.1211.111.1121.",
        "1111112111112111",
        "12111.1112.11112",
        "1112111.11112111",
        ".11111211.111112",
        "12.1111112111.11",
        "1111.12111112111",
        "2111111.1211111.",
    ),
    "ladder": (
        "..32........32..",
        "..32........32..",
        "..333333333333..",
        "..322222222232..",
        "..32........32..",
        "..32........32..",
        "..32........32..",
        "..32........32..",
    )
    * 2,
    "boulder": (
        "................",
        ".....333333.....",
        "...3311112233...",
        "..311111112223..",
        ".31111111112223.",
        ".31131111111223.",
        "3113111111112223",
        "3111111113112223",
        "3111111133112223",
        "3111111311122223",
        "3211111111122223",
        ".32111111122223.",
        ".32211111222223.",
        "..322222222223..",
        "...3322222233...",
        ".....333333.....",
    ),
    "walker": (
        "................",
        "..3..........3..",
        "..33........33..",
        "..323333333323..",
        "..322222222223..",
        ".32211222211223.",
        ".32213222213223.",
        ".32222222222223.",
        ".32222233222223.",
        ".32322222222323.",
        ".32232323232223.",
        "..322323232223..",
        "...3222222223...",
        "....33222233....",
        "....33....33....",
        "..3333....3333..",
    ),
    "flyer": (
        "................",
        "......3333......",
        "....33111133....",
        "3..3111111113..3",
        "33.3133113313.33",
        "3233132112313323",
        "3223111111113223",
        "3222311111132223",
        ".32231133113223.",
        "..323111111323..",
        "...3311111133...",
        "....31111113....",
        "....31311313....",
        ".....3.33.3.....",
        "................",
        "................",
    ),
    "cat": (
        "........3....3..",
        "........33..33..",
        "3.......313313..",
        "33......3111113.",
        ".33.....3113113.",
        "..3.....31111133",
        "..33....31113313",
        "...3....3111113.",
        "...33333331113..",
        "..3222222221113.",
        "..3222122212213.",
        "..3222122212213.",
        "..3222222222223.",
        "..3223333333223.",
        "..313......313..",
        "..333......333..",
    ),
    "cat_on_ladder": (
        "....3......3....",
        "....33....33....",
        "....31333313....",
        "...3111111113...",
        "...3112112113...",
        ".33311211211333.",
        ".31311111111313.",
        ".31331111113313.",
        ".32232222223223.",
        "..332222222233..",
        "...3221331223...",
        "...3222332223...",
        "...3222332223...",
        "..322233332223..",
        "..3113..3.3113..",
        "..3333.33.3333..",
    ),
}


def colours(name: str) -> np.ndarray:
    """Returns the colours 0 .. 3 of a picture in ART, uint8 [16, 16]."""
    return np.array([[0 if c == "." else int(c) for c in row] for row in ART[name]], np.uint8)


def apply_palette(colour: np.ndarray, palette: int) -> np.ndarray:
    """Turns colours 0 .. 3 into shades 0 .. 3 by a Game Boy palette byte; uint8, any shape."""
    table = np.array([palette >> (2 * i) & 3 for i in range(4)], np.uint8)
    return table[colour]


def _draw_sprites() -> np.ndarray:
    """Draws the shades of all sprites, uint8 [13, 16, 16]: cats are laid over what they stand on."""
    cells = [colours(name) for name in ("empty", "wall", "sand", "ladder", "boulder", "walker", "flyer")]
    sprites = [apply_palette(cell, BACKGROUND_PALETTE) for cell in cells]
    cat, climbing = colours("cat"), colours("cat_on_ladder")
    for palette in (ACTIVE_PALETTE, INACTIVE_PALETTE):
        for picture, under in ((cat, EMPTY), (cat[:, ::-1], EMPTY), (climbing, LADDER)):
            sprites.append(np.where(picture == 0, sprites[under], apply_palette(picture, palette)))
    return np.stack(sprites)


TILES = np.stack([colours(name) for name in ART])  # uint8 [9, 16, 16], colours, in the order of ART
SPRITES = np.array(SHADES, np.uint8)[_draw_sprites()]  # uint8 [13, 16, 16], greys as seen on screen
