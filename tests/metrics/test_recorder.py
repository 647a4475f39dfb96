import io
import json
import math
import os
import resource
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from jaxreward.errors import ConfigError, DataError, StorageError
from jaxreward.metrics.recorder import Recorder, is_timing, read_metrics


def row(update: int, **metrics):
    return {"update": update, "env_steps": 100 * update, "seconds": 2.0 * update, **metrics}


def read_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_events(folder):
    """All (step, tag, value) of TensorBoard's files: length 8 bytes, its CRC 4, the event, its CRC 4."""
    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            events.append(event)
    return events


def test_one_json_object_a_line_flushed_at_once_with_null_for_nan(tmp_path):
    recorder = Recorder(tmp_path, console=False, tensorboard=False)
    recorder.record(
        {
            "update": np.int32(1),
            "env_steps": 2**40,
            "seconds": 1.5,
            "loss": jnp.float32(0.25),
            "rate": np.float64("nan"),
            "high": jnp.inf,
            "low": -math.inf,
            "flag": np.bool_(True),
            "count": jnp.int32(3),
            "text": "one\ntwo",
        }
    )
    assert read_lines(tmp_path) == [  # not closed yet
        {
            "update": 1,
            "env_steps": 2**40,
            "seconds": 1.5,
            "loss": 0.25,
            "rate": None,
            "high": None,
            "low": None,
            "flag": True,
            "count": 3,
            "text": "one\ntwo",
            "steps_per_second": None,
        }
    ]
    recorder.record(row(2, update_norm=1.0) | {"seconds": 5.5, "env_steps": 2**40 + 800})
    assert read_metrics(tmp_path)[1]["steps_per_second"] == 200.0  # 800 steps in 4 s
    recorder.close()


def test_wrong_metrics_are_refused(tmp_path):
    recorder = Recorder(tmp_path, console=False, tensorboard=False)
    with pytest.raises(ValueError, match=r"metric loss: found shape \(2,\)"):
        recorder.record(row(1, loss=np.zeros(2)))
    with pytest.raises(ValueError, match="found no seconds"):
        recorder.record({"update": 1, "env_steps": 2})
    assert read_metrics(tmp_path) == []


def without_times(folder):
    return [{k: v for k, v in row.items() if not is_timing(k)} for row in read_metrics(folder)]


def test_a_resumed_file_equals_an_uninterrupted_one_but_for_times(tmp_path):
    def run(folder, first, last, speed):
        folder.mkdir(exist_ok=True)
        with Recorder(folder, console=False) as recorder:
            if first > 1:
                recorder.truncate_after(first - 1)
            for update in range(first, last + 1):
                times = {"seconds": speed * update, "seconds/learn": speed}
                recorder.record(row(update, loss=1 / update) | times)

    run(tmp_path / "whole", 1, 9, 1.0)
    run(tmp_path / "killed", 1, 7, 3.0)
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"update": 8, "env_st')
    assert len(read_metrics(tmp_path / "killed")) == 7  # half a line is no row
    run(tmp_path / "killed", 5, 9, 2.0)
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")
    assert [r["update"] for r in read_lines(tmp_path / "killed")] == list(range(1, 10))
    # TensorBoard is told to disregard all steps from 401 on of the files before
    starts = [e for e in read_events(tmp_path / "killed") if e.HasField("session_log")]
    assert [e.step for e in starts] == [401]


def test_truncating_nothing_and_everything(tmp_path):
    recorder = Recorder(tmp_path, console=False, tensorboard=False)
    recorder.truncate_after(3)
    assert not (tmp_path / "metrics.jsonl").exists()
    recorder.record(row(1))
    recorder.truncate_after(0)
    assert read_metrics(tmp_path) == []
    recorder.record(row(1, loss=2.0))
    assert read_metrics(tmp_path)[0]["loss"] == 2.0
    recorder.close()


