"""Levels of Catrap as small text files that a person can draw.

A level file holds 9 rows of 10 characters, top row first:

    .  empty      #  wall       :  sand       H  ladder     O  boulder
    m  walker (a monster that falls)          f  flyer (a monster that floats)
    @  a cat (one or two; the first in reading order obeys first)

Lines that start with ';' are comments, the first of which is the level's title; blank lines are ignored.
At least one monster must be there, and killing all of them must be possible. Levels that come with the
package also keep rows 0 and 8 all wall, because the agent's cropped picture cuts them in half.

`python -m jaxreward.envs.catrap.levels` prints the table of all shipped levels (`docs/levels.md`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import numpy as np

from jaxreward.envs.catrap import art, solver
from jaxreward.errors import DataError, did_you_mean

LEVELS_FOLDER = Path(__file__).parent / "levels"
# Short enough to be learned from 64-step episodes, too long for luck: the levels of learning curves.
BENCHMARK_LEVELS = ("02", "03", "13", "14", "15", "16", "17", "18", "19", "20")

_LOOKS = ", ".join(f"'{character}'" for character in art.CHARACTERS)


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """A level as drawn.

    Attributes:
      name: the file's name without ending, '01' and so on for shipped levels.
      title: the first comment of the file, or the name.
      cells: int8 [9, 10], read-only, the codes of `art`, EMPTY .. CAT.
      path: the file.
    """

    name: str
    title: str
    cells: np.ndarray
    path: Path


def level_names() -> tuple[str, ...]:
    """Names of the shipped levels, in growing difficulty."""
    return tuple(sorted(path.stem for path in LEVELS_FOLDER.glob("*.txt")))


def load_level(name: str | int | Path) -> Level:
    """Reads a shipped level or a level file.

    Args:
      name: the number or name of a shipped level (2, '2', '02') or the path of a level file.

    Returns:
      The level. Files outside the package are proven solvable first; shipped ones are by the tests.

    Raises:
      DataError: no such level, a malformed file, or a level that cannot be won.
    """
    text = str(name)
    shipped = text.zfill(2)
    if shipped in level_names():
        return _load_shipped(shipped)
    path = Path(text)
    if not os.path.isfile(text):  # False, too, for a name that is too long for a file
        raise DataError(
            f"Catrap has no level '{text}', and no file has that path{did_you_mean(shipped, level_names())} "
            f"(shipped: {', '.join(level_names())}; or give the path of a level file)"
        )
    try:
        drawn = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: this level cannot be read ({error.strerror})") from error
    level = parse_level(drawn, path)
    try:
        moves = solver.solve(level.cells)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if moves is None:
        raise DataError(f"{path}: this level cannot be won: no sequence of moves kills all monsters")
    return level


def all_levels() -> tuple[Level, ...]:
    """The shipped levels, in growing difficulty."""
    return tuple(_load_shipped(name) for name in level_names())


def choose_levels(names: str) -> tuple[Level, ...]:
    """The levels that a setting names.

    Args:
      names: number, name or file of a level; several with commas between; or 'all', the shipped ones.

    Raises:
      DataError: a level that is missing, malformed or unsolvable.
    """
    if names.strip() == "all":
        return all_levels()
    return tuple(load_level(name.strip()) for name in names.split(","))


def parse_level(text: str, path: Path) -> Level:
    """Reads the text of a level file; whether it can be won is not checked.

    Args:
      text: the file's content.
      path: the file, for the level's name and for messages.

    Raises:
      DataError: the file, the line, what was found there and what was expected.
    """
    title, rows, line_number = path.stem, [], 0
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith(";")]
    for line_number, raw in enumerate(text.splitlines(), start=1):
        line = raw.rstrip()
        if not line or line.startswith(";"):
            continue
        where = f"{path}, line {line_number}"
        if len(rows) == art.ROWS:
            raise DataError(f"{where}: found a row after the last of {art.ROWS}: '{line}'; expected none")
        if len(line) != art.COLUMNS:
            raise DataError(
                f"{where}: found {len(line)} characters ('{line}'), expected {art.COLUMNS}; "
                "draw empty cells as '.'"
            )
        for column, character in enumerate(line, start=1):
            if character not in art.CHARACTERS:
                raise DataError(f"{where}, column {column}: found '{character}', expected one of {_LOOKS}")
        rows.append([art.CHARACTERS[character] for character in line])
    if len(rows) != art.ROWS:
        raise DataError(
            f"{path}, line {line_number}: found the end after {len(rows)} rows, expected {art.ROWS}"
        )
    cells = np.array(rows, np.int8)
    cells.flags.writeable = False
    cats = int((cells == art.CAT).sum())
    if cats not in (1, 2):
        raise DataError(f"{path}: found {cats} cats ('@'), expected one or two")
    if not np.isin(cells, (art.WALKER, art.FLYER)).any():
        raise DataError(f"{path}: found no monster, expected at least one walker ('m') or flyer ('f')")
    return Level(path.stem, comments[0] if comments else title, cells, path)


def draw_level(cells: np.ndarray, title: str = "") -> str:
    """The text of a level file for cells int [9, 10]; `parse_level` reads it back."""
    characters = {code: character for character, code in art.CHARACTERS.items()}
    rows = ["".join(characters[int(code)] for code in row) for row in cells]
    return "\n".join([f"; {title}"] * bool(title) + rows) + "\n"


def table() -> str:
    """The table of all shipped levels in Markdown, every number computed from the level files."""
    lines = [
        "| level | title | cats | monsters | moves | states | dead states | random success | backtracking |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for level in all_levels():
        graph = solver.explore(level.cells)
        cats = int((level.cells == art.CAT).sum())
        monsters = int(np.isin(level.cells, (art.WALKER, art.FLYER)).sum())
        lucky = f"{100 * solver.random_success(graph):.2g} %"
        mark = "*" if level.name in BENCHMARK_LEVELS else ""
        lines.append(
            f"| {level.name}{mark} | {level.title} | {cats} | {monsters} | {graph.distance[0]} "
            f"| {len(graph.won)} | {solver.dead_share(graph):.2f} | {lucky} "
            f"| {'needed' if solver.needs_backtracking(graph) else 'no'} |"
        )
    return "\n".join(lines)


@functools.cache
def _load_shipped(name: str) -> Level:
    path = LEVELS_FOLDER / f"{name}.txt"
    level = parse_level(path.read_text(encoding="utf-8"), path)
    for row in (0, art.ROWS - 1):
        if (level.cells[row] != art.WALL).any():
            raise DataError(
                f"{path}: row {row} of a shipped level must be all wall ('#'), it is cut by the crop"
            )
    return level


_PREFACE = """# Levels of Catrap

Written by `python -m jaxreward.envs.catrap.levels`, which computes every number anew from the level files
by exhaustive search.

- **moves**: the shortest solution, in actions.
- **states**: how many states can be reached (facing left out).
- **dead states**: the share of them from which the level can no longer be won.
- **random success**: the probability that 64 uniformly random actions win (exact, by Markov chain; the
  actions are right, left, up and down, and swap in levels of two cats).
- **backtracking**: whether every solution makes a cat come back to a cell that it had left.
- **\\***: one of `BENCHMARK_LEVELS`.

01 to 12 grow in difficulty; 13 to 20 are shorter levels for learning curves; 21 and 22 have two cats and
need the actions 'all'.
"""

if __name__ == "__main__":
    print(_PREFACE)
    print(table())
