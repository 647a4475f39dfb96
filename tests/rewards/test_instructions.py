"""Rewards from instructions: hand-computed lists, and a plain Python account of random episodes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_streams import cut_rollout, make_spec, random_stream

from jaxreward.errors import ConfigError
from jaxreward.rewards.bimi import BiMI, BiMIConfig, informed, trajectory_frequency
from jaxreward.rewards.ellm import ELLM, ELLMConfig
from jaxreward.rewards.instructions import (
    SoftSettings,
    active_similarity,
    binary_step,
    no_progress,
    soft_step,
    walk,
)
from jaxreward.rewards.pixl2r import Pixl2R, Pixl2RConfig
from jaxreward.scorers.base import Scores

THREE = ("climb the ladder", "take the key", "open the door")
SOFT = SoftSettings(jnp.float32(0.1), jnp.float32(0.5), jnp.float32(2.0))


def column(values):
    """One environment's similarities to one instruction, [T, 1, 1]."""
    return jnp.array(values, jnp.float32)[:, None, None]


def test_soft_rewards_pay_what_exceeds_half_the_best():
    sims = column([0.05, 0.4, 0.3, 0.1, 0.9])
    _, reward, _ = walk(no_progress(1), sims, jnp.zeros((5, 1), bool), lambda p, s: soft_step(p, s, SOFT))
    # At or below the floor of 0.1: nothing. 0.4 - 0; 0.3 - 0.2; 0.9 - 0.2.
    np.testing.assert_allclose(reward[:, 0], [0, 0.4, 0.1, 0, 0.7], atol=1e-6)


