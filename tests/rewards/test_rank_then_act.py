"""Rank-Then-Act's windows against SciPy and a plain Python account of episodes."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_streams import cut_rollout, make_spec, random_stream
from scipy.stats import spearmanr

from jaxreward.errors import ConfigError
from jaxreward.rewards.rank_then_act import RankThenAct, RankThenActConfig
from jaxreward.scorers.base import Scores


@functools.cache
def compiled(config, equivariant, constant):
    """Propose, 'score' and settle as one program; the 'scorer' reads the frame's own number."""
    reward = RankThenAct(config, permutation_equivariant=equivariant)

    @jax.jit
    def step(state, rollout, key):
        a, b = jax.random.split(key)
        state, queries = reward.propose(state, rollout, a)
        values = queries.table[queries.index, queries.environment[:, None]]
        values = jnp.zeros_like(values) if constant else values
        rows = queries.step.shape[0]
        scores = Scores(values, jnp.ones(rows, bool), jnp.zeros(rows, jnp.int32))
        state, rewards, _ = reward.settle(state, rollout, queries, scores, b)
        return state, rewards["reward"]

    return reward, step


def run(config, stream, cuts, key=0, *, equivariant=False, constant=False):
    """The rewards [T, B] of a stream that is cut into rollouts."""
    reward, step = compiled(config, equivariant, constant)
    state = reward.init(jax.random.key(0), make_spec(stream[0].size))
    paid = []
    for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
        state, rewards = step(
            state, cut_rollout(stream, start, stop), jax.random.fold_in(jax.random.key(key), i)
        )
        paid.append(np.asarray(rewards))
    return np.concatenate(paid)


def rho(values):
    """SciPy's Spearman of the scored frames (all but the anchor) with time; 0 where undefined."""
    scored = values[1:]
    return 0.0 if len(scored) < 2 else spearmanr(scored, np.arange(len(scored))).statistic


def account(stream, pay):
    """Walks every environment's episodes; `pay(frames s_0 .. s_t, is the end) -> reward or None`."""
    first, final, frame, done, _ = stream
    rewards = np.zeros(done.shape)
    for b in range(first.size):
        episode = [first[b]]
        for t in range(done.shape[0]):
            episode.append(final[t, b])
            rewards[t, b] = pay(episode, done[t, b]) or 0.0
            if done[t, b]:
                episode = [frame[t, b]]
    return rewards


def window_reward(window, frequency):
    def pay(episode, end):
        t = len(episode) - 1
        if t % frequency == 0 or end:
            return rho(episode[t - min(window, t) + 1 :])
        return None

    return pay


@pytest.mark.parametrize(("window", "frequency"), [(15, 15), (15, 5), (5, 5), (25, 15), (2, 3), (40, 7)])
def test_windows_across_rollouts_equal_scipy(window, frequency):
    stream = random_stream(0, 64, 5)
    config = RankThenActConfig(mode="window", window=window, frequency=frequency)
    paid = run(config, stream, [0, 16, 32, 64])
    np.testing.assert_allclose(paid, account(stream, window_reward(window, frequency)), atol=1e-5)


def test_episode_reward_equals_scipy_and_scores_the_winning_frame():
    stream = random_stream(1, 96, 4, end_rate=0.05)

    def pay(episode, end):
        if not end:
            return None
        t = len(episode) - 1
        size = min(15, t + 1)
        rows = np.floor(np.arange(size) * t / (size - 1) + 0.5).astype(int)
        assert rows[-1] == t
        return rho([episode[i] for i in rows])

    paid = run(RankThenActConfig(mode="episode"), stream, [0, 32, 64, 96])
    np.testing.assert_allclose(paid, account(stream, pay), atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.permutations([4, 4, 8, 8, 16]))
def test_where_rollouts_are_cut_does_not_matter(seed, lengths):
    stream = random_stream(seed, 40, 3)
    config = RankThenActConfig(mode="window", window=7, frequency=4)
    cuts = np.concatenate([[0], np.cumsum(lengths)])
    np.testing.assert_allclose(run(config, stream, [0, 40]), run(config, stream, cuts), atol=1e-6)


