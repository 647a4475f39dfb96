"""The mechanics of PPO: losses by hand, both drivers equal, alignment, settings as data, no retracing."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.agents.base import Agent
from jaxreward.agents.networks import ActorCritic, Categorical, NetworkConfig
from jaxreward.agents.ppo import PPO, Batch, PPOConfig, Settings, explained_variance, ppo_loss
from jaxreward.envs.probe import MatchReward, make_probe
from jaxreward.envs.wrappers import vectorise
from jaxreward.errors import ConfigError
from jaxreward.training.unroll import unroll
from jaxreward.types import Experience

NETWORK = NetworkConfig(body="mlp", mlp_layers=(8,), width=8)
CONFIG = PPOConfig(epochs=2, minibatches=2, network=NETWORK)
ENVS, LENGTH = 4, 8


class PixelMatch(MatchReward):
    """The probe 'match' seen as a uint8 picture [8, 8, 1]."""

    def _record(self, state, reward):
        step = super()._record(state, reward)
        return step.replace(observation=self.render(step.frame)[..., :1])


def play(agent, environment, length=LENGTH, updates=10):
    """A state and what it experienced; the rewards are random, so that all advantages differ."""
    state = agent.init(jax.random.key(0), environment.spec, updates)
    environment_state, timestep = environment.reset(jax.random.key(1))
    memory = agent.memory(environment.spec.num_envs)
    act = jax.jit(functools.partial(unroll, environment, agent, length=length))
    # The first rollout is thrown away: the second starts in the middle of episodes.
    for key in jax.random.split(jax.random.key(2), 2):
        environment_state, timestep, memory, rollout = act(state, environment_state, timestep, memory, key)
    rewards = jax.random.normal(jax.random.key(3), rollout.timestep.env_reward.shape)
    return state, Experience(rollout, {"reward": rewards})


@functools.cache
def played(recurrent=False, horizon="terminal"):
    network = dataclasses.replace(NETWORK, recurrent=recurrent)
    agent = PPO(dataclasses.replace(CONFIG, network=network, horizon=horizon))
    # Episodes of three steps in rollouts of eight: episodes begin and end everywhere.
    return agent, *play(agent, make_probe("remember", ENVS))


def largest_difference(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(jnp.asarray(x, float) - jnp.asarray(y, float)))) for x, y in leaves)


def hand_batch(action, old_probability, advantage, value=0.0, target=0.0):
    one = functools.partial(jnp.full, (1,))
    return Batch(
        observation=jnp.zeros((1, 1)),
        first=one(False),
        episode_step=one(0),
        choice=one(action),
        log_prob=jnp.log(one(old_probability)),
        value=one(value),
        advantage=one(advantage),
        target=one(target),
    )


def settings_of(config):
    return Settings.of(config)


@pytest.mark.parametrize(
    ("old", "advantage", "objective", "has_gradient"),
    [
        # The new probability is 0.6 and ε = 0.2.
        (0.4, 1.0, 1.2, False),  # ratio 1.5 is cut
        (0.4, -1.0, -1.5, True),  # a bad action that became more probable is not
        (0.75, 1.0, 0.8, True),  # ratio 0.8, on the edge or inside
        (0.6, 2.0, 2.0, True),  # ratio 1
        (0.9, 1.0, 2 / 3, True),  # a good action that became less probable is not cut
        (0.9, -1.0, -0.8, False),  # ratio 2/3 is cut
    ],
)
def test_clipped_objective_by_hand(old, advantage, objective, has_gradient):
    settings = settings_of(CONFIG)
    batch = hand_batch(0, old, advantage)

    def policy_loss(logit):
        policy = Categorical(jnp.stack([logit, 0.0])[None])
        return ppo_loss(policy, jnp.zeros(1), batch, settings, jnp.float32(0.0))[1]["policy_loss"]

    loss, gradient = jax.value_and_grad(policy_loss)(jnp.log(jnp.float32(0.6 / 0.4)))
    np.testing.assert_allclose(loss, -objective, rtol=1e-5)
    if old != 0.75:
        # d ratio / d logit = ratio (1 - p).
        expected = -advantage * 0.6 / old * 0.4 if has_gradient else 0.0
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_whole_loss_by_hand():
    policy = Categorical(jnp.zeros((1, 2)))
    batch = hand_batch(0, 0.5, 3.0, value=1.0, target=2.0)
    loss, metrics = ppo_loss(policy, jnp.array([1.5]), batch, settings_of(CONFIG), jnp.float32(0.1))
    # - 1 * 3 + 0.5 * 0.5^2 - 0.1 * log 2
    np.testing.assert_allclose(loss, -3.0 + 0.125 - 0.1 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(metrics["approx_kl"], 0.0, atol=1e-7)
    policy = Categorical(jnp.log(jnp.array([[0.6, 0.4]])))
    _, metrics = ppo_loss(policy, jnp.array([1.5]), batch, settings_of(CONFIG), jnp.float32(0.1))
    np.testing.assert_allclose(metrics["approx_kl"], 0.2 - np.log(1.2), rtol=1e-4)


def test_value_clipping_by_hand():
    settings = settings_of(dataclasses.replace(CONFIG, value_clip=0.1))
    policy = Categorical(jnp.zeros((1, 2)))

    def value_loss(value):
        batch = hand_batch(0, 0.5, 0.0, value=1.0, target=2.0)
        return ppo_loss(policy, value[None], batch, settings, jnp.float32(0.0))[1]["value_loss"]

    # The value moved from 1 to 1.5, towards 2, by more than 0.1: the larger error is that of 1.1.
    loss, gradient = jax.value_and_grad(value_loss)(jnp.float32(1.5))
    np.testing.assert_allclose([loss, gradient], [0.9**2, 0.0], rtol=1e-5)
    # It moved away from 2: the larger error is its own.
    loss, gradient = jax.value_and_grad(value_loss)(jnp.float32(0.5))
    np.testing.assert_allclose([loss, gradient], [1.5**2, -3.0], rtol=1e-5)


def test_explained_variance_by_hand():
    target = jnp.array([0.0, 2.0])
    np.testing.assert_allclose(explained_variance(jnp.array([0.0, 1.0]), target), 0.75)
    np.testing.assert_allclose(explained_variance(jnp.array([5.0, 5.0]), target), 0.0)
    assert float(explained_variance(target, jnp.ones(2))) == 0.0


@pytest.mark.parametrize("recurrent", [False, True])
def test_both_drivers_are_equal_and_traced_once(recurrent):
    agent, state, experience = played(recurrent)
    assert isinstance(agent, Agent)
    chex.clear_trace_counter()
    learn = jax.jit(chex.assert_max_traces(agent.learn, n=1))
    fused = stepwise = state
    for key in jax.random.split(jax.random.key(4), 2):
        fused, fused_metrics = learn(fused, experience, key)
        stepwise, stepwise_metrics = agent.learn_stepwise(stepwise, experience, key)
    assert largest_difference(fused, stepwise) <= 1e-6
    assert fused_metrics.keys() == stepwise_metrics.keys()
    assert largest_difference(fused_metrics, stepwise_metrics) <= 1e-6
    assert all(np.isfinite(value) and value.shape == () for value in fused_metrics.values())
    assert largest_difference(fused.params, state.params) > 1e-4
    assert int(fused.update) == 2
    assert jax.tree.structure(fused) == jax.tree.structure(state)


@pytest.mark.parametrize(("layers", "tolerance"), [(((4, 4, 4),), 1e-6), (((4, 4, 4), (4, 3, 1)), 1e-4)])
def test_both_drivers_are_equal_on_pixels(layers, tolerance):
    # A convolution proper is computed by different algorithms inside and outside of a scan on CPU, and Adam
    # enlarges rounding of gradients near 0: hence the single minibatch and the wider tolerance.
    network = NetworkConfig(cnn_layers=layers, width=8)
    agent = PPO(PPOConfig(epochs=1, minibatches=1, network=network))
    state, experience = play(agent, vectorise(PixelMatch(), ENVS, 1))
    fused, _ = jax.jit(agent.learn)(state, experience, jax.random.key(4))
    stepwise, _ = agent.learn_stepwise(state, experience, jax.random.key(4))
    assert largest_difference(fused, stepwise) <= tolerance


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("horizon", ["terminal", "bootstrap"])
def test_learning_sees_the_steps_as_acting_did(recurrent, horizon):
    agent, state, experience = played(recurrent, horizon)
    rollout = experience.rollout
    # With no step size the policy stays the one that acted, so every ratio is 1.
    frozen = state.replace(
        settings=state.settings.replace(learning_rate=jnp.float32(0.0), final_learning_rate=jnp.float32(0.0))
    )
    after, metrics = agent.learn_stepwise(frozen, experience, jax.random.key(4))
    np.testing.assert_allclose(metrics["approx_kl"], 0.0, atol=1e-7)
    assert float(metrics["clip_fraction"]) == 0.0
    assert largest_difference(after.params, state.params) == 0.0

    following = agent.following_values(state, rollout)
    goes_on = ~np.asarray(rollout.timestep.done[:-1])
    assert 0 < goes_on.sum() < goes_on.size
    np.testing.assert_allclose(
        following[:-1][goes_on], rollout.extras["value"][1:][goes_on], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("recurrent", [False, True])
def test_value_of_the_final_observation_is_that_of_the_episode_going_on(recurrent):
    agent, state, experience = played(recurrent, "bootstrap")
    rollout = experience.rollout
    memory, first = rollout.first_memory, rollout.first_timestep
    expected = []
    for t in range(LENGTH):
        memory, _, _ = agent.act(state, memory, first, jax.random.key(0))
        after = jax.tree.map(lambda x, t=t: x[t], rollout.timestep)
        final = after.replace(observation=after.final_observation, first=jnp.zeros(ENVS, bool))
        expected.append(agent.act(state, memory, final, jax.random.key(0))[2]["value"])
        first = after
    np.testing.assert_allclose(
        agent.following_values(state, rollout), jnp.stack(expected), rtol=1e-5, atol=1e-6
    )


def test_two_learning_rates_in_one_program_are_two_separate_updates():
    agent, state, experience = played()
    rates = jnp.array([1e-2, 1e-3], jnp.float32)

    def learn(rate):
        changed = state.replace(settings=state.settings.replace(learning_rate=rate))
        return agent.learn(changed, experience, jax.random.key(4))

    together, metrics = jax.jit(jax.vmap(learn))(rates)
    np.testing.assert_allclose(metrics["learning_rate"], rates)
    alone = jax.jit(learn)
    for i, rate in enumerate(rates):
        one = jax.tree.map(lambda x, i=i: x[i], together.params)
        assert largest_difference(one, alone(rate)[0].params) < 1e-5
    first, second = (jax.tree.map(lambda x, i=i: x[i], together.params) for i in range(2))
    assert largest_difference(first, second) > 1e-3


def test_schedules_are_linear_in_updates():
    agent, state, experience = played()
    for update, rate, entropy in [(0, 1e-3, 0.05), (5, 5.5e-4, 0.0275), (10, 1e-4, 0.005), (99, 1e-4, 0.005)]:
        _, metrics = agent.learn_stepwise(
            state.replace(update=jnp.int32(update)), experience, jax.random.key(4)
        )
        np.testing.assert_allclose(
            [metrics["learning_rate"], metrics["entropy_coefficient"]], [rate, entropy], rtol=1e-5
        )


def test_target_kl_stops_visibly():
    agent, state, experience = played()
    config = dataclasses.replace(agent.config, target_kl=1e-7, learning_rate=1e-2)
    cautious = PPO(config)
    start = cautious.init(jax.random.key(0), make_probe("remember", ENVS).spec, 10)
    after, metrics = cautious.learn_stepwise(start, experience, jax.random.key(4))
    # The first of four minibatches meets the acting policy itself; the next one finds it changed.
    assert float(metrics["applied"]) == 0.25
    assert int(after.opt_state[1].count) == 1 and int(after.update) == 1
    _, metrics = agent.learn_stepwise(state, experience, jax.random.key(4))
    assert float(metrics["applied"]) == 1.0


def test_reward_streams_are_added():
    agent, state, experience = played()
    rewards = experience.rewards["reward"]
    split = {"b": 0.25 * rewards, "a": 0.75 * rewards}
    whole, _ = agent.learn_stepwise(state, experience, jax.random.key(4))
    added, _ = agent.learn_stepwise(state, Experience(experience.rollout, split), jax.random.key(4))
    assert largest_difference(whole.params, added.params) < 1e-5


def test_greedy_actions_are_modes_and_extras_are_kept():
    agent, state, experience = played()
    _, action, extras = agent.act(
        state, (), experience.rollout.first_timestep, jax.random.key(0), greedy=True
    )
    _, policy, value = state.network.apply(
        {"params": state.params},
        (),
        experience.rollout.first_timestep.observation,
        jnp.zeros(ENVS, bool),
        experience.rollout.first_timestep.episode_step,
        method=ActorCritic.__call__,
    )
    np.testing.assert_array_equal(action, np.argmax(policy.logits, axis=-1))
    np.testing.assert_allclose(extras["value"], value, rtol=1e-6)
    assert extras.keys() == {"log_prob", "value", "choice"}


def test_wrong_settings_are_named():
    agent, state, experience = played()
    odd = PPO(dataclasses.replace(agent.config, minibatches=3))
    with pytest.raises(ConfigError, match=r"minibatches is 3.*8 steps \* 4 environments = 32"):
        odd.learn(state, experience, jax.random.key(0))
    _, state, experience = played(recurrent=True)
    odd = PPO(dataclasses.replace(played(recurrent=True)[0].config, minibatches=8))
    with pytest.raises(ConfigError, match=r"minibatches is 8.*4 environments"):
        odd.learn(state, experience, jax.random.key(0))
    for wrong in (
        {"discount": 1.1},
        {"epochs": 0},
        {"clip": 0.0},
        {"target_kl": -1.0},
        {"horizon": "infinite"},
        {"standardisation": "none"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PPOConfig(**wrong)
    spec = make_probe("constant", 1).spec
    with pytest.raises(ConfigError, match="single array"):
        agent.init(jax.random.key(0), dataclasses.replace(spec, observation={"a": spec.observation}), 1)
    with pytest.raises(ConfigError, match="total_updates is 0"):
        agent.init(jax.random.key(0), spec, 0)
