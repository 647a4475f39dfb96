"""Reads the answers of vision-language models, strictly: an answer is understood whole or not at all.

An answer has a block for every frame, in any order, among prose that is ignored:

    Frame 1:                                    Frame 1: Rank: 3
    Frame Description: the cat is on the left   (the short form: one line)
    Rank: 3

A line that begins like a part of an answer must be one; numbers anywhere else are prose. RoboReward's answer
is one line, 'ANSWER: 4'.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

_FRAME = re.compile(r"\s*Frame\s+([0-9]{1,9})\s*:(.*)", re.DOTALL)
_DESCRIPTION = re.compile(r"\s*Frame\s+Description\s*:")
_RANK = re.compile(r"\s*Rank\s*:(.*)", re.DOTALL)
_PERCENTAGE = re.compile(r"\s*Task\s+Completion\s+Percentages?\s*:(.*)", re.DOTALL)
_SCORE = re.compile(r"\s*ANSWER\s*:(.*)", re.DOTALL)
_INTEGER = re.compile(r"\s*([0-9]{1,9})\s*")
_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%\s*")


@dataclasses.dataclass(frozen=True)
class Parsed:
    """What an answer says of each frame.

    Attributes:
      values: float32 [count], in the order in which the frames were shown; zeros if the answer is not ok.
      ok: the answer has exactly one value for every frame.
      reason: why it is not ok; '' if it is.
    """

    values: np.ndarray
    ok: bool
    reason: str = ""


def parse_ranks(text: str, count: int) -> Parsed:
    """Reads 'Rank: p' of every frame (RTA, section 3.1); ranks may be equal.

    Args:
      text: the answer, of any length.
      count: frames that were to be ranked, the anchor apart.

    Returns:
      Ranks in 1 .. count, later frames higher. Not ok, which the paper rewards with -1: a frame left out,
      given twice or never shown, a rank that is no integer in 1 .. count.
    """
    return _parse(text, count, _RANK, _INTEGER, 1, count, "Rank: p, a whole number")


def parse_percentages(text: str, count: int) -> Parsed:
    """Reads 'Task Completion Percentages: p%' of every frame (GVL), as given: nothing is rescaled.

    Args:
      text: the answer, of any length.
      count: frames that were to be judged, the anchor apart.

    Returns:
      Percentages in 0 .. 100. Not ok: a frame left out, given twice or never shown, or a value that is no
      number with a percent sign in 0 .. 100.
    """
    label = "Task Completion Percentages: p%, a number"
    return _parse(text, count, _PERCENTAGE, _PERCENT, 0, 100, label)


def parse_score(text: str) -> Parsed:
    """Reads 'ANSWER: s' of a whole video (RoboReward).

    Args:
      text: the answer, of any length.

    Returns:
      One score, a whole number in 1 .. 5. Not ok: no line that begins with 'ANSWER:', several of them, or one
      that goes on with anything else. (Robometer's reader of such answers falls back on any digit in 1 .. 5,
      then on 1.)
    """
    found = [line for line in map(_SCORE.fullmatch, text.splitlines()) if line is not None]
    if len(found) != 1:
        return Parsed(np.zeros(1, np.float32), False, f"{len(found)} lines 'ANSWER: s' found, one expected")
    value = _INTEGER.fullmatch(found[0][1])
    if value is None or not 1 <= int(value[1]) <= 5:
        reason = f"{_shown(found[0][0])} found, ANSWER: s, a whole number in 1 .. 5 expected"
        return Parsed(np.zeros(1, np.float32), False, reason)
    return Parsed(np.array([int(value[1])], np.float32), True)


def _parse(
    text: str, count: int, label: re.Pattern, number: re.Pattern, least: int, most: int, expected: str
) -> Parsed:
    found: dict[int, float] = {}
    open_frame: int | None = None

    def failed(reason: str) -> Parsed:
        return Parsed(np.zeros(count, np.float32), False, reason)

    for line in text.splitlines():
        header = _FRAME.fullmatch(line)
        if header is not None:
            if open_frame is not None:
                return failed(f"frame {open_frame} has no value")
            frame, rest = int(header[1]), header[2]
            if not 1 <= frame <= count:
                return failed(f"frame {frame} found, frames 1 to {count} were shown")
            if frame in found:
                return failed(f"frame {frame} found twice")
            if not rest.strip() or _DESCRIPTION.match(rest):
                open_frame = frame
                continue
        else:
            labelled = label.fullmatch(line)
            if labelled is None:
                continue
            if open_frame is None:
                return failed(f"a value without its frame found: {_shown(line)}")
            frame, rest = open_frame, line
        labelled = label.fullmatch(rest)
        value = number.fullmatch(labelled[1] if labelled else rest)
        if value is None or not least <= float(value[1]) <= most:
            return failed(f"frame {frame}: {_shown(rest)} found, {expected} in {least} .. {most} expected")
        found[frame], open_frame = float(value[1]), None
    if open_frame is not None:
        return failed(f"frame {open_frame} has no value")
    if len(found) < count:
        missing = next(frame for frame in range(1, count + 1) if frame not in found)
        return failed(f"{len(found)} of {count} frames found; frame {missing} is missing")
    return Parsed(np.array([found[frame] for frame in range(1, count + 1)], np.float32), True)


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else text[:40] + "...")
