"""Videos on disk and in memory: reading folders of demonstrations, writing results.

Reading is strict: a file that is empty, damaged, cut short or not a video at all is named together
with the reason, and skipped or refused as the options say; it never ends in a crash or in a silently
shorter video. FFmpeg (through PyAV) decodes whatever is left of a truncated file without an error, so
what was decoded is compared with what the container declares.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from PIL import Image

from jaxreward.errors import ConfigError, DataError
from jaxreward.files import write_atomically

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".gif", ".avi")

# Only true video containers: playlists and `concat` scripts can name other files and addresses.
_DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,gif,avi"


@dataclass(frozen=True)
class Crop:
    """Pixels to cut from each side of the picture, before any resizing.

    The paper crops Game Boy recordings from 640x360 to 640x330 (appendix A.3), without saying from
    which side; `Crop(bottom=30)` cuts a status bar at the bottom.
    """

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0

    def __post_init__(self):
        """Refuses negative sizes with ConfigError."""
        if min(self.top, self.bottom, self.left, self.right) < 0:
            raise ConfigError(f"{self}: expected 0 or more pixels on each side.")


@dataclass(frozen=True)
class VideoOptions:
    """How videos are read.

    Attributes:
      crop: pixels to cut from each side.
      size: (height, width) to shrink or stretch to after cropping; None keeps the picture's own size.
      grey: one luma channel (ITU-R 601-2) in place of RGB.
      stride: keep every stride-th decoded frame.
      max_frames: stop reading a file after so many kept frames; None reads all.
      min_frames: a video with fewer kept frames is reported as too short.
      drop_duplicates: drop frames that equal the kept frame before them: pauses, menus and title
        screens have no order that could be learned.
      duplicate_tolerance: greatest difference of any pixel, in levels of 0..255, at which two frames
        still count as equal; 0 for lossless videos, about 10 for compressed ones.
      on_bad: 'skip' reports files that cannot be used, 'refuse' raises DataError if there is one.
      allow_damaged: keep what can be decoded of a damaged or truncated file; it is noted in
        `Video.damage`.
      max_bytes: limit on the decoded frames that are held in memory.
    """

    crop: Crop = field(default_factory=Crop)
    size: tuple[int, int] | None = None
    grey: bool = False
    stride: int = 1
    max_frames: int | None = None
    min_frames: int = 2
    drop_duplicates: bool = True
    duplicate_tolerance: int = 0
    on_bad: Literal["skip", "refuse"] = "skip"
    allow_damaged: bool = False
    max_bytes: int = 4 * 2**30

    def __post_init__(self):
        """Refuses values out of range with ConfigError."""
        if self.size is not None and min(self.size) < 1:
            raise ConfigError(f"size {self.size}: expected (height, width) of at least one pixel.")
        for name in ("stride", "max_frames", "min_frames", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: expected at least 1.")
        if self.on_bad not in ("skip", "refuse"):
            raise ConfigError(f"on_bad {self.on_bad!r}: expected 'skip' or 'refuse'.")


@dataclass(frozen=True)
class Video:
    """One decoded video.

    Attributes:
      frames: uint8 [T, H, W, C], C = 1 (grey) or 3 (RGB).
      path: the file.
      fps: frames per second of the file, before striding.
      dropped_static: how many frames equalled the one before them and were dropped.
      damage: what was wrong with the file, where damaged files are allowed; else None.
    """

    frames: np.ndarray
    path: Path
    fps: float
    dropped_static: int
    damage: str | None = None


@dataclass(frozen=True)
class BadFile:
    """A file that could not be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class VideoSet:
    """Videos of one or more folders, mixed with weights.

    Attributes:
      videos: V videos, by folder and then by name.
      source: int32 [V], the folder that each video comes from.
      source_weights: float32 [number of folders], how often each folder is drawn from.
      bad: files that could not be used.
      ignored: files whose name is not that of a video.
    """

    videos: tuple[Video, ...]
    source: np.ndarray
    source_weights: np.ndarray
    bad: tuple[BadFile, ...] = ()
    ignored: tuple[Path, ...] = ()

    @property
    def weights(self) -> np.ndarray:
        """float32 [V], summing to 1: a folder's weight in equal shares to each of its videos."""
        counts = np.bincount(self.source, minlength=len(self.source_weights))
        shares = (self.source_weights / np.maximum(counts, 1))[self.source]
        return (shares / shares.sum()).astype(np.float32)

    @property
    def dropped_static(self) -> int:
        """How many static or duplicate frames were dropped, over all videos."""
        return sum(video.dropped_static for video in self.videos)

    def padded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The videos as rectangular arrays for a device.

        Returns:
          frames uint8 [V, Tmax, H, W, C], zero beyond each video's end; lengths int32 [V];
          weights float32 [V].

        Raises:
          DataError: there are no videos, or their pictures differ in size.
        """
        if not self.videos:
            raise DataError("a set of videos is empty; expected at least one video in it")
        first = self.videos[0]
        for video in self.videos:
            if video.frames.shape[1:] != first.frames.shape[1:]:
                raise DataError(
                    f"{video.path} has pictures of {_size(video.frames)}, {first.path} of "
                    f"{_size(first.frames)}: set `size` (and `crop`) to bring them to one size."
                )
        lengths = np.array([len(video.frames) for video in self.videos], np.int32)
        frames = np.zeros((len(self.videos), lengths.max(), *first.frames.shape[1:]), np.uint8)
        for row, video in zip(frames, self.videos, strict=True):
            row[: len(video.frames)] = video.frames
        return frames, lengths, self.weights

    def split(self, held_out: float, seed: int) -> tuple[VideoSet, VideoSet]:
        """Splits off whole videos for validation, the same share of every folder.

        Args:
          held_out: share of the videos to hold out, in [0, 1). A share above zero holds out at least
            one video of every folder that has two or more.
          seed: decides which; the same seed and files give the same split.

        Returns:
          (training, held out); the held-out set is empty when no folder has a video to spare.
        """
        if not 0.0 <= held_out < 1.0:
            raise ConfigError(f"held_out {held_out}: expected a share in [0, 1).")
        generator = np.random.default_rng(seed)
        is_held_out = np.zeros(len(self.videos), bool)
        for folder in range(len(self.source_weights)):
            members = np.flatnonzero(self.source == folder)
            wanted = math.ceil(held_out * len(members) - 1e-9)
            count = min(wanted, max(len(members) - 1, 0))
            is_held_out[generator.permutation(members)[:count]] = True
        return self._subset(np.flatnonzero(~is_held_out)), self._subset(np.flatnonzero(is_held_out))

    def _subset(self, indices: np.ndarray) -> VideoSet:
        return VideoSet(tuple(self.videos[i] for i in indices), self.source[indices], self.source_weights)


def read_video(path: str | os.PathLike, options: VideoOptions | None = None) -> Video:
    """Reads one video file: MP4, MOV, MKV, WEBM, GIF or AVI.

    Args:
      path: the file.
      options: see VideoOptions; `min_frames` and `on_bad` concern folders only.

    Returns:
      The video, with at least one frame.

    Raises:
      DataError: the file is missing, empty, no video, damaged, truncated, smaller than the crop, or
        larger in memory than `max_bytes`.
    """
    path, options = Path(path), options or VideoOptions()
    problems: list[str] = []
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty; expected a video.")
        with av.open(
            str(path.absolute()), options={"format_whitelist": _DEMUXERS}, metadata_errors="replace"
        ) as container:
            if not container.streams.video:
                raise DataError(f"{path}: no video stream was found in it.")
            stream = container.streams.video[0]
            # Threads cost more than they bring on small pictures.
            if stream.width * stream.height <= 640 * 360:
                stream.thread_count = 1
            else:
                stream.thread_type = "AUTO"
            fps = float(stream.average_rate or stream.guessed_rate or 0)
            frames, dropped = _collect(_decode(container, stream, path, problems), path, options)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except PermissionError:
        raise DataError(f"{path}: permission to read it was denied.") from None
    except av.FFmpegError as error:
        raise DataError(f"{path}: not a video that can be read ({error.strerror}).") from None
    except OSError as error:
        raise DataError(f"{path}: it cannot be read ({error.strerror or error}).") from None
    if not len(frames):
        raise DataError(f"{path}: no frame could be decoded ({'; '.join(problems) or 'it holds none'}).")
    damage = "; ".join(problems) or None
    if damage and not options.allow_damaged:
        raise DataError(f"{path}: {damage}. Replace the file, or set allow_damaged to use what is left.")
    return Video(frames, path, fps, dropped, damage)


def read_folder(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    weights: Sequence[float] | None = None,
    options: VideoOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VideoSet:
    """Reads all videos of one or more folders, with their subfolders.

    Files are recognised by their suffix (`SUFFIXES`); hidden files are passed over.

    Args:
      paths: a folder, or several.
      weights: how often each folder is drawn from, whatever the number of its videos; equal if None.
      options: see VideoOptions.
      progress: called with (files read, files in all) after each file.

    Returns:
      The videos, and by name the files that could not be used.

    Raises:
      DataError: a folder is missing or unreadable, holds no usable video, a file is bad and
        `on_bad` is 'refuse', or the videos exceed `max_bytes`.
      ConfigError: the weights do not fit the folders.
    """
    options = options or VideoOptions()
    folders = [Path(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    source_weights = _check_weights(folders, weights)
    listings = [_list_folder(folder) for folder in folders]
    total = sum(len(files) for files, _ in listings)
    videos, source, bad, done, used = [], [], [], 0, 0
    for number, (folder, (files, _)) in enumerate(zip(folders, listings, strict=True)):
        bad_before, videos_before = len(bad), len(videos)
        for file in files:
            try:
                video = read_video(file, options)
                if len(video.frames) < options.min_frames:
                    raise DataError(_too_short(video, options))
            except _MemoryLimitError:
                raise
            except DataError as error:
                if options.on_bad == "refuse":
                    raise DataError(f"{error} (on_bad is 'refuse'.)") from None
                bad.append(BadFile(file, str(error).removeprefix(f"{file}: ")))
            else:
                used += video.frames.nbytes
                if used > options.max_bytes:
                    raise _MemoryLimitError(_too_large(f"The videos up to {file}", options))
                videos.append(video)
                source.append(number)
            done += 1
            if progress is not None:
                progress(done, total)
        if len(videos) == videos_before:
            raise DataError(_nothing_usable(folder, bad[bad_before:]))
    ignored = tuple(path for _, others in listings for path in others)
    return VideoSet(tuple(videos), np.array(source, np.int32), source_weights, tuple(bad), ignored)


def block_mean(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Shrinks a picture by the mean of whole blocks, rounded down, in exact integer arithmetic.

    Args:
      frame: uint8 [H, W, C].
      size: (height, width), divisors of H and W.

    Returns:
      uint8 [height, width, C].
    """
    height, width, channels = frame.shape
    rows, columns = height // size[0], width // size[1]
    # 257 is the largest block whose sum of bytes fits 16 bits.
    total = np.uint16 if rows * columns <= 257 else np.uint32
    sums = frame.reshape(size[0], rows, width * channels).sum(1, dtype=total)
    sums = sums.reshape(size[0], size[1], columns, channels).sum(2, dtype=total)
    return (sums // (rows * columns)).astype(np.uint8)


def encode_video(frames: np.ndarray, fps: float, lossless: bool = True) -> bytes:
    """Encodes frames as an MP4 file in memory; the same frames give the same bytes.

    Args:
      frames: uint8 [T, H, W, 3] RGB, or [T, H, W, 1] or [T, H, W] grey.
      fps: frames per second, above 0.
      lossless: True keeps every pixel (H.264 in RGB; decoders everywhere read it, few browsers play
        it). False is for looking at: H.264 in yuv420p, which every player and browser shows; odd
        heights and widths are padded by one pixel.

    Returns:
      The file's content.

    Raises:
      DataError: the frames have another shape or dtype, or there are none.
    """
    frames = np.asarray(frames)
    if frames.ndim == 3:
        frames = frames[..., None]
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] not in (1, 3) or not frames.size:
        raise DataError(
            f"frames of shape {frames.shape} and dtype {frames.dtype}: "
            "expected uint8 [T, H, W, 3] or [T, H, W, 1]."
        )
    if not fps > 0:
        raise DataError(f"fps {fps}: expected more than 0.")
    if lossless:
        codec, pixels, settings = "libx264rgb", "rgb24", {"qp": "0", "preset": "ultrafast"}
    else:
        codec, pixels, settings = "libx264", "yuv420p", {"crf": "18", "preset": "veryfast"}
        odd = [(0, size % 2) for size in frames.shape[1:3]]
        frames = np.pad(frames, [(0, 0), *odd, (0, 0)], mode="edge")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000), options=settings)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        stream.thread_count = 1
        for frame in frames:
            rgb = np.ascontiguousarray(np.broadcast_to(frame, (*frame.shape[:2], 3)))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def write_video(path: str | os.PathLike, frames: np.ndarray, fps: float, lossless: bool = True) -> Path:
    """Writes frames as an MP4 file that is either complete or not there.

    Args:
      path: the file; missing folders are made.
      frames, fps, lossless: as for `encode_video`.

    Returns:
      The path.

    Raises:
      DataError: the frames cannot be encoded.
      StorageError: the disk is full or the folder cannot be written.
    """
    path = Path(path)
    write_atomically(path, encode_video(frames, fps, lossless))
    return path


