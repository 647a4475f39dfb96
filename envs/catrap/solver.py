"""Exhaustive search in Catrap levels: solutions, dead ends, random play and expert play.

NumPy only, with its own formulation of the rules over whole frontiers of states, so that the JAX rules
and this solver can be checked against each other. Facing and rewinding are left out: neither opens or
closes a way to win.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np

from jaxreward.envs.catrap import art
from jaxreward.envs.catrap.art import BOULDER, CAT, EMPTY, FLYER, LADDER, SAND, WALKER, WALL
from jaxreward.errors import DataError

RIGHT, LEFT, UP, DOWN, SWAP = 0, 1, 2, 3, 5
MAX_STATES = 300_000  # of a level that is searched; more would take minutes and gigabytes
ExpertKind = Literal["optimal", "near_optimal", "dithering"]

# A state is a row of bytes: the cells under a ring of wall (so that every neighbour exists), the places
# of the two cats (ABSENT for a missing one), and which cat obeys.
_WIDTH = art.COLUMNS + 2
_CELLS = (art.ROWS + 2) * _WIDTH
_FIRST, _ACTIVE, _STATE = _CELLS, _CELLS + 2, _CELLS + 3
_ABSENT = 0  # a corner of the ring


@dataclasses.dataclass(frozen=True, eq=False)
class StateGraph:
    """All states that a level can reach.

    Attributes:
      states: uint8 [S, 135], one row a state; row 0 is the start. See `unpack`.
      actions: the A actions of the columns: the D-pad, and SWAP in levels of two cats.
      transitions: int32 [S, A], the state after each action; a winning state leads to itself.
      won: bool [S], no monster is left.
      distance: int32 [S], the least number of actions to a win; -1 for dead states, which have none.
    """

    states: np.ndarray
    actions: tuple[int, ...]
    transitions: np.ndarray
    won: np.ndarray
    distance: np.ndarray


def explore(cells: np.ndarray, max_states: int = MAX_STATES) -> StateGraph:
    """Finds every reachable state of a level.

    Args:
      cells: integers [9, 10], the codes of `art`, EMPTY .. CAT.
      max_states: how many states are allowed.

    Raises:
      DataError: the level has more states.
    """
    states, actions, transitions, won = _search(cells, max_states, stop_at_win=False)
    return StateGraph(states, actions, transitions, won, _distances(transitions, won))


def solve(cells: np.ndarray, max_states: int = MAX_STATES) -> list[int] | None:
    """A shortest sequence of actions that wins a level, or None if there is none.

    Raises:
      DataError: no answer within `max_states` states.
    """
    _, actions, transitions, won = _search(cells, max_states, stop_at_win=True)
    if not won.any():
        return None
    parent = np.full(len(won), -1)
    by = np.zeros(len(won), np.int64)
    for state, row in enumerate(transitions):  # breadth first: the first parent found is the nearest
        for column, child in enumerate(row):
            if child > 0 and parent[child] < 0:
                parent[child], by[child] = state, column
    path, state = [], int(np.flatnonzero(won)[0])
    while state != 0:
        path.append(actions[by[state]])
        state = int(parent[state])
    return path[::-1]


def settle(cells: np.ndarray) -> np.ndarray:
    """Redraws a level (integers [9, 10], EMPTY .. CAT) as it is at rest; int8 [9, 10]."""
    grid, places, _ = unpack(_start(cells))
    drawn = grid[0].astype(np.int8)
    for row, column in places[0]:
        if row >= 0:
            drawn[row, column] = CAT
    return drawn


def unpack(states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Takes packed states apart.

    Args:
      states: uint8 [N, 135].

    Returns:
      Cells without cats, uint8 [N, 9, 10]; (row, column) of the two cats, int64 [N, 2, 2], (-1, -1) for
      an absent one; the cat that obeys, uint8 [N].
    """
    cells = states[:, :_CELLS].reshape(-1, art.ROWS + 2, _WIDTH)[:, 1:-1, 1:-1]
    places = states[:, _FIRST : _FIRST + 2].astype(np.int64)
    return cells, np.stack(np.divmod(places, _WIDTH), -1) - 1, states[:, _ACTIVE]


def dead_share(graph: StateGraph) -> float:
    """The share of reachable states from which no win is possible, 0 .. 1."""
    return float((graph.distance < 0).mean())


