"""The loop: one program or three, one seed or many, must be the same computation."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.agents.networks import NetworkConfig
from jaxreward.agents.ppo import PPO, PPOConfig
from jaxreward.envs.catrap.environment import Catrap, CatrapConfig
from jaxreward.errors import ConfigError
from jaxreward.models.frame_ranker import FrameRankerConfig
from jaxreward.rewards.constant import Constant, ConstantConfig
from jaxreward.rewards.environment_reward import EnvironmentReward, EnvironmentRewardConfig
from jaxreward.rewards.rank_then_act import RankThenAct, RankThenActConfig
from jaxreward.rewards.success import Success, SuccessConfig
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.training.loop import Loop, LoopConfig
from jaxreward.training.scoring import score_queries, score_queries_on_host

AGENT = PPOConfig(
    epochs=1, minibatches=2, network=NetworkConfig(body="cnn", cnn_layers=((4, 4, 4),), width=16)
)
MODEL = FrameRankerConfig(
    convolutions=((4, 4, 4),), width=16, blocks=1, heads=2, hidden=16, frame_shape=(36, 40)
)
REWARD = RankThenActConfig(mode="window", window=6, frequency=5)


def make_loop(fused="on", reward=REWARD, length=16):
    environment = Catrap(CatrapConfig(level="1", num_envs=8, max_episode_steps=12))
    scorer = CompactRanker(MODEL)
    ranked = RankThenAct(reward, permutation_equivariant=True)
    config = LoopConfig(rollout_length=length, score_chunk=7, fused=fused)
    loop = Loop(config, environment, PPO(AGENT), ranked, scorer, total_updates=4)
    return loop, scorer.init(jax.random.key(9), (36, 40, 1))


def run(loop, params, updates=3, seed=0):
    state, rows = loop.init(jax.random.key(seed)), []
    for _ in range(updates):
        state, metrics, _ = loop.update(state, params, ())
        rows.append(jax.device_get(metrics))
    return state, rows


def test_one_program_equals_a_jitted_call_a_minibatch():
    (fused, fused_rows), (stepwise, stepwise_rows) = (run(*make_loop(mode)) for mode in ("on", "off"))
    chex.assert_trees_all_close(fused.agent.params, stepwise.agent.params, atol=1e-5)
    chex.assert_trees_all_equal(fused.timestep.frame, stepwise.timestep.frame)
    for a, b in zip(fused_rows, stepwise_rows, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(a["return"], b["return"], rtol=1e-4)
    assert any(row["reward/queries"] > 0 and row["episodes"] > 0 for row in fused_rows)


def test_an_update_is_traced_once():
    loop, params = make_loop()
    update = jax.jit(chex.assert_max_traces(loop.update_program, n=1))
    state = loop.init(jax.random.key(0))
    for _ in range(3):
        state, _ = update(state, params, ())
    assert int(state.update) == 3


def test_seeds_and_settings_vmap_and_equal_separate_runs():
    loop, params = make_loop()
    states = [loop.init(jax.random.key(seed)) for seed in (0, 1)]
    rates = (1e-3, 1e-4)
    numbers = (jnp.int32(5), jnp.int32(3))

    def with_settings(state, rate, frequency):
        agent = state.agent.replace(settings=state.agent.settings.replace(learning_rate=jnp.float32(rate)))
        reward = state.reward.replace(settings=state.reward.settings.replace(frequency=frequency))
        return state.replace(agent=agent, reward=reward)

    states = [with_settings(*x) for x in zip(states, rates, numbers, strict=True)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *states)
    together, metrics = jax.jit(jax.vmap(loop.update_program, in_axes=(0, None, None)))(together, params, ())
    single = jax.jit(loop.update_program)
    for i, state in enumerate(states):
        alone, expected = single(state, params, ())
        # Not the parameters: Adam's first steps are the gradient's sign, and rounding decides that of a
        # gradient that is nearly zero.
        mine = jax.tree.map(lambda x, i=i: x[i], (together.timestep, together.environment, together.key))
        chex.assert_trees_all_equal(mine, (alone.timestep, alone.environment, alone.key))
        np.testing.assert_allclose(metrics["learning_rate"][i], expected["learning_rate"], rtol=1e-6)
        np.testing.assert_allclose(metrics["entropy"][i], expected["entropy"], rtol=0.02)
        # Rounding may order frames that look alike to this random scorer.
        np.testing.assert_allclose(metrics["reward/rho"][i], expected["reward/rho"], atol=0.1)
        assert int(metrics["reward/queries"][i]) == int(expected["reward/queries"])
    assert int(metrics["reward/queries"][0]) != int(metrics["reward/queries"][1])


def test_scoring_in_chunks_equals_scoring_at_once_and_on_the_host():
    loop, params = make_loop()
    state = loop.init(jax.random.key(0))
    *_, rollout = loop._act(state.agent, state.environment, state.timestep, state.memory, jax.random.key(1))
    _, queries = loop.reward.propose(state.reward, rollout, jax.random.key(2))
    arguments = (loop.environment, loop.scorer, params, (), queries, jax.random.key(3))
    whole = score_queries(*arguments, chunk=10_000)
    due = int(queries.count)
    assert due > 14
    for other in (score_queries(*arguments, chunk=7), score_queries_on_host(*arguments, chunk=7)):
        np.testing.assert_allclose(other.values[:due], whole.values[:due], atol=1e-5)
        assert other.values.shape == whole.values.shape
        assert bool(other.valid[:due].all())


def test_every_reward_pays_what_it_says():
    loop, _ = make_loop()
    rollout = loop._act(
        loop.init(jax.random.key(0)).agent, *loop.environment.reset(jax.random.key(0)), (), jax.random.key(1)
    )[-1]
    steps = rollout.timestep
    success = jnp.zeros_like(steps.done).at[3, 2].set(True)
    rollout = rollout.replace(
        timestep=steps.replace(info={"success": success}, env_reward=jnp.full(steps.done.shape, 0.5))
    )
    pay = lambda reward: reward.settle(reward.init(None, None), rollout, None, None, None)[1]["reward"]  # noqa: E731
    np.testing.assert_array_equal(pay(Success(SuccessConfig(value=2.0))), 2.0 * success)
    np.testing.assert_array_equal(pay(EnvironmentReward(EnvironmentRewardConfig(scale=4.0))), 2.0)
    np.testing.assert_array_equal(pay(Constant(ConstantConfig())), steps.done.astype(jnp.float32))
    np.testing.assert_array_equal(pay(Constant(ConstantConfig(value=0.1, when="step"))), np.float32(0.1))


def test_parts_that_do_not_fit_are_refused():
    loop, _ = make_loop()
    with pytest.raises(ConfigError, match="needs a scorer"):
        Loop(LoopConfig(), loop.environment, loop.agent, loop.reward, None, total_updates=1)
    remote = dataclasses.make_dataclass("Remote", [("jittable", bool, False)])()
    with pytest.raises(ConfigError, match="runs on the host"):
        Loop(LoopConfig(fused="on"), loop.environment, loop.agent, loop.reward, remote, total_updates=1)