def test_more_than_the_cap_moves_the_pointer_and_forgets_the_best():
    sims = jnp.tile(jnp.array([[0.9, 0.2]], jnp.float32), (7, 1, 1))
    progress, reward, active = walk(
        no_progress(1), sims, jnp.zeros((7, 1), bool), lambda p, s: soft_step(p, s, SOFT)
    )
    # 0.9, then 0.45 each time: 0.9, 1.35, 1.8, 2.25 > 2. Then 0.2 - 0, and 0.1 each.
    np.testing.assert_allclose(reward[:, 0], [0.9, 0.45, 0.45, 0.45, 0.2, 0.1, 0.1], atol=1e-6)
    assert active[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose([progress.paid[0], progress.best[0]], [0.4, 0.2], atol=1e-6)


def test_binary_rewards_pay_once_and_in_order():
    sims = jnp.array([[0.9, 0.9], [0.2, 0.9], [0.9, 0.5], [0.9, 0.9]], jnp.float32)[:, None]
    quiet = jnp.zeros((4, 1), bool)
    for strict, expected in ((False, [1, 1, 0, 0]), (True, [1, 1, 0, 0])):
        progress, reward, active = walk(
            no_progress(1), sims, quiet, lambda p, s, strict=strict: binary_step(p, s, 0.7, strict=strict)
        )
        assert reward[:, 0].tolist() == expected
        assert active[:, 0].tolist() == [0, 1, 2, 2] and progress.pointer.tolist() == [2]
    at = jnp.float32(0.5)
    assert binary_step(no_progress(1), column([0.5])[0], at)[1].tolist() == [1]
    assert binary_step(no_progress(1), column([0.5])[0], at, strict=True)[1].tolist() == [0]
    assert active_similarity(sims[0], jnp.array([2])).tolist() == [-np.inf]


def test_the_end_of_an_episode_starts_the_list_anew():
    done = jnp.array([[False], [True], [False]])
    progress, reward, active = walk(
        no_progress(1), column([0.9, 0.9, 0.9]), done, lambda p, s: binary_step(p, s, 0.7)
    )
    assert reward[:, 0].tolist() == [1, 0, 1] and active[:, 0].tolist() == [0, 1, 0]
    assert progress.pointer.tolist() == [1]


def test_equation_2_on_a_worked_rollout():
    """Environment 0: an episode of 2 steps (fires once) and 2 more (twice); environment 1: 4 steps, once."""
    fires = jnp.array([[1, 0], [0, 0], [1, 1], [1, 0]], bool)[..., None]
    done = jnp.array([[0, 0], [1, 0], [0, 0], [0, 0]], bool)
    np.testing.assert_allclose(trajectory_frequency(fires, done), [(1 / 2 + 2 / 2 + 1 / 4) / 3], rtol=1e-6)
    # An episode that ends with the rollout is no trajectory of length 0 beside it.
    np.testing.assert_allclose(
        trajectory_frequency(fires, done.at[-1].set(True)), trajectory_frequency(fires, done)
    )


def test_equation_3_and_its_logarithm():
    reward, frequency = jnp.array([1.0, 1, 1, 0]), jnp.array([0.25, 0, 1, 0.25])
    np.testing.assert_allclose(informed(reward, frequency, "linear"), [0.75, 1, 0, 0])
    np.testing.assert_allclose(informed(reward, frequency, "log"), [np.log(4), 1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(informed(reward, frequency, "none"), reward)


@functools.cache
def compiled(reward):
    """Propose and settle as one program."""

    @jax.jit
    def step(state, rollout, values, valid):
        state, queries = reward.propose(state, rollout, jax.random.key(1))
        scores = Scores(values, valid, jnp.zeros(valid.shape, jnp.int32))
        return reward.settle(state, rollout, queries, scores, jax.random.key(2))

    return step


def run(reward, stream, sims, cuts, valid=None):
    """The rewards [T, B] of a stream that is cut into rollouts."""
    state, paid = reward.init(jax.random.key(0), make_spec(stream[0].size)), []
    for start, stop in itertools.pairwise(cuts):
        flat = sims[start:stop].reshape(-1, sims.shape[-1])
        ok = np.ones(len(flat), bool) if valid is None else valid[start:stop].reshape(-1)
        state, rewards, metrics = compiled(reward)(state, cut_rollout(stream, start, stop), flat, ok)
        assert all(np.isfinite(float(value)) for value in metrics.values())
        paid.append(np.asarray(rewards["reward"]))
    return np.concatenate(paid)


ITERATION = BiMI(BiMIConfig(THREE, threshold=0.8, coefficient=0.95))
EPISODE = BiMI(BiMIConfig(THREE, threshold=0.6, frequency="episode", strict=True))


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000))
def test_bimi_equals_a_plain_account_of_episodes(seed):
    rng = np.random.default_rng(seed)
    stream, sims = random_stream(seed, 24, 3), rng.uniform(size=(24, 3, 3)).astype(np.float32)
    valid = rng.random((24, 3)) < 0.9
    done, cuts = stream[3], [0, 12, 24]
    found = run(ITERATION, stream, sims, cuts, valid)
    fires = (sims >= np.float32(0.8)) & valid[..., None]
    expected, pointer, frequency = np.zeros((24, 3)), [0] * 3, np.zeros(3)
    for start in (0, 12):
        for t in range(start, start + 12):
            for b in range(3):
                if pointer[b] < 3 and fires[t, b, pointer[b]]:
                    expected[t, b] = max(1 - 0.95 * frequency[pointer[b]], 0)
                    pointer[b] += 1
                if done[t, b]:
                    pointer[b] = 0
        shares = []
        for b in range(3):
            ends = [*np.flatnonzero(done[start : start + 12, b]) + start + 1, start + 12]
            first = start
            for end in ends:
                if end > first:
                    shares.append(fires[first:end, b].mean(0))
                first = end
        frequency = np.mean(shares, axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000))