class _MemoryLimitError(DataError):
    """Videos that exceed `max_bytes`: no single file is to blame, so it is never skipped over."""


def _decode(container, stream, path: Path, problems: list[str]) -> Iterator[av.VideoFrame]:
    """Yields frames and, once the file is exhausted, notes in `problems` what was wrong with it."""
    packets = container.demux(stream)
    decoded, end, errors = 0, None, 0
    while True:
        try:
            frames = next(packets).decode()
        except StopIteration:
            break
        except av.FFmpegError:
            errors += 1
            continue
        for frame in frames:
            decoded += 1
            errors += frame.is_corrupt
            end = _end_of(frame, stream)
            yield frame
    if errors:
        problems.append(f"{errors} errors while decoding")
    declared = _declared_frames(container, stream)
    # AVI declares one frame too many.
    if declared and decoded < declared - 1:
        problems.append(f"{decoded} frames could be decoded of the {declared} that it declares: truncated")
    duration = None if declared else _declared_end(container, stream)
    interval = 1 / float(stream.average_rate or 25)
    if duration and end is not None and end < duration - 1.5 * interval:
        problems.append(f"it ends after {end:.2f} s of the {duration:.2f} s that it declares: truncated")
    if container.format.name == "gif" and not _has_gif_trailer(path):
        problems.append("the GIF's end mark is missing: truncated")