def test_window_and_frequency_are_data_in_one_trace():
    stream = random_stream(2, 32, 3)
    reward = RankThenAct(RankThenActConfig(mode="window", window=25, frequency=15))
    state = reward.init(jax.random.key(0), make_spec(3))
    rollout = cut_rollout(stream, 0, 32)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def pay(state):
        state, queries = reward.propose(state, rollout, jax.random.key(0))
        values = queries.table[queries.index, queries.environment[:, None]]
        rows = queries.step.shape[0]
        scores = Scores(values, jnp.ones(rows, bool), jnp.zeros(rows, jnp.int32))
        return reward.settle(state, rollout, queries, scores, jax.random.key(1))[1]["reward"]

    for window, frequency in ((25, 15), (5, 5), (10, 3)):
        numbers = state.settings.replace(window=jnp.int32(window), frequency=jnp.int32(frequency))
        expected = account(stream, window_reward(window, frequency))
        np.testing.assert_allclose(pay(state.replace(settings=numbers)), expected, atol=1e-5)

    many = state.settings.replace(window=jnp.array([5, 10]), frequency=jnp.array([5, 3]))
    axes = jax.tree.map(lambda _: None, state).replace(settings=jax.tree.map(lambda _: 0, many), history=None)
    vmapped = jax.vmap(pay.__wrapped__.__wrapped__, in_axes=(axes,))(state.replace(settings=many))
    np.testing.assert_allclose(vmapped[1], account(stream, window_reward(10, 3)), atol=1e-5)


def test_mean_over_windows_telescopes_to_the_mean_of_the_paid_windows():
    stream = random_stream(3, 64, 4)
    paid = {}
    for aggregate in ("sum", "mean"):
        config = RankThenActConfig(mode="window", window=6, frequency=4, aggregate=aggregate)
        paid[aggregate] = run(config, stream, [0, 16, 32, 64])
    done = stream[3]
    for b in range(4):
        start = 0
        for end in np.flatnonzero(done[:, b]):
            steps = np.arange(1, end - start + 2)
            queries = np.sum((steps % 4 == 0) | (steps == steps[-1]))
            mean = paid["sum"][start : end + 1, b].sum() / queries
            assert paid["mean"][start : end + 1, b].sum() == pytest.approx(mean, abs=1e-5)
            start = end + 1


def test_a_constant_scorer_earns_nothing_in_expectation():
    stream = random_stream(4, 64, 4)
    exact = run(RankThenActConfig(mode="window", ties="expected"), stream, [0, 64], constant=True)
    np.testing.assert_array_equal(exact, 0.0)
    drawn = RankThenActConfig(mode="window", ties="random", shuffles=2)
    paid = np.stack([run(drawn, stream, [0, 64], key, constant=True) for key in range(40)])
    paid = paid[paid != 0]
    assert abs(paid.mean()) < 0.05
    assert paid.std() > 0.1  # the paper's random ties pay noise; the expected ones do not


def test_one_call_serves_all_shuffles_of_an_equivariant_scorer():
    stream = random_stream(5, 32, 3)
    config = RankThenActConfig(mode="window", shuffles=3)
    assert compiled(config, False, False)[0].rows_per_window == 3
    assert compiled(config, True, False)[0].rows_per_window == 1
    plain, quick = (run(config, stream, [0, 32], equivariant=e) for e in (False, True))
    np.testing.assert_allclose(plain, quick, atol=1e-6)


def test_shuffles_differ_and_keep_the_anchor():
    stream = random_stream(6, 40, 2, end_rate=0.0)
    reward = RankThenAct(RankThenActConfig(mode="window", window=15, frequency=15, shuffles=2))
    _, queries = reward.propose(
        reward.init(jax.random.key(0), make_spec(2)), cut_rollout(stream, 0, 40), jax.random.key(0)
    )
    due = int(queries.count)
    assert due == 2 * 2 * 3  # environments, shuffles, and t = 15, 30 and 40 (the end)
    time, where = np.asarray(queries.time[:due]), np.asarray(queries.where[:due])
    assert where.all()
    assert (time[:, 0] == time.min(axis=1)).all()
    assert (time[0, 1:] != time[1, 1:]).any()
    assert sorted(time[0]) == sorted(time[1])


