"""Brax environments keep the contract and step exactly as Brax itself does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

brax_envs = pytest.importorskip("brax.envs")

from jaxreward.envs.brax import BraxConfig, make  # noqa: E402
from jaxreward.envs.testing import check_environment, check_episodes, random_actions  # noqa: E402
from jaxreward.errors import ConfigError, SimulatorError  # noqa: E402


def test_contract():
    environment = make(BraxConfig("fast", num_envs=4, max_episode_steps=7))
    played = check_environment(environment, steps=20, varied_starts=False)
    assert not played.terminated.any()


def test_steps_are_those_of_brax():
    environment = make(BraxConfig("inverted_pendulum", num_envs=4, max_episode_steps=15))
    raw = brax_envs.get_environment("inverted_pendulum", backend="spring")
    raw_step = jax.jit(jax.vmap(raw.step))
    step = jax.jit(environment.step)
    state, first = jax.jit(environment.reset)(jax.random.key(0))
    raw_state = state.single
    starts, played = [np.asarray(first.observation)], []
    for action in random_actions(environment.spec, jax.random.key(1), 40):
        raw_state = raw_step(raw_state, action)
        state, timestep = step(state, action)
        played.append(jax.device_get(timestep))
        np.testing.assert_allclose(timestep.final_observation, raw_state.obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(timestep.terminated, raw_state.done > 0)
        np.testing.assert_array_equal(timestep.env_reward, 1.0)
        np.testing.assert_array_equal(timestep.terminated, np.abs(timestep.final_observation[:, 1]) > 0.2)
        if timestep.done.any():
            starts.append(np.asarray(timestep.observation[timestep.done]))
            raw_state = state.single
    starts = np.concatenate(starts)
    assert len(np.unique(starts[:, 0])) == len(starts) > 8, "Brax's own auto-reset repeats the first state"
    np.testing.assert_array_less(np.abs(starts), 0.0101)
    played = jax.tree.map(lambda *leaves: np.stack(leaves), *played)
    check_episodes(environment.spec, jax.device_get(first), played)
    assert played.terminated.any() and played.truncated.any()


@pytest.mark.slow
def test_the_pendulum_keeps_the_whole_contract():
    check_environment(make(BraxConfig(num_envs=4, max_episode_steps=20)), steps=50)


@pytest.mark.slow
def test_action_repeat_adds_rewards_and_stops_at_the_end():
    single = make(BraxConfig("inverted_pendulum", num_envs=2, action_repeat=1))
    double = make(BraxConfig("inverted_pendulum", num_envs=2, action_repeat=3))
    action = jnp.array([[1.0], [0.1]])
    state, _ = single.reset(jax.random.key(0))
    repeated, _ = double.reset(jax.random.key(0))
    rewards, ended, last = np.zeros(2), np.zeros(2, bool), None
    step, step_repeated = jax.jit(single.step), jax.jit(double.step)
    for _ in range(6):
        repeated, timestep = step_repeated(repeated, action)
        rewards = np.zeros(2)
        for _ in range(3):
            state, one = step(state, action)
            rewards += np.where(ended, 0, one.env_reward)
            last = (
                one.final_observation
                if last is None
                else np.where(ended[:, None], last, one.final_observation)
            )
            ended |= np.asarray(one.done)
        np.testing.assert_array_equal(timestep.env_reward, rewards)
        np.testing.assert_allclose(timestep.final_observation, last, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(timestep.terminated, ended)
        if ended.any():
            return
    raise AssertionError("the pole did not fall")


def test_unusable_settings_are_errors():
    with pytest.raises(ConfigError, match=r"'hoper'.*hopper"):
        make(BraxConfig("hoper"))
    with pytest.raises(ConfigError, match=r"backend 'spring'.*choose another"):
        make(BraxConfig("swimmer", backend="spring"))
    with pytest.raises(ConfigError, match="action_repeat is 0"):
        make(BraxConfig(action_repeat=0))


def test_what_brax_itself_cannot_run_is_a_simulator_error():
    # Brax 0.14.2 steps its swimmer with an argument that jax 0.10 no longer takes.
    with pytest.raises(SimulatorError, match=r"swimmer.*generalized.*choose another"):
        make(BraxConfig("swimmer", backend="generalized"))