@pytest.mark.parametrize("tail", ['{"update": 3', '{"update": 3, "x": 1}', "\0\0\0\0\n", '{"update"\n'])
def test_half_a_last_line_is_dropped_before_the_next_row(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"update": 1, "env_steps": 1, "seconds": 1}\n{"update": 2, "env_steps": 2, "seconds": 2}\n' + tail
    )
    with Recorder(tmp_path, console=False, tensorboard=False) as recorder:
        recorder.record(row(3))
    assert [r["update"] for r in read_lines(tmp_path)] == [1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\nnonsense\n{"update": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2: found b'nonsense'"):
        read_metrics(tmp_path)
    with pytest.raises(DataError, match="line 2"):
        Recorder(tmp_path, console=False, tensorboard=False).truncate_after(1)


def test_tensorboard_holds_the_finite_scalars_by_environment_steps(tmp_path):
    with Recorder(tmp_path, console=False) as recorder:
        recorder.record(row(1, loss=0.5, reward=math.nan))
        recorder.record(row(2, loss=0.25, reward=1.0))
    scalars = [
        (e.step, v.tag, v.simple_value)
        for e in read_events(tmp_path)
        for v in e.summary.value
        if v.tag in ("loss", "reward")
    ]
    assert scalars == [(100, "loss", 0.5), (200, "loss", 0.25), (200, "reward", 1.0)]


def test_a_killed_process_loses_no_complete_row(tmp_path):
    script = (
        "import sys; from jaxreward.metrics.recorder import Recorder\n"
        "recorder = Recorder(sys.argv[1], console=False, tensorboard=False)\n"
        "for u in range(1, 10**6):\n"
        "    recorder.record({'update': u, 'env_steps': u, 'seconds': u, 'text': 'x' * 200})\n"
        "    print(u, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
    while int(process.stdout.readline()) < 50:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    told = [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.stdout.close()
    updates = [r["update"] for r in read_metrics(tmp_path)]
    assert updates == list(range(1, len(updates) + 1))
    assert len(updates) >= (told or [50])[-1]


def test_a_full_disk_is_a_storage_error(tmp_path):
    recorder = Recorder(tmp_path, console=False, tensorboard=False)
    recorder.record(row(1))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))  # the next line does not fit
    try:
        with pytest.raises(StorageError, match=r"metrics of update 2 in .* could not be written"):
            recorder.record(row(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    recorder.close()
    assert [r["update"] for r in read_metrics(tmp_path)] == [1]


def test_a_missing_folder_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        Recorder(tmp_path / "gone", console=False, tensorboard=False).record(row(1))


def test_without_a_terminal_one_line_every_n_seconds_and_the_last(tmp_path):
    text = io.StringIO()
    with Recorder(
        tmp_path, Console(file=text, width=200), False, total_updates=10, quiet_seconds=6
    ) as recorder:
        recorder.print("reward: rank_then_act [no environment reward]")
        for update in range(1, 9):
            recorder.record(row(update, success=0.125 * update, return_on_wins=math.nan))
    lines = text.getvalue().splitlines()
    assert lines[0] == "reward: rank_then_act [no environment reward]"
    assert [line.split()[0] for line in lines[1:]] == ["100", "400", "700", "800"]
    # 50 steps a second; 600 and 200 steps are left
    assert lines[2] == "400 steps  50/s  success 0.5  0:00:12 left"
    assert lines[4] == "800 steps  50/s  success 1  0:00:04 left"


def test_a_terminal_shows_a_live_line(tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=150, _environ={"TERM": "xterm"})
    with Recorder(tmp_path, console, False, total_updates=3) as recorder:
        recorder.record(row(1, success=0.25))
        recorder.print("a note")
        recorder.record(row(2, success=0.75, return_on_failures=-0.5))
    shown = text.getvalue()
    assert "a note" in shown
    assert "200 steps  50/s  success 0.75  return on failures -0.5  0:00:02 left" in shown


def test_weights_and_biases_is_optional_and_named_when_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"jaxreward\[wandb\]"):
        Recorder(tmp_path, console=False, tensorboard=False, wandb_project="p")


def test_weights_and_biases_receives_the_rows(tmp_path, monkeypatch):
    class Run:
        def __init__(self):
            self.rows, self.finished = [], False

        def log(self, row):
            self.rows.append(row)

        def finish(self):
            self.finished = True

    class Wandb:
        run = Run()

        @classmethod
        def init(cls, **settings):
            cls.settings = settings
            return cls.run

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    with Recorder(tmp_path, console=False, tensorboard=False, wandb_project="p") as recorder:
        recorder.record(row(1, loss=0.5, bad=math.nan))
    assert Wandb.settings["project"] == "p"
    assert Wandb.settings["id"] == tmp_path.name
    assert Wandb.run.rows == [{"update": 1, "env_steps": 100, "seconds": 2.0, "loss": 0.5}]
    assert Wandb.run.finished
