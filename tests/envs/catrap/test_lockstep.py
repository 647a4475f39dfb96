"""The JAX rules and pictures against the cartridge in an emulator, move by move and pixel by pixel."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.envs.catrap import art, levels, render, rules, solver
from jaxreward.envs.pyboy_worker import Emulator

LEVELS, STEPS, CHUNK = 208, 52, 26  # 10,816 steps
MUTANT_LEVELS = 2 * CHUNK
LONG_LEVELS = 6
MEASURES = ("cells", "cats", "active", "monsters", "moves", "picture")


def _random_level(rng):
    chances = {
        art.EMPTY: 50,
        art.WALL: 18,
        art.SAND: 7,
        art.LADDER: 10,
        art.BOULDER: 8,
        art.WALKER: 4,
        art.FLYER: 3,
    }
    weights = np.array(list(chances.values())) / sum(chances.values())
    level = rng.choice(list(chances), size=(art.ROWS, art.COLUMNS), p=weights)
    for _ in range(2):  # ladders that lead somewhere
        top, column = rng.integers(0, 6), rng.integers(art.COLUMNS)
        level[top : top + rng.integers(2, 5), column] = art.LADDER
    level[-1, rng.random(art.COLUMNS) < 0.5] = art.WALL
    cats = rng.choice(level.size, rng.integers(1, 3), replace=False)
    level.reshape(-1)[cats] = art.CAT
    if not np.isin(level, (art.WALKER, art.FLYER)).any():
        level[0, 0] = art.FLYER if level[0, 0] != art.CAT else art.CAT
    if not np.isin(level, (art.WALKER, art.FLYER)).any():
        level[0, 1] = art.FLYER
    return level.astype(np.int8)


@pytest.fixture(scope="module")
def games():
    """Random levels int8 [LEVELS, 9, 10] and actions int32 [LEVELS, STEPS], rewinds and swaps among them."""
    rng = np.random.default_rng(7)
    chances = [0.24, 0.24, 0.17, 0.17, 0.1, 0.08]
    boards = np.stack([_random_level(rng) for _ in range(LEVELS)])
    return boards, rng.choice(6, size=(LEVELS, STEPS), p=chances).astype(np.int32)


@pytest.fixture(scope="module")
def emulator():
    emulator = Emulator()
    yield emulator
    emulator.close()


@pytest.fixture(scope="module")
def on_cartridge(games, emulator):
    return _play_on_cartridge(emulator, *games)


def _play_on_cartridge(emulator, boards, actions):
    """Plays games in the emulator; MEASURES before and after each action, [games, steps + 1, ...]."""
    moves = emulator.layout.address["moves"]
    games = []
    for board, row in zip(boards, actions, strict=True):
        emulator.choose(board)
        game = []
        for action in (None, *row.tolist()):
            emulator.reset() if action is None else emulator.step(action)
            now = emulator.read()
            cats = np.full(2, -1)
            cats[: len(now.cats)] = [12 * (row + 1) + column + 1 for row, column in now.cats]
            count = emulator.memory[moves] + 256 * emulator.memory[moves + 1]
            picture = zlib.crc32(np.ascontiguousarray(emulator.screen))
            game.append((now.cells, cats, now.active, now.monsters, count, picture))
        games.append([np.stack(measure) for measure in zip(*game, strict=True)])
    return [np.stack(measure) for measure in zip(*games, strict=True)]


def _play_in_jax(boards, actions, *, step=rules.step, sprites=render.sprites):
    """The same measures from the JAX rules and renderer."""

    play = _player(step, sprites)
    chunks = []
    for start in range(0, len(boards), CHUNK):
        chunk = jax.device_get(play(boards[start : start + CHUNK], actions[start : start + CHUNK]))
        pictures = [[zlib.crc32(np.ascontiguousarray(p)) for p in game] for game in chunk[-1]]
        chunks.append((*chunk[:-1], np.array(pictures)))
    return [np.concatenate(measure) for measure in zip(*chunks, strict=True)]


@functools.cache
def _player(step, sprites):
    @jax.jit
    @jax.vmap
    def play(board, actions):
        def measure(state):
            cats = jnp.where(jnp.arange(2) < state.num_cats, state.now.positions.astype(jnp.int32), -1)
            now, picture = state.now, render.grey(sprites(state), 1, crop=False)
            cells = now.cells.reshape(art.ROWS + 2, art.COLUMNS + 2)[1:-1, 1:-1]
            return cells, cats, now.active, now.monsters, state.moves, picture

        def body(state, action):
            state = step(state, action)
            return state, measure(state)

        first = rules.load(board, rewind=True)
        _, following = jax.lax.scan(body, first, actions)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), measure(first), following)

    return play


def _first_difference(cartridge, clone):
    """The first difference as (measure, level, step), or None."""
    for name, a, b in zip(MEASURES, cartridge, clone, strict=True):
        assert a.shape == b.shape, name
        if (a != b).any():
            return (name, *np.argwhere(a != b)[0, :2].tolist())
    return None


def test_the_cartridge_and_the_clone_agree(games, on_cartridge):
    boards, actions = games
    assert boards.shape[0] >= 200 and actions.size >= 10_000
    assert _first_difference(on_cartridge, _play_in_jax(boards, actions)) is None
    # What was compared holds enough of everything that can happen.
    _, cats, active, monsters, moves, pictures = on_cartridge
    assert (np.diff(moves) > 0).sum() > 2_000
    assert (np.diff(moves) < 0).sum() > 300, "rewinds that took something back"
    assert (np.diff(monsters) < 0).sum() > 50, "kills"
    assert (np.diff(active) != 0).sum() > 200, "swaps"
    assert (np.diff(cats[..., 0]) >= 24).sum() > 30, "falls of two cells or more"
    assert len(np.unique(pictures)) > 2_000


def test_rewinds_beyond_the_depth_agree(emulator):
    """More moves than are remembered, with blocked ones among them, then more rewinds than moves."""
    rng = np.random.default_rng(11)
    boards = []
    for _ in range(LONG_LEVELS):
        board = np.full((art.ROWS, art.COLUMNS), art.EMPTY)
        board[rng.integers(2, 8, 4), rng.integers(0, 10, 4)] = art.SAND
        board[2:9, 4] = art.LADDER
        board[8, :4], board[0, 0], board[7, 2], board[7, 7] = art.WALL, art.FLYER, art.CAT, art.CAT
        boards.append(board)
    actions = np.concatenate(
        [
            rng.choice(6, (LONG_LEVELS, 120), p=[0.27, 0.27, 0.21, 0.21, 0.0, 0.04]),
            np.full((LONG_LEVELS, 45), rules.REWIND),
            rng.integers(0, 6, (LONG_LEVELS, 10)),
        ],
        axis=1,
    ).astype(np.int32)
    cartridge = _play_on_cartridge(emulator, np.stack(boards).astype(np.int8), actions)
    assert (cartridge[4][:, 120] > rules.REWIND_DEPTH).all(), "moves before the rewinds"
    clone = _play_in_jax(np.stack(boards).astype(np.int8), actions)
    assert _first_difference(cartridge, clone) is None


def test_solutions_win_on_the_cartridge_and_nothing_changes_after(emulator):
    shipped = levels.all_levels()
    solutions = [solver.solve(level.cells) for level in shipped]
    longest = max(map(len, solutions))
    after_the_win = [*range(6), rules.LEFT, rules.REWIND]
    actions = [(solution + after_the_win * longest)[: longest + 8] for solution in solutions]
    boards = np.stack([level.cells for level in shipped])
    cartridge = _play_on_cartridge(emulator, boards, np.array(actions, np.int32))
    for level, solution, monsters, pictures in zip(
        shipped, solutions, cartridge[3], cartridge[5], strict=True
    ):
        assert monsters[len(solution) - 1] > 0 and (monsters[len(solution) :] == 0).all(), level.name
        assert len(set(pictures[len(solution) :].tolist())) == 1, level.name
    assert _first_difference(cartridge, _play_in_jax(boards, np.array(actions, np.int32))) is None


def test_animation_changes_nothing_at_rest(games):
    boards, actions = (array[:CHUNK] for array in games)
    emulator = Emulator(animated=True)
    try:
        cartridge = _play_on_cartridge(emulator, boards, actions)
    finally:
        emulator.close()
    assert _first_difference(cartridge, _play_in_jax(boards, actions)) is None


def test_the_cartridge_holds_the_shipped_levels_in_order(emulator):
    shipped = levels.all_levels()
    load = jax.jit(rules.load)
    for index, level in enumerate(shipped):
        emulator.choose(index)
        emulator.reset()
        expected = np.asarray(load(level.cells).now.cells).reshape(art.ROWS + 2, art.COLUMNS + 2)[1:-1, 1:-1]
        np.testing.assert_array_equal(emulator.read().cells, expected, err_msg=level.name)
    assert emulator.memory[emulator.layout.address["num_levels"]] == len(shipped)


def _boulder_onto_ladder(state, action):
    """A ladder no longer blocks a boulder."""
    flat = state.now.cells.reshape(-1)
    offset = jnp.array([1, -1, 0, 0, 0, 0])[action]
    at = state.now.positions[state.now.active].astype(jnp.int32)
    blocked = (flat[at + offset] == art.BOULDER) & (flat[at + 2 * offset] == art.LADDER)
    index = jnp.arange(flat.size)
    opened = jnp.where(blocked & (index == at + 2 * offset), art.EMPTY, flat).astype(flat.dtype)
    now = state.now.replace(cells=opened.reshape(state.now.cells.shape))
    return rules.step(state.replace(now=now), action)


def _facing_survives_a_rewind(state, action):
    following = rules.step(state, action)
    facing = jnp.where(action == rules.REWIND, state.now.facing_left, following.now.facing_left)
    return following.replace(now=following.now.replace(facing_left=facing))


def _flyers_are_solid(state, action):
    """Flyers cannot be killed."""
    following = rules.step(state, action)
    before, after = (((s.now.cells == art.FLYER).sum()) for s in (state, following))
    return jax.tree.map(lambda a, b: jnp.where(before != after, a, b), state, following)


@pytest.mark.parametrize("mutant", [_boulder_onto_ladder, _facing_survives_a_rewind, _flyers_are_solid])
def test_a_changed_rule_is_noticed(games, on_cartridge, mutant):
    boards, actions = (array[:MUTANT_LEVELS] for array in games)
    cartridge = [measure[:MUTANT_LEVELS] for measure in on_cartridge]
    assert _first_difference(cartridge, _play_in_jax(boards, actions, step=mutant)) is not None


def test_a_changed_picture_is_noticed(games, on_cartridge):
    def same_cats(state):
        return render.sprites(state.replace(now=state.now.replace(active=jnp.zeros_like(state.now.active))))

    boards, actions = (array[:MUTANT_LEVELS] for array in games)
    cartridge = [measure[:MUTANT_LEVELS] for measure in on_cartridge]
    found = _first_difference(cartridge, _play_in_jax(boards, actions, sprites=same_cats))
    assert found is not None and found[0] == "picture"
