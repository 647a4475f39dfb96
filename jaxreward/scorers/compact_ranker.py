"""The compact frame ranker as a scorer: a small network in place of RTA's vision-language model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax.errors import FlaxError

from jaxreward.errors import ModelError
from jaxreward.models.frame_ranker import FrameRanker, FrameRankerConfig
from jaxreward.scorers.base import Scores
from jaxreward.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class CompactRanker:
    """Ranks frames with a `FrameRanker`; jittable, vmappable over parameters, equivariant to shuffles.

    It needs no task sentence: what counts as progress is what the videos showed that it was trained on.

    Attributes:
      config: the structure of the network whose parameters `score` receives.
    """

    config: FrameRankerConfig = dataclasses.field(default_factory=FrameRankerConfig)

    jittable: ClassVar[bool] = True
    permutation_equivariant: ClassVar[bool] = True

    def init(self, key: Array, frame_shape: tuple[int, int, int]) -> PyTree:
        """Makes random parameters for frames of (H, W, C) pixels."""
        frames = jnp.zeros((1, 2, *frame_shape), jnp.uint8)
        return _initialiser(self.config)(key, frames, jnp.ones((1, 2), jnp.bool_))

    def prepare(self, params: PyTree, task: str) -> PyTree:
        """Returns an empty context: the network reads pixels alone."""
        del params, task
        return ()

    def score(self, params: PyTree, context: PyTree, frames: Array, where: Array, key: Array) -> Scores:
        """Scores the frames of each query; deterministic, so `key` changes nothing.

        Args:
          params: what `init` or training returned.
          context: what `prepare` returned.
          frames: uint8 [Q, K, H, W, C], C = 1 or 3; frame 0 is the anchor.
          where: bool [Q, K], False for slots that hold no frame.
          key: a typed key, unused.

        Returns:
          Scores with values float32 [Q, K], 0 in slots that hold no frame; the anchor's own value (column
          0) means nothing. `valid` is False for a query with a value that is not finite, as after a
          training that diverged. `tokens` is 0.

        Raises:
          ModelError: where frames do not fit the network or the parameters are not this network's.
        """
        del context, key
        try:
            logits = FrameRanker(self.config).apply(params, frames, where)
        except FlaxError as error:
            reason = str(error).split(" (https://")[0]
            raise ModelError(
                f"compact ranker: the parameters do not fit {self.config} on frames {list(frames.shape)}: "
                f"{reason} Use the config that was saved with them and frames of the size it was trained on."
            ) from error
        valid = jnp.where(where, jnp.isfinite(logits), True).all(-1)
        values = jnp.where(where, logits, 0.0)
        return Scores(values=values, valid=valid, tokens=jnp.zeros(frames.shape[0], jnp.int32))


@functools.lru_cache(maxsize=16)
def _initialiser(config: FrameRankerConfig) -> Callable:
    return jax.jit(FrameRanker(config).init)
