"""The records that the five parts hand to one another; time-major, [T, B, ...]."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Actions 0 .. n - 1, int32."""

    n: int


@dataclasses.dataclass(frozen=True)
class Box:
    """Real-valued actions of a shape, float32, each within [low, high]."""

    low: float
    high: float
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
    """What the other parts must know of an environment before anything runs.

    Attributes:
      num_envs: B, the number of environments that step together (local to this process).
      max_episode_steps: the time limit; an episode of this length is truncated.
      task: the task as one sentence.
      observation: shape and dtype of one environment's observation (a pytree of ShapeDtypeStruct).
      frame: shape and dtype of one environment's compact frame, the input of `render`.
      image_shape: (H, W, 3) of what `render` gives for one frame.
      action_space: Discrete or Box.
    """

    num_envs: int
    max_episode_steps: int
    task: str
    observation: PyTree
    frame: PyTree
    image_shape: tuple[int, int, int]
    action_space: Discrete | Box


@struct.dataclass
class TimeStep:
    """What an environment says after a reset or a step, with same-step auto-reset.

    On the step that ends an episode, `observation` and `frame` are the first of the NEXT episode and
    `final_observation` and `final_frame` are the last of the one that ended; on every other step the
    final ones equal the plain ones.
    """

    observation: PyTree  # [B, ...] what the agent sees next
    frame: PyTree  # [B, ...] compact form of what a scorer sees next
    final_observation: PyTree  # [B, ...] after the action, before any reset
    final_frame: PyTree  # [B, ...] after the action, before any reset
    first: Array  # bool [B], `observation` is the first of an episode
    episode_step: Array  # int32 [B], actions taken so far in the episode of `observation`
    env_reward: Array  # float32 [B], the environment's own reward (evaluation and oracles only)
    terminated: Array  # bool [B], the episode ended by itself in this step
    truncated: Array  # bool [B], the episode was cut by the time limit in this step
    info: dict[str, PyTree]  # [B, ...]; 'success' bool [B] is True on the step that reaches the goal

    @property
    def done(self) -> Array:
        """bool [B]: the episode ended in this step, for whichever reason."""
        return self.terminated | self.truncated


@struct.dataclass
class Rollout:
    """T steps of B environments."""

    first_timestep: TimeStep  # [B, ...] before the first action
    first_memory: PyTree  # [B, ...] the agent's recurrent memory before the first action
    action: Array  # [T, B, ...]
    timestep: TimeStep  # [T, B, ...] after each action
    extras: dict[str, Array]  # [T, B, ...] what the agent noted while acting (log_prob, value, ...)


@struct.dataclass
class Experience:
    """A rollout and the rewards that were settled for it."""

    rollout: Rollout
    rewards: dict[str, Array]  # {stream: float32 [T, B]}; most rewards have the single stream 'reward'


def previous(first: PyTree, following: PyTree) -> PyTree:
    """Shifts a [T, B] sequence by one step: row t is what held before action t.

    Args:
      first: [B, ...] the record before the first action.
      following: [T, B, ...] the records after each action.

    Returns:
      [T, B, ...] the records before each action.
    """
    return jax.tree.map(lambda a, b: jax.numpy.concatenate([a[None], b[:-1]]), first, following)


def zeros_from_spec(spec: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
    """A pytree of NumPy zeros with the shapes and dtypes of a spec, after `leading` axes."""
    return jax.tree.map(lambda s: np.zeros(leading + tuple(s.shape), s.dtype), spec)
