"""Random Catrap levels that are proven solvable, for training scorers that must work on unseen levels."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from jaxreward.envs.catrap import art, solver
from jaxreward.envs.catrap.art import BOULDER, CAT, EMPTY, FLYER, LADDER, SAND, WALKER, WALL
from jaxreward.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
    """What a generated level must satisfy.

    Attributes:
      min_moves, max_moves: bounds of the shortest solution.
      max_states: more reachable states are rejected (they cost time and are seldom good puzzles).
      max_random_success: the largest chance that 64 random moves win.
      cats: 1 or 2.
      max_attempts: drawings tried for each level wanted before giving up.
    """

    min_moves: int = 12
    max_moves: int = 40
    max_states: int = 4_000
    max_random_success: float = 0.05
    cats: int = 1
    max_attempts: int = 5_000


def generate(seed: int, num_levels: int, config: GeneratorConfig | None = None) -> list[np.ndarray]:
    """Draws random levels until enough of them pass the solver.

    The levels depend on the arguments alone: the same seed gives the same levels, and more levels of
    the same seed begin with the same ones.

    Args:
      seed: a number 0 or more.
      num_levels: how many levels.
      config: what they must satisfy; the default suits episodes of 64 steps.

    Returns:
      Levels int8 [9, 10], the codes of `art`; rows 0 and 8 are all wall.

    Raises:
      ConfigError: settings that leave no level, or that none of `max_attempts` drawings satisfied.
    """
    config = config or GeneratorConfig()
    if not 1 <= config.min_moves <= config.max_moves or config.cats not in (1, 2):
        raise ConfigError(f"found {config}; expected 1 <= min_moves <= max_moves and 1 or 2 cats")
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    while len(found) < num_levels:
        for _ in range(config.max_attempts):
            cells = draw(rng, config.cats)
            if accept(cells, config):
                found.append(cells)
                break
        else:
            raise ConfigError(
                f"none of {config.max_attempts} drawings satisfies {config}: relax it or raise max_attempts"
            )
    return found


def draw(rng: np.random.Generator, cats: int = 1) -> np.ndarray:
    """Draws one random level of floors, ladders and things at rest, int8 [9, 10]; it may be unsolvable."""
    cells = np.full((art.ROWS, art.COLUMNS), EMPTY, np.int8)
    cells[[0, -1]] = WALL
    left, right = rng.integers(0, 2, 2)  # how many columns of wall at the sides
    cells[:, :left] = WALL
    cells[:, art.COLUMNS - right :] = WALL
    columns = np.arange(left, art.COLUMNS - right)
    floors = _floors(rng)
    for floor, below in itertools.pairwise(floors):
        _draw_floor(cells, rng, columns, floor, below)
    _put_things(cells, rng, cats)
    return solver.settle(cells)


def accept(cells: np.ndarray, config: GeneratorConfig) -> bool:
    """Whether a level (int [9, 10]) at rest satisfies a config."""
    try:
        graph = solver.explore(cells, config.max_states)
    except DataError:  # too many states
        return False
    return (
        config.min_moves <= graph.distance[0] <= config.max_moves
        and solver.random_success(graph) <= config.max_random_success
    )


def _floors(rng: np.random.Generator) -> list[int]:
    """Rows of the floors from the top, the last one being the bottom wall; rooms are 1 to 3 high."""
    floors, row = [], 0
    while row < art.ROWS - 1:
        row = min(row + 1 + int(rng.choice(3, p=(0.35, 0.5, 0.15))) + 1, art.ROWS - 1)
        if art.ROWS - 1 - row == 1:  # no room fits below
            row = art.ROWS - 1
        floors.append(row)
    return floors


def _draw_floor(
    cells: np.ndarray, rng: np.random.Generator, columns: np.ndarray, floor: int, below: int
) -> None:
    """Draws a floor with openings: one ladder down to the floor below at least, more of them, holes, sand."""
    cells[floor, columns] = WALL
    openings = rng.choice(columns, int(rng.integers(1, 4)), replace=False)
    for number, column in enumerate(openings):
        kind = LADDER if number == 0 else rng.choice((LADDER, EMPTY, SAND), p=(0.3, 0.45, 0.25))
        cells[floor, column] = kind
        if kind == LADDER:
            cells[floor:below, column] = LADDER


def _put_things(cells: np.ndarray, rng: np.random.Generator, cats: int) -> None:
    """Puts monsters, boulders, sand, blocks of wall and the cats on free cells."""
    free = np.argwhere(cells == EMPTY)
    rng.shuffle(free)
    counts = {
        WALKER: rng.integers(1, 4),
        FLYER: rng.integers(0, 3),
        BOULDER: rng.integers(1, 5),
        SAND: rng.integers(0, 5),
        WALL: rng.integers(0, 3),
        CAT: cats,
    }
    things = [code for code, count in counts.items() for _ in range(int(count))]
    for code, (row, column) in zip(things, free[: len(things)], strict=False):
        cells[row, column] = code
