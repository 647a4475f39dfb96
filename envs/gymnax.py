"""Environments of gymnax (Lange, 2022): classic control, MinAtar, bsuite and others, in JAX.

Made for the interface of gymnax 1.0.1 and later, where a time limit is no termination. gymnax's own
auto-reset is not used: `step_env` and `reset_env` are, lifted by `wrappers.vectorise`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal
from urllib.error import URLError

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.envs.actions import BoxActions
from jaxreward.envs.names import unknown_name
from jaxreward.envs.pictures import ObservationPicture
from jaxreward.envs.wrappers import SingleStep, VectorEnvironment, vectorise
from jaxreward.errors import ConfigError, SimulatorError
from jaxreward.types import Array, Discrete, PyTree

_TASKS = {
    "CartPole-v1": "balance the pole upright on the moving cart",
    "Pendulum-v1": "swing the pendulum up and keep it upright",
    "Acrobot-v1": "swing the two-link arm above the line",
    "MountainCar-v0": "drive the car up the hill to the flag",
    "MountainCarContinuous-v0": "drive the car up the hill to the flag",
    "Asterix-MinAtar": "collect the treasures and avoid the enemies",
    "Breakout-MinAtar": "keep the ball in play and break all the bricks",
    "Freeway-MinAtar": "cross the road without being hit by a car",
    "Seaquest-MinAtar": "rescue the divers and shoot the enemies",
    "SpaceInvaders-MinAtar": "shoot all the aliens",
    "Catch-bsuite": "catch the falling ball with the paddle",
    "DeepSea-bsuite": "dive to the bottom right corner",
    "FourRooms-misc": "walk through the four rooms to the goal",
    "FrozenLake-misc": "cross the frozen lake to the goal without falling into a hole",
    "Reacher-misc": "reach the goal with the tip of the arm",
}
# Where the end of an episode, or a reward above zero at that end, means that the goal was reached.
_SUCCESS = {
    "Acrobot-v1": "terminated",
    "MountainCar-v0": "terminated",
    "MountainCarContinuous-v0": "terminated",
    "Catch-bsuite": "rewarded_end",
    "FourRooms-misc": "rewarded_end",
    "FrozenLake-misc": "rewarded_end",
}


@dataclasses.dataclass(frozen=True)
class GymnaxConfig:
    """Settings of a gymnax environment.

    Attributes:
      name: a name in gymnax's registry.
      num_envs: B.
      max_episode_steps: the time limit; 0 is the environment's own.
      task: the task as one sentence; empty for this project's sentence, or one made of the name.
      success: what `info['success']` means: the episode's natural end, a natural end with a reward above
        zero, or never; 'auto' is the meaning known for this name, and never for the others.
    """

    name: str = "CartPole-v1"
    num_envs: int = 64
    max_episode_steps: int = 0
    task: str = ""
    success: Literal["auto", "terminated", "rewarded_end", "never"] = "auto"


class GymnaxEnvironment:
    """One gymnax environment as a SingleEnvironment.

    Observation: gymnax's own as float32 [...]; a discrete one as a one-hot vector.
    Frame: the observation; its picture is that of `pictures.ObservationPicture`.
    Action: int32 [] or float32 [...] as gymnax's action space; real actions are clipped to its bounds.
    Reward and termination: gymnax's own.
    """

    def __init__(self, config: GymnaxConfig):
        """Makes the environment.

        Args:
          config: the settings; `num_envs` is not used.

        Raises:
          ConfigError: gymnax has no environment of this name, or one with spaces that have no counterpart.
          SimulatorError: gymnax could not make the environment.
        """
        import gymnax
        from gymnax.environments import spaces

        name = config.name
        if name not in gymnax.registered_envs:
            raise unknown_name("gymnax environment", name, gymnax.registered_envs)
        try:
            self._environment, parameters = gymnax.make(name)
        except (URLError, OSError) as error:
            raise SimulatorError(f"gymnax could not make '{name}': {error}") from error
        limit = config.max_episode_steps or int(parameters.max_steps_in_episode)
        self.max_episode_steps = limit
        # A few environments observe the share of their time that is left; one writes the limit as a float.
        as_written = type(parameters.max_steps_in_episode)(limit)
        self.parameters = parameters.replace(max_steps_in_episode=as_written)
        self.task = config.task or _TASKS.get(name, f"do well in the game {name.rsplit('-', 1)[0]}")
        self._success = _SUCCESS.get(name, "never") if config.success == "auto" else config.success

        actions = self._environment.action_space(self.parameters)
        self._box = None
        if isinstance(actions, spaces.Discrete):
            self.action_space = Discrete(int(actions.n))
        elif isinstance(actions, spaces.Box):
            self._box = BoxActions.of(name, np.asarray(actions.low), np.asarray(actions.high), actions.shape)
            self.action_space = self._box.space
        else:
            raise ConfigError(f"{name} has the actions {actions}, but only Discrete and Box can be used")

        observations = self._environment.observation_space(self.parameters)
        self._one_hot = int(observations.n) if isinstance(observations, spaces.Discrete) else 0
        low, high = _bounds(observations)
        observation = jax.eval_shape(self.reset, jax.random.key(0))[1].observation
        self._picture = ObservationPicture(observation, low, high)
        self.image_shape = self._picture.image_shape

    def reset(self, key: Array) -> tuple[PyTree, SingleStep]:
        """Starts an episode."""
        observation, state = self._environment.reset_env(key, self.parameters)
        return _as_arrays(state), self._record(observation, jnp.float32(0), jnp.bool_(False))

    def step(self, state: PyTree, action: Array, key: Array) -> tuple[PyTree, SingleStep]:
        """Takes one action."""
        if self._box is not None:
            action = self._box.to_simulator(action)
        observation, state, reward, terminated, _ = self._environment.step_env(
            key, state, action, self.parameters
        )
        return _as_arrays(state), self._record(observation, reward, terminated)

    def render(self, frame: PyTree) -> Array:
        """Draws the observation: a grid of grey cells or bars, uint8 [..., H, W, 3]."""
        return self._picture(frame)

    def _record(self, observation: PyTree, reward: Array, terminated: Array) -> SingleStep:
        reward = jnp.asarray(reward, jnp.float32)
        terminated = jnp.asarray(terminated, bool)
        if self._one_hot:
            observation = jax.nn.one_hot(observation, self._one_hot)
        observation = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), observation)
        success = {
            "never": jnp.bool_(False),
            "terminated": terminated,
            "rewarded_end": terminated & (reward > 0),
        }[self._success]
        return SingleStep(
            observation=observation,
            frame=observation,
            env_reward=reward,
            terminated=terminated,
            info={"success": success},
        )


def make(config: GymnaxConfig) -> VectorEnvironment:
    """Builds B gymnax environments.

    Args:
      config: the settings.

    Raises:
      ConfigError: an unknown name or a value that cannot be used.
      SimulatorError: gymnax could not make the environment.
    """
    if config.max_episode_steps < 0:
        raise ConfigError(f"max_episode_steps is {config.max_episode_steps}, but must be 0 (the own) or more")
    single = GymnaxEnvironment(config)
    return vectorise(single, config.num_envs, single.max_episode_steps)


def _as_arrays(state: PyTree) -> PyTree:
    """gymnax keeps plain Python numbers in its first states."""
    return jax.tree.map(jnp.asarray, state)


def _bounds(space) -> tuple[np.ndarray | float, np.ndarray | float]:
    """A gymnax observation space's bounds, raveled; infinite where there are none."""
    if not hasattr(space, "low"):
        return (0.0, 1.0) if hasattr(space, "n") else (-np.inf, np.inf)
    low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
    shape = tuple(np.atleast_1d(space.shape).astype(int))
    try:
        return np.broadcast_to(low, shape).ravel(), np.broadcast_to(high, shape).ravel()
    except ValueError:
        return -np.inf, np.inf