def _declared_frames(container, stream) -> int:
    """How many frames the container says a full decode gives; 0 where it does not say."""
    if "mp4" in container.format.name:
        # Edit lists, left by cutting without re-encoding, hide frames that `stream.frames` counts.
        return min(stream.frames, sum(not entry.is_discard for entry in stream.index_entries))
    return 0 if container.format.name == "gif" else stream.frames


def _declared_end(container, stream) -> float | None:
    """When the last frame ends in seconds, as declared; Matroska notes it per stream in a tag."""
    tag = stream.metadata.get("DURATION")
    if tag is not None:
        try:
            hours, minutes, seconds = tag.split(":")
            return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
        except ValueError:
            return None
    # With sound, the file may well last longer than its pictures.
    if len(container.streams) == 1 and container.duration:
        return container.duration / av.time_base
    return None


def _end_of(frame: av.VideoFrame, stream) -> float | None:
    if frame.time is None:
        return None
    if frame.duration and frame.time_base:
        return frame.time + float(frame.duration * frame.time_base)
    return frame.time + 1 / float(stream.average_rate or 25)


def _has_gif_trailer(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(16, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip(b"\0").endswith(b";")


def _collect(decoded: Iterator[av.VideoFrame], path: Path, options: VideoOptions) -> tuple[np.ndarray, int]:
    """Strides over, transforms and stacks decoded frames, dropping repetitions; also counts those."""
    kept: list[np.ndarray] = []
    dropped = used = 0
    # One for the whole file: `frame.to_ndarray(format=...)` sets up a conversion for every frame.
    reformatter = VideoReformatter()
    for number, frame in enumerate(decoded):
        if number % options.stride:
            continue
        picture = _transform(reformatter.reformat(frame, format="rgb24").to_ndarray(), path, options)
        if kept and picture.shape != kept[0].shape:
            raise DataError(
                f"{path}: its pictures change size from {_size(kept[0][None])} to {_size(picture[None])}; "
                "set `size`."
            )
        if kept and options.drop_duplicates and _alike(kept[-1], picture, options.duplicate_tolerance):
            dropped += 1
            continue
        used += picture.nbytes
        if used > options.max_bytes:
            raise _MemoryLimitError(_too_large(str(path), options))
        kept.append(picture)
        if len(kept) == options.max_frames:
            break
    return np.stack(kept) if kept else np.zeros((0, 0, 0, 0), np.uint8), dropped


def _transform(picture: np.ndarray, path: Path, options: VideoOptions) -> np.ndarray:
    """Crops, greys and resizes one picture, in this order; uint8 [H, W, 3] -> [H', W', C]."""
    height, width = picture.shape[:2]
    crop = options.crop
    if crop.top + crop.bottom >= height or crop.left + crop.right >= width:
        raise DataError(f"{path}: its pictures of {width}x{height} are too small for {crop}.")
    picture = picture[crop.top : height - crop.bottom, crop.left : width - crop.right]
    if options.grey:
        picture = np.asarray(Image.fromarray(np.ascontiguousarray(picture)).convert("L"))[..., None]
    if options.size is None or options.size == picture.shape[:2]:
        return np.ascontiguousarray(picture)
    if picture.shape[0] % options.size[0] == 0 and picture.shape[1] % options.size[1] == 0:
        return block_mean(np.ascontiguousarray(picture), options.size)
    image = Image.fromarray(np.ascontiguousarray(picture[..., 0] if options.grey else picture))
    resized = np.asarray(image.resize(options.size[::-1], Image.Resampling.BOX))
    return resized.reshape(*options.size, picture.shape[2])


def _alike(first: np.ndarray, second: np.ndarray, tolerance: int) -> bool:
    if tolerance == 0:
        return np.array_equal(first, second)
    return int(np.abs(first.astype(np.int16) - second).max()) <= tolerance


def _list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folder's video files and its other files, by name, hidden ones left out."""
    if not folder.exists():
        raise DataError(f"{folder}: no such folder; expected a folder of videos.")
    if not folder.is_dir():
        raise DataError(f"{folder}: it is a file; expected a folder of videos.")

    def refuse(error: OSError):
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}).") from error

    files, others = [], []
    for parent, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                (files if name.lower().endswith(SUFFIXES) else others).append(Path(parent) / name)
    if not files:
        raise DataError(f"{folder}: no video was found in it; expected files named {', '.join(SUFFIXES)}.")
    return files, others


