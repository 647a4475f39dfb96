"""RTA's scorer: a vision-language model that writes the progress rank of every frame (section 3.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxreward.errors import ConfigError
from jaxreward.models.generate import GenerateConfig
from jaxreward.models.tokenizer import Message
from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scores
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.parsing import Parsed, parse_ranks
from jaxreward.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class VLMRankerConfig:
    """Which vision-language model ranks, and how it is asked.

    Attributes:
      model: Hugging Face folder of the model that Stage 1 teaches to rank (see `training/rank_vlm.py`), or
        the name of one that ships with the package; empty: Stage 1 trains the compact ranker.
      describe: have every frame described before its rank, as the paper does; else ranks alone, which take a
        quarter of the tokens.
      temperature: of the sampling (table 5: 1.0 in Stage 1; table 4: 0.2 in Stage 2); 0 is greedy.
      max_new_tokens: the most tokens of an answer; one that is cut off cannot be read.
      dtype: of parameters and computation.
      cached_frames: frames whose features are kept for the next queries; at least those of one call.
    """

    model: str = ""
    describe: bool = True
    temperature: float = 0.2
    max_new_tokens: int = 1024
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    cached_frames: int = 1024

    def __post_init__(self) -> None:
        """Checks the ranges; raises ConfigError."""
        for field in ("max_new_tokens", "cached_frames"):
            if getattr(self, field) < 1:
                raise ConfigError(f"vlm.{field} is {getattr(self, field)}; expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"vlm.temperature is {self.temperature}; expected a number of at least 0")


class VLMRanker:
    """Asks a `ChatModel` for the order of frames; an answer that cannot be read is not valid.

    Attributes:
      answers: the texts of the last call, for logs.
      reasons: why each of them could not be read; '' for those that could.
    """

    jittable: ClassVar[bool] = False
    permutation_equivariant: ClassVar[bool] = False

    def __init__(self, chat_model: ChatModel, config: VLMRankerConfig | None = None) -> None:
        """Binds the model and the settings."""
        self.chat_model, self.config = chat_model, config or VLMRankerConfig()
        self.answers: list[str] = []
        self.reasons: list[str] = []

    def ask(self, task: str, count: int) -> Sequence[Message]:
        """The chat that asks for `count` frames; its first image is the anchor."""
        return prompts.rank_frames(task, count, describe=self.config.describe)

    def parse(self, answer: str, count: int) -> Parsed:
        """Reads an answer."""
        return parse_ranks(answer, count)

    def prepare(self, params: PyTree, task: str) -> PyTree:
        """Returns the task sentence, which goes into every prompt."""
        del params
        return task

    def score(self, params: PyTree, context: PyTree, frames: Array, where: Array, key: Array) -> Scores:
        """Has the model judge the frames of each query, all queries in one batch.

        Args:
          params: the model's variables, with a 'lora' collection where there is one.
          context: the task sentence.
          frames: uint8 [Q, K, H, W, 3]; frame 0 is the anchor, the others are shown in this order.
          where: bool [Q, K], False for slots that hold no frame (a suffix).
          key: of the sampling.

        Returns:
          Scores with values float32 [Q, K], as the model wrote them, 0 for the anchor and for empty slots;
          `valid` is False where the answer could not be read. A query with nothing to rank is not asked: it
          has zeros, is valid, and costs nothing.

        Raises:
          ModelError: frames that the model cannot read, or a prompt that is longer than the largest bucket.
        """
        frames, where = np.asarray(frames), np.asarray(where)
        counts = np.maximum(where.sum(1) - 1, 0)
        asked = np.flatnonzero(counts)
        values = np.zeros(where.shape, np.float32)
        valid, tokens = np.ones(len(where), bool), np.zeros(len(where), np.int32)
        self.answers, self.reasons = [], []
        if asked.size:
            chats = [self.ask(context, int(counts[query])) for query in asked]
            shown = np.concatenate([frames[query, : counts[query] + 1] for query in asked])
            sampling = GenerateConfig(self.config.temperature, self.config.max_new_tokens)
            self.answers, generated = self.chat_model.answer(params, chats, shown, key, sampling)
            for query, answer in zip(asked, self.answers, strict=True):
                parsed = self.parse(answer, int(counts[query]))
                values[query, 1 : counts[query] + 1] = parsed.values
                valid[query] = parsed.ok
                self.reasons.append(parsed.reason)
            tokens[asked] = generated.lengths
        return Scores(jnp.asarray(values), jnp.asarray(valid), jnp.asarray(tokens))
