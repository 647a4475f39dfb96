"""ELLM- of BiMI's paper (section 4.3): a slice of the trajectory against the instruction.

ELLM (Du et al., 2023) asks a language model for goals as it goes; ELLM- takes the expert's instructions.
"""

from __future__ import annotations

import dataclasses

from jaxreward.rewards.instructions import SoftInstructionConfig, SoftInstructionReward


@dataclasses.dataclass(frozen=True)
class ELLMConfig(SoftInstructionConfig):
    """Settings of the soft reward on a slice of 10 frames, the published code's length."""


class ELLM(SoftInstructionReward):
    """Soft similarity of the newest frames."""