def _check_weights(folders: Sequence[Path], weights: Sequence[float] | None) -> np.ndarray:
    if not folders:
        raise ConfigError("No folder of videos was given; expected at least one.")
    if weights is None:
        return np.ones(len(folders), np.float32)
    if len(weights) != len(folders):
        raise ConfigError(f"{len(weights)} weights for {len(folders)} folders of videos: expected one each.")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"Weights {list(weights)}: expected finite numbers above 0.")
    return np.array(weights, np.float32)


def _too_short(video: Video, options: VideoOptions) -> str:
    dropped = f" after {video.dropped_static} repeated ones were dropped" if video.dropped_static else ""
    found = f"{len(video.frames)} frames{dropped}"
    return f"{video.path}: too short, {found}; expected at least {options.min_frames}."


def _too_large(what: str, options: VideoOptions) -> str:
    return (
        f"{what} need more than max_bytes = {options.max_bytes:,} bytes in memory; reduce `size`, choose "
        f"`grey`, a larger `stride` or a smaller `max_frames`, or raise `max_bytes`."
    )


def _nothing_usable(folder: Path, bad: Sequence[BadFile]) -> str:
    shown = "; ".join(f"{file.path.name}: {file.reason}" for file in bad[:5])
    more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
    return f"{folder}: none of its {len(bad)} videos can be used: {shown}{more}"


def _size(frames: np.ndarray) -> str:
    return f"{frames.shape[2]}x{frames.shape[1]}"
