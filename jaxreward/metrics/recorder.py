"""Where a run's numbers go: `metrics.jsonl`, TensorBoard event files, the console, optionally W&B.

`metrics.jsonl` is the record that everything else (reports, comparisons, resuming) reads: one JSON object
an update, flushed at once, so a killed process loses at most the line it was writing.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxreward.errors import ConfigError, DataError, StorageError

FILE_NAME = "metrics.jsonl"
CONSOLE_FIELDS = ("success", "return", "return_on_wins", "return_on_failures")
RATE_WINDOW = 20  # updates over which the rate and the time left are averaged

Row = dict[str, Any]


def is_timing(name: str) -> bool:
    """Whether a field is a measured time: all in which a resumed run may differ from an uninterrupted one."""
    return name in ("seconds", "steps_per_second") or name.startswith("seconds/")


class Recorder:
    """Writes one row of metrics an update to every sink. Use it as a context manager, or `close` it."""

    def __init__(
        self,
        folder: str | os.PathLike,
        console: bool | Console = True,
        tensorboard: bool = True,
        *,
        wandb_project: str | None = None,
        name: str | None = None,
        total_updates: int | None = None,
        console_fields: Sequence[str] = CONSOLE_FIELDS,
        quiet_seconds: float = 30.0,
    ):
        """Opens nothing yet; files are made by the first `record`.

        Args:
          folder: an existing run folder.
          console: print progress: a live line on a terminal, else a line every `quiet_seconds`.
          tensorboard: write event files into `folder`, with environment steps as the step.
          wandb_project: also record to this Weights & Biases project.
          name: of the run there, unique within the project; the folder's name if None.
          total_updates: the updates of the whole run, for the bar and the time left.
          console_fields: the metrics that the console shows where a row has them.
          quiet_seconds: seconds between two lines where the console is no terminal.

        Raises:
          ConfigError: `wandb_project` is given and the package wandb is missing.
        """
        self.folder = Path(folder)
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._lines = _JsonLines(self.folder / FILE_NAME)
        self._sinks: list[Any] = [self._lines]
        if tensorboard:
            self._sinks.append(_TensorBoard(self.folder))
        if wandb_project is not None:
            self._sinks.append(_WeightsAndBiases(self.folder, wandb_project, name or self.folder.name))
        self._console: _LiveConsole | _QuietConsole | None = None
        if console:
            console = console if isinstance(console, Console) else Console()
            if console.is_terminal:
                self._console = _LiveConsole(console, console_fields, total_updates)
            else:
                self._console = _QuietConsole(console, console_fields, total_updates, quiet_seconds)
            self._sinks.append(self._console)

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Records one update.

        Args:
          metrics: scalars (Python, NumPy or JAX; non-finite ones become null) and short texts. Among
            them: `update`, the update's number; `env_steps`, environment steps so far over all
            environments; `seconds`, spent so far. `steps_per_second` is added, over the last updates.

        Raises:
          DataError: a line of the existing file is damaged.
          StorageError: the run folder cannot be written or the disk is full.
          ValueError: a metric is no scalar, or one of the three is missing.
        """
        missing = {"update", "env_steps", "seconds"} - set(metrics)
        if missing:
            raise ValueError(f"metrics to record: found no {', '.join(sorted(missing))}")
        fetched = jax.device_get(dict(metrics))
        row = {name: _plain(name, fetched[name]) for name in metrics}  # device_get sorts the names
        self._recent.append((row["seconds"], row["env_steps"]))
        elapsed = row["seconds"] - self._recent[0][0]
        steps = row["env_steps"] - self._recent[0][1]
        row["steps_per_second"] = steps / elapsed if elapsed > 0 else None
        try:
            for sink in self._sinks:
                sink.write(row)
        except OSError as error:
            raise StorageError(
                f"metrics of update {row['update']} in {self.folder} could not be written: "
                f"{error.strerror or error}; free space or permit writing there, then resume the run"
            ) from error

    def truncate_after(self, update: int) -> None:
        """Forgets all rows later than `update`, and a half-written last line; call it before resuming.

        Afterwards a resumed run's file equals an uninterrupted one's but for times (`is_timing`).

        Raises:
          DataError: a line before the last is no JSON object.
          StorageError: the file cannot be written.
        """
        try:
            kept = self._lines.truncate_after(update)
        except OSError as error:
            raise StorageError(
                f"{self._lines.path} could not be shortened: {error.strerror or error}; permit writing there"
            ) from error
        self._recent.clear()
        for sink in self._sinks[1:]:
            sink.resume_after(kept["env_steps"] if kept else -1)

    def print(self, text: str) -> None:
        """Prints a line above the progress; nothing where the console is off."""
        if self._console is not None:
            self._console.print(text)

    def close(self) -> None:
        """Flushes and closes every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Recorder:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes every sink, also after an error."""
        self.close()


