"""Lifts a single pure-JAX environment to the batched Environment protocol."""

from __future__ import annotations

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.errors import ConfigError, SimulatorError
from jaxreward.types import Array, Box, Discrete, EnvironmentSpec, PyTree, TimeStep


@struct.dataclass
class SingleStep:
    """What one environment says after a reset or a step, with no reset of its own."""

    observation: PyTree  # [...]
    frame: PyTree  # [...] compact form of what a scorer sees
    env_reward: Array  # float32 []
    terminated: Array  # bool [], the episode ended by itself
    info: dict[str, PyTree]  # [...]; holds 'success' bool []


class SingleEnvironment(Protocol):
    """One environment as pure functions: no batch axis, no time limit, no auto-reset.

    The records of `reset` and of `step` must have the same tree, shapes and dtypes.
    """

    task: str  # the task as one sentence
    action_space: Discrete | Box
    image_shape: tuple[int, int, int]  # (H, W, 3) of what `render` gives for one frame

    def reset(self, key: Array) -> tuple[PyTree, SingleStep]:
        """Starts an episode, at random by `key`; reward and end are zero."""
        ...

    def step(self, state: PyTree, action: Array, key: Array) -> tuple[PyTree, SingleStep]:
        """Takes one action."""
        ...

    def render(self, frame: PyTree) -> Array:
        """Turns compact frames of any leading axes into uint8 RGB pictures [..., H, W, 3]."""
        ...


@struct.dataclass
class VectorState:
    """The state of B environments that were lifted by `vectorise`."""

    key: Array  # typed key [B], what is left of each environment's own stream of randomness
    single: PyTree  # [B, ...] the environments' states
    episode_step: Array  # int32 [B], actions taken in the running episode


def vectorise(single: SingleEnvironment, num_envs: int, max_episode_steps: int) -> VectorEnvironment:
    """Lifts a single pure-JAX environment to B environments with a time limit and same-step auto-reset.

    Every environment draws from a key of its own, so its episodes depend neither on B nor on the others,
    and each new episode begins at a newly drawn state. An episode that does not end by itself within
    `max_episode_steps` is truncated; one that ends by itself at that very step is terminated. The new
    episode's state is drawn for all environments at every step and chosen where it is needed: this is
    `vmap` and `where`, with no branch.

    Args:
      single: the environment.
      num_envs: B, at least 1.
      max_episode_steps: the time limit, at least 1.

    Returns:
      An Environment on the device whose whole state is a pytree, so it can be saved at any step.

    Raises:
      ConfigError: `num_envs` or `max_episode_steps` is below 1.
      SimulatorError: `reset` and `step` of `single` give different trees, shapes or dtypes.
    """
    return VectorEnvironment(single, num_envs, max_episode_steps)


class VectorEnvironment:
    """B environments made of one; see `vectorise`."""

    on_device = True
    can_save = True

    def __init__(self, single: SingleEnvironment, num_envs: int, max_episode_steps: int):
        """As `vectorise`."""
        for name, value in (("num_envs", num_envs), ("max_episode_steps", max_episode_steps)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, but must be at least 1")
        self.single = single
        _, first = _check_same(single)
        self.spec = EnvironmentSpec(
            num_envs=num_envs,
            max_episode_steps=max_episode_steps,
            task=single.task,
            observation=first.observation,
            frame=first.frame,
            image_shape=tuple(single.image_shape),
            action_space=single.action_space,
        )

    def reset(self, key: Array) -> tuple[VectorState, TimeStep]:
        """Starts B new episodes, each at random by its own part of `key`."""
        keys = jax.vmap(jax.random.split)(jax.random.split(key, self.spec.num_envs))
        state, step = _strong(jax.vmap(self.single.reset)(keys[:, 1]))
        count = jnp.zeros(self.spec.num_envs, jnp.int32)
        false = jnp.zeros(self.spec.num_envs, bool)
        return VectorState(key=keys[:, 0], single=state, episode_step=count), TimeStep(
            observation=step.observation,
            frame=step.frame,
            final_observation=step.observation,
            final_frame=step.frame,
            first=~false,
            episode_step=count,
            env_reward=step.env_reward,
            terminated=false,
            truncated=false,
            info=step.info,
        )

    def step(self, state: VectorState, action: Array) -> tuple[VectorState, TimeStep]:
        """Takes one action in each environment; ended episodes start anew in the same step.

        Args:
          state: of B environments.
          action: [B, ...], as the action space says.
        """
        keys = jax.vmap(functools.partial(jax.random.split, num=3))(state.key)
        following, step = _strong(jax.vmap(self.single.step)(state.single, action, keys[:, 1]))
        fresh, start = _strong(jax.vmap(self.single.reset)(keys[:, 2]))

        episode_step = state.episode_step + 1
        terminated = step.terminated
        truncated = (episode_step >= self.spec.max_episode_steps) & ~terminated
        done = terminated | truncated

        following, observation, frame = where(
            done, (fresh, start.observation, start.frame), (following, step.observation, step.frame)
        )
        episode_step = jnp.where(done, 0, episode_step)
        return VectorState(key=keys[:, 0], single=following, episode_step=episode_step), TimeStep(
            observation=observation,
            frame=frame,
            final_observation=step.observation,
            final_frame=step.frame,
            first=done,
            episode_step=episode_step,
            env_reward=step.env_reward,
            terminated=terminated,
            truncated=truncated,
            info=step.info,
        )

    def render(self, frame: PyTree) -> Array:
        """Turns compact frames of any leading axes into uint8 RGB pictures [..., H, W, 3]."""
        return self.single.render(frame)


def where(condition: Array, chosen: PyTree, otherwise: PyTree) -> PyTree:
    """Chooses between two [B, ...] pytrees, typed keys included, by one bool an environment.

    Args:
      condition: bool [B].
      chosen: [B, ...], taken where the condition holds.
      otherwise: [B, ...], taken elsewhere.
    """

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, chosen, otherwise)


def _strong(tree: PyTree) -> PyTree:
    """Gives every array a strong dtype: a weak one would cost a second compilation."""

    def convert(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(convert, tree)


def _check_same(single: SingleEnvironment) -> tuple[PyTree, SingleStep]:
    """The shapes and dtypes of (state, SingleStep), equal for reset and step."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    space = single.action_space
    action = (
        jax.ShapeDtypeStruct((), jnp.int32)
        if isinstance(space, Discrete)
        else jax.ShapeDtypeStruct(space.shape, jnp.float32)
    )
    after_reset = jax.eval_shape(lambda k: _strong(single.reset(k)), key)
    after_step = jax.eval_shape(lambda s, a, k: _strong(single.step(s, a, k)), after_reset[0], action, key)
    name = type(single).__name__
    if jax.tree.structure(after_reset) != jax.tree.structure(after_step):
        raise SimulatorError(
            f"{name}: reset gives the tree {jax.tree.structure(after_reset)}, step gives "
            f"{jax.tree.structure(after_step)}; make both the same"
        )
    found = zip(jax.tree_util.tree_leaves_with_path(after_reset), jax.tree.leaves(after_step), strict=True)
    for (path, a), b in found:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise SimulatorError(
                f"{name}: reset gives {a.dtype}{list(a.shape)} for {jax.tree_util.keystr(path)}, "
                f"step gives {b.dtype}{list(b.shape)}; make both the same"
            )
    return after_reset
