"""A run that is killed or interrupted at any moment and resumed equals an uninterrupted one, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxreward.command_line import dataclass_types
from jaxreward.envs import registry
from jaxreward.metrics.recorder import is_timing, read_metrics
from jaxreward.training.experiment import ExperimentConfig, latest_state
from jaxreward.training.run_folder import open_run

pytestmark = pytest.mark.slow

UPDATES = 24
TINY = (
    "--rank.steps=6 --rank.evaluate-every=1 --rank.batch-size=4 --rank.epochs=1 --rank.evaluation-clips=8 "
    "--rank.clips.length=8 --rank.clips.stride=whole --videos.count=4 --env.num-envs=8 "
    "--env.max-episode-steps=16 --loop.rollout-length=12 --loop.score-chunk=8 --act.checkpoint-every=3 "
    f"--act.updates={UPDATES} --act.keep-checkpoints=100 --eval-episodes=8 --agent.epochs=2 "
    "--agent.minibatches=2 --model.blocks=1 --videos.held-out-levels"
)
CONFIGS = {"catrap_jax_rta": "", "catrap_rta": "--env.workers 1 "}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the command in a process of its own; what one compiles serves the next."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start(*arguments: object) -> subprocess.Popen:
        command = [sys.executable, "-m", "jaxreward.train", *(str(a) for a in arguments)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | cache
        )

    return start


def start_run(start, name: str, runs) -> subprocess.Popen:
    """Starts a new tiny run in a folder for it alone."""
    return start("--config", name, *(CONFIGS[name] + TINY).split(), "--runs", runs)


def finish(process: subprocess.Popen) -> None:
    """Waits for a process that must succeed."""
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed


def wait_for(process: subprocess.Popen, runs, pattern: str):
    """Waits until the run has made a file; returns the run's folder."""
    deadline = time.monotonic() + 300
    while not (found := list(runs.glob(f"*/{pattern}"))):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{pattern} did not appear"
        time.sleep(0.002)
    assert found
    (folder,) = runs.iterdir()
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def uninterrupted(request, start, tmp_path_factory):
    """The name of a config, and the folder of its run that nothing disturbed."""
    runs = tmp_path_factory.mktemp("uninterrupted")
    finish(start_run(start, request.param, runs))
    (folder,) = runs.iterdir()
    return request.param, folder


def agent_of(folder):
    """All leaves of the newest checkpoint's agent: parameters, optimiser, counters."""
    _, config = open_run(folder, dataclass_types(ExperimentConfig))
    environment = registry.make(config.env)
    try:
        _, state, update = latest_state(config, environment, folder)
    finally:
        if not environment.on_device:
            environment.close()
    assert update == UPDATES
    return jax.tree.leaves_with_path(state)


def without_times(row: dict) -> dict:
    """A row of metrics without what may differ."""
    return {name: value for name, value in row.items() if not is_timing(name)}


def assert_equal_runs(folder, expected) -> None:
    """Agent, metrics, scorer and evaluation are the same, bit for bit."""
    for (path, found), (_, wanted) in zip(agent_of(folder), agent_of(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert found.dtype == wanted.dtype, name
        if jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key):
            found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), err_msg=name)
    rows, wanted_rows = read_metrics(folder), read_metrics(expected)
    assert [row["update"] for row in rows] == list(range(1, UPDATES + 1))
    assert [without_times(row) for row in rows] == [without_times(row) for row in wanted_rows]
    scorers = [f / "scorer" / "scorer.safetensors" for f in (folder, expected)]
    assert scorers[0].read_bytes() == scorers[1].read_bytes()
    results = [json.loads((f / "result.json").read_text()) for f in (folder, expected)]
    assert results[0]["sampled"] == results[1]["sampled"]
    assert results[0]["greedy"] == results[1]["greedy"]


@pytest.mark.parametrize("moment", ["before acting", "while acting", "late"])
def test_a_killed_run_resumes_to_the_same_result(uninterrupted, start, tmp_path, moment):
    name, expected = uninterrupted
    chance = random.Random()  # a new moment every time; the message of a failure says which
    checkpoint = chance.choice(range(3, UPDATES - 3, 3))
    pattern = {
        "before acting": chance.choice(
            ["demonstrations/*/*.mp4", "checkpoints/rank/2", "checkpoints/rank/5"]
        ),
        "while acting": f"checkpoints/{checkpoint}",
        "late": f"checkpoints/{UPDATES}",
    }[moment]
    pause = chance.uniform(0, 0.3 if moment != "while acting" else 0.1)
    process = start_run(start, name, tmp_path)
    try:
        folder = wait_for(process, tmp_path, pattern)
        time.sleep(pause)
    finally:
        process.kill()
        process.communicate()
    print(f"killed {pause:.3f} s after {pattern} appeared")
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    finish(start("--resume", folder))
    assert_equal_runs(folder, expected)


def test_ctrl_c_saves_and_the_run_goes_on(uninterrupted, start, tmp_path):
    name, expected = uninterrupted
    process = start_run(start, name, tmp_path)
    try:
        folder = wait_for(process, tmp_path, "checkpoints/6")
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert f"--resume {folder}" in printed
    saved = [int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdecimal()]
    assert 6 <= max(saved) < UPDATES
    finish(start("--resume", folder))
    if name == "catrap_jax_rta":  # a simulator starts new episodes at the extra checkpoint
        assert_equal_runs(folder, expected)
    else:
        assert [row["update"] for row in read_metrics(folder)] == list(range(1, UPDATES + 1))
