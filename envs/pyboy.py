"""Catrap in the Game Boy emulator PyBoy: our own cartridge, or a user's ROM of the original.

Many emulators run in a few worker processes (`envs/pyboy_worker.py`) over memory that they share with
this one. A step presses a button and ends when the game is at rest, so it is exactly one step of the
pure-JAX rules, however long something falls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import mmap
import time
import weakref
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.envs.catrap import art
from jaxreward.envs.catrap.cartridge import ROM
from jaxreward.envs.catrap.environment import TASK
from jaxreward.envs.catrap.levels import choose_levels
from jaxreward.envs.host import HostEnvironment, HostStep, Unroll
from jaxreward.envs.pyboy_worker import (
    CROP_ROWS,
    SCREEN_COLUMNS,
    SCREEN_ROWS,
    BlockSettings,
    Emulator,
    EmulatorBlock,
    block_mean,
    read_rom,
)
from jaxreward.envs.workers import (
    ANSWER_SECONDS,
    RESET,
    STEP,
    InProcess,
    Member,
    Worker,
    array_bytes,
    end_all,
    lay_out,
    shared_file,
)
from jaxreward.errors import ConfigError, SimulatorError
from jaxreward.types import Discrete, EnvironmentSpec

__all__ = ["CartridgeConfig", "CartridgeEnvironment", "Emulator", "EmulatorVectorEnvironment", "measure_raw"]

Actions = Literal["dpad", "all"]
NUM_ACTIONS = {"dpad": 4, "all": 6}


@dataclasses.dataclass(frozen=True)
class CartridgeConfig:
    """Settings of Catrap in an emulator.

    Attributes:
      level: number, name or file of a level; several with commas between, or 'all': environment i plays
        level i mod n. A user's ROM plays what its save state holds instead.
      num_envs: B, emulators that step together.
      max_episode_steps: button presses until an episode is truncated.
      workers: processes that run the emulators; 0 runs them in this one.
      scale: screen pixels a pixel of the observation, which is grey uint8 [120 / scale, 160 / scale, 1]: the
        centre 160 x 120 of the screen, averaged over blocks; 1, 2, 4 or 8.
      frame_scale: the same for the frames that a scorer sees, [144 / frame_scale, 160 / frame_scale, 1];
        1, 2, 4, 8 or 16.
      actions: 'dpad' is RIGHT 0, LEFT 1, UP 2, DOWN 3; 'all' adds REWIND 4 and SWAP 5.
      rom: path of a user's own ROM of the original game; empty for our cartridge.
      save_state: path of a PyBoy save state at the start of a level of that ROM.
      unroll: how a driver should step: from inside jit ('scan') or in a plain loop ('loop').
    """

    level: str = "2"
    num_envs: int = 128
    max_episode_steps: int = 64
    workers: int = 2
    scale: int = 4
    frame_scale: int = 4
    actions: Actions = "dpad"
    rom: str = ""
    save_state: str = ""
    unroll: Unroll = "loop"


class CartridgeEnvironment(HostEnvironment):
    """Catrap in emulators under the Environment protocol.

    Observation: grey uint8 [120 / scale, 160 / scale, 1]. Frame: grey uint8 [144 / frame_scale,
    160 / frame_scale, 1]. Action: int32, see `CartridgeConfig.actions`. Reward: 1.0 on a win. Termination:
    the last monster is dead. `info`: 'success' bool.
    """

    def __init__(self, config: CartridgeConfig):
        """Starts the emulators; raises ConfigError or SimulatorError."""
        super().__init__(EmulatorVectorEnvironment(config), unroll=config.unroll)
        self.config = config

    def pictures(self, frames: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Full-size pictures of one episode, for videos, by playing its actions anew.

        The episode's level is the one that begins with the picture of its first frame. Frames that begin
        like no level, and those of a user's ROM, which need not play the same way twice, are returned as
        they are, in RGB.

        Args:
          frames: uint8 [L + 1, 144 / frame_scale, 160 / frame_scale, 1], the episode's frames.
          actions: int32 [L].

        Returns:
          uint8 [L + 1, 144, 160, 3], RGB; [L + 1, 144 / frame_scale, 160 / frame_scale, 3] where the
          frames are returned.

        Raises:
          SimulatorError: the emulator does not start.
        """
        frames = np.asarray(frames)
        shown = _replay(self.host.levels, frames[0, ..., 0], actions, self.config.frame_scale)
        return np.repeat(frames, 3, axis=-1) if shown is None else shown