def test_the_frequency_of_the_previous_episode(seed):
    rng = np.random.default_rng(seed)
    stream, sims = random_stream(seed, 24, 2, 0.2), rng.uniform(size=(24, 2, 3)).astype(np.float32)
    found = run(EPISODE, stream, sims, [0, 12, 24])
    expected = np.zeros((24, 2))
    for b in range(2):
        pointer, known, count, steps = 0, np.zeros(3), np.zeros(3), 0
        for t in range(24):
            fired, active = sims[t, b] > np.float32(0.6), pointer
            if active < 3 and fired[active]:
                expected[t, b] = max(1 - known[active], 0)
                pointer += 1
            count, steps = count + (fired & (np.arange(3) != active)), steps + 1
            if stream[3][t, b]:
                known, pointer, count, steps = count / steps, 0, np.zeros(3), 0
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert compiled(EPISODE)._cache_size() == 1


@pytest.mark.parametrize(
    ("reward", "frames"), [(Pixl2R(Pixl2RConfig(THREE)), 1), (ELLM(ELLMConfig(THREE)), 10)]
)
def test_windows_are_the_newest_frames_of_the_episode(reward, frames):
    stream = first, final, frame, done, _ = random_stream(3, 30, 2, 0.15)
    state = reward.init(jax.random.key(0), make_spec(2))
    shown = {}
    for start in (0, 10, 20):
        rollout = cut_rollout(stream, start, start + 10)
        state, queries = reward.propose(state, rollout, jax.random.key(0))
        assert int(queries.count) == 20
        pictures = np.asarray(queries.table)[queries.index, np.asarray(queries.environment)[:, None]]
        for row, (step, where) in enumerate(zip(queries.step, np.asarray(queries.where), strict=True)):
            shown[start + int(step) // 2, int(step) % 2] = pictures[row][where].tolist()
    for b in range(2):
        episode = [first[b]]
        for t in range(30):
            episode.append(final[t, b])
            assert shown[t, b] == [float(x) for x in episode[-frames:]]
            if done[t, b]:
                episode = [frame[t, b]]


def test_rewards_cut_into_rollouts_are_the_same():
    stream = random_stream(5, 24, 2)
    sims = np.random.default_rng(5).uniform(size=(24, 2, 3)).astype(np.float32)
    for reward in (Pixl2R(Pixl2RConfig(THREE)), BiMI(BiMIConfig(THREE, information="none"))):
        whole, parts = (run(reward, stream, sims, cuts) for cuts in ([0, 24], [0, 8, 16, 24]))
        np.testing.assert_allclose(whole, parts, atol=1e-6)


def test_settings_are_data():
    """One program for many thresholds."""
    reward = BiMI(BiMIConfig(("a",), information="none"))
    rollout = cut_rollout(random_stream(1, 6, 2, 0.0), 0, 6)
    scores = Scores(jnp.linspace(0, 1, 12)[:, None], jnp.ones(12, bool), jnp.zeros(12, jnp.int32))
    state = reward.init(jax.random.key(0), make_spec(2))

    def paid(threshold):
        own = state.replace(settings=state.settings.replace(threshold=threshold))
        own, queries = reward.propose(own, rollout, jax.random.key(0))
        return reward.settle(own, rollout, queries, scores, jax.random.key(0))[1]["reward"].sum()

    assert jax.jit(jax.vmap(paid))(jnp.array([0.0, 0.95, 1.1])).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: BiMI(BiMIConfig()), "reward.instructions is empty"),
        (lambda: BiMIConfig(("climb", " ")), r"reward.instructions\[1\] is empty"),
        (lambda: ELLMConfig(THREE, frames=0), "reward.frames is 0"),
        (lambda: BiMIConfig(THREE, threshold=1.5), "reward.threshold is 1.5"),
        (lambda: BiMIConfig(THREE, coefficient=0.0), "reward.coefficient is 0.0"),
        (lambda: Pixl2RConfig(THREE, cap=-1.0), "reward.cap is -1.0"),
    ],
)
def test_bad_settings_are_refused(build, words):
    with pytest.raises(ConfigError, match=words):
        build()
