"""The Agent protocol: pure functions on an explicit state."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxreward.types import Array, EnvironmentSpec, Experience, PyTree, TimeStep


@runtime_checkable
class Agent(Protocol):
    """A learner. Numeric settings are leaves of `state`, so that states can be vmapped over settings."""

    def init(self, key: Array, spec: EnvironmentSpec, total_updates: int) -> PyTree:
        """Makes the agent's state: parameters, optimiser, settings; `total_updates` ends the schedules."""
        ...

    def memory(self, batch_size: int) -> PyTree:
        """The recurrent memory at the start of an episode, [B, ...]; an empty tuple without recurrence."""
        ...

    def act(
        self, state: PyTree, memory: PyTree, timestep: TimeStep, key: Array, *, greedy: bool = False
    ) -> tuple[PyTree, Array, dict[str, Array]]:
        """Chooses an action [B] for each environment; also the next memory and extras for learning."""
        ...

    def learn(self, state: PyTree, experience: Experience, key: Array) -> tuple[PyTree, dict[str, Array]]:
        """One update from one rollout; returns the new state and scalar metrics. One jittable program."""
        ...

    def learn_stepwise(
        self, state: PyTree, experience: Experience, key: Array
    ) -> tuple[PyTree, dict[str, Array]]:
        """Equal to `learn`, driven from Python with one jitted call a minibatch.

        On CPU, convolution gradients inside a scan are many times slower than outside of one.
        """
        ...
