"""GVL: completion percentages of shuffled frames, and the value-order correlation (Ma et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxreward.correlation import spearman
from jaxreward.models.tokenizer import Message
from jaxreward.scorers import prompts
from jaxreward.scorers.parsing import Parsed, parse_percentages
from jaxreward.scorers.vlm_ranker import VLMRanker
from jaxreward.types import Array


class GVL(VLMRanker):
    """A `VLMRanker` that asks for percentages in place of ranks, as arXiv:2411.04549 does.

    The anchor is shown with 0 % and not judged. `describe` has no effect: every frame is described.
    """

    def ask(self, task: str, count: int) -> Sequence[Message]:
        """The chat that asks for `count` frames; its first image is the anchor."""
        return prompts.percentages(task, count)

    def parse(self, answer: str, count: int) -> Parsed:
        """Reads an answer; percentages are taken as given."""
        return parse_percentages(answer, count)


def value_order_correlation(values: Array, time: Array, where: Array | None = None) -> Array:
    """VOC: Spearman's rank correlation of values with time; 0 where it is undefined.

    Args:
      values: float [..., T].
      time: [..., T], the frames' places in the video.
      where: bool [..., T], False for slots that hold no frame.

    Returns:
      float32 [...] in [-1, 1].
    """
    return spearman(values, time, ties="average", where=where)
