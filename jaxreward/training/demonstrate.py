"""Expert demonstrations of Catrap as lossless videos, for Stage 1.

Winning sequences come from exhaustive search; they are played on the cartridge (or by the JAX rules,
which show the same pixels), and each becomes a video of one frame a step at rest, the first and the last
included. `demonstrations.json` in the same folder describes every video.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from jaxreward.data.video import encode_video
from jaxreward.envs.catrap import cartridge, levels, solver
from jaxreward.envs.pyboy_worker import BUTTONS, Emulator
from jaxreward.errors import ConfigError, DataError, SimulatorError
from jaxreward.files import write_atomically

MANIFEST = "demonstrations.json"
KINDS: tuple[str, ...] = get_args(solver.ExpertKind)
_FORMAT = 1
_CHUNK = 96  # videos that one emulator plays: starting it costs as much as a few of them
_SAVE_EVERY = 256  # videos: what a kill without warning loses at most
_HEADER = ("format", "seed", "max_length", "fps", "actions")


@dataclasses.dataclass(frozen=True)
class DemonstrateConfig:
    """What to record.

    Attributes:
      out: folder for the videos, `LEVEL/INDEX_KIND.mp4`, and their description, `demonstrations.json`.
        What it already holds is kept and not recorded again.
      level: number, name or file of a level; several with commas between, or 'all'.
      count: videos of each level.
      kind: 'optimal' plays shortest solutions, 'near_optimal' makes up to 30 % detours, 'dithering' 40 to
        70 %, 'mixed' takes turns. All win.
      seed: decides the sequences; the video of an index does not depend on how many there are.
      backend: 'cartridge' plays in the Game Boy emulator, 'jax' by the JAX rules, with equal pixels.
      max_length: the longest sequence, in actions.
      fps: frames per second at which players show the videos.
      workers: processes that play at the same time (the 'jax' backend uses one). More than one is for
        scripts with a guarded main module, as Python's `spawn` requires.
    """

    out: Path
    level: str = "all"
    count: int = 96
    kind: Literal["mixed", "optimal", "near_optimal", "dithering"] = "mixed"
    seed: int = 0
    backend: Literal["cartridge", "jax"] = "cartridge"
    max_length: int = 64
    fps: int = 10
    workers: int = 1

    def __post_init__(self):
        """Refuses values out of range with ConfigError."""
        for name in ("count", "max_length", "fps", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: expected at least 1.")
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed}: expected 0 or more.")
        if self.kind not in ("mixed", *KINDS):
            raise ConfigError(f"kind '{self.kind}': expected one of mixed, {', '.join(KINDS)}.")
        if self.backend not in ("cartridge", "jax"):
            raise ConfigError(f"backend '{self.backend}': expected 'cartridge' or 'jax'.")


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One recorded video.

    Attributes:
      file: path relative to the folder.
      level: the level's name.
      level_sha256: hash of the level as drawn.
      index: number among the level's videos.
      kind: one of KINDS.
      optimal: actions of a shortest solution of the level.
      moves: the actions played, numbers into the header's `actions`.
      frames: pictures in the video, one more than there are moves.
      sha256: hash of the file.
      cartridge_sha256: hash of the cartridge that played it; None if the JAX rules did.
    """

    file: str
    level: str
    level_sha256: str
    index: int
    kind: str
    optimal: int
    moves: tuple[int, ...]
    frames: int
    sha256: str
    cartridge_sha256: str | None


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """What a folder holds of what was asked for.

    Attributes:
      folder: where the videos are.
      videos: all that were asked for, by level and index.
      recorded: how many of them are new.
    """

    folder: Path
    videos: tuple[Demonstration, ...]
    recorded: int


