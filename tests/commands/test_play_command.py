"""`python -m jaxreward.play` as a person meets it: it plays, writes a video, and says what is wrong."""

import contextlib
import dataclasses
import io
import json
import shutil

import av
import jax
import numpy as np
import pytest

from jaxreward import play, train
from jaxreward.command_line import run_command

# The cheapest run that has a policy and a scorer: symbols for the one, no training for the other.
TINY = (
    "--config=catrap_jax_rta_symbolic --scorer=untrained --videos.count=2 --no-preflight --env.num-envs=4 "
    "--env.level=1 --env.max-episode-steps=12 --loop.rollout-length=8 --act.updates=2 --eval-episodes=4 "
    "--agent.epochs=1 --agent.minibatches=1 --model.blocks=1 --json"
)


def execute(*arguments: object) -> int:
    """Runs the command in this process and returns its exit code."""
    return run_command(lambda: play.command([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run."""
    runs = tmp_path_factory.mktemp("runs")
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_command(lambda: train.command([*TINY.split(), "--runs", str(runs)])) == 0
    (folder,) = runs.iterdir()
    return folder


def assert_one_line(capsys, *words: str) -> None:
    """Standard error is one line that begins with 'error:' and names what it is about."""
    message = capsys.readouterr().err
    assert message.startswith("error: "), message
    assert message.count("\n") == 1, message
    for word in words:
        assert word in message


def test_plays_and_writes_a_video(run, tmp_path, capsys):
    video = tmp_path / "episode.mp4"
    assert execute(run, "--episodes", 5, "--video", video, "--json") == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["episodes"] == 8  # a multiple of the four environments
    assert summary["update"] == 2
    assert summary["run"] == str(run)
    low, high = summary["success_interval"]
    assert 0 <= low <= summary["success_rate"] <= high <= 1
    assert "8 episodes of the policy after update 2" in " ".join(printed.err.split())
    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert 2 <= len(frames) <= 13  # the first picture and one a step
    height, width, _ = frames[0].shape
    assert height > 144  # the screen with a line of text below it
    assert width >= 160
    # The same key plays the same episodes.
    assert execute(run, "--episodes", 5, "--json") == 0
    del summary["video"]
    assert json.loads(capsys.readouterr().out) == summary


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}/nowhere"], ["nowhere", "no such folder"]),
        (["{run}/checkpoints"], ["config.json", "cannot be read"]),
        (["{run}", "--episodes", "0"], ["--episodes is 0"]),
        (["{run}", "--episodes", "many"], ["many"]),
        (["{run}", "--seed", "7"], ["seed_7"]),
        (["{run}", "--env", "catrip"], ["catrip", "catrap"]),
        (["{run}", "--env", "gymnax:CartPole-v1"], ["network.body", "float32 (4,)"]),
        (["{run}", "--vido", "a.mp4"], ["vido"]),
        ([], ["run"]),
    ],
)
def test_what_a_user_can_mend_is_one_line(run, capsys, arguments, words):
    assert execute(*(argument.format(run=run) for argument in arguments)) == 2
    assert_one_line(capsys, *words)


def test_plays_in_another_environment_of_the_same_form(run, capsys):
    """Other numbers of environments and another time limit give the training state other shapes."""
    config = play.registry.parse("catrap:1")
    assert (config.num_envs, config.max_episode_steps) != (4, 12)
    _, experiment_config = play.open_run(run, play.dataclass_types(play.ExperimentConfig))
    other = dataclasses.replace(experiment_config.env, num_envs=2, max_episode_steps=20)
    environment = play.registry.make(other)
    _, state, update = play.latest_state(experiment_config, environment, run)
    assert update == 2
    original = play.latest_state(experiment_config, play.registry.make(experiment_config.env), run)[1]
    jax.tree.map(np.testing.assert_array_equal, state.params, original.params)


def test_a_video_that_cannot_be_written(run, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert execute(run, "--episodes", 1, "--video", tmp_path / "file" / "episode.mp4") == 2
    assert_one_line(capsys, "episode.mp4", "cannot be written")


def test_a_run_without_a_checkpoint(run, tmp_path, capsys):
    shutil.copy(run / "config.json", tmp_path)
    assert execute(tmp_path) == 2
    assert_one_line(capsys, "no checkpoint yet", "--resume")
