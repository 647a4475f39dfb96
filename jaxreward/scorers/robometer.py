"""Robometer as a scorer: progress, success and preference, read off a prompt without generating anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models import robometer, weights
from jaxreward.models.generate import Buckets
from jaxreward.models.tokenizer import Message
from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scores
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.types import Array, PyTree

TOKENS = (robometer.PROGRESS_TOKEN, robometer.PREFERENCE_TOKEN, robometer.SPLIT_TOKEN)
# Of qwen-vl-utils, which sizes the authors' images in place of preprocessor_config.json: it enlarges less.
IMAGE_TOKENS = (4, 16384)


class Robometer:
    """Judges every frame of a video, arXiv:2603.02115; the frames of a query are a video in its order."""

    jittable: ClassVar[bool] = False
    permutation_equivariant: ClassVar[bool] = False

    def __init__(
        self,
        chat_model: ChatModel,
        *,
        output: Literal["progress", "success"] = "progress",
        max_frames: int = 8,
    ) -> None:
        """Binds the model.

        Args:
          chat_model: of a Robometer folder; see `load`.
          output: what a frame's value is: the progress, or the probability of success.
          max_frames: of a video that are shown, evenly spaced, first and last included; values of the others
            are interpolated. The published model was trained on 8.

        Raises:
          ModelError: another model, or a tokenizer without the tokens that Robometer adds.
          ConfigError: a setting out of range.
        """
        if not isinstance(chat_model.module, robometer.Robometer):
            raise ModelError(
                f"{chat_model.model.path}: a {type(chat_model.module).__name__} found; expected a Robometer"
            )
        vocabulary = chat_model.tokenizer.get_vocab()
        if absent := [token for token in TOKENS if token not in vocabulary]:
            raise ModelError(
                f"{chat_model.model.path}: tokenizer without {', '.join(absent)} found; Robometer adds "
                "<|split_token|>, <|reward_token|>, <|pref_token|>, <|sim_token|> and <|prog_token|>, in "
                "this order, to Qwen3-VL's tokens: use the authors' tokenizer files"
            )
        if output not in ("progress", "success"):
            raise ConfigError(f"output {output!r} found; expected 'progress' or 'success'")
        if max_frames < 2:
            raise ConfigError(f"max_frames {max_frames} found; expected at least 2")
        self.chat_model, self.output, self.max_frames = chat_model, output, max_frames
        self._ids = {token: vocabulary[token] for token in TOKENS}
        self._read = jax.jit(self._hidden, static_argnames="method")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        mesh: Any = None,
        buckets: Buckets | None = None,
        cached_frames: int = 1024,
        **options: Any,
    ) -> Robometer:
        """Loads a folder in the authors' layout or in LeRobot's; frames are sized as in training.

        Args:
          path: the folder.
          dtype: of parameters and computation, 'float32' or 'bfloat16'.
          mesh: places the parameters; None: on the default device.
          buckets: shapes that programs are compiled for.
          cached_frames: frames whose features are kept.
          **options: those of `__init__`.

        Raises:
          ModelError: as `weights.load` and `__init__`; a folder without a progress head, or of a model that
            is read without progress tokens.
        """
        folder = Path(path)
        try:
            settings = folder / "config.yaml"
            config = robometer.read_structure(
                weights.read_config(folder),
                weights.read_headers(folder),
                settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else "",
            )
        except ModelError as error:
            raise error if str(folder) in str(error) else ModelError(f"{folder}: {error}") from error
        model = weights.load(folder, dtype=dtype, mesh=mesh, config=config)
        chat_model = ChatModel(model, buckets=buckets, cached_frames=cached_frames, frame_tokens=IMAGE_TOKENS)
        return cls(chat_model, **options)

    def prepare(self, params: PyTree, task: str) -> PyTree:
        """Returns the task sentence."""
        del params
        return task

    def score(self, params: PyTree, context: PyTree, frames: Array, where: Array, key: Array) -> Scores:
        """Judges the videos of all queries in one batch; each different frame is encoded once.

        Args:
          params: the model's variables.
          context: the task sentence.
          frames: uint8 [Q, K, H, W, 3], in the order of time.
          where: bool [Q, K], False for slots that hold no frame (a suffix).
          key: unused, nothing is sampled.

        Returns:
          Scores with values float32 [Q, K] in [0, 1], 0 in empty slots.
        """
        del key
        frames, where = np.asarray(frames), np.asarray(where)
        counts, values = where.sum(1), np.zeros(where.shape, np.float32)
        asked = np.flatnonzero(counts)
        if asked.size:
            places = [self._places(int(counts[query])) for query in asked]
            shown = np.concatenate([frames[query, own] for query, own in zip(asked, places, strict=True)])
            chats = [prompts.robometer_progress(context, len(own)) for own in places]
            found = self._judge(params, chats, shown, robometer.PROGRESS_TOKEN, self.output)
            for query, own, row in zip(asked, places, found, strict=True):
                every = np.arange(counts[query])
                values[query, : counts[query]] = np.interp(every, own, row[: len(own)])
        none = jnp.zeros(len(where), jnp.int32)
        return Scores(jnp.asarray(values), jnp.ones(len(where), bool), none)

    def preference(self, params: PyTree, task: str, first: np.ndarray, second: np.ndarray) -> float:
        """The probability that the first video shows more progress than the second.

        Args:
          params: the model's variables.
          task: the task sentence.
          first: uint8 [T, H, W, 3], in the order of time.
          second: uint8 [U, H, W, 3], of the same size.
        """
        videos = [video[self._places(len(video))] for video in (np.asarray(first), np.asarray(second))]
        progress = self.chat_model.model.config.get("pairs_ask_progress", True)
        chats = [prompts.robometer_preference(task, *map(len, videos), progress=progress)]
        found = self._judge(params, chats, np.concatenate(videos), robometer.PREFERENCE_TOKEN, "preference")
        return float(found[0, 0])

    def _places(self, count: int) -> np.ndarray:
        """Which of `count` frames are shown."""
        if not count:
            raise ModelError("a video without frames found; expected at least one frame")
        return np.unique(np.linspace(0, count - 1, min(count, self.max_frames)).round().astype(int))

    def _judge(
        self, params: PyTree, chats: Sequence[Sequence[Message]], frames: np.ndarray, token: str, method: str
    ) -> np.ndarray:
        """float32 [B, F]: what a head says at every `token` of each chat; the rest is padding."""
        batch, features = self.chat_model.prompts(params, chats, frames, add_generation_prompt=False)
        found = []
        for _, size, part in self.chat_model.generator.parts(batch):
            marked = part.tokens == self._ids[token]
            most = self.max_frames if token == robometer.PROGRESS_TOKEN else 1
            at = np.zeros((len(marked), most), np.int32)
            for row, own in zip(at, marked, strict=True):
                places = np.flatnonzero(own)
                row[: len(places)] = places
            found.append(np.asarray(self._read(params, part, features, at, method=method))[:size])
        return np.concatenate(found)

    def _hidden(self, params: PyTree, batch: Any, features: Any, at: Array, *, method: str) -> Array:
        """What the head `method` says of the states at columns `at` [B, F], after the final norm."""

        def read(module: robometer.Robometer) -> Array:
            embeddings, extra = module.embed(batch.tokens, batch.image_rows, features)
            hidden, _ = module(embeddings, batch.positions, batch.where, extra=extra)
            return getattr(module, method)(jnp.take_along_axis(hidden, at[..., None], axis=1))

        return self.chat_model.module.apply(params, method=read)
