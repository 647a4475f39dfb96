"""Processes that each run a block of simulators, over arrays that they share with this one.

Free of JAX, like every module that a worker imports. A worker is a fresh interpreter: forking a process
in which JAX has started can deadlock, and multiprocessing's spawn would import the main module, and JAX
with it. Commands and answers are single bytes on the worker's standard input and output; everything else
goes through the arrays, so nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol

import numpy as np

from jaxreward.errors import JaxrewardError, SimulatorError

RESET, STEP, QUIT = b"R", b"S", b"Q"  # to a worker
DONE, FAILED = b"D", b"F"  # from a worker; FAILED is followed by a length (uint32) and a message
ANSWER_SECONDS = 120.0  # a worker that has not answered by then hangs

ArraySpecs = Mapping[str, tuple[tuple[int, ...], Any]]  # name: (shape, dtype)


class Block(Protocol):
    """Simulators that run in one process."""

    def run(self, command: bytes) -> None:
        """Resets or steps the environments that are selected in the shared arrays."""
        ...

    def close(self) -> None:
        """Ends the simulators."""
        ...


class Member(Protocol):
    """A block as its parent sees it: in a process of its own, or in this one."""

    def send(self, command: bytes) -> None:
        """Gives a command and returns at once."""
        ...

    def wait(self) -> None:
        """Waits for the end of the last command; raises SimulatorError if it failed."""
        ...

    def end(self) -> None:
        """Ends the block."""
        ...


def array_bytes(specs: ArraySpecs) -> int:
    """The size of a buffer for `lay_out`, at least 1."""
    return max(
        1, sum(_padded(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in specs.values())
    )


def lay_out(specs: ArraySpecs, memory: Any) -> dict[str, np.ndarray]:
    """Lays arrays out one after another in a buffer of `array_bytes(specs)` bytes."""
    arrays, offset = {}, 0
    for name, (shape, dtype) in specs.items():
        arrays[name] = np.ndarray(shape, dtype, memory, offset)
        offset += _padded(arrays[name].nbytes)
    return arrays


def shared_file(size: int) -> BinaryIO:
    """An open file of `size` zero bytes, in memory where the system can.

    It has no name, so nothing has to be unlinked: it goes when the last process lets go of it.
    """
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("jaxreward"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(size)
    return file


class Worker:
    """The parent's side of a process that runs a block."""

    def __init__(
        self,
        module: str,
        settings: dict[str, Any],
        descriptor: int,
        name: str,
        *,
        patience: float = ANSWER_SECONDS,
    ):
        """Starts the process; `wait` for its first answer, which says that the block is ready.

        Args:
          module: the module that calls `serve` when it is run.
          settings: what its block is built from; must survive JSON.
          descriptor: of the shared file.
          name: of the worker, for error messages.
          patience: seconds after which a worker that has not answered hangs.
        """
        self._name, self._patience = name, patience
        # -P: the current folder must not shadow modules; those that this process can import, it can, too.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, json.dumps([descriptor, settings])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
            process_group=0,  # out of reach of Ctrl-C in a terminal
        )

    def send(self, command: bytes) -> None:
        """See `Member`."""
        try:
            self._process.stdin.write(command)
        except BrokenPipeError:
            raise self._died() from None

    def wait(self) -> None:
        """See `Member`."""
        answers = self._process.stdout
        if not select.select([answers], [], [], self._patience)[0]:
            raise SimulatorError(f"{self._name} has not answered for {self._patience:.0f} s")
        answer = answers.read(1)
        if answer == FAILED:
            length = struct.unpack("<I", _read_exactly(answers, 4))[0]
            raise SimulatorError(f"{self._name}: {_read_exactly(answers, length).decode(errors='replace')}")
        if answer != DONE:
            raise self._died()

    def end(self) -> None:
        """See `Member`; kills a process that does not quit when asked."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(QUIT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _died(self) -> SimulatorError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with status {code}"
        return SimulatorError(f"{self._name} {how} without an answer: its memory may have run out")


class InProcess:
    """A block in this process, on a thread of its own.

    Renderers that use OpenGL belong to the thread that made them, and JAX's callbacks come from any.
    """

    def __init__(self, make_block: Callable[[], Block]):
        """Makes the block on its thread; raises what `make_block` raises."""
        self._thread = ThreadPoolExecutor(1, "simulators")
        try:
            self.block = self._thread.submit(make_block).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._running: Future | None = None

    def send(self, command: bytes) -> None:
        """See `Member`."""
        self._running = self._thread.submit(self.block.run, command)

    def wait(self) -> None:
        """See `Member`."""
        running, self._running = self._running, None
        if running is not None:
            try:
                running.result()
            except SimulatorError:
                raise
            except Exception as error:
                raise SimulatorError(f"the simulators: {_message(error)}") from error

    def end(self) -> None:
        """See `Member`."""
        try:
            self._thread.submit(self.block.close).result()
        except RuntimeError:  # the interpreter ends and takes no more work
            self.block.close()
        self._thread.shutdown()


def serve(make_block: Callable[[dict[str, Any], mmap.mmap], Block], size: Callable[[dict], int]) -> None:
    """Runs a block for the parent process until it says so or is gone; the whole life of a worker.

    Args:
      make_block: builds the block from the settings and the shared memory.
      size: the bytes of the shared memory, from the settings.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends the workers
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    block = None
    try:
        descriptor, settings = json.loads(sys.argv[1])
        block = make_block(settings, mmap.mmap(descriptor, size(settings)))
        answers.write(DONE)
        while (command := sys.stdin.buffer.read(1)) not in (b"", QUIT):
            block.run(command)
            answers.write(DONE)
    except BrokenPipeError:
        pass
    except Exception as error:
        message = _message(error).encode()
        answers.write(FAILED + struct.pack("<I", len(message)) + message)
    finally:
        if block is not None:
            block.close()


def end_all(members: list[Member]) -> None:
    """Ends blocks, one after another."""
    with contextlib.ExitStack() as stack:  # goes on past one that cannot be ended
        for member in reversed(members):
            stack.callback(member.end)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, JaxrewardError) else f"{type(error).__name__}: {error}"


def _padded(size: int) -> int:
    """Room for an array that leaves the next one aligned."""
    return -(-size // 64) * 64


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := file.read(count - len(data))):
        data += more
    return data.ljust(count, b"\0")
