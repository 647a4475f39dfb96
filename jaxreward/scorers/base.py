"""The Scorer protocol: frames in, one value a frame (or a sentence) out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from flax import struct

from jaxreward.types import Array, PyTree


@struct.dataclass
class Scores:
    """Answers to Q queries."""

    values: Array  # float32 [Q, A], A = frames or sentences; a higher value means later, or more alike
    valid: Array  # bool [Q], False where the answer could not be read (the reward is then -1)
    tokens: Array  # int32 [Q], tokens generated (0 for models that generate none)


@runtime_checkable
class Scorer(Protocol):
    """A frozen model that judges frames."""

    jittable: bool  # `score` may be called inside jit
    permutation_equivariant: bool  # shuffling the frames only shuffles the values

    def prepare(self, params: PyTree, task: str) -> PyTree:
        """Encodes the task once, on the host; its result goes to every `score` call."""
        ...

    def score(self, params: PyTree, context: PyTree, frames: Array, where: Array, key: Array) -> Scores:
        """Scores the frames of each query.

        Args:
          params: the model's parameters.
          context: what `prepare` returned.
          frames: uint8 [Q, K, H, W, 3]; frame 0 is the anchor.
          where: bool [Q, K], False for slots that hold no frame (always a suffix).
          key: a typed key, for models that sample.
        """
        ...