def random_success(graph: StateGraph, steps: int = 64) -> float:
    """The probability that `steps` uniformly random actions win, computed exactly.

    The actions are those of the graph: the four of the D-pad, and SWAP in levels of two cats.
    """
    probability = np.zeros(len(graph.won))
    probability[0] = 1.0
    for _ in range(steps):
        share = np.repeat(probability / len(graph.actions), len(graph.actions))
        probability = np.bincount(graph.transitions.reshape(-1), share, minlength=len(graph.won))
    return float(probability[graph.won].sum())


def needs_backtracking(graph: StateGraph, max_nodes: int = 3_000_000) -> bool:
    """Whether every solution makes a cat come back to a cell that it had left.

    Proven by exhausting all ways to play in which no cat rests twice on the same cell.

    Raises:
      DataError: more than `max_nodes` pairs of a state and a set of visited cells.
    """
    places = graph.states[:, _FIRST : _FIRST + 2].astype(int).tolist()
    transitions, alive, won = graph.transitions.tolist(), (graph.distance >= 0).tolist(), graph.won.tolist()
    if not alive[0]:
        raise DataError("a level that cannot be won neither needs backtracking nor does without")
    start = (0, 1 << places[0][0] | 1 << (_CELLS + places[0][1]))
    seen, stack = {start}, [start]
    while stack:
        state, visited = stack.pop()
        if won[state]:
            return False
        for child in set(transitions[state]):
            if child == state or not alive[child]:
                continue
            now_visited, again = visited, False
            for cat in range(2):
                if places[child][cat] != places[state][cat]:
                    bit = 1 << (cat * _CELLS + places[child][cat])
                    again |= bool(visited & bit)
                    now_visited |= bit
            node = (child, now_visited)
            if not again and node not in seen:
                seen.add(node)
                stack.append(node)
        if len(seen) > max_nodes:
            raise DataError(f"whether the level needs backtracking is open after {max_nodes} positions")
    return True


def sample_expert(
    graph: StateGraph, rng: np.random.Generator, kind: ExpertKind = "optimal", max_length: int = 64
) -> list[int]:
    """Samples a winning sequence of actions.

    Args:
      graph: a level that can be won.
      rng: the source of randomness.
      kind: 'optimal': a random choice among the best actions at each step. 'near_optimal': each
        trajectory draws a rate from U(0, 0.3) and takes that share of its steps at random among the
        actions that change something and leave a win possible. 'dithering': the same with U(0.4, 0.7),
        so that most steps are wasted. All end with the win.
      max_length: the longest sequence; detours that would make it longer are not taken.

    Raises:
      DataError: the level cannot be won within `max_length` actions, or an unknown kind.
    """
    if kind not in get_args(ExpertKind):
        raise DataError(f"there is no expert of kind '{kind}', expected one of {get_args(ExpertKind)}")
    if not 0 <= graph.distance[0] <= max_length:
        found = "no solution" if graph.distance[0] < 0 else f"a shortest solution of {graph.distance[0]}"
        raise DataError(f"found {found}, expected at most {max_length} actions")
    low, high = {"optimal": (0.0, 0.0), "near_optimal": (0.0, 0.3), "dithering": (0.4, 0.7)}[kind]
    rate = rng.uniform(low, high)
    state, path = 0, []
    while not graph.won[state]:
        following = graph.transitions[state]
        distance = graph.distance[following]
        choices = np.flatnonzero(distance == graph.distance[state] - 1)
        if rng.random() < rate:
            time_left = max_length - len(path) - 1
            detours = np.flatnonzero((distance >= 0) & (distance <= time_left) & (following != state))
            choices = detours if len(detours) else choices
        column = rng.choice(choices)
        path.append(graph.actions[column])
        state = following[column]
    return path


def _search(
    cells: np.ndarray, max_states: int, stop_at_win: bool
) -> tuple[np.ndarray, tuple[int, ...], np.ndarray, np.ndarray]:
    """Breadth-first search; returns states, actions, transitions [S, A] and won [S].

    With `stop_at_win` the search ends with the first layer that holds a win; the transitions of states
    that were not expanded are -1.
    """
    start = _start(cells)
    actions = (RIGHT, LEFT, UP, DOWN) + ((SWAP,) if start[0, _FIRST + 1] != _ABSENT else ())
    numbers = {start.tobytes(): 0}
    layers, rows = [start], []
    frontier = start
    while len(frontier):
        won = _won(frontier)
        if stop_at_win and won.any():
            rows.append(np.full((len(frontier), len(actions)), -1, np.int32))
            break
        after = np.stack([_step(frontier, action) for action in actions], 1)
        after[won] = frontier[won][:, None]
        data = after.tobytes()
        new = []
        row = np.empty(len(frontier) * len(actions), np.int32)
        for i in range(len(row)):
            key = data[i * _STATE : (i + 1) * _STATE]
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(numbers)
                new.append(i)
            row[i] = number
        if len(numbers) > max_states:
            raise DataError(
                f"the level has more than {max_states} states; expected fewer, so that it can be searched"
            )
        rows.append(row.reshape(len(frontier), len(actions)))
        frontier = after.reshape(-1, _STATE)[new]
        layers.append(frontier)
    states = np.concatenate(layers)
    return states, actions, np.concatenate(rows), _won(states)


