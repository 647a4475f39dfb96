"""Command: record expert videos of Catrap for Stage 1.

    python -m jaxreward.demonstrations --out demonstrations/ --level all --count 96

A second run with the same arguments goes on where the first was interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxreward.errors import JaxrewardError
from jaxreward.training.demonstrate import MANIFEST, DemonstrateConfig, demonstrate


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: the command line; that of the process if None.

    Returns:
      The exit status: 0, 2 after an error that the user can mend, 130 when interrupted.
    """
    console = Console(stderr=True)
    columns = (TextColumn("Recording"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        config = tyro.cli(
            DemonstrateConfig,
            prog="python -m jaxreward.demonstrations",
            description="Record expert videos of Catrap.",
            args=arguments,
        )
        with Progress(*columns, console=console, transient=True) as bar, _interrupts_noted() as check:
            task = bar.add_task("", total=None)

            def show(ready: int, total: int) -> None:
                bar.update(task, completed=ready, total=total)
                check()

            done = demonstrate(config, show)
    except JaxrewardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. Run the same command again to go on.", file=sys.stderr)
        return 130
    frames = sum(video.frames for video in done.videos)
    kept = len(done.videos) - done.recorded
    print(f"{len(done.videos)} videos, {frames} frames: {done.recorded} recorded, {kept} already there.")
    print(f"They are in {done.folder}, described in {os.path.join(done.folder, MANIFEST)}.")
    return 0


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[Callable[[], None]]:
    """Notes a first Ctrl-C; the function that is yielded raises it as KeyboardInterrupt.

    Raised wherever it comes, it could strike inside the emulator's or the video library's compiled code,
    which drops it. A second Ctrl-C interrupts at once.
    """
    noted = False

    def note(*_) -> None:
        nonlocal noted
        noted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if noted:
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, former)


if __name__ == "__main__":
    sys.exit(main())
