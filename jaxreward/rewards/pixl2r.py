"""Pixl2R (Goyal et al., 2020) as BiMI's paper uses it: the newest frame against the instruction.

The original shapes potentials that a network of its own learns; here, as in BiMI (section 4.3), the
similarity comes from a frozen CLIP.
"""

from __future__ import annotations

import dataclasses

from jaxreward.rewards.instructions import SoftInstructionConfig, SoftInstructionReward


@dataclasses.dataclass(frozen=True)
class Pixl2RConfig(SoftInstructionConfig):
    """Settings of the soft reward on one frame; two frames for a scorer of differences (published code)."""

    frames: int = 1


class Pixl2R(SoftInstructionReward):
    """Soft similarity of the newest frame."""
