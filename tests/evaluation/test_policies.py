"""Evaluation of policies: which episodes count, and what is said about them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from scipy import stats

from jaxreward.envs.catrap.environment import Catrap, CatrapConfig
from jaxreward.envs.probe import Probe, make_probe
from jaxreward.envs.wrappers import vectorise
from jaxreward.evaluation.policies import (
    Episode,
    Evaluation,
    UniformRandom,
    evaluate,
    pad_frames,
    split_episodes,
)
from jaxreward.types import Box, Rollout


class Always:
    """An agent that always does the same, and counts its steps in its memory."""

    def __init__(self, action):
        self.action = action

    def memory(self, batch_size):
        return jnp.zeros(batch_size, jnp.int32)

    def act(self, state, memory, timestep, key, *, greedy=False):
        return memory + 1, jnp.full(memory.shape, self.action, jnp.int32), {}


class WinsEarlyOrLosesLate(Probe):
    """Half of the episodes are won in one step, the others are lost after eight."""

    length = 8

    def reset(self, key):
        state, single = super().reset(key)
        return state, single.replace(frame=jnp.reshape(state.cue, (1,)))

    def step(self, state, action, key):
        state, single = super().step(state, action, key)
        won = state.cue > 0
        return state, single.replace(
            frame=jnp.reshape(state.cue, (1,)), terminated=won | (state.step >= 8), info={"success": won}
        )


@struct.dataclass
class Nothing:
    """No agent state."""


def test_short_episodes_are_not_favoured():
    environment = vectorise(WinsEarlyOrLosesLate(), 64, 8)
    found = evaluate(environment, Always(0), Nothing(), jax.random.key(0), episodes=1024)
    assert len(found.episodes) == 1024
    assert {e.length for e in found.episodes} == {1, 8}
    assert all(e.success == (e.length == 1) for e in found.episodes)
    # The truth is 1/2; of the episodes that end first, 8 of 9 would be successes.
    assert stats.binomtest(found.successes, 1024, 0.5).pvalue > 1e-4


@pytest.mark.parametrize(("asked", "played"), [(1, 4), (4, 4), (5, 8), (12, 12)])
def test_every_environment_plays_the_same_number(asked, played):
    environment = vectorise(WinsEarlyOrLosesLate(), 4, 8)
    assert (
        len(evaluate(environment, Always(0), Nothing(), jax.random.key(1), episodes=asked).episodes) == played
    )


def test_success_and_return_of_a_probe():
    environment = make_probe("action", 3)
    good = evaluate(environment, Always(1), Nothing(), jax.random.key(0), episodes=6).summary()
    bad = evaluate(environment, Always(0), Nothing(), jax.random.key(0), episodes=6).summary()
    assert (good["success_rate"], good["env_return"], good["length"]) == (1.0, 1.0, 1.0)
    assert (bad["success_rate"], bad["env_return"], bad["length"]) == (0.0, -1.0, 1.0)
    assert (good["pass_at_5"], bad["pass_at_5"]) == (1.0, 0.0)


def test_the_summary_has_wilsons_interval():
    episodes = [
        Episode(i < 7, 2, 0.5, np.arange(2) + i, np.zeros((3, 1)), np.zeros(2), np.zeros(2, bool))
        for i in range(20)
    ]
    summary = Evaluation(episodes, greedy=False).summary()
    expected = stats.binomtest(7, 20).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(summary["success_interval"], [expected.low, expected.high], atol=1e-12)
    assert summary["success_rate"] == 0.35
    assert summary["episodes"] == 20
    assert summary["length"] == 2
    assert summary["env_return"] == 0.5
    assert summary["pass_at_5"] == pytest.approx(1 - (13 * 12 * 11 * 10 * 9) / (20 * 19 * 18 * 17 * 16))
    assert Evaluation(episodes[:4], greedy=False).summary()["pass_at_5"] is None
    alike = Evaluation([episodes[0]] * 20, greedy=True).summary()
    assert (alike["success_rate"], alike["success_interval"], alike["pass_at_5"]) == (1.0, None, None)
    assert Evaluation(episodes, greedy=True).summary()["success_interval"] == summary["success_interval"]


def test_episodes_are_cut_at_their_ends_across_rollouts():
    environment = make_probe("remember", 2)  # episodes of three steps, cut out of rollouts of two
    state, timestep = environment.reset(jax.random.key(3))
    rollouts = []
    for actions in ([0, 1], [1, 1], [0, 0]):
        first, steps = timestep, []
        for action in actions:
            state, timestep = environment.step(state, jnp.full(2, action))
            steps.append(timestep)
        following = jax.tree.map(lambda *x: np.stack(x), *steps)
        taken = np.repeat(np.array(actions)[:, None], 2, 1)
        rollouts.append(jax.tree.map(np.asarray, Rollout(first, (), taken, following, {})))
    columns = split_episodes(rollouts)
    assert [[e.length for e in column] for column in columns] == [[3, 3], [3, 3]]
    for b, column in enumerate(columns):
        assert [e.actions.tolist() for e in column] == [[0, 1, 1], [1, 0, 0]]
        for number, episode in enumerate(column):
            first = rollouts[0].first_timestep if number == 0 else None
            cue = episode.frames[0, 0]
            assert cue in (-1.0, 1.0)
            assert first is None or cue == first.frame[b, 0]
            # After the first step the probe shows 0, also in the final frame.
            assert episode.frames[:, 0].tolist() == [cue, 0, 0, 0]
            right = (episode.actions[-1] == 1) == (cue > 0)
            assert episode.success == right
            assert episode.env_return == (1.0 if right else -1.0)


def test_padding_repeats_the_last_frame():
    episodes = [
        Episode(True, 2, 0.0, np.zeros(2), np.array([[1], [2], [3]]), np.zeros(2), np.zeros(2, bool)),
        Episode(
            False, 4, 0.0, np.zeros(4), np.array([[5], [6], [7], [8], [9]]), np.zeros(4), np.zeros(4, bool)
        ),
    ]
    frames, lengths = pad_frames(episodes, 4)
    assert frames[..., 0].tolist() == [[1, 2, 3, 3, 3], [5, 6, 7, 8, 9]]
    assert lengths.tolist() == [3, 5]


def test_catrap_episodes_hold_their_final_frames():
    environment = Catrap(CatrapConfig(level="1", num_envs=4, max_episode_steps=6))
    random = UniformRandom(environment.spec)
    found = evaluate(environment, random, (), jax.random.key(0), episodes=8)
    assert len(found.episodes) == 8
    start = jax.tree.map(lambda x: np.asarray(x[0]), environment.reset(jax.random.key(9))[1].frame)
    for episode in found.episodes:
        assert 1 <= episode.length <= 6
        assert len(episode.actions) == episode.length
        for leaf, first in zip(jax.tree.leaves(episode.frames), jax.tree.leaves(start), strict=True):
            assert len(leaf) == episode.length + 1
            np.testing.assert_array_equal(leaf[0], first)
        assert episode.success == (episode.env_return > 0)
        assert episode.success or episode.length == 6


def test_uniform_random_actions_are_uniform():
    spec = make_probe("target", 4000).spec
    assert isinstance(spec.action_space, Box)
    agent = UniformRandom(spec)
    timestep = make_probe("target", 4000).reset(jax.random.key(0))[1]
    _, action, _ = agent.act((), (), timestep, jax.random.key(1))
    assert action.shape == (4000, 1)
    assert stats.kstest(np.asarray(action)[:, 0], stats.uniform(-2, 4).cdf).pvalue > 1e-4
    discrete = make_probe("action", 4000)
    _, action, _ = UniformRandom(discrete.spec).act(
        (), (), discrete.reset(jax.random.key(0))[1], jax.random.key(2)
    )
    assert stats.binomtest(int(action.sum()), 4000).pvalue > 1e-4
