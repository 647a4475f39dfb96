"""Command: record expert videos of Catrap for Stage 1.

    python -m jaxreward.demonstrations --out demonstrations/ --level all --count 96

A second run with the same arguments goes on where the first was interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxreward.command_line import parse, run_command
from jaxreward.training.act import Interrupted, interruption
from jaxreward.training.demonstrate import MANIFEST, DemonstrateConfig, demonstrate


def command(arguments: Sequence[str]) -> None:
    """Records what the command line asks for."""
    program, description = "python -m jaxreward.demonstrations", "Record expert videos of Catrap."
    config = parse(DemonstrateConfig, arguments, program, description)
    columns = (TextColumn("Recording"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # An interrupt that strikes inside the emulator's or the video library's compiled code would be dropped.
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        interruption() as interrupted,
    ):
        task = bar.add_task("", total=None)

        def show(ready: int, total: int) -> None:
            bar.update(task, completed=ready, total=total)
            if interrupted():
                raise Interrupted("what is recorded is saved; run the same command again to go on")

        done = demonstrate(config, show)
    frames = sum(video.frames for video in done.videos)
    kept = len(done.videos) - done.recorded
    print(f"{len(done.videos)} videos, {frames} frames: {done.recorded} recorded, {kept} already there.")
    print(f"They are in {done.folder}, described in {os.path.join(done.folder, MANIFEST)}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's entry point.

    Args:
      arguments: the command line; that of the process if None.

    Returns:
      The exit status: 0, 2 after an error that the user can mend, 130 when interrupted.
    """
    return run_command(lambda: command(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
