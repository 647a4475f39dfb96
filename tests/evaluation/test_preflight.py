"""The reward's check before acting: hand-made clips and indices, and a scorer that reads brightness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.evaluation.preflight import MARGIN, PreflightResult, clip_kinds, clip_rollout, episode_rewards
from jaxreward.rewards.rank_then_act import RankThenAct, RankThenActConfig
from jaxreward.rewards.success import Success, SuccessConfig
from jaxreward.scorers.base import Scores


class Brightness:
    """A perfect scorer of videos that grow brighter: a frame's value is its mean grey."""

    jittable = True
    permutation_equivariant = True

    def prepare(self, params, task):
        return ()

    def score(self, params, context, frames, where, key):
        values = jnp.where(where, frames.astype(jnp.float32).mean((2, 3, 4)), 0.0)
        return Scores(values, jnp.ones(len(frames), bool), jnp.zeros(len(frames), jnp.int32))


class BrightnessOnTheHost(Brightness):
    """The same, outside of jit."""

    jittable = False

    def score(self, params, context, frames, where, key):
        assert not isinstance(frames, jax.core.Tracer)
        return super().score(params, context, frames, where, key)


def clips(*shades: list[int]) -> np.ndarray:
    """Grey pictures of 2 by 2 pixels, a clip for each list of shades."""
    values = np.array(shades, np.uint8)[:, :, None, None, None]
    return np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], 2, 2, 3)))


def shades(frames: np.ndarray) -> list[list[int]]:
    """What `clips` made frames of."""
    return frames[..., 0, 0, 0].tolist()


def test_clip_kinds_by_hand():
    # 6 frames, 5 of them steps; the second video has 3 frames and is padded. The time limit is 8 steps.
    videos = clips([10, 11, 12, 13, 14, 15], [20, 21, 22, 22, 22, 22])
    kinds = clip_kinds(videos, np.array([6, 3]), 8)
    found = {kind: shades(frames) for kind, (frames, _) in kinds.items()}
    assert found["expert"] == [
        [10, 11, 12, 13, 14, 15, 15, 15, 15],
        [20, 21, 22, 22, 22, 22, 22, 22, 22],
    ]
    assert found["reversed"] == [
        [15, 14, 13, 12, 11, 10, 10, 10, 10],
        [22, 21, 20, 20, 20, 20, 20, 20, 20],
    ]
    # 60 % of 5 steps are 3; 60 % of 2 are 1.2, that is 1.
    assert found["frozen"] == [
        [10, 11, 12, 13, 13, 13, 13, 13, 13],
        [20, 21, 21, 21, 21, 21, 21, 21, 21],
    ]
    # 3 steps over 8: 0, .375, .75, 1.125, 1.5 (to even: 2), 1.875, 2.25, 2.625, 3.
    assert found["slow"][0] == [10, 10, 11, 11, 12, 12, 12, 13, 13]
    # 1.2 steps over 8: 0, .15, .3, .45, .6, .75, .9, 1.05, 1.2.
    assert found["slow"][1] == [20, 20, 20, 20, 21, 21, 21, 21, 21]
    ends = {kind: lengths.tolist() for kind, (_, lengths) in kinds.items()}
    assert ends == {"expert": [6, 3], "reversed": [6, 3], "frozen": [9, 9], "slow": [9, 9]}


def test_a_video_longer_than_an_episode_is_shown_in_longer_steps():
    kinds = clip_kinds(clips([1, 2, 3, 4, 5, 6]), np.array([6]), 3)
    found = {kind: shades(frames)[0][:4] for kind, (frames, _) in kinds.items()}
    assert found["expert"] == [1, 3, 4, 6]
    assert found["reversed"] == [6, 4, 3, 1]
    assert found["slow"] == [1, 2, 3, 4]
    assert all(ends.tolist() == [4] for _, ends in kinds.values())


def test_clips_as_one_rollout():
    rollout = clip_rollout(clips([0, 1, 2, 3, 3], [5, 6, 7, 8, 9]), jnp.array([4, 5]))
    assert rollout.timestep.terminated.T.tolist() == [
        [False, False, True, False],
        [False, False, False, True],
    ]
    assert rollout.timestep.episode_step.T.tolist() == [[1, 2, 0, 1], [1, 2, 3, 0]]
    assert shades(rollout.first_timestep.frame[:, None]) == [[0], [5]]
    assert shades(jnp.swapaxes(rollout.timestep.final_frame, 0, 1)) == [[1, 2, 3, 3], [6, 7, 8, 9]]


@pytest.mark.parametrize("scorer", [Brightness(), BrightnessOnTheHost()])
def test_rewards_of_rising_falling_constant_and_short_clips(scorer):
    rising = [10, 20, 30, 40, 50, 60, 70]
    frames = clips(rising, rising[::-1], [80] * 7, [10, 20, 30, 40, 40, 40, 40], [10, 20, 40, 30, 30, 30, 30])
    lengths = np.array([7, 7, 7, 4, 4], np.int32)
    reward = RankThenAct(RankThenActConfig(mode="episode", frames=15), permutation_equivariant=True)
    paid = episode_rewards(reward, scorer, (), (), frames, lengths, jax.random.key(0), chunk=2)
    assert paid.shape == (6, 5)
    assert paid.dtype == np.float32
    expected = np.zeros((6, 5))
    # Once, on the clip's last step. The anchor is not scored: of the last clip 20, 40, 30 remain, rho 1/2.
    expected[5, 0], expected[5, 1], expected[5, 2], expected[2, 3], expected[2, 4] = 1, -1, 0, 1, 0.5
    np.testing.assert_allclose(paid, expected, atol=1e-6)


def test_windows_are_paid_within_a_clip():
    reward = RankThenAct(
        RankThenActConfig(mode="window", window=3, frequency=3), permutation_equivariant=True
    )
    frames = clips([1, 2, 3, 4, 3, 2, 1])
    paid = episode_rewards(reward, Brightness(), (), (), frames, [7], jax.random.key(0))
    # At t = 3 the window 2, 3, 4 scores 3, 4; at t = 6 the window 3, 2, 1 scores 2, 1.
    np.testing.assert_allclose(paid[:, 0], [0, 0, 1, 0, 0, -1], atol=1e-6)


def test_a_reward_without_a_scorer():
    paid = episode_rewards(
        Success(SuccessConfig()), None, None, None, clips([1, 2, 3]), [3], jax.random.key(0)
    )
    np.testing.assert_array_equal(paid, np.zeros((2, 1)))


def result(**means: float) -> PreflightResult:
    """A result in which all clips of a kind earn the same, two clips each."""
    return PreflightResult({kind: np.full(2, mean, np.float32) for kind, mean in means.items()})


def test_warnings():
    good = result(expert=0.9, reversed=-0.9, frozen=0.4, slow=0.5, random=0.1)
    assert good.margin == pytest.approx(0.8)
    assert good.warnings() == []
    weak = result(expert=0.5, reversed=-0.9, frozen=0.1, slow=0.1, random=0.21)
    assert len(weak.warnings()) == 1
    assert "0.29 more than random" in weak.warnings()[0]
    assert str(MARGIN) in weak.warnings()[0]
    hackable = result(expert=0.9, reversed=-0.9, frozen=0.4, slow=0.95, random=0.0)
    assert len(hackable.warnings()) == 1
    assert hackable.warnings()[0].startswith("slow clips")
    assert good.table()[0] == ("expert", pytest.approx(0.9), 0.0, 2)