def read_metrics(folder: str | os.PathLike) -> list[Row]:
    """Reads a run's `metrics.jsonl`; null stands for a non-finite number.

    A half-written last line (of a killed process) is left out; a missing file has no rows.

    Raises:
      DataError: a line before the last is no JSON object with an `update`.
    """
    return [row for row, _ in _complete_rows(Path(folder) / FILE_NAME)]


def _complete_rows(path: Path) -> list[tuple[Row, int]]:
    """Each complete row and the offset of its end in bytes."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows, end = [], 0
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: nothing, or half a line
        end += len(line) + 1
        try:
            row = json.loads(line)
            row["update"]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) - 1:
                break
            raise DataError(
                f"{path}, line {number}: found {line[:60]!r}, expected a JSON object with an update; "
                "restore the file, or delete the line"
            ) from error
        rows.append((row, end))
    return rows


def _plain(name: str, value: Any) -> float | int | bool | str | None:
    if isinstance(value, str):
        return value
    if np.size(value) != 1:
        raise ValueError(f"metric {name}: found shape {np.shape(value)}, expected a scalar")
    number = np.asarray(value).item()
    if isinstance(number, bool | int):
        return number
    return float(number) if math.isfinite(number) else None


class _JsonLines:
    def __init__(self, path: Path):
        self.path = path
        self._file: io.FileIO | None = None

    def write(self, row: Row) -> None:
        if self._file is None:
            self.truncate_after(math.inf)
            self._file = io.FileIO(self.path, "a")  # unbuffered: a line is one system call
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate_after(self, update: float) -> Row | None:
        """Shortens the file to the rows up to `update`; returns the last of them."""
        self.close()
        kept = [(row, end) for row, end in _complete_rows(self.path) if row["update"] <= update]
        if self.path.exists():
            os.truncate(self.path, kept[-1][1] if kept else 0)
        return kept[-1][0] if kept else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _TensorBoard:
    def __init__(self, folder: Path):
        self._folder = folder
        self._writer = None
        self._purge_step: int | None = None

    def write(self, row: Row) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter  # protobuf takes half a second to import

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step, flush_secs=30)
        for name, value in row.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, row["env_steps"])
            elif value is not None:
                self._writer.add_scalar(name, value, row["env_steps"])

    def resume_after(self, env_steps: int) -> None:
        """Has TensorBoard disregard what an interrupted process recorded after its last checkpoint."""
        self.close()
        self._purge_step = env_steps + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _WeightsAndBiases:
    def __init__(self, folder: Path, project: str, name: str):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "recording to Weights & Biases: the package wandb is not installed, expected it beside "
                "jaxreward; pip install 'jaxreward[wandb]', or leave the project's name out"
            ) from error
        self._run = wandb.init(project=project, dir=str(folder), name=name, id=name, resume="allow")

    def write(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None})

    def resume_after(self, env_steps: int) -> None:
        """W&B keeps no history to cut: rows are told apart by `update`."""

    def close(self) -> None:
        self._run.finish()


def _describe(row: Row, fields: Sequence[str], total_updates: int | None) -> str:
    """One line: steps, rate, the chosen metrics, time left."""
    parts = [f"{row['env_steps']:,} steps"]
    rate = row["steps_per_second"]
    if rate:
        parts.append(f"{rate:,.0f}/s")
    for name in fields:
        if row.get(name) is not None:
            parts.append(f"{name.replace('_', ' ')} {row[name]:.3g}")
    if rate and total_updates and row["update"]:
        steps_per_update = row["env_steps"] / row["update"]
        left = max(total_updates - row["update"], 0) * steps_per_update / rate
        parts.append(f"{_duration(left)} left")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class _LiveConsole:
    def __init__(self, console: Console, fields: Sequence[str], total: int | None):
        self._fields, self._total = fields, total
        columns = [TextColumn("{task.description}"), TimeElapsedColumn()]
        self._progress = Progress(*([BarColumn(bar_width=20)] if total else []), *columns, console=console)
        self._task = None

    def write(self, row: Row) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=self._total)
            self._progress.start()
        self._progress.update(
            self._task, completed=row["update"], description=_describe(row, self._fields, self._total)
        )

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def resume_after(self, env_steps: int) -> None:
        """The bar shows whatever the next row says."""

    def close(self) -> None:
        self._progress.stop()


class _QuietConsole:
    def __init__(self, console: Console, fields: Sequence[str], total: int | None, quiet_seconds: float):
        self._console, self._fields, self._total = console, fields, total
        self._quiet_seconds = quiet_seconds
        self._printed: float = -math.inf
        self._unprinted: Row | None = None

    def write(self, row: Row) -> None:
        self._unprinted = row
        if row["seconds"] - self._printed >= self._quiet_seconds:
            self._show(row)

    def _show(self, row: Row) -> None:
        self.print(_describe(row, self._fields, self._total))
        self._printed, self._unprinted = row["seconds"], None

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def resume_after(self, env_steps: int) -> None:
        """Prints the next row at once."""
        self._printed = -math.inf

    def close(self) -> None:
        if self._unprinted is not None:
            self._show(self._unprinted)