def _distances(transitions: np.ndarray, won: np.ndarray) -> np.ndarray:
    """Least number of actions to a win, int32 [S]; -1 where there is none."""
    far = np.iinfo(np.int32).max - 1
    distance = np.where(won, 0, far)
    while True:
        nearer = np.minimum(distance, 1 + distance[transitions].min(1))
        if (nearer == distance).all():
            return np.where(distance >= far, -1, distance).astype(np.int32)
        distance = nearer


def _won(states: np.ndarray) -> np.ndarray:
    return ~((states[:, :_CELLS] == WALKER) | (states[:, :_CELLS] == FLYER)).any(1)


def _start(cells: np.ndarray) -> np.ndarray:
    """The packed first state of a level, uint8 [1, 135], after everything has fallen."""
    padded = np.pad(np.asarray(cells, np.uint8), 1, constant_values=WALL).reshape(-1)
    cats = np.flatnonzero(padded == CAT)[:2]
    state = np.zeros((1, _STATE), np.uint8)
    state[0, :_CELLS] = np.where(padded == CAT, EMPTY, padded)
    state[0, _FIRST : _FIRST + len(cats)] = cats
    _fall(state)
    return state


def _step(states: np.ndarray, action: int) -> np.ndarray:
    """The states [N, 135] after an action that starts from rest."""
    states = states.copy()
    if action == SWAP:
        states[:, _ACTIVE] ^= 1
        return states
    every = np.arange(len(states))
    active = states[:, _ACTIVE].astype(np.int64)
    cat = states[every, _FIRST + active].astype(np.int64)
    other = states[every, _FIRST + 1 - active].astype(np.int64)
    offset = {RIGHT: 1, LEFT: -1, UP: -_WIDTH, DOWN: _WIDTH}[action]
    target, beyond = cat + offset, np.clip(cat + 2 * offset, 0, _CELLS - 1)
    here = states[every, cat]
    ahead = np.where(target == other, CAT, states[every, target])
    if action in (RIGHT, LEFT):
        past = np.where(beyond == other, CAT, states[every, beyond])
        enters = np.isin(ahead, (EMPTY, LADDER, SAND, WALKER, FLYER))
        eats = np.isin(ahead, (SAND, WALKER, FLYER))
        pushes = (ahead == BOULDER) & (past == EMPTY)
        states[every[eats | pushes], target[eats | pushes]] = EMPTY
        states[every[pushes], beyond[pushes]] = BOULDER
    elif action == UP:
        enters = (here == LADDER) & np.isin(ahead, (EMPTY, LADDER))
    else:
        enters = (ahead == LADDER) | ((here == LADDER) & (ahead == EMPTY))
    states[every[enters], _FIRST + active[enters]] = target[enters]
    _fall(states)
    return states


def _fall(states: np.ndarray) -> None:
    """Lets everything fall, in place: one cell a round, bottom row first, until nothing moves."""
    every = np.arange(len(states))
    grid = states[:, :_CELLS].copy()
    cats = states[:, _FIRST : _FIRST + 2].astype(np.int64)
    for cat in range(2):
        loose = grid[every, cats[:, cat]] == EMPTY
        grid[every[loose], cats[loose, cat]] = CAT + cat
    rows = grid.reshape(len(states), art.ROWS + 2, _WIDTH)
    moving = True
    while moving:
        moving = False
        for row in range(art.ROWS - 1, 0, -1):
            above, below = rows[:, row], rows[:, row + 1]
            falls = (below == EMPTY) & ((above == BOULDER) | (above == WALKER) | (above >= CAT))
            if falls.any():
                moving = True
                below[falls] = above[falls]
                above[falls] = EMPTY
    for cat in range(2):
        where, place = np.nonzero(grid == CAT + cat)
        states[where, _FIRST + cat] = place
    states[:, :_CELLS] = np.where(grid >= CAT, EMPTY, grid)
