"""TOPReward: how likely a model finds it that a video completes the task (arXiv:2602.19313)."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scores
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.types import Array, PyTree

ANSWER = "True"


class TOPReward:
    """The value of frame k is log P('True' | frames 0 .. k, the task); nothing is generated.

    The frames of a query are a video in its order: shuffled ones make no sense here.
    """

    jittable: ClassVar[bool] = False
    permutation_equivariant: ClassVar[bool] = False

    def __init__(self, chat_model: ChatModel, *, robot: bool = False) -> None:
        """Binds the model.

        Args:
          chat_model: the model.
          robot: call the video a robot manipulation trajectory, as the paper does.
        """
        self.chat_model, self.robot = chat_model, robot

    def prepare(self, params: PyTree, task: str) -> PyTree:
        """Returns the task sentence."""
        del params
        return task

    def score(self, params: PyTree, context: PyTree, frames: Array, where: Array, key: Array) -> Scores:
        """Judges every prefix of each query's video, all in one batch; each frame is encoded once.

        Args:
          params: the model's variables.
          context: the task sentence.
          frames: uint8 [Q, K, H, W, 3], in the order of time.
          where: bool [Q, K], False for slots that hold no frame (a suffix).
          key: unused, nothing is sampled.

        Returns:
          Scores with values float32 [Q, K], natural logarithms of at most 0, 0 in empty slots.
        """
        del key
        frames, where = np.asarray(frames), np.asarray(where)
        values = np.zeros(where.shape, np.float32)
        rows, last = np.nonzero(where)
        if rows.size:
            chats = [prompts.is_completed(context, int(k) + 1, robot=self.robot) for k in last]
            shown = np.concatenate([frames[row, : k + 1] for row, k in zip(rows, last, strict=True)])
            answers = [ANSWER] * len(chats)
            values[rows, last] = self.chat_model.log_probabilities(params, chats, shown, answers)
        none = jnp.zeros(len(where), jnp.int32)
        return Scores(jnp.asarray(values), jnp.ones(len(where), bool), none)
