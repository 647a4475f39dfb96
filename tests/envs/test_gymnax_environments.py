"""gymnax environments keep the contract and step exactly as gymnax itself does."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.envs.gymnax import GymnaxConfig, make
from jaxreward.envs.testing import check_environment, random_actions
from jaxreward.errors import ConfigError
from jaxreward.types import Box, Discrete


@pytest.mark.parametrize(
    ("name", "max_episode_steps"),
    [("CartPole-v1", 25), ("Breakout-MinAtar", 9), ("Pendulum-v1", 20), ("FrozenLake-misc", 0)],
)
def test_contract(name, max_episode_steps):
    environment = make(GymnaxConfig(name, num_envs=6, max_episode_steps=max_episode_steps))
    played = check_environment(environment, steps=60, varied_starts=name != "FrozenLake-misc")
    if name == "CartPole-v1":
        assert played.terminated.any() and played.truncated.any()


@pytest.mark.parametrize("name", ["CartPole-v1", "Breakout-MinAtar", "Pendulum-v1", "MountainCar-v0"])
def test_steps_are_those_of_gymnax(name):
    limit = 18
    environment = make(GymnaxConfig(name, num_envs=5, max_episode_steps=limit))
    raw, parameters = gymnax.make(name)
    parameters = parameters.replace(max_steps_in_episode=limit)
    raw_step = jax.jit(jax.vmap(raw.step, in_axes=(0, 0, 0, None)))
    step = jax.jit(environment.step)

    state, timestep = jax.jit(environment.reset)(jax.random.key(3))
    ended = 0
    for t, action in enumerate(random_actions(environment.spec, jax.random.key(4), 40)):
        # These games draw nothing at random after the start, so any key does for gymnax.
        keys = jax.random.split(jax.random.key(100 + t), 5)
        observation, _, reward, terminated, truncated, info = raw_step(keys, state.single, action, parameters)
        state, timestep = step(state, action)
        done = np.asarray(timestep.done)
        np.testing.assert_array_equal(done, terminated | truncated)
        np.testing.assert_array_equal(timestep.terminated, terminated)
        np.testing.assert_array_equal(timestep.truncated, truncated & ~terminated)
        np.testing.assert_allclose(timestep.env_reward, reward, rtol=1e-6)
        np.testing.assert_allclose(
            timestep.final_observation, info["final_observation"], rtol=1e-6, atol=1e-7
        )
        np.testing.assert_allclose(timestep.observation[~done], observation[~done], rtol=1e-6, atol=1e-7)
        ended += done.sum()
    assert ended > 0


def test_pendulum_is_truncated_after_its_own_200_steps():
    environment = make(GymnaxConfig("Pendulum-v1", num_envs=3))
    assert environment.spec.max_episode_steps == 200
    assert environment.spec.action_space == Box(-2.0, 2.0, (1,))
    state, first = environment.reset(jax.random.key(0))
    actions = random_actions(environment.spec, jax.random.key(1), 401)
    _, timesteps = jax.jit(lambda s: jax.lax.scan(environment.step, s, actions))(state)
    truncated = np.asarray(timesteps.truncated)
    assert np.flatnonzero(truncated.all(axis=1)).tolist() == [199, 399]
    assert truncated.sum() == 6 and not timesteps.terminated.any()
    # The new episodes start anew: at random angles, unlike the last ones and unlike the first.
    np.testing.assert_array_less(
        0.01, np.abs(timesteps.observation[199] - timesteps.final_observation[199]).max(1)
    )
    np.testing.assert_array_less(0.001, np.abs(timesteps.observation[199] - first.observation).max(1))


def test_actions_outside_the_box_are_clipped():
    environment = make(GymnaxConfig("Pendulum-v1", num_envs=2))
    state, _ = environment.reset(jax.random.key(0))
    _, beyond = environment.step(state, jnp.array([[50.0], [-50.0]]))
    _, at_bound = environment.step(state, jnp.array([[2.0], [-2.0]]))
    np.testing.assert_array_equal(beyond.observation, at_bound.observation)
    np.testing.assert_array_equal(beyond.env_reward, at_bound.env_reward)


def test_reaching_the_flag_is_success():
    environment = make(GymnaxConfig("MountainCar-v0", num_envs=2))
    state, timestep = environment.reset(jax.random.key(0))
    step = jax.jit(environment.step)
    # Pushing in the direction of the velocity climbs the hill well within 200 steps.
    for _ in range(199):
        state, timestep = step(state, jnp.where(timestep.observation[:, 1] < 0, 0, 2))
        if timestep.done.any():
            break
    np.testing.assert_array_equal(timestep.info["success"], timestep.terminated)
    assert timestep.info["success"].any()
    assert (timestep.final_observation[timestep.terminated, 0] >= 0.5).all()


def test_a_discrete_observation_is_one_hot():
    environment = make(GymnaxConfig("FrozenLake-misc", num_envs=2))
    _, timestep = environment.reset(jax.random.key(0))
    np.testing.assert_array_equal(timestep.observation, np.eye(16, dtype=np.float32)[[0, 0]])


@pytest.mark.parametrize("name", [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"])
def test_every_name_can_be_made(name):
    spec = make(GymnaxConfig(name, num_envs=2)).spec
    assert isinstance(spec.action_space, Discrete | Box)
    assert spec.task and spec.observation.dtype == jnp.float32
    assert min(spec.image_shape[:2]) >= 84


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'cartpole'.*CartPole-v1"):
        make(GymnaxConfig("cartpole"))
    with pytest.raises(ConfigError, match="num_envs is 0"):
        make(GymnaxConfig(num_envs=0))
    with pytest.raises(ConfigError, match="max_episode_steps is -1"):
        make(GymnaxConfig(max_episode_steps=-1))
