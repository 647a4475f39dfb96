"""`python -m jaxreward.train` as a person meets it: results, one-line errors before long work, exit codes."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import shutil
import signal

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict
from rich.console import Console

from jaxreward import train
from jaxreward.checkpoints.store import CheckpointStore
from jaxreward.command_line import run_command
from jaxreward.configs import CONFIGS
from jaxreward.data.video import encode_video
from jaxreward.envs import registry
from jaxreward.envs.catrap import art, levels
from jaxreward.models import lora, weights
from jaxreward.training import experiment, prepare_scorer, run_folder

TINY = (
    "--rank.steps=2 --rank.evaluate-every=1 --rank.batch-size=4 --rank.epochs=1 --rank.evaluation-clips=8 "
    "--rank.objective=soft_spearman --rank.clips.length=8 --rank.clips.stride=whole --videos.count=3 "
    "--env.num-envs=8 --env.max-episode-steps=32 --loop.rollout-length=16 --loop.score-chunk=8 "
    "--act.updates=6 --act.checkpoint-every=2 --eval-episodes=8 --agent.epochs=1 --agent.minibatches=1 "
    "--model.blocks=1 --model.convolutions 8 4 4 --videos.held-out-levels"
)


def execute(*arguments: object) -> int:
    """Runs the command in this process and returns its exit code."""
    return run_command(lambda: train.command([str(argument) for argument in arguments]))


def fingerprint(folder) -> dict[str, str]:
    """The hash of every file in a folder, the lock apart."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def assert_one_line(capsys, *words: str) -> None:
    """Standard error is one line that begins with 'error:' and names what it is about."""
    message = capsys.readouterr().err
    assert message.startswith("error: "), message
    assert message.endswith("\n")
    assert message.count("\n") == 1, message
    for word in words:
        assert word in message


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole tiny run: its summary as printed, and its folder."""
    runs = tmp_path_factory.mktemp("runs")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = execute("--config", "catrap_jax_rta", *TINY.split(), "--runs", runs, "--json")
    assert code == 0
    (folder,) = runs.iterdir()
    return json.loads(printed.getvalue().splitlines()[-1]), folder


@pytest.fixture
def unfinished(finished, tmp_path):
    """A copy of the tiny run as if it had been killed just before its evaluation."""
    folder = tmp_path / "copied"
    shutil.copytree(finished[1], folder)
    for name in ("result.json", "summary.json", "report.html"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def no_long_work(monkeypatch):
    """Makes recording, Stage 1, the preflight and acting fail at once: errors must come before them."""

    def refuse(*_, **__):
        raise AssertionError("long work began before the error was found")

    for name in ("demonstrate", "train_ranker", "train_vlm_ranker"):
        monkeypatch.setattr(prepare_scorer, name, refuse)
    for name in ("run_preflight", "act"):
        monkeypatch.setattr(experiment, name, refuse)


def test_the_last_line_is_the_summary(finished):
    summary, folder = finished
    assert {"heldout_rho", "success_rate", "success_interval"} <= set(summary)
    assert {"env_steps", "wall_seconds", "cpu_seconds", "run_dir"} <= set(summary)
    assert summary["run_dir"] == str(folder)
    assert summary["env_steps"] == 6 * 16 * 8
    assert -1 <= summary["heldout_rho"] <= 1
    low, high = summary["success_interval"]
    assert 0 <= low <= summary["success_rate"] <= high <= 1
    assert summary["wall_seconds"] > 0
    assert summary["cpu_seconds"] > 0
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_the_transfer_matrix_and_a_resumed_run_s_seconds(unfinished):
    written = json.loads((unfinished / "config.json").read_text())
    written["config"]["videos"]["transfer"] = ["02", "3"]
    (unfinished / "config.json").write_text(json.dumps(written))
    (unfinished / "seconds.json").write_text('{"wall_seconds": 1e6, "cpu_seconds": 2e6}')
    assert execute("--resume", unfinished) == 0
    rows = json.loads((unfinished / "transfer.json").read_text())["trained_on"]
    assert list(rows) == list(rows["02"]) == ["02", "03"]
    assert all(-1 <= rho <= 1 for row in rows.values() for rho in row.values())
    assert (unfinished / "transfer.png").read_bytes().startswith(b"\x89PNG")
    assert "transfer.png" in (unfinished / "report.html").read_text()
    summary = json.loads((unfinished / "summary.json").read_text())
    assert 1e6 < summary["wall_seconds"] < 1e6 + 1000
    assert 2e6 < summary["cpu_seconds"] < 2e6 + 1000


def test_a_vision_language_model_is_asked(tiny_chat_folder, tmp_path):
    """A random one says nothing that can be read, for which every episode pays -1."""
    small = [
        word for word in TINY.split() if not word.startswith(("--env.num", "--act", "--loop.r", "--eval"))
    ]
    code = execute(
        "--config=catrap_jax_rta", *small, "--scorer", tiny_chat_folder, "--no-preflight", "--runs", tmp_path,
        "--env.num-envs=2", "--env.max-episode-steps=16", "--loop.rollout-length=16", "--act.updates=2",
        "--act.checkpoint-every=2", "--reward.frames=3", "--vlm.max-new-tokens=8", "--vlm.dtype=float32",
        "--eval-episodes=2",
    )  # fmt: skip
    assert code == 0
    (folder,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/parse_failure_share"] for row in rows] == [1, 1]
    assert rows[0]["reward/queries"] == 4
    assert [row["return"] for row in rows] == [-1, -1]


TINY_VLM = (
    "--vlm.no-describe --vlm.max-new-tokens=32 --vlm-rank.format-steps=1 --vlm-rank.steps=2 "
    "--vlm-rank.batch-size=2 --vlm-rank.group-size=2 --vlm-rank.evaluate-every=2 "
    "--vlm-rank.evaluation-clips=2 --vlm-rank.clips.length=4 --vlm-rank.clips.stride=whole "
    "--vlm-rank.grpo.minibatch-size=2 --videos.count=3 --videos.held-out-levels --env.num-envs=2 "
    "--env.max-episode-steps=16 --loop.rollout-length=16 --act.updates=1 --agent.epochs=1 "
    "--agent.minibatches=1 --reward.frames=3 --eval-episodes=2 --no-preflight"
)


def test_a_vision_language_model_is_taught(tiny_chat_folder, tmp_path, monkeypatch, capsys):
    """Ctrl-C between updates, then resumed; another run then takes the adapter, or refuses a damaged one."""
    arguments = ["--config=catrap_vlm_rta", "--vlm.model", tiny_chat_folder, *TINY_VLM.split()]
    learnt = prepare_scorer._learnt

    def strike(metrics):
        if "reward" in metrics:
            signal.raise_signal(signal.SIGINT)
        return learnt(metrics)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_scorer, "_learnt", strike)
        assert execute(*arguments, "--runs", tmp_path / "taught") == 130
    (taught,) = (tmp_path / "taught").iterdir()
    assert not (taught / "scorer").exists()
    assert CheckpointStore(taught / "checkpoints" / "rank").read_metadata()["step"] == 2
    assert execute("--resume", taught) == 0
    rows = [json.loads(line) for line in (taught / "rank_metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 3]
    assert ["reward" in row for row in rows] == [False, False, True]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    samples = [json.loads(line) for line in (taught / "rank_samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [3, 3]
    assert -1 <= json.loads((taught / "summary.json").read_text())["heldout_rho"] <= 1
    found, _ = lora.load(taught / "scorer", weights.load(tiny_chat_folder).architecture)
    assert any(np.any(array) for path, array in flatten_dict(found).items() if path[-1] == "b")
    capsys.readouterr()
    assert execute(*arguments, "--scorer", taught, "--runs", tmp_path / "taken") == 0
    assert "Stage 1 (rank)" not in capsys.readouterr().out
    card = taught / "scorer" / "scorer.json"
    card.write_text("{}")
    assert execute(*arguments, "--scorer", taught, "--runs", tmp_path / "refused") == 2
    assert_one_line(capsys, str(card), "model")


def test_a_model_that_is_nowhere_to_be_found(tmp_path, capsys, no_long_work):
    missing = tmp_path / "no_model"
    assert execute("--config=catrap_vlm_rta", "--vlm.model", missing, "--runs", tmp_path / "runs") == 2
    assert_one_line(capsys, str(missing), "config.json")
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", '{"model_type": "gpt2"}', ("gpt2", "qwen3_vl")),
        ("model.safetensors", "no tensors", ("model.safetensors", "truncated or damaged")),
    ],
)
def test_model_folders_that_cannot_be_used(
    tiny_chat_folder, tmp_path, capsys, no_long_work, name, content, words
):
    copied = tmp_path / "model"
    shutil.copytree(tiny_chat_folder, copied)
    (copied / name).write_text(content)
    assert execute("--config=catrap_jax_rta", "--scorer", copied, "--runs", tmp_path / "runs") == 2
    assert_one_line(capsys, *words)


def test_a_run_leaves_its_files(finished):
    _, folder = finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["env_steps"] for row in rows] == [128 * n for n in range(1, 7)]
    assert CheckpointStore(folder / "checkpoints").steps() == [2, 4, 6]
    kinds = json.loads((folder / "preflight.json").read_text())["kinds"]
    assert set(kinds) == {"expert", "reversed", "frozen", "slow", "random"}
    assert kinds["expert"]["mean"] > kinds["reversed"]["mean"]
    assert "<h1>catrap_jax_rta</h1>" in (folder / "report.html").read_text()
    assert len(list((folder / "demonstrations").glob("*/*.mp4"))) == 3
    assert list((folder / "videos").glob("*.mp4"))


def test_the_config_of_a_former_run_can_be_used_again(finished):
    _, folder = finished
    name, config = train.find_config(str(folder / "config.json"))
    expected = train.override(CONFIGS["catrap_jax_rta"], TINY.split(), "train")
    assert (name, config) == ("catrap_jax_rta", expected)
    changed = train.override(config, ["--act.updates", "9"], "train")
    assert changed == dataclasses.replace(expected, act=dataclasses.replace(expected.act, updates=9))


def test_list_and_help(capsys):
    assert execute("--list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CONFIGS)
    assert execute("--help") == 0
    assert "--resume RUN" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        execute("--config", "catrap_rta", "--help")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--env.num-envs" in shown
    assert "--reward.frequency" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "catrap_jax_rtaa"], ["catrap_jax_rtaa", "did you mean", "catrap_jax_rta"]),
        (["--config"], ["--config needs a value"]),
        (["--runs", "elsewhere"], ["--config"]),
        (["nonsense"], ["nonsense"]),
        (["--config", "catrap_jax_rta", "--act.update", "3"], ["--act.update'", "act.updates"]),
        (["--config", "catrap_jax_rta", "--env.levle=3"], ["--env.levle'", "env.level"]),
        (["--config", "catrap_jax_rta", "--act.updates", "many"], ["act.updates", "many"]),
        (["--config", "catrap_jax_rta", "--act.updates", "0"], ["act.updates is 0", "at least 1"]),
        (["--config", "catrap_jax_rta", "--reward.mode", "windows"], ["reward.mode", "windows", "window"]),
        (["--config", "catrap_jax_rta", "--loop.rollout-length", "0"], ["loop.rollout_length is 0"]),
        (["--config", "catrap_jax_rta", "--videos.held-out", "1.0"], ["videos.held_out is 1.0"]),
        (["--config", "catrap_jax_rta", "--videos.count", "0"], ["videos.count is 0"]),
        (["--config", "catrap_jax_rta", "--env", "catrip:3"], ["catrip", "catrap"]),
        (["--config", "nowhere/config.json"], ["nowhere/config.json", "cannot be read"]),
        (["--resume", "nowhere"], ["nowhere", "no such folder"]),
        (["--resume", "nowhere", "--config", "catrap_jax_rta"], ["--resume", "no other option"]),
        (["--config", "catrap_jax_rta", "--env.level", "99"], ["'99'"]),
        (["--config", "catrap_jax_rta", "--videos.held-out-levels", "98"], ["'98'"]),
        (["--config", "catrap_jax_rta", "--env.num-envs", "0"], ["num_envs is 0"]),
        (["--config", "catrap_jax_rta", "--agent.minibatches", "7"], ["agent.minibatches is 7"]),
        (["--config", "catrap_jax_rta", "--scorer", "nowhere/scorer"], ["nowhere/scorer", "cannot be read"]),
        (["--config", "catrap_jax_rta", "--env", "gymnax:CartPole-v1"], ["network.body", "'mlp'"]),
        (
            ["--config", "catrap_jax_rta", "--env", "gymnax:CartPole-v1", "--agent.network.body", "mlp"],
            ["--videos DIR"],
        ),
        (["--config", "catrap_rta", "--env.workers", "9999"], ["workers is 9999"]),
        (["--config", "catrap_jax_rta", "--videos", "--seed", "1"], ["--videos needs"]),
        (["--config", "catrap_jax_rta", "--json=false"], ["--json takes no value", "false"]),
        (["--config", "catrap_jax_rta", "--env", "gymnasium:"], ["gymnasium:", "a name"]),
        (["--config", "catrap_jax_rta", "--seed", "-1"], ["seed is -1"]),
        (["--config", "x" * 300], ["there is no config", "--list"]),
        (["--config", "catrap_jax_rta", "--env.level", "y" * 300], ["no level"]),
        (["--config", "catrap_jax_rta", "--videos.transfer", "02", "97"], ["'97'"]),
        (["--config", "catrap_rta", "--env.rom", "nowhere.gb"], ["nowhere.gb", "cannot be read"]),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(tmp_path, capsys, no_long_work, arguments, words):
    runs = tmp_path / "runs"
    if "--runs" not in arguments:
        arguments = [*arguments, *([] if "--resume" in arguments else ["--runs", runs])]
    assert execute(*arguments) == 2
    assert_one_line(capsys, *words)
    assert not runs.exists() or not list(runs.iterdir())


def level_file(path, *, winnable: bool, malformed: bool = False):
    """A level of one cat and one walker on a floor, with a wall between them if it is not to be won."""
    shipped = levels.draw_level(levels.load_level("01").cells)
    rows = [line for line in shipped.splitlines() if line and not line.startswith(";")]
    if malformed:
        rows[3] = rows[3][:-1] + "?"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_malformed_level(tmp_path, capsys, no_long_work):
    path = level_file(tmp_path / "broken.txt", winnable=True, malformed=True)
    arguments = ["--config", "catrap_jax_rta", "--env.level", path, "--runs", tmp_path / "runs"]
    assert execute(*arguments) == 2
    assert_one_line(capsys, "broken.txt, line 4, column 10", "'?'")
    assert not list((tmp_path / "runs").iterdir())


def test_a_level_that_cannot_be_won(tmp_path, capsys, no_long_work):
    wall = next(c for c, v in art.CHARACTERS.items() if v == art.WALL)
    rows = [wall * 10] + [wall + "." * 3 + wall + "." * 4 + wall] * 6
    rows += [wall + ".@." + wall + "..m." + wall, wall * 10]
    path = tmp_path / "hopeless.txt"
    path.write_text("\n".join(rows) + "\n")
    for config in ("catrap_jax_rta", "catrap_rta"):
        assert execute("--config", config, "--env.level", path, "--runs", tmp_path / "runs") == 2
        assert_one_line(capsys, "hopeless.txt", "cannot be won")
    assert not list((tmp_path / "runs").iterdir())


def test_two_levels_of_one_name(tmp_path, capsys, no_long_work):
    for folder, shipped in (("a", "02"), ("b", "03")):
        (tmp_path / folder).mkdir()
        drawn = levels.draw_level(levels.load_level(shipped).cells)
        (tmp_path / folder / "mine.txt").write_text(drawn)
    both = f"{tmp_path / 'a' / 'mine.txt'},{tmp_path / 'b' / 'mine.txt'}"
    assert execute("--config=catrap_jax_rta", "--env.level", both, "--runs", tmp_path / "runs") == 2
    assert_one_line(capsys, "different levels with the name 'mine'")


def test_a_single_video_leaves_none_to_hold_out(tmp_path):
    frames = np.zeros((9, 36, 40, 3), np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None, None] * 20
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "one.mp4").write_bytes(encode_video(frames, 10))
    config = CONFIGS["catrap_jax_rta"]
    videos = dataclasses.replace(config.videos, folders=(str(tmp_path / "videos"),))
    rank = dataclasses.replace(config.rank, clips=dataclasses.replace(config.rank.clips, length=8))
    config = dataclasses.replace(config, videos=videos, rank=rank)
    run = run_folder.create(tmp_path / "runs", "tiny", config)
    console = Console(file=io.StringIO())
    environment = registry.make(config.env)
    sets = prepare_scorer.read_videos(config, environment, run, console, lambda: False)
    assert set(sets) == {"train"}
    assert "no video is held out" in console.file.getvalue()


def test_paths_become_absolute_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a level")
    (tmp_path / "02").write_text("not a level")
    base = CONFIGS["catrap_jax_rta"]
    config = dataclasses.replace(base, env=dataclasses.replace(base.env, level="mine.txt, 02"))
    found = train.with_absolute_paths(config)
    assert found.env.level == f"{tmp_path / 'mine.txt'},02"
    assert found.scorer == "train"


def test_a_rom_that_is_none(tmp_path, capsys, no_long_work):
    rom = tmp_path / "game.gb"
    arguments = ["--config", "catrap_rta", "--env.rom", rom, "--runs", tmp_path / "runs"]
    rom.write_bytes(b"no game")
    assert execute(*arguments) == 2
    assert_one_line(capsys, "game.gb", "not a Game Boy ROM", "7 bytes")
    rom.write_bytes(bytes(0x8000))  # the right size, but no header
    assert execute(*arguments) == 2
    assert_one_line(capsys, "game.gb", "header checksum")
    assert not list((tmp_path / "runs").iterdir())


def video(frames: int, shade: int = 0) -> bytes:
    """A video in which every frame differs from the one before."""
    values = (np.arange(frames) * 7 + shade) % 256
    pictures = np.broadcast_to(values[:, None, None, None].astype(np.uint8), (frames, 36, 40, 3))
    return encode_video(np.ascontiguousarray(pictures), 10)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, ["videos", "no such folder"]),
        ("a file", ["videos", "it is a file"]),
        ({}, ["videos", "no video"]),
        ({"notes.txt": b"words"}, ["videos", "no video"]),
        ({"cut.mp4": video(40)[:400]}, ["cut.mp4"]),
        ({"empty.mp4": b""}, ["empty.mp4", "empty"]),
        ({"short.mp4": video(4), "shorter.mp4": video(3)}, ["short.mp4", "4 frames"]),
    ],
)
def test_videos_that_cannot_be_used(tmp_path, capsys, no_long_work, files, words):
    folder = tmp_path / "videos"
    if isinstance(files, str):
        folder.write_text(files)
    elif files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    before = fingerprint(folder) if folder.is_dir() else None
    code = execute("--config", "catrap_jax_rta", "--videos", folder, "--runs", tmp_path / "runs")
    assert code == 2
    assert_one_line(capsys, *words)
    assert not list((tmp_path / "runs").iterdir())
    assert before is None or fingerprint(folder) == before


def test_a_run_folder_that_cannot_be_made(tmp_path, capsys, no_long_work):
    (tmp_path / "runs").write_text("a file")
    assert execute("--config", "catrap_jax_rta", "--runs", tmp_path / "runs") == 2
    assert_one_line(capsys, "runs", "cannot be written")


def test_a_scorer_that_is_damaged(finished, tmp_path, capsys, no_long_work):
    scorer = tmp_path / "scorer"
    shutil.copytree(finished[1] / "scorer", scorer)
    weights = scorer / "scorer.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 0xFF
    weights.write_bytes(bytes(content))
    code = execute(
        "--config", "catrap_jax_rta", "--scorer", scorer / "scorer.json", "--runs", tmp_path / "runs"
    )
    assert code == 2
    assert_one_line(capsys, "scorer.safetensors")
    assert not list((tmp_path / "runs").iterdir())


def test_a_scorer_for_frames_of_another_size(finished, tmp_path, capsys, no_long_work):
    code = execute(
        *("--config", "catrap_rta", "--scorer", finished[1], "--env.frame-scale", 8, "--env.num-envs", 8),
        *("--env.workers", 0, "--runs", tmp_path / "runs"),
    )
    assert code == 2
    assert_one_line(capsys, "frames")
    assert not list((tmp_path / "runs").iterdir())


def test_a_damaged_checkpoint_is_refused_and_nothing_is_touched(unfinished, capsys, no_long_work):
    arrays = max((unfinished / "checkpoints" / "6").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(arrays.read_bytes())
    for place in range(len(content) // 4, len(content), len(content) // 8):
        content[place] ^= 0xFF
    arrays.write_bytes(bytes(content))
    before = fingerprint(unfinished)
    assert execute("--resume", unfinished) == 2
    assert_one_line(capsys, "checkpoint 6", "damaged")
    assert fingerprint(unfinished) == before


def test_the_checkpoint_of_another_network_is_refused(unfinished, capsys, no_long_work):
    file = unfinished / "config.json"
    config = json.loads(file.read_text())
    config["config"]["agent"]["network"]["cnn_layers"] = [[24, 4, 4]]
    file.write_text(json.dumps(config))
    before = fingerprint(unfinished)
    assert execute("--resume", unfinished) == 2
    assert_one_line(capsys, "checkpoint 6", "found float32", "expected float32", "24")
    assert fingerprint(unfinished) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["config.json"]),
        ('{"name": "x", "config": {"class": "ExperimentConfig", "sede": 1}}', ["sede", "did you mean seed"]),
    ],
)
def test_a_run_whose_config_is_damaged(unfinished, capsys, no_long_work, content, words):
    (unfinished / "config.json").write_text(content)
    before = fingerprint(unfinished)
    assert execute("--resume", unfinished) == 2
    assert_one_line(capsys, *words)
    assert fingerprint(unfinished) == before


@pytest.mark.slow  # compiles acting anew
def test_a_full_disk_leaves_the_former_checkpoint(unfinished, capsys, monkeypatch):
    shutil.rmtree(unfinished / "checkpoints" / "6")
    file = unfinished / "config.json"
    config = json.loads(file.read_text())
    config["config"]["preflight"] = False
    file.write_text(json.dumps(config))

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {k: v for k, v in fingerprint(unfinished).items() if k.startswith("checkpoints")}
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", fail)
        assert execute("--resume", unfinished) == 2
    assert_one_line(capsys, "checkpoint 6", "No space left on device", "checkpoint (4) is untouched")
    after = {k: v for k, v in fingerprint(unfinished).items() if k.startswith("checkpoints")}
    assert after == before
    assert CheckpointStore(unfinished / "checkpoints").latest_step() == 4


def test_a_run_that_another_process_works_on(unfinished, capsys, no_long_work):
    folder, _ = train.open_run(unfinished, train.dataclass_types(experiment.ExperimentConfig))
    with folder.lock():
        assert execute("--resume", unfinished) == 2
    assert_one_line(capsys, "another process", str(os.getpid()))
