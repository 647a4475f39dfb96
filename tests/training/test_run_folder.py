import dataclasses
import enum
import json
import math
import subprocess
import sys
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.errors import ConfigError, StorageError
from jaxreward.training.run_folder import create, from_json, open_run, read_config, to_json


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Window:
    length: int = 15
    kind: Literal["mixed", "optimal"] = "mixed"


@dataclasses.dataclass(frozen=True)
class Constant:
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class Inner:
    window: Window = Window()
    shape: tuple[int, ...] = (64, 64)
    pair: tuple[str, float] = ("a", 0.5)


class Base:
    pass


@dataclasses.dataclass(frozen=True)
class Maze(Base):
    size: int


@dataclasses.dataclass(frozen=True)
class Experiment:
    name: str
    reward: Inner | Constant = Constant()
    clip: float | None = None
    limit: int | str = 3
    colour: Colour = Colour.RED
    fused: bool = True
    tags: dict[str, int] = dataclasses.field(default_factory=dict)
    extra: tuple[Window | Constant, ...] = ()
    env: Base = Maze(3)
    anything: Any = Constant(1.0)

    def __post_init__(self):
        if self.name == "bad":
            raise ConfigError("name is bad; expected a good one")


TYPES = {"Experiment": Experiment, "Maze": Maze, "Constant": Constant}

floats = st.floats(allow_nan=False)
windows = st.builds(Window, st.integers(), st.sampled_from(["mixed", "optimal"]))
constants = st.builds(Constant, floats)
inners = st.builds(
    Inner, windows, st.lists(st.integers(), max_size=3).map(tuple), st.tuples(st.text(max_size=3), floats)
)
experiments = st.builds(
    Experiment,
    st.text(max_size=5).filter(lambda name: name != "bad"),
    inners | constants,
    st.none() | floats,
    st.integers() | st.text(max_size=3),
    st.sampled_from(Colour),
    st.booleans(),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.lists(windows | constants, max_size=2).map(tuple),
    st.builds(Maze, st.integers()),
    constants,
)


@given(experiments)
@settings(max_examples=60, deadline=None)
def test_a_config_survives_json(config):
    text = json.dumps(to_json(config), allow_nan=False)
    assert from_json(json.loads(text), TYPES) == config


def test_the_json_of_a_config_is_plain():
    assert to_json(Experiment("x", reward=Inner(), clip=math.inf, extra=(Window(2),))) == {
        "class": "Experiment",
        "name": "x",
        "reward": {
            "class": "Inner",
            "window": {"class": "Window", "length": 15, "kind": "mixed"},
            "shape": [64, 64],
            "pair": ["a", 0.5],
        },
        "clip": "inf",
        "limit": 3,
        "colour": "RED",
        "fused": True,
        "tags": {},
        "extra": [{"class": "Window", "length": 2, "kind": "mixed"}],
        "env": {"class": "Maze", "size": 3},
        "anything": {"class": "Constant", "value": 1.0},
    }
    with pytest.raises(TypeError, match="found object"):
        to_json(Window(object()))


