"""The rules of Catrap for one game, as pure functions of arrays; batch them with `jax.vmap`.

A cat walks, climbs, digs and pushes boulders through a level of 9 x 10 cells until no monster is left.

- Left and right: into an empty cell or a ladder the cat moves; sand vanishes and the cat moves in; a
  monster is killed and the cat moves in; a boulder moves one cell if the cell beyond is empty and no cat
  is there, and the cat stays where it is.
- Up: from a ladder into a ladder or an empty cell. Down: into a ladder, or from a ladder into an empty
  cell.
- After each move boulders, walkers and cats fall as long as the cell below is empty; a cat on a ladder
  holds on; sand and flyers never fall. Ladders, cats and everything solid support what is above.
- In levels of two cats SWAP changes which of them obeys; each cat is an obstacle to the other.
- REWIND takes back the last move that changed anything (40 moves at most are remembered); SWAP is no
  move of its own, but a move taken back also brings back the cat that made it.
- After the last monster's death nothing changes any more. Nothing kills a cat, but a level can become
  unsolvable.

All arrays hold the level with a ring of wall around it, so that no index needs a bounds check, and
each step is a fixed number of selections and shifts: no scatter, no loop of data-dependent length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreward.envs.catrap import art
from jaxreward.envs.catrap.art import BOULDER, CAT, EMPTY, FLYER, LADDER, SAND, WALKER, WALL
from jaxreward.types import Array

RIGHT, LEFT, UP, DOWN, REWIND, SWAP = range(6)
ACTION_NAMES = ("right", "left", "up", "down", "rewind", "swap")

REWIND_DEPTH = 40
PADDED_ROWS, PADDED_COLUMNS = art.ROWS + 2, art.COLUMNS + 2
_SIZE = PADDED_ROWS * PADDED_COLUMNS
# Each cell's place in the flat padded grid: uint8, because a mask of bytes is the quickest to make.
INDEX = np.arange(_SIZE, dtype=np.uint8).reshape(PADDED_ROWS, PADDED_COLUMNS)
_OFFSETS = (1, -1, -PADDED_COLUMNS, PADDED_COLUMNS, 0, 0)  # of the actions, in the flat padded grid


@struct.dataclass
class Snapshot:
    """All that a rewind brings back."""

    cells: Array  # int8 [11, 12], codes EMPTY .. FLYER, with a ring of WALL
    positions: Array  # int32 [2], row * 12 + column in the padded grid; 0 for an absent cat
    facing_left: Array  # bool [2]
    active: Array  # int32 [], the cat that obeys, 0 or 1
    monsters: Array  # int32 [], monsters left; 0 is a win


@struct.dataclass
class History:
    """A ring of the snapshots before each of the last moves."""

    snapshots: Snapshot  # every array with a leading axis [REWIND_DEPTH]
    next_slot: Array  # int32 [], where the next snapshot goes
    length: Array  # int32 [], moves that can be taken back, at most REWIND_DEPTH


@struct.dataclass
class State:
    """One game at rest."""

    now: Snapshot
    num_cats: Array  # int32 [], 1 or 2
    moves: Array  # int32 [], moves that changed anything, less those taken back
    history: History | None  # None: REWIND does nothing


def won(state: State) -> Array:
    """bool []: no monster is left."""
    return state.now.monsters == 0


def load(level: Array, *, rewind: bool = False) -> State:
    """Sets up a level and lets everything fall.

    Args:
      level: integers [9, 10], the codes of `art` (EMPTY .. CAT); the first cat in reading order obeys
        first, cats beyond the second are ignored.
      rewind: whether moves are remembered (static).

    Returns:
      The state before the first move.
    """
    level = jnp.pad(jnp.asarray(level, jnp.int8), 1, constant_values=WALL)
    is_cat = (level == CAT).reshape(-1)
    positions = jnp.nonzero(is_cat, size=2, fill_value=0)[0].astype(jnp.int32)
    cells = jnp.where(level == CAT, EMPTY, level).astype(jnp.int8)
    cells, positions = _settle(cells, positions)
    now = Snapshot(
        cells=cells,
        positions=positions,
        facing_left=jnp.zeros(2, bool),
        active=jnp.int32(0),
        monsters=((level == WALKER) | (level == FLYER)).sum(dtype=jnp.int32),
    )
    num_cats = jnp.minimum(is_cat.sum(dtype=jnp.int32), 2)
    return State(now, num_cats, jnp.int32(0), _empty_history(now) if rewind else None)


def step(state: State, action: Array) -> State:
    """Plays one action to its end: the move, then all falling.

    Args:
      state: a game at rest.
      action: int32 [], RIGHT .. SWAP.

    Returns:
      The game at rest again; unchanged (but for the cat's facing) if the action was impossible.
    """
    alive = ~won(state)
    moved, after = _move(state.now, jnp.where(alive, action, REWIND))
    swap = alive & (action == SWAP) & (state.num_cats == 2)
    after = after.replace(active=jnp.where(swap, 1 - after.active, after.active))
    following = state.replace(now=after, moves=state.moves + moved)
    if state.history is None:
        return following
    following = following.replace(history=_remember(state.history, state.now, moved))
    back = alive & (action == REWIND) & (state.history.length > 0)
    return jax.tree.map(lambda a, b: jnp.where(back, a, b), _take_back(state), following)


def _move(now: Snapshot, action: Array) -> tuple[Array, Snapshot]:
    """Moves the active cat by a D-pad action (others do nothing); returns whether anything moved."""
    horizontal, up, down = action <= LEFT, action == UP, action == DOWN
    offset = jnp.array(_OFFSETS, jnp.int32)[action]
    is_active = jnp.arange(2) == now.active
    cat, other = now.positions[now.active], now.positions[1 - now.active]
    target, beyond = cat + offset, jnp.clip(cat + 2 * offset, 0, _SIZE - 1)
    flat = now.cells.reshape(-1)
    here = flat[cat]
    ahead = jnp.where(target == other, jnp.int8(CAT), flat[target])
    next_ahead = jnp.where(beyond == other, jnp.int8(CAT), flat[beyond])

    monster = (ahead == WALKER) | (ahead == FLYER)
    free = (ahead == EMPTY) | (ahead == LADDER)
    push = horizontal & (ahead == BOULDER) & (next_ahead == EMPTY)
    walk = (
        (horizontal & (free | (ahead == SAND) | monster))
        | (up & (here == LADDER) & free)
        | (down & ((ahead == LADDER) | ((here == LADDER) & (ahead == EMPTY))))
    )
    cleared = push | (walk & (ahead != LADDER))
    cells = jnp.where(_at(target) & cleared, jnp.int8(EMPTY), now.cells)
    cells = jnp.where(_at(beyond) & push, jnp.int8(BOULDER), cells)
    cells, positions = _settle(cells, jnp.where(is_active & walk, target, now.positions))
    return push | walk, Snapshot(
        cells=cells,
        positions=positions,
        facing_left=jnp.where(is_active & horizontal, action == LEFT, now.facing_left),
        active=now.active,
        monsters=now.monsters - (walk & monster),
    )


def _settle(cells: Array, positions: Array) -> tuple[Array, Array]:
    """Lets boulders, walkers and cats fall until each is supported.

    A column of 9 cells of 3 bits is one integer, so that a batch of grids is a batch of 12 integers.
    From the bottom up each thing that can fall lands on `rest`, the lowest cell that is free above the
    last support.

    Args:
      cells: int8 [11, 12], the padded grid without cats.
      positions: int32 [2].

    Returns:
      Cells and positions at rest.
    """
    shifts = 3 * jnp.arange(art.ROWS, dtype=jnp.int32)[:, None]
    packed = (cells[1:-1].astype(jnp.int32) << shifts).sum(0)
    columns = jnp.arange(PADDED_COLUMNS, dtype=jnp.int32)
    cat_row, cat_column = positions // PADDED_COLUMNS - 1, positions % PADDED_COLUMNS
    on_empty = cells.reshape(-1)[positions] == EMPTY  # a cat on a ladder does not fall
    for cat in range(2):
        falling = (columns == cat_column[cat]) & on_empty[cat]
        packed = packed | jnp.where(falling, CAT << (3 * cat_row[cat]), 0)

    settled = jnp.zeros_like(packed)
    rest = jnp.full_like(packed, art.ROWS - 1)
    landed = jnp.zeros((2, PADDED_COLUMNS), jnp.int32)
    for row in reversed(range(art.ROWS)):
        code = (packed >> (3 * row)) & 7
        falls = (code == BOULDER) | (code == WALKER) | (code == CAT)
        landed = jnp.where(cat_row[:, None] == row, rest, landed)
        settled = settled | jnp.where(code == CAT, 0, code << (3 * jnp.where(falls, rest, row)))
        rest = jnp.where(falls, rest - 1, jnp.where(code == EMPTY, rest, row - 1))
    cells = cells.at[1:-1].set(((settled >> shifts) & 7).astype(jnp.int8))
    landed = jnp.stack([landed[0, cat_column[0]], landed[1, cat_column[1]]])
    return cells, jnp.where(on_empty, (landed + 1) * PADDED_COLUMNS + cat_column, positions)


def _at(position: Array) -> Array:
    """bool [11, 12]: where in the padded grid a position (int32 []) is."""
    return position.astype(jnp.uint8) == INDEX


def _empty_history(now: Snapshot) -> History:
    """A history of no moves; its slots hold copies of `now`, which are never read."""
    snapshots = jax.tree.map(lambda x: jnp.broadcast_to(x, (REWIND_DEPTH, *x.shape)), now)
    return History(snapshots, jnp.int32(0), jnp.int32(0))


def _remember(history: History, now: Snapshot, moved: Array) -> History:
    """Adds `now` as the state before a move, if something moved; the oldest of 40 is forgotten."""
    slot = history.next_slot
    return History(
        snapshots=jax.tree.map(
            lambda ring, x: ring.at[slot].set(jnp.where(moved, x, ring[slot])), history.snapshots, now
        ),
        next_slot=jnp.where(moved, (slot + 1) % REWIND_DEPTH, slot),
        length=jnp.where(moved, jnp.minimum(history.length + 1, REWIND_DEPTH), history.length),
    )


def _take_back(state: State) -> State:
    """The state before the last remembered move."""
    history = state.history
    slot = (history.next_slot - 1) % REWIND_DEPTH
    now = jax.tree.map(lambda ring: ring[slot], history.snapshots)
    history = history.replace(next_slot=slot, length=history.length - 1)
    return state.replace(now=now, moves=state.moves - 1, history=history)
