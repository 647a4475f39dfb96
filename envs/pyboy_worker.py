"""Game Boy emulators: a single one, and the process that runs a block of them.

This module and all that it imports stay free of JAX: a worker process is an emulator and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxreward.envs.catrap.art import BOULDER, EMPTY, FLYER, LADDER, SAND, WALKER, WALL
from jaxreward.envs.catrap.cartridge import ROM, addresses
from jaxreward.envs.workers import RESET, array_bytes, lay_out, serve
from jaxreward.errors import SimulatorError

SCREEN_ROWS, SCREEN_COLUMNS = 144, 160
CROP_ROWS = 120  # the policy sees the centre 160 x 120 of the screen
BUTTONS = ("right", "left", "up", "down", "a", "select")  # in the order of the actions
MAX_FRAMES = 1200  # 20 s of play: a game that is not at rest by then never will be


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a game holds at rest, read from its memory."""

    cells: np.ndarray  # int8 [rows, columns], codes EMPTY .. FLYER of `art`
    cats: tuple[tuple[int, int], ...]  # (row, column) of each cat
    active: int  # which of `cats` obeys
    monsters: int  # how many are left


class Layout(Protocol):
    """Where a game keeps its state in memory."""

    hold_frames: int  # for how many frames a button is held

    def at_rest(self, memory: Any) -> bool:
        """Whether the game waits for a button."""
        ...

    def monsters(self, memory: Any) -> int:
        """How many monsters are left; 0 is a win."""
        ...

    def read(self, memory: Any) -> Reading:
        """The whole state; meaningful at rest."""
        ...