def test_parse_failure_pays_minus_one_and_short_episodes_pay_nothing():
    stream = random_stream(7, 4, 2, end_rate=1.0)  # every episode ends after one step
    reward = RankThenAct(RankThenActConfig(mode="window"))
    state = reward.init(jax.random.key(0), make_spec(2))
    rollout = cut_rollout(stream, 0, 4)
    state, queries = reward.propose(state, rollout, jax.random.key(0))
    rows = queries.step.shape[0]
    for valid, expected in ((True, 0.0), (False, -1.0)):
        scores = Scores(jnp.zeros((rows, 15)), jnp.full(rows, valid), jnp.zeros(rows, jnp.int32))
        paid = reward.settle(state, rollout, queries, scores, jax.random.key(1))[1]["reward"]
        np.testing.assert_array_equal(paid, expected)


def test_non_finite_values_pay_nothing():
    stream = random_stream(8, 16, 2)
    _, final, frame, done, _ = stream
    final[final > 0] = np.nan
    frame[~done] = final[~done]
    config = RankThenActConfig(mode="window", frequency=5)
    paid = run(config, stream, [0, 16])
    np.testing.assert_array_equal(paid[~np.isfinite(account(stream, window_reward(15, 5)))], 0.0)
    assert np.isfinite(paid).all()


@pytest.mark.parametrize("field", ["window", "frequency", "frames", "shuffles"])
def test_bad_settings_name_the_field(field):
    with pytest.raises(ConfigError, match=rf"reward\.{field} is 0"):
        RankThenActConfig(**{field: 0})


SHARDED = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np
import reward_streams as streams
from jaxreward.rewards.bimi import BiMI, BiMIConfig
from jaxreward.rewards.ellm import ELLM, ELLMConfig
from jaxreward.rewards.rank_then_act import RankThenAct, RankThenActConfig
from jaxreward.scorers.base import Scores
from jaxreward.types import Rollout
P = jax.P
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rollout = streams.cut_rollout(streams.random_stream(0, 32, 4), 0, 32)
spec_of = lambda tree, p: jax.tree.map(lambda _: p, tree)
specs = Rollout(spec_of(rollout.first_timestep, P("data")), (), P(None, "data"),
                spec_of(rollout.timestep, P(None, "data")), {})
for reward in (
    RankThenAct(RankThenActConfig(mode="window", window=9, frequency=5)),
    BiMI(BiMIConfig(("a", "b"), frames=4, threshold=0.3)),
    ELLM(ELLMConfig(("a", "b"))),
):
    def pay(history, rollout):
        num = rollout.timestep.first.shape[1]
        state = reward.init(jax.random.key(0), streams.make_spec(num)).replace(history=history)
        state, queries = reward.propose(state, rollout, jax.random.key(0))
        values = queries.table[queries.index, queries.environment[:, None]]
        if not isinstance(reward, RankThenAct):
            values = jnp.tanh(values[:, :1] * jnp.array([1.0, 2.0]))  # one for each sentence
        rows = queries.step.shape[0]
        scores = Scores(values, jnp.ones(rows, bool), jnp.zeros(rows, jnp.int32))
        return reward.settle(state, rollout, queries, scores, jax.random.key(1))[1]["reward"]

    history = reward.init(jax.random.key(0), streams.make_spec(4)).history
    sharded = jax.jit(jax.shard_map(pay, mesh=mesh, in_specs=(P(None, "data"), specs),
                                    out_specs=P(None, "data"), check_vma=False))
    whole = jax.jit(pay)(history, rollout)
    assert np.any(whole)
    np.testing.assert_allclose(sharded(history, rollout), whole, atol=1e-6)
print("equal", jax.device_count())
"""


def test_shard_map_over_environments_equals_one_device():
    command = [sys.executable, "-c", SHARDED]
    helpers = {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | helpers)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "equal 2" in result.stdout
