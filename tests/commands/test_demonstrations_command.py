"""The command as a person meets it: exit codes and single lines."""

import json
import signal
import subprocess
import sys
import time

import pytest

from jaxreward.demonstrations import main


def test_records_and_resumes(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--level", "1", "--count", "2", "--kind", "optimal"]
    assert main(arguments) == 0
    assert "2 videos, " in capsys.readouterr().out
    assert main(arguments) == 0
    assert "0 recorded, 2 already there" in capsys.readouterr().out
    assert len(list(tmp_path.glob("01/*.mp4"))) == 2


@pytest.mark.parametrize("arguments", [["--level", "99"], ["--level", "nowhere.txt"], ["--count", "0"]])
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(tmp_path, capsys, arguments):
    try:
        code = main(["--out", str(tmp_path), *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    message = capsys.readouterr().err.strip()
    assert message.count("\n") == 0
    assert "Traceback" not in message
    assert arguments[1] in message


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--nope"], "--nope"), (["--kind", "best"], "best"), ([], "--out")]
)
def test_unknown_arguments_are_one_line_and_exit_code_2(capsys, arguments, named):
    assert main(arguments) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ")
    assert message.count("\n") == 0
    assert named in message


def test_interrupted_by_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "jaxreward.demonstrations", "--out", str(tmp_path), "--level", "1"]
    process = subprocess.Popen([*command, "--count", "5000"], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("01/*.mp4"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    videos = json.loads((tmp_path / "demonstrations.json").read_text())["videos"]
    assert len(videos) >= 2
    assert all((tmp_path / video["file"]).is_file() for video in videos)
