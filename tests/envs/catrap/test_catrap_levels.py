"""Level files, the claims about shipped levels, the solver's statistics and the generator."""

import re
from pathlib import Path

import numpy as np
import pytest

from jaxreward.envs.catrap import art, generate, levels, solver
from jaxreward.errors import ConfigError, DataError

GOOD = ["##########", *["#........#"] * 5, "#.@...m..#", "##########", "##########"]


@pytest.fixture(scope="module")
def graphs():
    return {level.name: solver.explore(level.cells) for level in levels.all_levels()}


def write(tmp_path, rows):
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_level_files_read_back(tmp_path):
    level = levels.load_level(write(tmp_path, ["; A walk", "", *GOOD, "", "; end"]))
    assert (level.name, level.title) == ("mine", "A walk")
    assert level.cells.shape == (9, 10) and level.cells.dtype == np.int8
    assert level.cells[6, 2] == art.CAT and level.cells[6, 6] == art.WALKER
    again = levels.parse_level(levels.draw_level(level.cells, level.title), Path("again.txt"))
    np.testing.assert_array_equal(again.cells, level.cells)
    assert levels.load_level(2) is levels.load_level("02") is levels.load_level("2")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (GOOD[:8], r"mine.txt, line 8: found the end after 8 rows, expected 9"),
        ([*GOOD, GOOD[0]], r"mine.txt, line 10: found a row after the last of 9"),
        (["; title", "#" * 9, *GOOD[1:]], r"mine.txt, line 2: found 9 characters"),
        (
            [*GOOD[:3], "#...x....#", *GOOD[4:]],
            r"line 4, column 5: found 'x', expected one of '\.'",
        ),
        ([row.replace("@", ".") for row in GOOD], r"found 0 cats \('@'\), expected one or two"),
        ([row.replace("#...", "@@@.", 1) for row in GOOD], r"found \d+ cats"),
        ([row.replace("m", ".") for row in GOOD], r"found no monster, expected at least one"),
        (
            [row.replace("m", "#f") if "m" in row else row for row in [*GOOD[:6], "##@#m....#", *GOOD[7:]]],
            "11 ch",
        ),
        ([*GOOD[:6], "##@#m....#", *GOOD[7:]], r"mine.txt: this level cannot be won"),
    ],
)
def test_bad_level_files_say_what_is_wrong(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        levels.load_level(write(tmp_path, rows))


def test_unknown_levels_are_named():
    with pytest.raises(DataError, match=r"no level '99'.*shipped: 01, 02"):
        levels.load_level(99)


def test_claims_about_shipped_levels(graphs):
    moves = {name: int(graph.distance[0]) for name, graph in graphs.items()}
    assert len(graphs) >= 12 and min(moves.values()) > 0
    campaign = [moves[f"{number:02d}"] for number in range(1, 13)]
    assert campaign == sorted(campaign)
    assert 15 <= moves["02"] <= 17 and moves["04"] >= 20 and moves["06"] >= 25
    assert solver.dead_share(graphs["02"]) >= 0.3
    assert 8 <= len(levels.BENCHMARK_LEVELS) <= 10
    for name in levels.BENCHMARK_LEVELS:
        assert 15 <= moves[name] <= 25 and solver.random_success(graphs[name]) < 0.005, name
    assert sum(solver.needs_backtracking(graph) for graph in graphs.values()) >= 4
    for level in levels.all_levels():
        assert (level.cells[[0, -1]] == art.WALL).all()
        np.testing.assert_array_equal(solver.settle(level.cells), level.cells, err_msg=level.name)
    assert all(np.isin(code, levels.load_level(1).cells) for code in range(8))
    two_cats = [level for level in levels.all_levels() if (level.cells == art.CAT).sum() == 2]
    for level in two_cats:
        graph = graphs[level.name]  # without SWAP no win is left
        assert solver._distances(graph.transitions[:, :4], graph.won)[0] == -1
    assert two_cats


def test_the_document_is_what_the_script_writes():
    document = Path(__file__).parents[3] / "docs" / "levels.md"
    assert document.read_text().rstrip().endswith(levels.table())


def corridor(length):
    """A corridor with the cat at its left end and a flyer at its right: `length` moves are needed."""
    cells = np.full((9, 10), art.WALL)
    cells[4, : length + 1] = art.EMPTY
    cells[4, 0], cells[4, length] = art.CAT, art.FLYER
    return cells


def test_random_success_of_a_corridor_is_that_of_a_random_walk():
    graph = solver.explore(corridor(2))
    assert len(graph.won) == 3 and list(graph.distance) == [2, 1, 0]
    # One action of four goes right; left at the wall, up and down stay: win within 2 steps 1/16, within 3
    # steps one wasted action more: 1/16 + (3/4 + 1/2) / 16.
    assert solver.random_success(graph, 1) == 0
    assert solver.random_success(graph, 2) == pytest.approx(1 / 16)
    assert solver.random_success(graph, 3) == pytest.approx(1 / 16 + 1.25 / 16)
    assert solver.solve(corridor(7)) == [solver.RIGHT] * 7


def test_random_success_agrees_with_sampling(graphs):
    graph = graphs["01"]
    rng = np.random.default_rng(0)
    state = np.zeros(40_000, np.int64)
    for _ in range(64):
        state = graph.transitions[state, rng.integers(0, 4, len(state))]
    share, exact = graph.won[state].mean(), solver.random_success(graph)
    assert abs(share - exact) < 4 * np.sqrt(exact * (1 - exact) / len(state))


def test_backtracking_by_hand():
    assert not solver.needs_backtracking(solver.explore(corridor(5)))
    there_and_back = corridor(8)
    there_and_back[4, 0], there_and_back[4, 4] = art.FLYER, art.CAT
    assert solver.needs_backtracking(solver.explore(there_and_back))


def test_dead_states_by_hand():
    # The cat falls off either edge: only the right pit holds the flyer.
    cells = np.full((9, 10), art.WALL)
    cells[4, 3:6] = art.EMPTY
    cells[4, 4], cells[5, 3], cells[5, 5:7] = art.CAT, art.EMPTY, (art.EMPTY, art.FLYER)
    graph = solver.explore(cells)
    assert len(graph.won) == 4 and solver.dead_share(graph) == 0.25


def test_too_many_states_are_an_error():
    with pytest.raises(DataError, match="more than 20 states"):
        solver.explore(levels.load_level(2).cells, max_states=20)


@pytest.mark.parametrize("kind", ["optimal", "near_optimal", "dithering"])
def test_experts_win_in_time_and_differ(graphs, kind):
    rng = np.random.default_rng(3)
    graph = graphs["03"]
    paths = [solver.sample_expert(graph, rng, kind) for _ in range(40)]
    for path in paths:
        state = 0
        for action in path:
            assert not graph.won[state]
            state = graph.transitions[state, graph.actions.index(action)]
        assert graph.won[state] and len(path) <= 64
    lengths = np.array([len(path) for path in paths])
    best = graph.distance[0]
    if kind == "optimal":
        assert (lengths == best).all()
    else:
        assert len({tuple(path) for path in paths}) > 20
        assert lengths.mean() > (1.05 if kind == "near_optimal" else 1.8) * best
    assert max(len(solver.sample_expert(graph, rng, kind, best)) for _ in range(10)) == best


def test_expert_errors(graphs):
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="shortest solution of 18, expected at most 10"):
        solver.sample_expert(graphs["03"], rng, max_length=10)
    with pytest.raises(DataError, match=re.escape("no expert of kind 'best'")):
        solver.sample_expert(graphs["03"], rng, "best")


def test_generator_is_deterministic_and_keeps_its_promises():
    config = generate.GeneratorConfig(min_moves=10, max_moves=30, max_states=2_000)
    found = generate.generate(5, 4, config)
    again = generate.generate(5, 2, config)
    np.testing.assert_array_equal(found[:2], again)
    for cells in found:
        graph = solver.explore(cells)
        assert 10 <= graph.distance[0] <= 30 and len(graph.won) <= 2_000
        assert solver.random_success(graph) <= config.max_random_success
        assert (cells[[0, -1]] == art.WALL).all()
        np.testing.assert_array_equal(solver.settle(cells), cells)
    with pytest.raises(ConfigError, match="none of 3 drawings"):
        generate.generate(0, 1, generate.GeneratorConfig(min_moves=400, max_moves=500, max_attempts=3))