class EmulatorVectorEnvironment:
    """A `HostVectorEnvironment` of Catrap emulators; returns copies, never its shared arrays."""

    def __init__(self, config: CartridgeConfig):
        """Starts the workers and waits until all emulators run.

        Raises:
          ConfigError: a setting that cannot be used.
          DataError: a level that is missing, malformed or unsolvable.
          SimulatorError: a ROM that cannot be used, or a worker that does not start.
        """
        _check(config)
        # A bad file is an error here, not the death of a worker.
        self.rom_sha256 = hashlib.sha256(read_rom(config.rom or ROM)).hexdigest()
        self.config = config
        self.spec = _spec(config)
        self.info_spec = {"success": jax.ShapeDtypeStruct((), jnp.bool_)}
        self.levels = levels = [] if config.rom else _levels(config)
        count = max(config.workers, 1)
        bounds = [config.num_envs * i // count for i in range(count + 1)]
        blocks = [_block(config, levels, *pair) for pair in itertools.pairwise(bounds)]
        self._slices = [slice(block.start, block.stop) for block in blocks]
        self._members: list[Member] = []
        self._finalizer = weakref.finalize(self, end_all, self._members)
        specs = blocks[0].array_specs()
        try:
            with shared_file(array_bytes(specs)) as file:
                self._arrays = lay_out(specs, mmap.mmap(file.fileno(), array_bytes(specs)))
                for block in blocks:
                    self._members.append(self._member(block, file.fileno()))
            for member in self._members:
                member.wait()
        except BaseException:
            self.close()
            raise

    def _member(self, block: BlockSettings, descriptor: int) -> Member:
        if not self.config.workers:
            return InProcess(functools.partial(EmulatorBlock, block, self._arrays))
        name = f"the emulator worker of environments {block.start} .. {block.stop - 1}"
        # On a busy machine each emulator may take up to a second to start.
        patience = ANSWER_SECONDS + block.stop - block.start
        settings = dataclasses.asdict(block)
        return Worker("jaxreward.envs.pyboy_worker", settings, descriptor, name, patience=patience)

    def reset(self, handles: np.ndarray, seeds: np.ndarray) -> HostStep:
        """See `HostVectorEnvironment`; the game draws no random numbers."""
        del seeds
        self._run(RESET, handles)
        return self._result(handles)

    def step(self, handles: np.ndarray, action: np.ndarray) -> HostStep:
        """See `HostVectorEnvironment`."""
        known = NUM_ACTIONS[self.config.actions]
        if np.any((action < 0) | (action >= known)):
            raise SimulatorError(f"an action is {action.min()} .. {action.max()}; expected 0 .. {known - 1}")
        self._arrays["action"][handles] = action
        self._run(STEP, handles)
        return self._result(handles)

    def close(self) -> None:
        """See `HostVectorEnvironment`."""
        self._finalizer()

    def _run(self, command: bytes, handles: np.ndarray) -> None:
        if not self._finalizer.alive:
            raise SimulatorError("the emulators were closed: make a new environment")
        selected = self._arrays["selected"]
        selected[...] = False
        selected[handles] = True
        pairs = zip(self._members, self._slices, strict=True)
        asked = [member for member, rows in pairs if selected[rows].any()]
        try:
            for member in asked:
                member.send(command)
            for member in asked:
                member.wait()
        except BaseException:
            # Answers may still be on their way: there is no telling them from those to the next command.
            self.close()
            raise

    def _result(self, handles: np.ndarray) -> HostStep:
        rows = {name: array[handles] for name, array in self._arrays.items()}  # integer indices copy
        return HostStep(
            observation=rows["observation"],
            frame=rows["frame"],
            final_observation=rows["final_observation"],
            final_frame=rows["final_frame"],
            first=rows["first"],
            episode_step=rows["episode_step"],
            env_reward=rows["terminated"].astype(np.float32),
            terminated=rows["terminated"],
            truncated=rows["truncated"],
            info={"success": rows["terminated"]},
        )


def _levels(config: CartridgeConfig) -> list[list[list[int]]]:
    """The cells of the levels that a config names."""
    levels = choose_levels(config.level)
    for level in levels:
        if config.actions == "dpad" and (level.cells == art.CAT).sum() > 1:
            raise ConfigError(
                f"Catrap level '{level.name}' has two cats, found actions='dpad': set actions='all', "
                "which can swap them"
            )
    return [level.cells.tolist() for level in levels]


def _replay(
    levels: list[list[list[int]]], first: np.ndarray, actions: np.ndarray, frame_scale: int
) -> np.ndarray | None:
    """Pictures uint8 [L + 1, 144, 160, 3] of the actions in the level that begins with the frame `first`."""
    if not levels:
        return None
    with contextlib.closing(Emulator(level=np.array(levels[0]))) as emulator:
        for level in levels:
            emulator.choose(np.array(level))
            emulator.reset()
            if np.array_equal(block_mean(np.ascontiguousarray(emulator.screen), frame_scale), first):
                break
        else:
            return None
        pictures = [emulator.picture()]
        for action in actions:
            emulator.step(int(action))
            pictures.append(emulator.picture())
        return np.stack(pictures)


def _block(config: CartridgeConfig, levels: list[list[list[int]]], start: int, stop: int) -> BlockSettings:
    return BlockSettings(
        num_envs=config.num_envs,
        start=start,
        stop=stop,
        max_episode_steps=config.max_episode_steps,
        scale=config.scale,
        frame_scale=config.frame_scale,
        levels=levels,
        rom=config.rom,
        save_state=config.save_state,
    )


def _spec(config: CartridgeConfig) -> EnvironmentSpec:
    scale, frame_scale = config.scale, config.frame_scale
    height, width = SCREEN_ROWS // frame_scale, SCREEN_COLUMNS // frame_scale
    return EnvironmentSpec(
        num_envs=config.num_envs,
        max_episode_steps=config.max_episode_steps,
        task=TASK,
        observation=jax.ShapeDtypeStruct((CROP_ROWS // scale, SCREEN_COLUMNS // scale, 1), jnp.uint8),
        frame=jax.ShapeDtypeStruct((height, width, 1), jnp.uint8),
        image_shape=(height, width, 3),
        action_space=Discrete(NUM_ACTIONS[config.actions]),
    )


def _check(config: CartridgeConfig) -> None:
    """Raises ConfigError for the first setting that cannot be used."""
    allowed = {
        "scale": (1, 2, 4, 8),
        "frame_scale": (1, 2, 4, 8, 16),
        "actions": get_args(Actions),
        "unroll": get_args(Unroll),
    }
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            raise ConfigError(f"{name} is {getattr(config, name)!r}; expected one of {values}")
    for name, least in (("num_envs", 1), ("max_episode_steps", 1), ("workers", 0)):
        if getattr(config, name) < least:
            raise ConfigError(f"{name} is {getattr(config, name)}; expected at least {least}")
    if config.workers > config.num_envs:
        raise ConfigError(f"workers is {config.workers}, more than num_envs, {config.num_envs}")
    if config.save_state and not config.rom:
        raise ConfigError("save_state is given without rom: our own cartridge needs none, clear it")


def measure_raw(config: CartridgeConfig, steps: int, *, seed: int = 0) -> dict[str, float]:
    """Measures how fast the emulators step with random actions and no policy.

    Args:
      config: settings.
      steps: vector steps to time.
      seed: of the actions.

    Returns:
      'steps_per_second' (environment steps by the wall clock), 'start_seconds' (until all emulators run)
      and 'reset_seconds' (one reset of all).
    """
    actions = np.random.default_rng(seed).integers(
        0, NUM_ACTIONS[config.actions], (steps, config.num_envs), np.int32
    )
    handles = np.arange(config.num_envs, dtype=np.int32)
    times = [time.perf_counter()]
    environment = EmulatorVectorEnvironment(config)
    try:
        times.append(time.perf_counter())
        environment.reset(handles, np.zeros(config.num_envs, np.uint32))
        times.append(time.perf_counter())
        for action in actions:
            environment.step(handles, action)
        times.append(time.perf_counter())
    finally:
        environment.close()
    start, reset, stepping = np.diff(times)
    return {
        "steps_per_second": steps * config.num_envs / stepping,
        "start_seconds": float(start),
        "reset_seconds": float(reset),
    }
