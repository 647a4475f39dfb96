"""Buffers: what a learner learns from, given what was acted."""

from __future__ import annotations

import dataclasses

from jaxreward.types import Array, Experience, Rollout


@dataclasses.dataclass(frozen=True)
class OnPolicy:
    """Hands on each rollout once, for learners that learn from what their present policy did.

    Its state between two updates is empty, so a checkpoint does not carry a rollout.
    """

    def init(self) -> tuple[()]:
        """Holds nothing."""
        return ()

    def add(self, state: tuple[()], rollout: Rollout, rewards: dict[str, Array]) -> Experience:
        """Holds a rollout and its rewards {stream: float32 [T, B]} until they are sampled."""
        return Experience(rollout=rollout, rewards=rewards)

    def sample(self, state: Experience, key: Array | None = None) -> tuple[tuple[()], Experience]:
        """Gives what was added, unchanged, and forgets it; nothing is drawn, so no key is needed."""
        return (), state