class CartridgeLayout:
    """The memory of our own cartridge, by the addresses that its build wrote."""

    hold_frames = 1
    _AT_REST = (1, 4)  # IDLE and WON in game.c

    def __init__(self):
        """Reads the addresses."""
        self.address = addresses()
        self._state, self._monsters = self.address["state"], self.address["monsters"]

    def at_rest(self, memory: Any) -> bool:
        """See `Layout`."""
        return memory[self._state] in self._AT_REST

    def monsters(self, memory: Any) -> int:
        """See `Layout`."""
        return memory[self._monsters]

    def read(self, memory: Any) -> Reading:
        """See `Layout`."""
        start = self.address["cells"]
        padded = np.array(memory[start : start + 11 * 16], np.int8).reshape(11, 16)
        start, count = self.address["position"], memory[self.address["num_cats"]]
        positions = memory[start : start + count]
        return Reading(
            cells=padded[1:10, 1:11],
            cats=tuple((at // 16 - 1, at % 16 - 1) for at in positions),
            active=memory[self.address["active"]],
            monsters=self.monsters(memory),
        )


class OriginalCatrapLayout:
    """The memory of the commercial Catrap, after a public disassembly; not verified against the game.

    The grid starts at C111, 16 bytes a row; a cat adds 10h to the cell on which it stands. FFA1 is set
    while something moves; FFA4 is 0 in play. FFD7 and FFD8 are the active cat's y and x in pixels.
    """

    hold_frames = 4
    _CELLS = np.array([EMPTY, LADDER, WALKER, BOULDER, SAND, WALL, FLYER], np.int8)
    _GRID = slice(0xC110, 0xC1A0)

    def at_rest(self, memory: Any) -> bool:
        """See `Layout`."""
        return memory[0xFFA1] == 0

    def monsters(self, memory: Any) -> int:
        """See `Layout`; a cleared level counts as 0 whatever the grid shows."""
        grid = memory[self._GRID]
        return 0 if memory[0xFFA4] else grid.count(2) + grid.count(6)

    def read(self, memory: Any) -> Reading:
        """See `Layout`."""
        grid = np.array(memory[self._GRID], np.uint8).reshape(9, 16)[:, 1:12]
        cats = tuple((int(row), int(column)) for row, column in np.argwhere(grid & 0x10))
        active = (memory[0xFFD7] // 16, memory[0xFFD8] // 16)
        return Reading(
            cells=self._CELLS[np.minimum(grid & 0x0F, 6)],
            cats=cats,
            active=cats.index(active) if active in cats else 0,
            monsters=self.monsters(memory),
        )


def read_rom(path: str | Path) -> bytes:
    """Reads a Game Boy ROM.

    Returns:
      The image.

    Raises:
      SimulatorError: it cannot be read, or has another size or header checksum than a Game Boy ROM.
    """
    try:
        image = Path(path).read_bytes()
    except OSError as error:
        raise SimulatorError(f"the ROM {path} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(image).hexdigest()
    expected = "give the .gb file of a Game Boy cartridge as --env.rom"
    if not image or len(image) % 0x8000:
        raise SimulatorError(
            f"{path} is not a Game Boy ROM: it has {len(image)} bytes, not a multiple of 32768 "
            f"(SHA-256 {digest}); {expected}"
        )
    checksum = -(sum(image[0x134:0x14D]) + 0x14D - 0x134) & 0xFF
    if image[0x14D] != checksum:
        raise SimulatorError(
            f"{path} is not a Game Boy ROM, or a damaged one: its header checksum (at 0x14D) is "
            f"{image[0x14D]:#04x}, its header sums to {checksum:#04x} (SHA-256 {digest}); {expected}"
        )
    return image


class Emulator:
    """One Game Boy with a Catrap in it, for play, for recording, and as a part of a block.

    Without arguments it is our own cartridge. A user's own ROM needs a save state of the level to play,
    and is read through `OriginalCatrapLayout`.
    """

    def __init__(
        self,
        *,
        level: int | np.ndarray = 0,
        rom: str = "",
        save_state: str = "",
        animated: bool = False,
    ):
        """Starts the game; call `reset` before anything else.

        Args:
          level: what to play on our cartridge; see `choose`.
          rom: path of a user's ROM; empty for our own cartridge.
          save_state: path of a PyBoy save state at the start of a level, for a user's ROM.
          animated: whether our cartridge shows how things move, as it does for people. What it shows at
            rest is the same; without animation a step takes a third of the frames.

        Raises:
          SimulatorError: the ROM or the save state cannot be used, or the game does not start.
        """
        image = read_rom(rom or ROM)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using SDL2 binaries")
            from pyboy import PyBoy

        self.layout: Layout = OriginalCatrapLayout() if rom else CartridgeLayout()
        try:
            self._pyboy = PyBoy(
                io.BytesIO(image),  # not by its path: battery files beside it are neither read nor written
                window="null",
                sound_emulated=False,
                no_input=True,
                cgb=False,
                log_level="ERROR",
            )
        except Exception as error:  # PyBoy raises plain exceptions of several kinds
            raise SimulatorError(f"PyBoy cannot run {rom or ROM.name}: {error}") from error
        self._pyboy.set_emulation_speed(0)
        self.memory = self._pyboy.memory
        self._pixels = self._pyboy.screen.ndarray  # the emulator draws into it
        self._frames: list[np.ndarray] | None = None
        self._save_state = _read_save_state(save_state, rom) if rom else None
        self._name = rom or ROM.name
        if rom:
            self.reset()  # a save state that does not fit is an error now, and not after Stage 1
        else:
            self._start(animated)
            self.choose(level)

    @property
    def screen(self) -> np.ndarray:
        """uint8 [144, 160], the grey picture of the last step; a view that the next step overwrites."""
        return self._pixels[:, :, 0]

    def picture(self) -> np.ndarray:
        """uint8 [144, 160, 3], a copy of the picture of the last step in RGB."""
        return self._pixels[:, :, :3].copy()

    def read(self) -> Reading:
        """The game's state."""
        return self.layout.read(self.memory)

    @property
    def monsters(self) -> int:
        """How many monsters are left; 0 is a win."""
        return self.layout.monsters(self.memory)

    def choose(self, level: int | np.ndarray) -> None:
        """Says which level of our cartridge the next `reset` begins.

        Args:
          level: index of a shipped level, from 0, or integers [9, 10], the codes of `art`, of any other.

        Raises:
          SimulatorError: the cartridge has no such level, or plays a user's ROM.
        """
        if self._save_state is not None:
            raise SimulatorError(f"{self._name} plays the level of its save state; no other can be chosen")
        address = self.layout.address
        if isinstance(level, np.ndarray):
            number, start = 255, address["ram_level"]
            for offset, cell in enumerate(level.reshape(-1)):
                self.memory[start + offset] = int(cell)
        else:
            number, count = level, self.memory[address["num_levels"]]
            if not 0 <= level < count:
                raise SimulatorError(f"{self._name} has the levels 0 .. {count - 1}, found level {level}")
        self.memory[address["level_request"]] = number

    def reset(self, frames: list[np.ndarray] | None = None) -> None:
        """Begins the level anew and waits until it is at rest.

        Args:
          frames: if given, every frame shown on the way is appended, uint8 [144, 160, 3]; the last is
            the picture at rest.
        """
        self._frames = frames
        if self._save_state is not None:
            try:
                self._pyboy.load_state(io.BytesIO(self._save_state))
            except Exception as error:  # PyBoy raises plain exceptions of several kinds
                raise SimulatorError(
                    f"the save state does not fit {self._name}: {error}. Make it with this ROM and this "
                    "version of PyBoy"
                ) from error
        else:
            self._press("start")
        self._rest()

    def step(self, action: int, frames: list[np.ndarray] | None = None) -> None:
        """Presses the button of an action and waits until the game is at rest; see `reset`.

        Args:
          action: RIGHT 0, LEFT 1, UP 2, DOWN 3, REWIND 4 (button A), SWAP 5 (Select).
          frames: see `reset`.
        """
        self._frames = frames
        self._press(BUTTONS[action])
        self._rest()

    def close(self) -> None:
        """Ends the emulator."""
        self._pyboy.stop(save=False)

    def _start(self, animated: bool) -> None:
        """Waits until our cartridge runs."""
        for _ in range(MAX_FRAMES):
            if self.layout.at_rest(self.memory):
                break
            self._pyboy.tick(1, False, False)
        else:
            raise SimulatorError(f"{self._name} did not start within {MAX_FRAMES} frames")
        self.memory[self.layout.address["fast"]] = not animated

    def _press(self, button: str) -> None:
        self._pyboy.button(button, self.layout.hold_frames)
        self._tick(self.layout.hold_frames)

    def _rest(self) -> None:
        """Lets the game come to rest, and one frame more: the screen lags behind by one."""
        for _ in range(MAX_FRAMES):
            if self.layout.at_rest(self.memory):
                break
            self._tick(1)
        else:
            raise SimulatorError(f"{self._name} did not come to rest within {MAX_FRAMES} frames")
        self._pyboy.tick(1, True, False)
        if self._frames is not None:
            self._frames.append(self.picture())

    def _tick(self, count: int) -> None:
        if self._frames is None:
            self._pyboy.tick(count, False, False)
            return
        for _ in range(count):
            self._pyboy.tick(1, True, False)
            self._frames.append(self.picture())


def _read_save_state(path: str, rom: str) -> bytes:
    if not path:
        raise SimulatorError(
            f"the ROM {rom} needs a save state at the start of a level: play it in PyBoy "
            f"('python -m pyboy {rom}'), press Z there, and give the .state file as --env.save-state"
        )
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SimulatorError(f"the save state {path} cannot be read: {error.strerror}") from None


def block_mean(picture: np.ndarray, size: int) -> np.ndarray:
    """The mean of each block of size x size pixels, rounded down.

    Args:
      picture: uint8 [H, W], both multiples of `size` (at most 16, so that sums fit 16 bits).
      size: pixels.

    Returns:
      uint8 [H // size, W // size].
    """
    if size == 1:
        return picture
    # Two passes of whole-array additions: several times faster than a mean over two axes.
    rows = picture[0::size].astype(np.uint16)
    for offset in range(1, size):
        rows += picture[offset::size]
    total = rows[:, 0::size].copy()
    for offset in range(1, size):
        total += rows[:, offset::size]
    return (total // (size * size)).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """What a block of emulators must know."""

    num_envs: int  # of all blocks together
    start: int  # the environments of this block are start .. stop - 1
    stop: int
    max_episode_steps: int
    scale: int  # screen pixels a pixel of the policy's picture
    frame_scale: int  # screen pixels a pixel of the scorer's frame
    levels: list[list[list[int]]]  # cells; environment i plays levels[i % len(levels)]
    rom: str
    save_state: str

    def array_specs(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shapes and dtypes of the arrays that the parent and the blocks share."""
        batch = self.num_envs
        observation = (batch, CROP_ROWS // self.scale, SCREEN_COLUMNS // self.scale, 1)
        frame = (batch, SCREEN_ROWS // self.frame_scale, SCREEN_COLUMNS // self.frame_scale, 1)
        return {
            "action": ((batch,), np.int32),
            "episode_step": ((batch,), np.int32),
            "selected": ((batch,), np.bool_),
            "first": ((batch,), np.bool_),
            "terminated": ((batch,), np.bool_),
            "truncated": ((batch,), np.bool_),
            "observation": (observation, np.uint8),
            "final_observation": (observation, np.uint8),
            "frame": (frame, np.uint8),
            "final_frame": (frame, np.uint8),
        }


class EmulatorBlock:
    """The emulators of the environments start .. stop - 1, with their episodes, over shared arrays."""

    def __init__(self, settings: BlockSettings, arrays: dict[str, np.ndarray]):
        """Starts the emulators; see `Emulator` for what it raises."""
        self._settings, self._arrays = settings, arrays
        self._emulators = {row: self._emulator(row) for row in range(settings.start, settings.stop)}

    def run(self, command: bytes) -> None:
        """Resets or steps the selected environments; results are in the shared arrays."""
        selected = self._arrays["selected"]
        for row, emulator in self._emulators.items():
            if selected[row]:
                if command == RESET:
                    self._begin(row, emulator)
                    self._same_as_final(row)
                else:
                    self._step(row, emulator)

    def close(self) -> None:
        """Ends the emulators."""
        for emulator in self._emulators.values():
            emulator.close()

    def _emulator(self, row: int) -> Emulator:
        settings = self._settings
        if settings.rom:
            return Emulator(rom=settings.rom, save_state=settings.save_state)
        return Emulator(level=np.array(settings.levels[row % len(settings.levels)]))

    def _begin(self, row: int, emulator: Emulator) -> None:
        arrays = self._arrays
        emulator.reset()
        arrays["first"][row] = True
        arrays["episode_step"][row] = 0
        arrays["terminated"][row] = arrays["truncated"][row] = False
        self._draw(emulator, arrays["observation"][row], arrays["frame"][row])

    def _same_as_final(self, row: int) -> None:
        for name in ("observation", "frame"):
            self._arrays[f"final_{name}"][row] = self._arrays[name][row]

    def _step(self, row: int, emulator: Emulator) -> None:
        arrays = self._arrays
        emulator.step(int(arrays["action"][row]))
        steps, terminated = int(arrays["episode_step"][row]) + 1, emulator.monsters == 0
        truncated = not terminated and steps >= self._settings.max_episode_steps
        self._draw(emulator, arrays["final_observation"][row], arrays["final_frame"][row])
        if terminated or truncated:
            self._begin(row, emulator)
        else:
            arrays["first"][row] = False
            arrays["episode_step"][row] = steps
            for name in ("observation", "frame"):
                arrays[name][row] = arrays[f"final_{name}"][row]
        arrays["terminated"][row], arrays["truncated"][row] = terminated, truncated

    def _draw(self, emulator: Emulator, observation: np.ndarray, frame: np.ndarray) -> None:
        scale, frame_scale = self._settings.scale, self._settings.frame_scale
        margin = (SCREEN_ROWS - CROP_ROWS) // 2
        screen = np.ascontiguousarray(emulator.screen)
        frame[..., 0] = block_mean(screen, frame_scale)
        if scale == frame_scale and margin % scale == 0:
            observation[...] = frame[margin // scale : (margin + CROP_ROWS) // scale]
        else:
            observation[..., 0] = block_mean(screen[margin : margin + CROP_ROWS], scale)


def main() -> None:
    """Runs a block for the parent process."""
    serve(
        lambda settings, memory: EmulatorBlock(
            BlockSettings(**settings), lay_out(BlockSettings(**settings).array_specs(), memory)
        ),
        lambda settings: array_bytes(BlockSettings(**settings).array_specs()),
    )


if __name__ == "__main__":
    main()
