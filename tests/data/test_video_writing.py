"""Writing: whole files or none, and captions that can be seen."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jaxreward.data.annotate import annotate
from jaxreward.data.video import encode_video, write_atomically, write_video
from jaxreward.errors import DataError, StorageError


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((0, 4, 4, 3), np.uint8),
        np.zeros((2, 4, 4, 3), np.float32),
        np.zeros((2, 4, 4, 2), np.uint8),
        np.zeros((4, 4), np.uint8),
    ],
)
def test_frames_that_cannot_be_encoded(frames):
    with pytest.raises(DataError, match="expected uint8"):
        encode_video(frames, 10)


def test_fps_must_be_positive():
    with pytest.raises(DataError, match="fps 0"):
        encode_video(np.zeros((2, 4, 4, 3), np.uint8), 0)


FULL_DISK = """
import resource, signal, sys
import numpy as np
from jaxreward.data.video import write_video
from jaxreward.errors import StorageError
frames = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3)).astype(np.uint8)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write_video(sys.argv[1], frames, 10)
except StorageError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path):
    """A limit on the size of files makes the kernel refuse the write, as a full disk would."""
    path = tmp_path / "v.mp4"
    path.write_bytes(b"old")
    command = [sys.executable, "-B", "-c", FULL_DISK, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"{path}: cannot be written (File too large)" in result.stdout, result.stderr
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["v.mp4"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        write_video(tmp_path / "file" / "v.mp4", np.zeros((2, 4, 4, 3), np.uint8), 10)
    with pytest.raises(StorageError):
        write_atomically(tmp_path, b"a folder of this name is there")


def test_annotate_enlarges_exactly_and_adds_a_panel():
    frames = np.random.default_rng(0).integers(0, 256, (4, 9, 15, 3)).astype(np.uint8)
    result = annotate(frames, ["a", "b", "b", "c"], min_width=61)
    assert result.shape[2] == 76  # 15 * 5 = 75, made even
    assert result.shape[1] % 2 == 0
    np.testing.assert_array_equal(result[:, :45, :75], frames.repeat(5, 1).repeat(5, 2))
    panel = result[:, 45:]
    assert not np.array_equal(panel[0], panel[1])
    np.testing.assert_array_equal(panel[1], panel[2])
    assert panel.max() > 200 > 60 > panel.min()


def test_annotate_draws_the_curve_up_to_now():
    frames = np.zeros((5, 20, 40, 1), np.uint8)
    values = np.array([0.0, 1.0, np.nan, -1.0, 0.5])
    plain = annotate(frames, [("step", "reward")] * 5)
    curve = annotate(frames, [("step", "reward")] * 5, values)
    assert curve.shape[1] > plain.shape[1]
    blue = (curve[..., 2].astype(int) - curve[..., 0] > 100).sum((1, 2))
    assert blue[1] > blue[0] > 0
    flat = annotate(frames, [""] * 5, np.full(5, np.nan))
    assert not (flat[..., 2].astype(int) - flat[..., 0] > 100).any()


def test_annotate_needs_one_caption_and_value_a_frame():
    frames = np.zeros((3, 4, 4, 3), np.uint8)
    with pytest.raises(DataError, match="3 frames, 2 captions, no values"):
        annotate(frames, ["", ""])
    with pytest.raises(DataError, match="3 frames, 3 captions, 1 values"):
        annotate(frames, [""] * 3, [1.0])
