"""The Environment protocol: batched, with same-step auto-reset."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxreward.types import Array, EnvironmentSpec, PyTree, TimeStep


@runtime_checkable
class Environment(Protocol):
    """B environments that step together.

    `reset`, `step` and `render` are pure and jittable where `on_device` is True; a host environment
    (`envs/host.py`) makes its calls from inside jit by an ordered callback.

    An environment whose compact frames are smaller than its screen may also offer `pictures(frames,
    actions)`: full-size uint8 RGB pictures [L + 1, H, W, 3] of one episode, for videos.
    """

    spec: EnvironmentSpec
    on_device: bool  # True: pure JAX. False: a simulator on the host
    can_save: bool  # True: `state` alone restores the environment exactly (so a run resumes in mid-episode)

    def reset(self, key: Array) -> tuple[PyTree, TimeStep]:
        """Starts B new episodes; `first` is True, `episode_step` 0, rewards and ends are zero."""
        ...

    def step(self, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """Takes one action in each environment; ended episodes start anew in the same step."""
        ...

    def render(self, frame: PyTree) -> Array:
        """Turns compact frames of any leading axes into uint8 RGB pictures [..., H, W, 3]; jittable."""
        ...
