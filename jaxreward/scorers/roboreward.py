"""RoboReward: a Qwen3-VL that scores the end of a robot's video from 1 to 5 (Lee et al., 2026)."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models import weights
from jaxreward.models.generate import GenerateConfig
from jaxreward.models.qwen_config import QWEN3
from jaxreward.models.qwen_vl import QwenVL
from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scores
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.parsing import parse_score
from jaxreward.types import Array, PyTree

# Of a slice of two frames; qwen-vl-utils' limits for videos.
SLICE_TOKENS = (128, 768)


class RoboReward:
    """The value of frame k is the score of the video that ends with it, (s - 1) / 4 (arXiv:2601.00675).

    The frames of a query are a video in its order, one a second: shuffled ones make no sense here.

    Attributes:
      answers: the texts of the last call, for logs.
      reasons: why each of them could not be read; '' for those that could.
    """

    jittable: ClassVar[bool] = False
    permutation_equivariant: ClassVar[bool] = False

    def __init__(
        self,
        chat_model: ChatModel,
        *,
        prefixes: bool = True,
        unreadable_is_one: bool = False,
        max_new_tokens: int = 128,
    ) -> None:
        """Binds the model.

        Args:
          chat_model: of a RoboReward folder; see `load`.
          prefixes: ask once for each frame, about the video up to it. False: ask once, about the whole video,
            and give that value to every frame, which costs a fraction but has no order in it.
          unreadable_is_one: an answer that cannot be read is a valid score of 1, as in the authors' reader.
          max_new_tokens: the most tokens of an answer.

        Raises:
          ConfigError: a setting out of range.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {max_new_tokens} found; expected at least 1")
        self.chat_model, self.prefixes, self.unreadable_is_one = chat_model, prefixes, unreadable_is_one
        self.max_new_tokens = max_new_tokens
        self.answers: list[str] = []
        self.reasons: list[str] = []

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, dtype: str = "float32", mesh: Any = None, **options: Any
    ) -> RoboReward:
        """Loads RoboReward-4B or -8B, plain Qwen3-VL folders; `options` are those of `__init__`.

        Raises:
          ModelError: as `weights.load`, or another family, whose prompts hold no times.
        """
        model = weights.load(path, dtype=dtype, mesh=mesh)
        module = model.architecture.module
        if not isinstance(module, QwenVL) or module.config.family != QWEN3:
            raise ModelError(
                f"{path}: model_type {model.config.get('model_type')!r} found; expected 'qwen3_vl', which "
                "RoboReward is"
            )
        return cls(ChatModel(model, frame_tokens=SLICE_TOKENS), **options)

    def prepare(self, params: PyTree, task: str) -> PyTree:
        """Returns the task sentence."""
        del params
        return task

    def score(self, params: PyTree, context: PyTree, frames: Array, where: Array, key: Array) -> Scores:
        """Scores each query's video, or every prefix of it, all in one batch; each slice is encoded once.

        Args:
          params: the model's variables.
          context: the task sentence.
          frames: uint8 [Q, K, H, W, 3], in the order of time.
          where: bool [Q, K], False for slots that hold no frame (a suffix).
          key: unused by the greedy answers.

        Returns:
          Scores with values float32 [Q, K] in [0, 1], 0 in empty slots and where an answer could not be read;
          `valid` is False for a query with such an answer, unless `unreadable_is_one`.

        Raises:
          ModelError: frames that the model cannot read, or a prompt that is longer than the largest bucket.
        """
        frames, where = np.asarray(frames), np.asarray(where)
        counts = where.sum(1)
        values, tokens = np.zeros(where.shape, np.float32), np.zeros(len(where), np.int32)
        valid = np.ones(len(where), bool)
        self.answers, self.reasons = [], []
        rows, last = np.nonzero(where)
        if not self.prefixes:
            rows = np.flatnonzero(counts)
            last = counts[rows] - 1
        if rows.size:
            videos = [_slices(frames[row, : k + 1]) for row, k in zip(rows, last, strict=True)]
            chats = [prompts.roboreward(context, len(video)) for video in videos]
            greedy = GenerateConfig(temperature=0.0, max_new_tokens=self.max_new_tokens)
            shown = np.concatenate(videos)
            self.answers, generated = self.chat_model.answer(params, chats, shown, key, greedy)
            for row, k, answer in zip(rows, last, self.answers, strict=True):
                parsed = parse_score(answer)
                self.reasons.append(parsed.reason)
                valid[row] &= parsed.ok or self.unreadable_is_one
                first = k if self.prefixes else 0
                values[row, first : k + 1] = parsed.values[0] / 4 - 0.25 if parsed.ok else 0
            np.add.at(tokens, rows, generated.lengths)
        return Scores(jnp.asarray(values), jnp.asarray(valid), jnp.asarray(tokens))


def _slices(video: np.ndarray) -> np.ndarray:
    """uint8 [ceil(T / 2), H, W, 6] of a video [T, H, W, 3]: pairs of frames; the last may stand twice."""
    if len(video) % 2:
        video = np.concatenate([video, video[-1:]])
    return np.concatenate([video[::2], video[1::2]], axis=-1)
