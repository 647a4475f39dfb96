"""Demonstrations: the emulator against the JAX rules, and folders that are resumed, damaged or foreign."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from jaxreward.data.video import VideoOptions, read_folder, read_video
from jaxreward.envs.catrap import levels
from jaxreward.envs.pyboy_worker import Emulator
from jaxreward.errors import ConfigError, DataError, SimulatorError, StorageError
from jaxreward.training import demonstrate as module
from jaxreward.training.demonstrate import KINDS, MANIFEST, DemonstrateConfig, demonstrate


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    config = DemonstrateConfig(out=tmp_path_factory.mktemp("recorded"), level="1", count=6)
    return config, demonstrate(config)


def copy_of(recorded, folder):
    """The recorded folder again, to be changed at will."""
    config, _ = recorded
    for path in config.out.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(config.out)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return dataclasses.replace(config, out=folder)


def test_what_is_recorded_is_what_is_described(recorded):
    config, done = recorded
    document = json.loads((config.out / MANIFEST).read_text())
    assert document["seed"] == 0
    assert document["actions"][:4] == ["right", "left", "up", "down"]
    assert [video["file"] for video in document["videos"]] == [video.file for video in done.videos]
    assert [video.kind for video in done.videos] == [*KINDS, *KINDS]
    assert done.recorded == 6
    for video in done.videos:
        content = (config.out / video.file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == video.sha256
        frames = read_video(config.out / video.file, VideoOptions(drop_duplicates=False)).frames
        assert frames.shape == (video.frames, 144, 160, 3)
        assert video.frames == len(video.moves) + 1
        assert len(video.moves) == video.optimal or video.kind != "optimal"
    assert len(read_folder(config.out, options=VideoOptions(on_bad="refuse")).videos) == 6


def test_videos_show_the_game_at_rest(recorded):
    """Replayed by hand on the emulator: one picture a step, from the start to the win."""
    config, done = recorded
    video = done.videos[2]
    frames = read_video(config.out / video.file, VideoOptions(drop_duplicates=False)).frames
    emulator = Emulator(level=levels.load_level(1).cells)
    emulator.reset()
    np.testing.assert_array_equal(frames[0], emulator.picture())
    for move, frame in zip(video.moves, frames[1:], strict=True):
        assert emulator.monsters > 0
        emulator.step(move)
        np.testing.assert_array_equal(frame, emulator.picture())
    assert emulator.monsters == 0
    emulator.close()


def test_both_backends_give_the_same_files(recorded, tmp_path):
    config, done = recorded
    by_rules = demonstrate(dataclasses.replace(config, out=tmp_path, backend="jax"))
    played = [dataclasses.replace(video, cartridge_sha256=None) for video in done.videos]
    assert list(by_rules.videos) == played  # hashes of the files included


def test_nothing_is_recorded_twice(recorded):
    config, done = recorded
    seen = []
    again = demonstrate(config, lambda *now: seen.append(now))
    assert (again.recorded, again.videos, seen) == (0, done.videos, [(6, 6)])


def test_more_videos_and_other_kinds_are_added(recorded, tmp_path):
    config = copy_of(recorded, tmp_path)
    more = demonstrate(dataclasses.replace(config, count=8))
    assert more.recorded == 2
    assert more.videos[:6] == recorded[1].videos
    optimal = demonstrate(dataclasses.replace(config, kind="optimal", count=3))
    assert optimal.recorded == 2  # index 0 of 'mixed' is the same video
    assert len(json.loads((tmp_path / MANIFEST).read_text())["videos"]) == 10


def test_missing_and_damaged_videos_are_recorded_again(recorded, tmp_path):
    config = copy_of(recorded, tmp_path)
    files = [tmp_path / video.file for video in recorded[1].videos]
    files[1].unlink()
    files[4].write_bytes(files[4].read_bytes()[:-100])
    again = demonstrate(config)
    assert again.recorded == 2
    assert again.videos == recorded[1].videos


def test_an_interruption_leaves_a_folder_that_can_be_resumed(recorded, tmp_path):
    config = dataclasses.replace(recorded[0], out=tmp_path)

    def interrupt(ready, total):
        if ready == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demonstrate(config, interrupt)
    assert len(json.loads((tmp_path / MANIFEST).read_text())["videos"]) == 3
    assert not list(tmp_path.rglob(".*"))
    rest = demonstrate(config)
    assert rest.recorded == 3
    assert rest.videos == recorded[1].videos


def test_a_new_cartridge_records_anew(recorded, tmp_path, monkeypatch):
    config = copy_of(recorded, tmp_path)
    image = bytearray(module.cartridge.ROM.read_bytes())
    image[-1] ^= 1
    (tmp_path / "other.gb").write_bytes(image)
    monkeypatch.setattr(module.cartridge, "ROM", tmp_path / "other.gb")
    again = demonstrate(config)
    assert again.recorded == 6
    assert [video.sha256 for video in again.videos] == [video.sha256 for video in recorded[1].videos]


def test_worker_processes_give_the_same_files(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 3)
    done = demonstrate(dataclasses.replace(recorded[0], out=tmp_path, workers=2))
    assert done.videos == recorded[1].videos


def test_seeds_differ(recorded, tmp_path):
    other = demonstrate(dataclasses.replace(recorded[0], out=tmp_path, seed=1))
    assert [video.moves for video in other.videos] != [video.moves for video in recorded[1].videos]


def test_a_drawn_level(tmp_path):
    rows = ["##########"] * 5 + ["#@......m#"] + ["##########"] * 3
    drawing = "\n".join(rows)
    (tmp_path / "mine.txt").write_text(drawing)
    config = DemonstrateConfig(out=tmp_path / "out", level=str(tmp_path / "mine.txt"), count=1)
    first = demonstrate(config)
    assert first.videos[0].file == "mine/0000_optimal.mp4"
    (tmp_path / "mine.txt").write_text(drawing.replace("#@.", "#.@"))
    changed = demonstrate(config)
    assert changed.recorded == 1  # under the same name there is another level now
    assert changed.videos[0].level_sha256 != first.videos[0].level_sha256


def test_what_cannot_be_recorded(recorded, tmp_path):
    config = dataclasses.replace(recorded[0], out=tmp_path)
    with pytest.raises(DataError, match="no level '99'"):
        demonstrate(dataclasses.replace(config, level="99"))
    with pytest.raises(ConfigError, match="more than one level is named 01"):
        demonstrate(dataclasses.replace(config, level="1,01"))
    with pytest.raises(DataError, match=r"level '01'.*at most 2 actions"):
        demonstrate(dataclasses.replace(config, max_length=2))
    (tmp_path / "file").touch()
    with pytest.raises((DataError, StorageError), match="file"):
        demonstrate(dataclasses.replace(config, out=tmp_path / "file"))


def test_a_folder_of_other_settings_is_left_alone(recorded, tmp_path):
    config = copy_of(recorded, tmp_path)
    before = (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(DataError, match="seed 0, not 7"):
        demonstrate(dataclasses.replace(config, seed=7))
    assert (tmp_path / MANIFEST).read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"videos": []}', '{"videos": [{"file": "a"}]}'])
def test_a_damaged_description_is_named(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DataError, match="damaged or of another format"):
        demonstrate(DemonstrateConfig(out=tmp_path, level="1", count=1))


def test_a_cartridge_that_does_not_win_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module.solver, "sample_expert", lambda *_: [0, 1])
    with pytest.raises(SimulatorError, match="after the winning sequence"):
        demonstrate(DemonstrateConfig(out=tmp_path, level="1", count=1))


@pytest.mark.parametrize("changes", [{"count": 0}, {"seed": -1}, {"kind": "best"}, {"backend": "gpu"}])
def test_config_out_of_range(changes):
    with pytest.raises(ConfigError, match=str(next(iter(changes)))):
        DemonstrateConfig(out="x", **changes)
