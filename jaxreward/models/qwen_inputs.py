"""What Qwen's models read, laid out on the host: frames in rows of one length, and token positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flax import struct

from jaxreward.errors import ModelError
from jaxreward.models.qwen_config import QWEN3, QwenVisionConfig, QwenVLConfig
from jaxreward.types import Array


@struct.dataclass
class QwenImages:
    """Images for a vision tower: R rows of S slots, each slot holding one patch or nothing.

    A frame (a still image, or one temporal slice of a video) attends to itself alone and lies in one row;
    small frames share a row. No array grows with the square of the number of patches.
    """

    patches: Array  # float32 [R, S, C * t * p * p], 0 in empty slots
    segments: Array  # int32 [R, S], the number of the slot's frame, -1 in empty slots
    positions: Array  # int32 [R, S, 2], (row, column) of the patch in its frame
    order: Array  # int32 [N], which group of `merge`^2 slots, over all rows, becomes the n-th image token
    windows: Array | None = None  # int32 [R, W, window^2], slots of the same row in one window, -1: none
    in_window: Array | None = None  # int32 [R, S], where in `windows` [R] each slot stands, flattened
    table_rows: Array | None = None  # int32 [R, S, 4], neighbours in the table of learned positions
    table_weights: Array | None = None  # float32 [R, S, 4], weights of the neighbours


def rounded_up(size: int) -> int:
    """The next size that rows may have: 16 steps in each octave and at least 16, so that few shapes occur."""
    step = max(16, 1 << max(0, (size - 1).bit_length() - 5))
    return -(-size // step) * step


def image_token_count(grid: Sequence[int] | np.ndarray, config: QwenVLConfig) -> np.ndarray:
    """Tokens that stand for an image.

    Args:
      grid: int [..., 3], (time, height, width) in patches.
      config: structure.

    Returns:
      int64 [...].
    """
    return np.prod(np.asarray(grid, np.int64), -1) // config.vision.patches_per_token


def vision_inputs(
    config: QwenVLConfig, patches: np.ndarray, grids: np.ndarray, bucket: int | None = None
) -> QwenImages:
    """Lays the patches of images out in rows.

    Rows are as long as the largest frame, rounded up by `rounded_up`. With a bucket, the shapes of the
    result are those for the bucket filled up with frames of the largest size, so that they depend on the
    bucket and the size alone where all images have one size.

    Args:
      config: structure.
      patches: float32 [P, C * t * p * p], images one after another; the patches of one frame stand in groups
        of merge x merge neighbours, as Qwen's image processors give them.
      grids: int [n, 3], (time, height, width) of each image in patches; height and width are multiples of
        `merge`.
      bucket: number of patches to pad to, at least P; None: P.

    Returns:
      The layout with N = bucket / merge^2 image tokens, in the order of `patches`; what stands after the
      first P / merge^2 means nothing.

    Raises:
      ModelError: for patches that the grids do not describe, or a bucket that does not hold them.
    """
    vision = config.vision
    patches, grids = np.asarray(patches, np.float32), np.asarray(grids, np.int64)
    bucket = _checked_bucket(vision, patches, grids, bucket)
    heights, widths = np.repeat(grids[:, 1:], grids[:, 0], axis=0).T
    lengths = heights * widths
    empty_frames = (bucket - len(patches)) // lengths.max()
    row_length = rounded_up(int(lengths.max()))
    frame_rows, frame_starts = _pack(
        np.concatenate([lengths, np.full(empty_frames, lengths.max())]), row_length
    )
    rows = int(frame_rows.max()) + 1

    # From here on one entry for each patch, in the order of `patches`.
    frame = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(patches)) - (np.cumsum(lengths) - lengths)[frame]
    slots = frame_rows[frame] * row_length + frame_starts[frame] + within
    group, inner = np.divmod(within, vision.patches_per_token)
    group_y, group_x = np.divmod(group, widths[frame] // vision.merge)
    y = group_y * vision.merge + inner // vision.merge
    x = group_x * vision.merge + inner % vision.merge

    def spread(values: np.ndarray, empty: float = 0) -> np.ndarray:
        """Puts one value for each patch into its slot."""
        table = np.full((rows * row_length, *values.shape[1:]), empty, values.dtype)
        table[slots] = values
        return table.reshape(rows, row_length, *values.shape[1:])

    order = np.zeros(bucket // vision.patches_per_token, np.int32)
    order[: len(patches) // vision.patches_per_token] = (
        slots[:: vision.patches_per_token] // vision.patches_per_token
    )
    images = QwenImages(
        patches=spread(patches),
        segments=spread(frame.astype(np.int32), -1),
        positions=spread(np.stack([y, x], -1).astype(np.int32)),
        order=order,
    )
    if vision.window:
        across = -(-widths // vision.window)
        per_frame = -(-heights // vision.window) * across
        window = (np.cumsum(per_frame) - per_frame)[frame]
        window = window + y // vision.window * across[frame] + x // vision.window
        windows, in_window = _window_tables(window, slots, row_length, rows, vision.window**2)
        images = images.replace(windows=windows, in_window=spread(in_window))
    if vision.table:
        neighbours, weights = _interpolation(vision.table, y, x, heights[frame], widths[frame])
        images = images.replace(table_rows=spread(neighbours), table_weights=spread(weights))
    return images


def _checked_bucket(
    vision: QwenVisionConfig, patches: np.ndarray, grids: np.ndarray, bucket: int | None
) -> int:
    """Checks the arguments of `vision_inputs` and returns the number of patches to pad to."""
    if grids.ndim != 2 or grids.shape[-1] != 3 or not len(grids) or grids.min() < 1:
        raise ModelError(
            f"image grids {grids.tolist()} found; expected at least one (time, height, width), each >= 1"
        )
    if (grids[:, 1:] % vision.merge).any():
        raise ModelError(
            f"image grids {grids.tolist()} found; heights and widths must be multiples of {vision.merge} "
            "patches"
        )
    expected = (int(grids.prod(-1).sum()), vision.patch_values)
    if patches.shape != expected:
        raise ModelError(
            f"patches of shape {patches.shape} found; the grids {grids.tolist()} and patches of "
            f"{vision.temporal_patch} frames of {vision.patch} x {vision.patch} pixels give {expected}"
        )
    bucket = len(patches) if bucket is None else bucket
    if bucket < len(patches) or bucket % vision.patches_per_token:
        raise ModelError(
            f"a bucket of {bucket} patches found for images of {len(patches)}; expected at least as many, "
            f"and a multiple of {vision.patches_per_token}"
        )
    return bucket


def _pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Puts frames into rows, the longest first, each into the first row that has room.

    Returns:
      (row int64 [F], first slot int64 [F]) of each frame.
    """
    rows, starts = np.zeros_like(lengths), np.zeros_like(lengths)
    used = np.zeros(len(lengths), np.int64)
    for frame in np.argsort(-lengths, kind="stable"):
        row = np.argmax(used + lengths[frame] <= capacity)
        rows[frame], starts[frame] = row, used[row]
        used[row] += lengths[frame]
    return rows, starts


