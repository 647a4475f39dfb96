"""Each rule of Catrap on a level drawn by hand, then all of them against the solver's own formulation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.envs.catrap import art, levels, rules, solver

LETTERS = {
    "R": rules.RIGHT,
    "L": rules.LEFT,
    "U": rules.UP,
    "D": rules.DOWN,
    "A": rules.REWIND,
    "S": rules.SWAP,
}
STEP = jax.jit(rules.step)
LOAD = jax.jit(rules.load, static_argnames="rewind")


def cells_of(drawing):
    """Puts a drawing of a few rows into the lower left of a level of walls and empty sky."""
    rows = [row.strip() for row in drawing.strip().splitlines()]
    full = ["." * 10] * (9 - len(rows)) + [row.ljust(10, "#") for row in rows]
    return np.array([[art.CHARACTERS[c] for c in row] for row in full], np.int8)


def drawing_of(state, height, width):
    """Draws the lower left of a state: '@' the cat that obeys, 'c' the one that waits."""
    letters = {code: letter for letter, code in art.CHARACTERS.items()}
    grid = [[letters[int(code)] for code in row] for row in state.now.cells]
    for cat in range(int(state.num_cats)):
        row, column = divmod(int(state.now.positions[cat]), rules.PADDED_COLUMNS)
        grid[row][column] = "@" if cat == state.now.active else "c"
    return ["".join(row[1 : width + 1]) for row in grid[10 - height : 10]]


def play(drawing, actions, rewind=False):
    state = LOAD(cells_of(drawing), rewind=rewind)
    for letter in actions:
        state = STEP(state, jnp.int32(LETTERS[letter]))
    return state


RULES = {
    "walks into empty": ("@..f", "R", ".@.f"),
    "does not walk into a wall": ("#@#f", "R", "#@#f"),
    "digs sand": ("@:.f", "R", ".@.f"),
    "kills a walker": ("f@m", "R", "f.@"),
    "kills a flyer": ("f@f", "R", "f.@"),
    "walks onto a ladder": ("@Hf", "R", ".@f"),
    "pushes a boulder and stays": ("@O.f", "R", "@.Of"),
    "no push against sand": ("@O:f", "R", "@O:f"),
    "no push against a ladder": ("@OHf", "R", "@OHf"),
    "no push against a boulder": ("@OO.f", "R", "@OO.f"),
    "no push against a monster": ("@Of", "R", "@Of"),
    "no push against a cat": ("f@O@", "R", "f@Oc"),
    "no push against the edge": ("f......@O#", "R", "f......@O#"),
    "no climbing without a ladder": (".f\n@#", "U", ".f\n@#"),
    "climbs a ladder": ("Hf\nH#\n@#", "U", "Hf\nH#\n@#"),
    "climbs from a ladder": ("#Hf\n#H#\n@H#", "RU", "#Hf\n#@#\n.H#"),
    "stands on a ladder's top": ("..f\n@H#\n##f", "R", "..f\n.@#\n##f"),
    "leaves a ladder upwards": ("..f\n@H#", "RU", ".@f\n.H#"),
    "climbs no further than one above": ("..f\n@H#", "RUU", ".@f\n.H#"),
    "up does not dig": (".:f\n@H#", "RU", ".:f\n.@#"),
    "up does not kill": (".ff\n@H#", "RU", ".ff\n.@#"),
    "down into a ladder": ("@f\nH#\nH#", "D", ".f\n@#\nH#"),
    "down from a ladder falls": ("@f\nH#\n.#\n.#", "DD", ".f\nH#\n.#\n@#"),
    "down does not dig": ("@f\n:#", "D", "@f\n:#"),
    "kills from a ladder": ("@..\nHmf", "DR", "...\nH@f"),
    "falls off an edge": ("@.f\n#.#\n#.#", "R", "..f\n#.#\n#@#"),
    "falls onto sand": ("@.f\n#.#\n#:#", "R", "..f\n#@#\n#:#"),
    "falls onto a ladder's top": ("@.f\n#.#\n#H#", "R", "..f\n#@#\n#H#"),
    "falls onto a monster without a kill": ("@.f\n#.#\n#m#", "R", "..f\n#@#\n#m#"),
    "flyers float": ("f..\n..@", "L", "f..\n.@."),
    "sand floats": (":.f\n..@", "L", ":.f\n.@."),
    "a boulder falls when pushed": ("@O.f\n##.#\n##.#", "R", "@..f\n##.#\n##O#"),
    "a boulder rests on a ladder": ("@O.f\n##H#", "R", "@.Of\n##H#"),
    "a boulder rests on a walker": ("@O.f\n##.#\n##m#", "R", "@..f\n##O#\n##m#"),
    "a walker falls through dug sand": ("#mf\n#O#\n@:#", "R", "#mf\n#O#\n.@#"),
    "a stack follows the cat that leaves": ("Of\nm#\n@.", "R", ".f\nO#\nm@"),
    "a stack falls with the cat": ("#Of\n@f#\n#.#", "R", "#.f\n.O#\n#@#"),
    "cats hold each other": ("@.f\n#@#", "R", ".@f\n#c#"),
    "cats block each other": ("@@f", "R", "@cf"),
    "the other cat obeys after a swap": ("@@.f", "SR", "c.@f"),
    "a swap back": ("@.@f", "SSR", ".@cf"),
    "no swap with one cat": ("@.f", "SR", ".@f"),
    "nothing moves after the win": ("@m.", "RR", ".@."),
    "no swap after the win": ("@m.@", "RS", ".@.c"),
    "everything falls at the start": ("@Om\n...\n##f", "", "...\n@Om\n##f"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    before, actions, after = RULES[rule]
    after = after.splitlines()
    assert drawing_of(play(before, actions), len(after), len(after[0])) == after


def test_counts_and_facing():
    state = play("f.@m.", "L")
    assert state.now.facing_left[0] and state.moves == 1 and state.now.monsters == 2
    state = play("f.@m.", "LRR")
    assert not state.now.facing_left[0] and state.moves == 3 and state.now.monsters == 1
    blocked = play("f#@.m", "L")
    assert blocked.now.facing_left[0] and blocked.moves == 0
    won = play("@m.", "RL")
    assert rules.won(won) and not won.now.facing_left[0]


def test_rewind_takes_back_kills_sand_and_the_acting_cat():
    drawing = "@:m.@f"
    start, back = play(drawing, "", rewind=True), play(drawing, "RRSLAAA", rewind=True)
    assert back.moves == 0 and back.history.length == 0
    chex.assert_trees_all_equal(back.now, start.now)  # the swap before the third move is taken back, too
    one = play(drawing, "RRA", rewind=True)
    chex.assert_trees_all_equal(one.now, play(drawing, "R").now)


def test_rewind_restores_facing_and_ignores_impossible_moves():
    drawing = "f#@.m"
    back = play(drawing, "LRA", rewind=True)  # L only turns the cat; R moves and is taken back
    assert back.now.facing_left[0] and back.moves == 0
    assert drawing_of(back, 1, 5) == ["f#@.m"]
    assert play("@m.", "RA", rewind=True).now.monsters == 0  # a win stays


def test_rewind_remembers_forty_moves():
    drawing = "@.f......."
    there = play(drawing, "RL" * 30, rewind=True)
    for _ in range(3):  # impossible moves must not disturb the oldest memory
        there = STEP(there, jnp.int32(rules.UP))
    assert there.history.length == rules.REWIND_DEPTH
    for moves_left in range(59, 19, -1):
        there = STEP(there, jnp.int32(rules.REWIND))
        assert there.moves == moves_left
        assert drawing_of(there, 1, 3) == (["@.f"] if moves_left % 2 == 0 else [".@f"])
    chex.assert_trees_all_equal(STEP(there, jnp.int32(rules.REWIND)).now, there.now)


def random_levels(rng, number):
    weights = (0.5, 0.14, 0.06, 0.14, 0.06, 0.06, 0.04)
    cells = rng.choice(7, size=(number, 9, 10), p=weights).astype(np.int8)
    for i in range(number):
        cats = rng.choice(90, 1 + i % 2, replace=False)
        cells[i].reshape(-1)[cats] = art.CAT
    return cells


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_jax_rules_equal_the_solvers(seed):
    rng = np.random.default_rng(seed)
    number, steps = 300, 40
    cells = random_levels(rng, number)
    packed = np.concatenate([solver._start(level) for level in cells])
    state = jax.jit(jax.vmap(rules.load))(cells)
    step = jax.jit(jax.vmap(rules.step))
    for t in range(steps + 1):
        grid, places, active = solver.unpack(packed)
        np.testing.assert_array_equal(np.asarray(state.now.cells)[:, 1:-1, 1:-1], grid)
        row, column = np.divmod(np.asarray(state.now.positions), rules.PADDED_COLUMNS)
        np.testing.assert_array_equal(np.stack([row, column], -1) - 1, places)
        np.testing.assert_array_equal(state.now.active, active)
        left = np.isin(grid, (art.WALKER, art.FLYER)).sum((1, 2))
        np.testing.assert_array_equal(state.now.monsters, left)
        if t == steps:
            break
        action = rng.choice((0, 1, 2, 3, 5), number).astype(np.int32)
        state = step(state, action)
        two = (places[:, 1, 0] >= 0) | (action != rules.SWAP)
        for which in (0, 1, 2, 3, 5):
            chosen = (action == which) & (left > 0) & two
            if chosen.any():
                packed[chosen] = solver._step(packed[chosen], which)


def test_batching_changes_nothing_and_traces_once():
    rng = np.random.default_rng(0)
    cells = random_levels(rng, 12)
    load = jax.jit(jax.vmap(lambda level: rules.load(level, rewind=True)))
    chex.clear_trace_counter()
    step = jax.jit(jax.vmap(chex.assert_max_traces(rules.step, n=1)))
    batch = load(cells)
    singles = [LOAD(level, rewind=True) for level in cells]
    for _ in range(20):
        action = rng.integers(0, 6, len(cells)).astype(np.int32)
        batch = step(batch, action)
        singles = [STEP(s, a) for s, a in zip(singles, action, strict=True)]
    chex.assert_trees_all_equal(batch, jax.tree.map(lambda *x: jnp.stack(x), *singles))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(batch))


def test_shipped_solutions_win_in_the_jax_rules():
    for level in levels.all_levels():
        state = LOAD(level.cells)
        for action in solver.solve(level.cells):
            assert not rules.won(state)
            state = STEP(state, jnp.int32(action))
        assert rules.won(state), level.name
