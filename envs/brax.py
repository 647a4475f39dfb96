"""Environments of Brax (Freeman et al., 2021): rigid bodies simulated in JAX.

Brax's own wrappers are not used: its auto-reset goes back to the same first state for ever and loses the
last observation, and its time limit is folded into `done`. Here `wrappers.vectorise` does both apart.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Literal

import jax
import jax.numpy as jnp

from jaxreward.envs.actions import BoxActions
from jaxreward.envs.names import unknown_name
from jaxreward.envs.pictures import ObservationPicture
from jaxreward.envs.wrappers import SingleStep, VectorEnvironment, vectorise
from jaxreward.errors import ConfigError, SimulatorError
from jaxreward.types import Array, PyTree

_TASKS = {
    "ant": "walk forward as fast as possible on four legs",
    "halfcheetah": "run forward as fast as possible",
    "hopper": "hop forward as fast as possible on one leg",
    "humanoid": "walk forward on two legs without falling",
    "humanoidstandup": "stand up from lying on the ground",
    "inverted_pendulum": "balance the pole upright on the moving cart",
    "inverted_double_pendulum": "balance the two-link pole upright on the moving cart",
    "pusher": "push the cylinder to the goal",
    "reacher": "reach the target with the tip of the arm",
    "swimmer": "swim forward as fast as possible",
    "walker2d": "walk forward as fast as possible on two legs",
}


@dataclasses.dataclass(frozen=True)
class BraxConfig:
    """Settings of a Brax environment.

    Attributes:
      name: a name in Brax's registry.
      backend: the physics; not every environment works with every one.
      num_envs: B.
      max_episode_steps: the time limit, in actions.
      action_repeat: steps of the environment for one action; their rewards are added.
      task: the task as one sentence; empty for this project's sentence, or one made of the name.
    """

    name: str = "inverted_pendulum"
    backend: Literal["generalized", "spring", "positional", "mjx"] = "spring"
    num_envs: int = 64
    max_episode_steps: int = 1000
    action_repeat: int = 1
    task: str = ""


class BraxEnvironment:
    """One Brax environment as a SingleEnvironment.

    Observation: Brax's own, float32 [D].
    Frame: the observation; its picture is D bars (`pictures.ObservationPicture`).
    Action: float32 [A] in [-1, 1], clipped; Brax scales it to the actuators where they want more.
    Reward: Brax's own. Terminated: Brax's `done` (a fall). `info['success']` is always False: these tasks
    have no goal that ends them.
    """

    def __init__(self, config: BraxConfig):
        """Makes the environment.

        Args:
          config: the settings; `num_envs` and `max_episode_steps` are not used.

        Raises:
          ConfigError: Brax has no environment of this name, the backend does not fit it, or
            `action_repeat` is below 1.
        """
        if config.action_repeat < 1:
            raise ConfigError(f"action_repeat is {config.action_repeat}, but must be at least 1")
        with warnings.catch_warnings():
            # Brax says at every start that MJX is its successor.
            warnings.filterwarnings("ignore", message="Brax System")
            from brax import envs

            if config.name not in envs._envs:
                raise unknown_name("Brax environment", config.name, envs._envs)
            try:
                self._environment = envs.get_environment(config.name, backend=config.backend)
            except ValueError as error:
                raise ConfigError(
                    f"Brax's '{config.name}' cannot be made with the backend '{config.backend}' ({error}); "
                    f"choose another of generalized, spring, positional, mjx"
                ) from error
        self._action_repeat = config.action_repeat
        self.task = config.task or _TASKS.get(config.name, f"do well in the task {config.name}")
        self._box = BoxActions.of(config.name, -1.0, 1.0, (self._environment.action_size,))
        self.action_space = self._box.space
        observation = jax.eval_shape(self.reset, jax.random.key(0))[1].observation
        self._picture = ObservationPicture(observation)
        self.image_shape = self._picture.image_shape

    def reset(self, key: Array) -> tuple[PyTree, SingleStep]:
        """Starts an episode."""
        state = self._environment.reset(key)
        return state, self._record(state, state.reward, state.done)

    def step(self, state: PyTree, action: Array, key: Array) -> tuple[PyTree, SingleStep]:
        """Takes one action; Brax's dynamics draw nothing at random."""
        del key
        action = self._box.to_simulator(action)
        if self._action_repeat == 1:
            state = self._advance(state, action)
            return state, self._record(state, state.reward, state.done)

        def repeat(carry, _):
            state, reward = carry
            following = self._advance(state, action)
            # What comes after the end of an episode within one action does not happen.
            ended = state.done > 0
            state = jax.tree.map(lambda a, b: jnp.where(ended, a, b), state, following)
            return (state, reward + jnp.where(ended, 0.0, following.reward)), None

        (state, reward), _ = jax.lax.scan(repeat, (state, jnp.float32(0)), None, length=self._action_repeat)
        return state, self._record(state, reward, state.done)

    def render(self, frame: PyTree) -> Array:
        """Draws the observation as bars, uint8 [..., H, W, 3]."""
        return self._picture(frame)

    def _record(self, state: PyTree, reward: Array, done: Array) -> SingleStep:
        return SingleStep(
            observation=state.obs,
            frame=state.obs,
            env_reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(done) > 0,
            info={"success": jnp.bool_(False)},
        )

    def _advance(self, state: PyTree, action: Array) -> PyTree:
        # Brax writes into the dictionaries of the state that it is given, hence the copy, and returns plain
        # Python numbers for some rewards and ends.
        following = self._environment.step(jax.tree.map(lambda x: x, state), action)
        return jax.tree.map(lambda before, after: jnp.asarray(after, before.dtype), state, following)


def make(config: BraxConfig) -> VectorEnvironment:
    """Builds B Brax environments.

    Args:
      config: the settings.

    Raises:
      ConfigError: an unknown name or a value that cannot be used.
      SimulatorError: this version of Brax calls functions that this version of JAX no longer has.
    """
    try:
        return vectorise(BraxEnvironment(config), config.num_envs, config.max_episode_steps)
    except (TypeError, AttributeError) as error:
        raise SimulatorError(
            f"Brax's '{config.name}' with the backend '{config.backend}' does not run on jax "
            f"{jax.__version__}: {error}; choose another backend or environment"
        ) from error