def test_missing_fields_take_their_defaults_and_a_sole_class_need_not_be_named():
    reward = {"class": "Inner", "window": {"length": 25}}
    config = from_json({"class": "Experiment", "name": "x", "reward": reward}, TYPES)
    assert config == Experiment("x", reward=Inner(window=Window(25)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewrad": 1}, r"rewrad: found a field that Experiment has not.*did you mean reward\?"),
        (
            {"reward": {"class": "Inner", "window": {"lenght": 3}}},
            r"reward\.window\.lenght: .*Window has not.*did you mean length\?",
        ),
        (
            {"reward": {"class": "Iner"}},
            r"reward: found class 'Iner', expected one of Constant, Inner; did you mean Inner\?",
        ),
        ({"reward": {"value": 1.0}}, r"reward: found \{'value': 1.0\}, expected Inner or Constant"),
        (
            {"reward": {"class": "Maze", "size": 1}},
            r"reward: found class 'Maze', expected one of Constant, Inner",
        ),
        (
            {"reward": {"class": "Constant", "value": "1"}},
            r"reward\.value: found '1' \(str\), expected float",
        ),
        (
            {"reward": {"class": "Constant", "value": True}},
            r"reward\.value: found True \(bool\), expected float",
        ),
        ({"clip": "x"}, r"clip: found 'x', expected float or null"),
        ({"fused": 1}, r"fused: found 1 \(int\), expected bool"),
        ({"limit": 1.5}, r"limit: found 1.5, expected int or str"),
        ({"colour": "RAD"}, r"colour: found 'RAD' \(str\), expected one of RED, BLUE; did you mean RED\?"),
        (
            {"extra": [{"class": "Window", "kind": "optmal"}]},
            r"extra\[0\]\.kind: found 'optmal', expected one of mixed, optimal; did you mean optimal\?",
        ),
        ({"extra": {}}, r"extra: found \{\} \(dict\), expected a list"),
        ({"reward": {"class": "Inner", "pair": ["a"]}}, r"reward\.pair: found 1 values, expected 2"),
        ({"env": {"class": "Constant"}}, r"env: found class 'Constant', expected one of Maze"),
        ({"env": {"class": "Maze"}}, r"env\.size: found nothing, expected a value \(Maze has no default\)"),
        (
            {"class": "os.system"},
            r"config: found class 'os.system', expected one of Constant, Experiment, Maze",
        ),
        ({"class": ["Experiment"]}, r"config: found class \['Experiment'\]"),
        ({"tags": {"a": "b"}}, r"tags\.a: found 'b' \(str\), expected int"),
        ({"name": "bad"}, "name is bad"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    value = {**to_json(Experiment("x")), **change}
    with pytest.raises(ConfigError, match=message):
        from_json(value, TYPES)


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match=r"config: found \[1\] \(list\)"):
        from_json([1], TYPES)


def test_each_run_has_a_folder_of_its_own(tmp_path):
    config = Experiment("x", clip=math.inf)
    runs = [create(tmp_path / "runs", "catrap_rta", config) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path.parent == tmp_path / "runs"
        assert run.path.name.startswith("catrap_rta-2")
        again, read = open_run(run.path, TYPES)
        assert (again, read) == (run, config)
        assert read_config(run.config, TYPES) == ("catrap_rta", config)


def test_the_files_of_a_run_lie_where_the_documentation_says(tmp_path):
    run = create(tmp_path, "c", Window())
    names = ["checkpoints", "demonstrations", "report.html", "config.json"]
    paths = [run.checkpoints, run.demonstrations, run.report, run.config]
    assert [str(path.relative_to(run.path)) for path in paths] == names


def test_opening_what_is_no_run_says_so(tmp_path):
    run = create(tmp_path, "catrap", Experiment("x"))
    with pytest.raises(ConfigError, match=f"did you mean {run.path.name}"):
        open_run(str(run.path)[:-1] + "x", TYPES)
    with pytest.raises(ConfigError, match="No such file"):
        open_run(tmp_path, TYPES)
    run.config.write_text("{}")
    with pytest.raises(ConfigError, match="no JSON with a name and a config"):
        open_run(run.path, TYPES)
    run.config.write_text('{"name": "c", "config": {"class": "Experiment", "nmae": 1}}')
    with pytest.raises(ConfigError, match=r"config\.json: nmae: .*did you mean name\?"):
        open_run(run.path, TYPES)


def test_json_is_written_whole_or_not_at_all(tmp_path):
    run = create(tmp_path, "c", Window())
    run.write_json("summary.json", {"rate": math.nan, "list": [1.0, math.inf, (2,)]})
    assert json.loads((run.path / "summary.json").read_text()) == {"rate": None, "list": [1.0, None, [2]]}
    with pytest.raises(TypeError):
        run.write_json("summary.json", {"rate": object()})
    assert json.loads((run.path / "summary.json").read_text())["list"] == [1.0, None, [2]]
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "summary.json"]


def test_an_unwritable_place_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StorageError, match=r"run folder in .*file/runs: cannot be written \(Not a directory\)"
    ):
        create(tmp_path / "file" / "runs", "c", Window())
    run = create(tmp_path, "c", Window())
    run.config.unlink()
    run.path.rmdir()
    with pytest.raises(StorageError, match=r"summary\.json: cannot be written"):
        run.write_json("summary.json", {})


def test_a_full_disk_is_a_storage_error(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        run = create(tmp_path, "c", Window())
        run.write_json("summary.json", {"x": 1})
        with pytest.raises(
            StorageError, match=r"summary.json: cannot be written \(No space left on device\)"
        ):
            run.write_json("summary.json", {"x": "y" * 100_000})
        assert json.loads((run.path / "summary.json").read_text()) == {"x": 1}
        run.write_json("summary.json", {"x": 2})
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


HOLDER = """
import sys, pathlib
from jaxreward.training.run_folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1]), "c").lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_cannot_work_on_one_run_and_a_killed_one_lets_go(tmp_path):
    run = create(tmp_path, "c", Window())
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"found another process \\(id {holder.pid}\\)"), run.lock():
            pass
        holder.kill()
        holder.wait()
        with run.lock():
            pass
    with run.lock():  # and again
        pass
