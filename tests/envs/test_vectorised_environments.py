"""The lift from one environment to many, on a game small enough to know every number."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.envs.testing import check_environment
from jaxreward.envs.wrappers import SingleStep, vectorise
from jaxreward.errors import ConfigError, SimulatorError
from jaxreward.types import Discrete


@struct.dataclass
class CountdownState:
    left: jax.Array  # weakly typed on purpose
    lucky: jax.Array


class Countdown:
    """Action 1 takes one off a number drawn from 2 .. 9; zero ends the episode."""

    task = "count down"
    action_space = Discrete(2)
    image_shape = (2, 2, 3)

    def reset(self, key):
        left = jax.random.randint(key, (), 2, 10)
        return CountdownState(left=left, lucky=0.0 * left), self._record(left, 0.0, False)

    def step(self, state, action, key):
        left = state.left - action
        lucky = jax.random.uniform(key)
        return CountdownState(left=left, lucky=lucky), self._record(left, lucky, left == 0)

    def render(self, frame):
        return jnp.broadcast_to(frame[..., None, None, None], (*frame.shape, 2, 2, 3)).astype(jnp.uint8)

    @staticmethod
    def _record(left, reward, terminated):
        return SingleStep(
            observation={"left": jnp.asarray(left, jnp.float32)},
            frame=left,
            env_reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated),
            info={"success": jnp.asarray(terminated), "left": left},
        )


@functools.cache
def player(num_envs, limit):
    """Plays a row of actions from a key, compiled once."""
    environment = vectorise(Countdown(), num_envs=num_envs, max_episode_steps=limit)

    @jax.jit
    def play(key, actions):
        state, first = environment.reset(key)
        return first, jax.lax.scan(environment.step, state, actions)[1]

    return lambda key, actions: jax.device_get(play(key, actions))


def test_contract():
    played = check_environment(vectorise(Countdown(), num_envs=7, max_episode_steps=12), steps=60)
    assert played.terminated.any() and played.truncated.any()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), limit=st.sampled_from([1, 5]))
def test_every_number(seed, limit):
    actions = np.random.default_rng(seed).integers(0, 2, (25, 4)).astype(np.int32)
    first, played = player(4, limit)(jax.random.key(seed), actions)
    left, steps = first.observation["left"].copy(), np.zeros(4, int)
    for t in range(25):
        left, steps = left - actions[t], steps + 1
        terminated = left == 0
        truncated = (steps == limit) & ~terminated
        done = terminated | truncated
        np.testing.assert_array_equal(played.final_observation["left"][t], left)
        np.testing.assert_array_equal(played.final_frame[t], left)
        np.testing.assert_array_equal(played.info["left"][t], left)
        np.testing.assert_array_equal(played.terminated[t], terminated)
        np.testing.assert_array_equal(played.truncated[t], truncated)
        np.testing.assert_array_equal(played.first[t], done)
        # A new episode's number is whatever was drawn, within its range.
        left = np.where(done, played.observation["left"][t], left)
        assert ((left[done] >= 2) & (left[done] <= 9)).all()
        np.testing.assert_array_equal(played.observation["left"][t], left)
        steps = np.where(done, 0, steps)
        np.testing.assert_array_equal(played.episode_step[t], steps)


def test_starts_and_chances_are_drawn_anew_everywhere():
    first, played = player(500, 1)(jax.random.key(0), np.zeros((8, 500), np.int32))
    starts = np.concatenate([first.observation["left"][None], played.observation["left"]])
    counts = np.bincount(starts.astype(int).ravel(), minlength=10)[2:]
    # Uniform over 8 numbers: 562.5 each of 4,500, standard deviation 22.
    assert (np.abs(counts - 562.5) < 110).all()
    correlation = np.corrcoef(starts)
    assert np.abs(correlation - np.eye(9)).max() < 0.2
    assert len(np.unique(played.env_reward)) > 3990


def test_an_environment_draws_the_same_numbers_in_any_company():
    key = jax.random.key(5)
    environment = vectorise(Countdown(), num_envs=6, max_episode_steps=5)
    state, _ = environment.reset(key)
    alone = vectorise(Countdown(), num_envs=1, max_episode_steps=5)
    alone_state = jax.tree.map(lambda x: x[2:3], state)
    step, step_alone = jax.jit(environment.step), jax.jit(alone.step)
    for _ in range(12):
        state, together = step(state, jnp.ones(6, jnp.int32))
        alone_state, by_itself = step_alone(alone_state, jnp.ones(1, jnp.int32))
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[2:3], together), by_itself)


def test_it_vmaps_over_seeds():
    environment = vectorise(Countdown(), num_envs=3, max_episode_steps=5)
    keys = jax.random.split(jax.random.key(0), 4)
    actions = jnp.ones((10, 3), jnp.int32)

    def run(key):
        return jax.lax.scan(environment.step, environment.reset(key)[0], actions)[1]

    together = jax.jit(jax.vmap(run))(keys)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[1], together), jax.jit(run)(keys[1]))


class OtherDtype(Countdown):
    def step(self, state, action, key):
        state, record = super().step(state, action, key)
        return state, record.replace(frame=record.frame.astype(jnp.float32))


class OtherTree(Countdown):
    def step(self, state, action, key):
        state, record = super().step(state, action, key)
        return state, record.replace(info={"success": record.terminated})


def test_mistakes_are_errors():
    with pytest.raises(SimulatorError, match=r"OtherDtype.*int32.*frame.*float32"):
        vectorise(OtherDtype(), 2, 3)
    with pytest.raises(SimulatorError, match="OtherTree: reset gives the tree"):
        vectorise(OtherTree(), 2, 3)
    with pytest.raises(ConfigError, match="max_episode_steps is 0"):
        vectorise(Countdown(), 2, 0)
