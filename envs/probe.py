"""Probe environments: each asks for one ability of a learner, and its values are known exactly.

A learner that fails a probe is wrong in the part that the probe is the first to need (after Andy Jones,
"Debugging reinforcement learning systems without the agonizing pain", 2021). They are also the fastest
environments for tests of anything else.

Observation float32 [1], frame float32 [1] in [-1, 1], rendered as a grey square of 8 by 8 pixels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.envs.wrappers import SingleStep, VectorEnvironment, vectorise
from jaxreward.errors import ConfigError
from jaxreward.types import Array, Box, Discrete


@struct.dataclass
class ProbeState:
    """Where an episode stands."""

    cue: Array  # float32 [], -1 or 1, drawn at the start of the episode
    step: Array  # int32 [], actions taken


class Probe:
    """Two actions, episodes of `length` steps, no reward; probes change what they need."""

    task = "collect reward"
    action_space: Discrete | Box = Discrete(2)
    image_shape = (8, 8, 3)
    length = 1  # steps of an episode
    ends = True  # False: the episode never ends by itself, only by the time limit

    def reset(self, key: Array) -> tuple[ProbeState, SingleStep]:
        """Starts an episode with a cue of -1 or 1, each half of the time."""
        cue = jax.random.rademacher(key, (), jnp.float32)
        state = ProbeState(cue=cue, step=jnp.int32(0))
        return state, self._record(state, jnp.float32(0.0))

    def step(self, state: ProbeState, action: Array, key: Array) -> tuple[ProbeState, SingleStep]:
        """Takes one action."""
        reward = jnp.asarray(self.reward(state, action), jnp.float32)
        state = state.replace(step=state.step + 1)
        return state, self._record(state, reward)

    def observe(self, state: ProbeState) -> Array:
        """What the agent sees, float32 []."""
        return jnp.float32(0.0)

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """The reward of an action."""
        return 0.0

    def render(self, frame: Array) -> Array:
        """Turns frames float32 [..., 1] in [-1, 1] into grey pictures, uint8 [..., 8, 8, 3]."""
        grey = jnp.round((frame + 1.0) * 127.5).astype(jnp.uint8)
        return jnp.broadcast_to(grey[..., None, None], (*frame.shape[:-1], *self.image_shape))

    def _record(self, state: ProbeState, reward: Array) -> SingleStep:
        observation = jnp.reshape(self.observe(state), (1,)).astype(jnp.float32)
        ended = (state.step >= self.length) if self.ends else jnp.bool_(False)
        return SingleStep(
            observation=observation,
            frame=observation,
            env_reward=reward,
            terminated=ended,
            info={"success": ended & (reward > 0.0)},
        )


class ConstantReward(Probe):
    """One step, reward 1, observation 0: v = 1. Needs a value function at all."""

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """Always 1."""
        return 1.0


class ObservationReward(Probe):
    """One step, the reward is the observation, -1 or 1: v(s) = s. Needs a value that depends on it."""

    def observe(self, state: ProbeState) -> Array:
        """The cue."""
        return state.cue

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """The cue."""
        return state.cue


class DelayedReward(Probe):
    """Two steps, observations 0 and 1, reward 1 at the end: v(0) = γ, v(1) = 1. Needs discounting."""

    length = 2

    def observe(self, state: ProbeState) -> Array:
        """Actions taken so far."""
        return state.step.astype(jnp.float32)

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """1 on the second step."""
        return jnp.where(state.step == 1, 1.0, 0.0)


class ActionReward(Probe):
    """One step, observation 0, reward 1 for action 1 and -1 for action 0. Needs a policy gradient."""

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """1 for action 1, else -1."""
        return jnp.where(action == 1, 1.0, -1.0)


class MatchReward(ObservationReward):
    """One step, reward 1 if the action (0 or 1) has the sign of the observation, else -1.

    Needs a policy that depends on the observation: v = 1 for the best one.
    """

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """1 where action 1 meets cue 1 or action 0 meets cue -1, else -1."""
        return jnp.where((action == 1) == (state.cue > 0.0), 1.0, -1.0)


class RememberReward(MatchReward):
    """Three steps; the cue is seen before the first only, and the action of the last must match it.

    Needs memory: v = 1 just before the last step for the best policy with one, 0 for any without.
    """

    length = 3

    def observe(self, state: ProbeState) -> Array:
        """The cue at first, then 0."""
        return jnp.where(state.step == 0, state.cue, 0.0)

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """1 or -1 on the last step, 0 before."""
        return jnp.where(state.step == self.length - 1, super().reward(state, action), 0.0)


class EndlessReward(Probe):
    """Reward 1 a step, observation 0, no end but the time limit of 4 steps: what does the limit mean?

    v = 1 / (1 - γ) if the task goes on beyond it ('bootstrap'); v = (1 - γ^(4 - t)) / (1 - γ) after t
    steps if it ends there ('terminal').
    """

    length = 4
    ends = False

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """Always 1."""
        return 1.0


class TargetReward(ObservationReward):
    """One step; a real-valued action in [-2, 2] is paid by minus its squared distance to the observation.

    Needs a policy of real-valued actions: the best mean is the observation.
    """

    action_space = Box(-2.0, 2.0, (1,))

    def reward(self, state: ProbeState, action: Array) -> Array | float:
        """Minus the squared distance between action and cue."""
        return -jnp.square(action[0] - state.cue)


PROBES: dict[str, type[Probe]] = {
    "constant": ConstantReward,
    "observation": ObservationReward,
    "delayed": DelayedReward,
    "action": ActionReward,
    "match": MatchReward,
    "remember": RememberReward,
    "endless": EndlessReward,
    "target": TargetReward,
}


def make_probe(name: str, num_envs: int, max_episode_steps: int | None = None) -> VectorEnvironment:
    """Makes B copies of a probe.

    Args:
      name: a key of `PROBES`.
      num_envs: B.
      max_episode_steps: the time limit; by default the probe's own length.

    Returns:
      An Environment on the device.

    Raises:
      ConfigError: for an unknown name.
    """
    if name not in PROBES:
        raise ConfigError(f"there is no probe named {name!r}; choose one of {', '.join(PROBES)}.")
    probe = PROBES[name]()
    return vectorise(probe, num_envs, max_episode_steps or probe.length)