def _window_tables(
    window: np.ndarray, slots: np.ndarray, row_length: int, rows: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists the slots of each window, row by row.

    Args:
      window: int [P], the number of each patch's window, over all frames; none is left out.
      slots: int [P], the slot of each patch, over all rows.
      row_length: S.
      rows: R.
      size: patches that the largest window holds.

    Returns:
      (int32 [R, W, size] slots of the row, -1 for none; int32 [P] places of the patches in their row's
      table, flattened).
    """
    counts = np.bincount(window)
    first = np.cumsum(counts) - counts
    order = np.argsort(window, kind="stable")
    rank = np.empty(len(window), np.int64)
    rank[order] = np.arange(len(window)) - np.repeat(first, counts)
    # Windows are numbered anew within each row.
    row = slots[order[first]] // row_length
    by_row = np.argsort(row, kind="stable")
    per_row = np.bincount(row, minlength=rows)
    number_in_row = np.empty(len(counts), np.int64)
    number_in_row[by_row] = np.arange(len(counts)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    place = number_in_row[window] * size + rank
    table = np.full((rows, int(per_row.max()) * size), -1, np.int32)
    table[slots // row_length, place] = slots % row_length
    return table.reshape(rows, -1, size), place.astype(np.int32)


def _interpolation(
    side: int, y: np.ndarray, x: np.ndarray, height: np.ndarray, width: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in a square table, resampled bilinearly to a frame with the corners aligned.

    Args:
      side: of the table.
      y: int [P], rows of patches.
      x: int [P], columns of patches.
      height: int [P], heights of their frames in patches.
      width: int [P], widths of their frames in patches.

    Returns:
      (int32 [P, 4] rows of the flattened table, float32 [P, 4] weights, whose sum is 1).
    """

    def axis(index: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = index.astype(np.float32) * np.float32(side - 1) / np.maximum(size - 1, 1).astype(np.float32)
        low = np.floor(at)
        high_weight = at - low
        neighbours = np.stack([low, np.minimum(low + 1, side - 1)], -1).astype(np.int32)
        return neighbours, np.stack([1 - high_weight, high_weight], -1)

    rows, row_weights = axis(y, height)
    columns, column_weights = axis(x, width)
    neighbours = rows[:, :, None] * side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return neighbours.reshape(-1, 4), weights.reshape(-1, 4)


def rope_positions(
    tokens: np.ndarray,
    grids: np.ndarray,
    config: QwenVLConfig,
    *,
    seconds_per_grid: float | Sequence[float] = 1.0,
) -> tuple[np.ndarray, int]:
    """Positions of a prompt's tokens in (time, height, width), as transformers' `get_rope_index` gives them.

    Text counts upwards on all three axes. The tokens of an image take their place in its grid, from where
    the text stopped, and the text goes on after the longer side of the grid (M-RoPE: Qwen2-VL,
    arXiv:2409.12191, section 2.1). Qwen2.5-VL counts the time of a video in seconds; there, too, the text
    goes on after the longer side, as in transformers 5, where the paper has it go on after the last slice if
    that is further. Qwen3-VL takes each temporal slice of a video for an image of its own, with text between
    the slices.

    Args:
      tokens: int [T], the prompt without padding.
      grids: int [n, 3], (time, height, width) in patches of the images and videos, in the prompt's order.
      config: structure.
      seconds_per_grid: seconds between two temporal slices, of all videos or of each of the n grids.

    Returns:
      (int32 [3, T], the position of the first token after the prompt).

    Raises:
      ModelError: for a prompt whose image tokens are not those of its grids.
    """
    tokens, grids = np.asarray(tokens), np.asarray(grids, np.int64).reshape(-1, 3)
    at = np.flatnonzero(np.isin(tokens, (config.image_token, config.video_token)))
    counts = image_token_count(grids, config)
    if counts.sum() != len(at):
        raise ModelError(
            f"{len(at)} image tokens found in a prompt whose {len(grids)} images take {counts.sum()}; repeat "
            "each image's token `image_token_count` times"
        )
    is_video = tokens[at[np.cumsum(counts) - counts]] == config.video_token
    # steps of the time position from one temporal slice to the next
    interval = np.where(is_video, config.tokens_per_second * np.asarray(seconds_per_grid, np.float32), 1)
    if config.family == QWEN3:
        slices = np.where(is_video, grids[:, 0], 1)
        grids, is_video, interval = (np.repeat(x, slices, axis=0) for x in (grids, is_video, interval))
        grids[is_video, 0] = 1
        counts = image_token_count(grids, config)
    # `owner` and `rank`: the grid of each image token and its place in the grid.
    begin = at[np.cumsum(counts) - counts]
    owner = np.repeat(np.arange(len(grids)), counts)
    rank = np.arange(len(at)) - (np.cumsum(counts) - counts)[owner]
    broken = (at != begin[owner] + rank) | (tokens[at] != tokens[begin][owner])
    if broken.any():
        raise ModelError(
            f"the tokens of image {owner[broken][0]} are interrupted at token {at[broken][0] - 1}; expected "
            f"{counts[owner[broken][0]]} of one kind in a row"
        )
    height, width = grids[:, 1:].T // config.vision.merge
    steps = np.ones(len(tokens), np.int64)
    steps[at] = 0
    steps[begin + counts - 1] = np.maximum(height, width)
    start = np.cumsum(steps) - steps
    time, rest = np.divmod(rank, (height * width)[owner])
    time = (time.astype(np.float32) * interval[owner]).astype(np.int64)
    positions = np.tile(start, (3, 1))
    positions[:, at] = start[begin[owner]] + np.stack([time, *np.divmod(rest, width[owner])])
    return positions.astype(np.int32), int(positions.max(initial=-1)) + 1
