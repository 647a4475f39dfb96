"""PPO on probe environments whose values and best policies are known exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.agents.networks import NetworkConfig
from jaxreward.agents.ppo import PPO, PPOConfig
from jaxreward.envs.probe import make_probe
from jaxreward.training.unroll import unroll
from jaxreward.types import Experience

NETWORK = NetworkConfig(body="mlp", mlp_layers=(32,), width=32, activation="tanh")
CONFIG = PPOConfig(
    discount=0.9,
    trace=0.95,
    learning_rate=5e-3,
    final_learning_rate=5e-4,
    entropy_coefficient=0.01,
    final_entropy_coefficient=0.0,
    epochs=2,
    minibatches=2,
    network=NETWORK,
)
ENVS, LENGTH = 32, 12


# Every probe has the same shapes and time limit, so all share one compilation of the learning step.
learn = jax.jit(PPO.learn, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def act(agent, environment, state, environment_state, timestep, memory, key):
    return unroll(environment, agent, state, environment_state, timestep, memory, key, length=LENGTH)


@functools.cache
def probe(name):
    return make_probe(name, ENVS, max_episode_steps=4)


def train(agent, name, updates, **settings):
    environment = probe(name)
    state = agent.init(jax.random.key(0), environment.spec, updates)
    settings = {name: jnp.float32(value) for name, value in settings.items()}
    state = state.replace(settings=state.settings.replace(**settings))
    environment_state, timestep = environment.reset(jax.random.key(1))
    memory = agent.memory(ENVS)
    for key in jax.random.split(jax.random.key(2), updates):
        act_key, learn_key = jax.random.split(key)
        environment_state, timestep, memory, rollout = act(
            agent, environment, state, environment_state, timestep, memory, act_key
        )
        experience = Experience(rollout, {"reward": rollout.timestep.env_reward})
        state, metrics = learn(agent, state, experience, learn_key)
    return state, metrics, rollout


def look(state, observations, steps=None):
    """The policy and values of single observations, with no memory of anything before."""
    observations = jnp.asarray(observations, jnp.float32)[:, None]
    steps = jnp.zeros(len(observations), jnp.int32) if steps is None else jnp.asarray(steps, jnp.int32)
    first = jnp.ones(len(observations), bool)
    _, policy, value = state.network.apply({"params": state.params}, (), observations, first, steps)
    return policy, np.asarray(value)


def test_constant_reward_has_value_one():
    state, _, _ = train(PPO(CONFIG), "constant", 60)
    _, value = look(state, [0.0])
    np.testing.assert_allclose(value, [1.0], atol=0.02)


def test_value_follows_the_observation():
    state, metrics, _ = train(PPO(CONFIG), "observation", 60)
    _, value = look(state, [-1.0, 1.0])
    np.testing.assert_allclose(value, [-1.0, 1.0], atol=0.02)
    assert metrics["explained_variance"] > 0.99


def test_value_is_discounted():
    state, _, _ = train(PPO(CONFIG), "delayed", 80)
    _, value = look(state, [0.0, 1.0], steps=[0, 1])
    np.testing.assert_allclose(value, [0.9, 1.0], atol=0.02)


def test_policy_finds_the_paid_action():
    state, _, _ = train(PPO(CONFIG), "action", 60)
    policy, value = look(state, [0.0])
    assert jax.nn.softmax(policy.logits)[0, 1] > 0.97
    np.testing.assert_allclose(value, [1.0], atol=0.06)


def test_policy_follows_the_observation():
    state, _, _ = train(PPO(CONFIG), "match", 80)
    policy, value = look(state, [-1.0, 1.0])
    probabilities = jax.nn.softmax(policy.logits)
    assert probabilities[0, 0] > 0.95 and probabilities[1, 1] > 0.95
    np.testing.assert_allclose(value, [1.0, 1.0], atol=0.1)


def test_real_valued_policy_follows_the_observation():
    state, _, _ = train(PPO(CONFIG), "target", 150)
    policy, _ = look(state, [-1.0, 1.0])
    # The space is [-2, 2], so the targets -1 and 1 are half the range.
    np.testing.assert_allclose(policy.mode()[:, 0], [-0.5, 0.5], atol=0.06)
    assert jnp.exp(policy.log_std)[0] < 0.5


def test_time_limit_is_an_end_when_the_horizon_is_terminal():
    state, _, _ = train(PPO(CONFIG), "endless", 100)
    _, value = look(state, [0.0] * 4, steps=[0, 1, 2, 3])
    np.testing.assert_allclose(value, [3.439, 2.71, 1.9, 1.0], atol=0.06)


def test_time_limit_is_no_end_when_the_horizon_bootstraps():
    config = dataclasses.replace(CONFIG, horizon="bootstrap", learning_rate=2e-2)
    state, _, _ = train(PPO(config), "endless", 200)
    _, value = look(state, [0.0, 0.0], steps=[0, 3])
    np.testing.assert_allclose(value, [10.0, 10.0], atol=0.2)


@pytest.mark.parametrize("recurrent", [True, False])
def test_remembering_needs_a_recurrent_network(recurrent):
    network = dataclasses.replace(NETWORK, recurrent=recurrent)
    agent = PPO(dataclasses.replace(CONFIG, network=network))
    _, _, rollout = train(agent, "remember", 120, discount=1.0, learning_rate=1e-2)
    mean_reward = float(rollout.timestep.env_reward[2::3].mean())
    assert mean_reward > 0.9 if recurrent else abs(mean_reward) < 0.25
