"""Rules of the house that hold for every file, checked on the source."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxreward", "agents", "envs", "checkpoints")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# who may read the environment's own reward, or the engine's state in `info`
READERS_OF_ENV_REWARD = (
    "envs/",
    "jaxreward/evaluation/",
    "jaxreward/rewards/environment_reward.py",
    "jaxreward/rewards/success.py",
    "jaxreward/rewards/noise.py",
    "jaxreward/training/episodes.py",  # the metrics of a run
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


def installed_layout(folder: Path) -> Path:
    """Lays the packages out as a wheel does, which is how the import contracts name them."""
    for package in PACKAGES:
        inside = folder / "jaxreward" / ("" if package == "jaxreward" else package)
        for path in (ROOT / package).rglob("*.py"):
            target = inside / path.relative_to(ROOT / package)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    return folder


def run_import_linter(folder: Path) -> subprocess.CompletedProcess:
    command = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    options = [str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
    return subprocess.run(
        [sys.executable, "-c", command, *options], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_imports_go_down_the_floors(tmp_path):
    result = run_import_linter(installed_layout(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("agents/offender.py", "jaxreward.envs.base"),
        ("models/offender.py", "jaxreward.scorers.base"),
        ("unplaced.py", "jaxreward.types"),
    ],
)
def test_the_import_contracts_notice_an_offender(tmp_path, module, imported):
    folder = installed_layout(tmp_path)
    (folder / "jaxreward" / module).write_text(f"import {imported}\n")
    result = run_import_linter(folder)
    assert result.returncode == 1
    assert module.removesuffix(".py").split("/")[-1] in result.stdout


@pytest.mark.parametrize("package", ["agents", "envs", "checkpoints"])
def test_the_top_level_folders_refuse_their_bare_names(package):
    result = subprocess.run(
        [sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert f"ImportError: import this package as jaxreward.{package}" in result.stderr


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_can_run_what_a_file_or_a_model_says(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            assert not {m.split(".")[0] for m in modules} & FORBIDDEN_MODULES, f"line {node.lineno}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"line {node.lineno}"
            for keyword in node.keywords:
                allows = keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False
                assert not allows, f"line {node.lineno}"


def public_definitions(body: list[ast.stmt], prefix: str = ""):
    """Functions and classes of a module and of its public classes, without what functions hold."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_whatever_is_public_has_a_docstring(path):
    module = parse(path)
    assert ast.get_docstring(module), "the module has no docstring"
    missing = [name for name, node in public_definitions(module.body) if not ast.get_docstring(node)]
    assert not missing


def reads_of_env_reward(module: ast.Module) -> list[str]:
    """Lines that read a time step's `env_reward` or its `info` (building one by keyword reads nothing)."""
    called = {id(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(module):
        read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in called
        if read and node.attr in ("env_reward", "info"):
            found.append(f"line {node.lineno}: .{node.attr}")
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "info":
            found.append(f"line {node.lineno}: info[...]")
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_oracles_and_evaluation_read_the_environments_own_reward(path):
    if not name_of(path).startswith(READERS_OF_ENV_REWARD):
        assert reads_of_env_reward(parse(path)) == []


def test_a_read_of_the_environments_own_reward_is_noticed():
    assert len(reads_of_env_reward(ast.parse("x = t.env_reward\ny = t.info['k']\nz = info['k']"))) == 3
    assert reads_of_env_reward(ast.parse("T(env_reward=r, info={}); log.info('k'); s.uses_env_reward")) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_path_of_anyones_machine_is_in_the_source(path):
    text = path.read_text(encoding="utf-8")
    home = os.path.expanduser("~") + os.sep
    assert not [part for part in (home, str(ROOT) + os.sep, "/home/", "/root/", "/Users/") if part in text]
