"""Image features of video frames, computed once for each frame and shared by all prompts that show it.

A ranking scorer shows the same frames many times: shuffled, and in windows that overlap. The vision tower
sees each of them once.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models.vision_language import ImageFeatures
from jaxreward.types import Array


def _write(table: Array, new: Array, first: Array) -> Array:
    """Puts blocks of rows into a table [..., N, D] at `first`, int32 [n]; what lies outside is dropped."""
    tokens = new.shape[-2] // first.shape[0]
    at = (first[:, None] + jnp.arange(tokens)).ravel()
    return table.at[..., at, :].set(new, mode="drop")


class FrameCache:
    """A table of image features for frames of one size, from which the longest unused frames are dropped.

    Call `clear` when the parameters of the vision tower have changed.

    Attributes:
      tokens_per_frame: rows of the table that one frame takes.
      capacity: frames that the table holds.
      encoded: frames encoded so far.
      compilations: programs that write to the table, compiled so far.
    """

    def __init__(
        self,
        encode: Callable[[np.ndarray], ImageFeatures],
        *,
        tokens_per_frame: int,
        capacity: int,
        batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    ) -> None:
        """Makes an empty cache.

        Args:
          encode: maps frames uint8 [n, H, W, C] to features of n * tokens_per_frame rows, frame by frame. It
            is called with n from `batches` only.
          tokens_per_frame: tokens that one frame becomes.
          capacity: frames to keep; at least as many as the prompts of one `lookup` show.
          batches: sizes in which frames are encoded; the last is filled up by repeating a frame.

        Raises:
          ConfigError: for numbers below 1 or sizes that do not ascend.
        """
        for name, value in (("tokens_per_frame", tokens_per_frame), ("capacity", capacity)):
            if value < 1:
                raise ConfigError(f"{name} {value} found; expected at least 1")
        if not batches or batches[0] < 1 or list(batches) != sorted(set(batches)):
            raise ConfigError(f"batches {batches} found; expected ascending sizes from 1")
        self.tokens_per_frame = tokens_per_frame
        self.capacity = capacity
        self.encoded = 0
        self.compilations = 0
        self._encode = encode
        self._batches = batches
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by hash, the frame unused longest first
        self._table: ImageFeatures | None = None
        self._shape: tuple[int, ...] | None = None

        def write(table: ImageFeatures, new: ImageFeatures, first: Array) -> ImageFeatures:
            self.compilations += 1
            return jax.tree.map(lambda x, y: _write(x, y, first), table, new)

        self._write = jax.jit(write, donate_argnums=0)

    def lookup(self, frames: np.ndarray) -> tuple[ImageFeatures, np.ndarray]:
        """Finds or computes the features of frames.

        Args:
          frames: uint8 [N, H, W, C], N at least 1, in any order and with repetitions.

        Returns:
          (the table, int32 [N] the first of each frame's `tokens_per_frame` rows in it). The table is valid
          until the next call, which writes into the same memory.

        Raises:
          ModelError: for no frames, frames of another size than before, more different frames than the
            capacity, or an `encode` whose features have another number of rows.
        """
        frames = np.asarray(frames)
        self._check(frames)
        hashes = [hashlib.blake2b(frame.tobytes(), digest_size=16).digest() for frame in frames]
        numbers = {name: number for number, name in enumerate(hashes)}
        if len(numbers) > self.capacity:
            raise ModelError(
                f"{len(numbers)} different frames found in one lookup, but the cache holds {self.capacity}; "
                "look up fewer at once or raise the capacity"
            )
        for name in numbers:
            if name in self._slots:
                self._slots.move_to_end(name)
        unseen = [name for name in numbers if name not in self._slots]
        largest = self._batches[-1]
        for start in range(0, len(unseen), largest):
            names = unseen[start : start + largest]
            self._add(names, frames[[numbers[name] for name in names]])
        first = [self._slots[name] * self.tokens_per_frame for name in hashes]
        return self._table, np.asarray(first, np.int32)

    def clear(self) -> None:
        """Forgets all frames; the table keeps its memory."""
        self._slots.clear()

    def _check(self, frames: np.ndarray) -> None:
        if frames.ndim != 4 or frames.dtype != np.uint8 or not frames.shape[0]:
            raise ModelError(
                f"frames {frames.dtype} {frames.shape} found; expected uint8 [N, H, W, C], N >= 1"
            )
        if self._shape not in (None, frames.shape[1:]):
            raise ModelError(
                f"frames of shape {frames.shape[1:]} found; this cache holds frames of {self._shape}: "
                "use one cache for each size"
            )
        self._shape = frames.shape[1:]

    def _add(self, names: list[bytes], frames: np.ndarray) -> None:
        """Encodes frames that are not in the cache and gives them slots, if need be of the longest unused."""
        batch = next(size for size in self._batches if size >= len(names))
        features = self._encode(np.concatenate([frames, np.repeat(frames[-1:], batch - len(names), axis=0)]))
        rows = batch * self.tokens_per_frame
        if features.rows.shape[0] != rows:
            raise ModelError(
                f"{features.rows.shape[0]} rows of features for {batch} frames found; expected {rows}, "
                f"{self.tokens_per_frame} a frame"
            )
        self.encoded += len(names)
        slots = []
        for _ in names:
            full = len(self._slots) + len(slots) >= self.capacity
            slots.append(self._slots.popitem(last=False)[1] if full else len(self._slots) + len(slots))
        if self._table is None:
            self._table = jax.tree.map(self._empty, features)
        # slot `capacity` lies outside of the table: the frames that fill up the batch are dropped
        slots_padded = np.pad(
            np.asarray(slots, np.int32), (0, batch - len(names)), constant_values=self.capacity
        )
        self._table = self._write(self._table, features, slots_padded * self.tokens_per_frame)
        self._slots.update(zip(names, slots, strict=True))

    def _empty(self, features: Array) -> Array:
        rows = self.capacity * self.tokens_per_frame
        return jnp.zeros((*features.shape[:-2], rows, features.shape[-1]), features.dtype)