def demonstrate(
    config: DemonstrateConfig, progress: Callable[[int, int], None] | None = None
) -> Demonstrations:
    """Records expert videos, and goes on where a former call was interrupted.

    Args:
      config: what to record.
      progress: called with (videos ready, videos in all) after each.

    Raises:
      DataError: no such level, a level too long for `max_length`, or a folder whose description is
        damaged or of other settings.
      SimulatorError: the emulator cannot be started, or does not win with a winning sequence.
      StorageError: the folder cannot be written.
    """
    chosen = _choose_levels(config.level)
    header = _header(config)
    known = _read_manifest(config.out, header)
    played_on = None
    if config.backend == "cartridge":
        played_on = hashlib.sha256(cartridge.ROM.read_bytes()).hexdigest()
    wanted = [_plan(level, index, played_on, config) for level in chosen for index in range(config.count)]
    pending = [plan for plan in wanted if not _is_ready(plan, known.get(plan.file), config.out)]
    total, recorded = len(wanted), 0
    if progress is not None:
        progress(total - len(pending), total)
    try:
        for demonstration in _record_all(pending, config):
            known[demonstration.file] = demonstration
            recorded += 1
            if recorded % _SAVE_EVERY == 0:
                _write_manifest(config.out, header, known)
            if progress is not None:
                progress(total - len(pending) + recorded, total)
    finally:
        # Also when interrupted or failing: what is complete stays usable.
        if recorded:
            _write_manifest(config.out, header, known)
    return Demonstrations(config.out, tuple(known[plan.file] for plan in wanted), recorded)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A video to record."""

    file: str
    level: levels.Level
    level_sha256: str
    cartridge_sha256: str | None
    index: int
    kind: str
    seed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Job:
    """Sequences of one level to play: all that a worker process needs."""

    out: Path
    files: tuple[str, ...]
    cells: np.ndarray  # int8 [9, 10]
    sequences: tuple[tuple[int, ...], ...]
    backend: str
    fps: int


def _choose_levels(names: str) -> tuple[levels.Level, ...]:
    chosen = levels.choose_levels(names)
    repeated = {level.name for level in chosen if [other.name for other in chosen].count(level.name) > 1}
    if repeated:
        raise ConfigError(f"level '{names}': more than one level is named {', '.join(sorted(repeated))}.")
    return chosen


def _plan(level: levels.Level, index: int, played_on: str | None, config: DemonstrateConfig) -> _Plan:
    kind = KINDS[index % len(KINDS)] if config.kind == "mixed" else config.kind
    drawn = levels.draw_level(level.cells).encode()
    # Each video has a seed of its own, so that any subset can be recorded again.
    seed = (config.seed, zlib.crc32(drawn), KINDS.index(kind), index)
    file = f"{level.name}/{index:04d}_{kind}.mp4"
    return _Plan(file, level, hashlib.sha256(drawn).hexdigest(), played_on, index, kind, seed)


def _record_all(plans: Sequence[_Plan], config: DemonstrateConfig) -> Iterator[Demonstration]:
    """Records level by level; yields each video when its file is complete."""
    if config.workers == 1 or config.backend == "jax" or len(plans) <= _CHUNK:
        for chunk, optimal, job in _jobs(plans, config):
            for plan, moves, (frames, digest) in zip(chunk, job.sequences, _play(job), strict=True):
                yield _describe(plan, optimal, moves, frames, digest)
        return
    # Spawned, since a fork of a process that runs JAX can deadlock.
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(config.workers, context, initializer=_ignore_interrupt)
    try:
        started = {
            executor.submit(_play_all, job): (chunk, optimal, job)
            for chunk, optimal, job in _jobs(plans, config)
        }
        for future in concurrent.futures.as_completed(started):
            chunk, optimal, job = started[future]
            for plan, moves, (frames, digest) in zip(chunk, job.sequences, future.result(), strict=True):
                yield _describe(plan, optimal, moves, frames, digest)
    finally:
        executor.shutdown(cancel_futures=True)


def _jobs(plans: Sequence[_Plan], config: DemonstrateConfig) -> Iterator[tuple[Sequence[_Plan], int, _Job]]:
    """Searches each level once and cuts its videos into jobs; yields plans, shortest length, job."""
    by_level: dict[str, list[_Plan]] = {}
    for plan in plans:
        by_level.setdefault(plan.level.name, []).append(plan)
    for group in by_level.values():
        level = group[0].level
        graph = solver.explore(level.cells)
        for start in range(0, len(group), _CHUNK):
            chunk = group[start : start + _CHUNK]
            try:
                sequences = tuple(_sample(graph, plan, config.max_length) for plan in chunk)
            except DataError as error:
                raise DataError(f"level '{level.name}': {error}.") from None
            files = tuple(plan.file for plan in chunk)
            job = _Job(config.out, files, level.cells, sequences, config.backend, config.fps)
            yield chunk, int(graph.distance[0]), job


def _sample(graph: solver.StateGraph, plan: _Plan, max_length: int) -> tuple[int, ...]:
    moves = solver.sample_expert(graph, np.random.default_rng(plan.seed), plan.kind, max_length)
    return tuple(int(move) for move in moves)


def _describe(plan: _Plan, optimal: int, moves: tuple[int, ...], frames: int, digest: str) -> Demonstration:
    return Demonstration(
        file=plan.file,
        level=plan.level.name,
        level_sha256=plan.level_sha256,
        index=plan.index,
        kind=plan.kind,
        optimal=optimal,
        moves=moves,
        frames=frames,
        sha256=digest,
        cartridge_sha256=plan.cartridge_sha256,
    )


def _ignore_interrupt() -> None:
    # Ctrl-C is the parent's to handle; it lets the workers finish what they are writing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _play_all(job: _Job) -> list[tuple[int, str]]:
    return list(_play(job))


def _play(job: _Job) -> Iterator[tuple[int, str]]:
    """Plays and writes videos; yields the number of frames and the hash of each."""
    play = _play_in_jax if job.backend == "jax" else _play_on_cartridge
    for file, frames in zip(job.files, play(job.cells, job.sequences), strict=True):
        content = encode_video(frames, job.fps)
        write_atomically(job.out / file, content)
        yield len(frames), hashlib.sha256(content).hexdigest()


def _play_on_cartridge(cells: np.ndarray, sequences: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """Yields uint8 [T + 1, 144, 160, 3] for each sequence of T actions."""
    emulator = Emulator(level=cells)
    try:
        for moves in sequences:
            emulator.reset()
            frames = [emulator.picture()]
            for move in moves:
                emulator.step(move)
                frames.append(emulator.picture())
            if emulator.monsters:
                raise SimulatorError(
                    f"the cartridge shows {emulator.monsters} monsters after the winning sequence "
                    f"{list(moves)}; expected none: its rules differ from the solver's, build it anew "
                    "with `python -m jaxreward.envs.catrap.cartridge.build`"
                )
            yield np.stack(frames)
    finally:
        emulator.close()


def _play_in_jax(cells: np.ndarray, sequences: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """The same as `_play_on_cartridge`, by the JAX rules."""
    # Imported here, since workers that play on the cartridge do without JAX.
    import jax
    import jax.numpy as jnp

    from jaxreward.envs.catrap import render, rules

    def play(actions):
        def step(state, action):
            state = rules.step(state, action)
            return state, render.sprites(state)

        first = rules.load(jnp.asarray(cells))
        _, following = jax.lax.scan(step, first, actions)
        return jnp.concatenate([render.sprites(first)[None], following])

    # Nothing changes after a win, so that padding with any action is harmless.
    padded = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, moves in zip(padded, sequences, strict=True):
        row[: len(moves)] = moves
    sprites = np.asarray(jax.jit(jax.vmap(play))(padded))
    for row, moves in zip(sprites, sequences, strict=True):
        yield np.asarray(render.render(row[: len(moves) + 1]))


def _header(config: DemonstrateConfig) -> dict[str, Any]:
    """What all videos of a folder have in common."""
    values = (_FORMAT, config.seed, config.max_length, config.fps, list(BUTTONS))
    return dict(zip(_HEADER, values, strict=True))


def _read_manifest(folder: Path, header: dict[str, Any]) -> dict[str, Demonstration]:
    """The demonstrations that a folder describes, by file; none if it does not exist."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        videos = [Demonstration(**{**video, "moves": tuple(video["moves"])}) for video in document["videos"]]
        found = {name: document[name] for name in _HEADER}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: it cannot be read ({error.strerror or error}).") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}: damaged or of another format; delete it to record anew.") from None
    for name, value in header.items():
        if found[name] != value:
            raise DataError(
                f"{folder} holds demonstrations with {name} {found[name]}, not {value}; "
                "choose another folder or the same settings."
            )
    return {video.file: video for video in videos}


def _write_manifest(folder: Path, header: dict[str, Any], known: dict[str, Demonstration]) -> None:
    """Writes the description, one line a video, so that people can read and compare it."""
    lines = [json.dumps(dataclasses.asdict(known[file])) for file in sorted(known)]
    head = json.dumps(header, indent=1).removesuffix("\n}")
    text = head + ',\n "videos": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    write_atomically(folder / MANIFEST, text)


def _is_ready(plan: _Plan, known: Demonstration | None, folder: Path) -> bool:
    """Whether the video is there, whole, of the same level and from the same cartridge."""
    if known is None:
        return False
    if (known.level_sha256, known.cartridge_sha256) != (plan.level_sha256, plan.cartridge_sha256):
        return False
    try:
        content = (folder / plan.file).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest() == known.sha256
