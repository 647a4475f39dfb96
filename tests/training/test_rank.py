"""Stage 1: learning on videos whose progress is known, exact resuming, and what is measured."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from PIL import Image

from jaxreward.data.clips import ClipConfig
from jaxreward.errors import ConfigError, DataError, ModelError
from jaxreward.models.frame_ranker import FrameRankerConfig
from jaxreward.scorers.base import Scores
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.training.rank import (
    OBJECTIVES,
    RankConfig,
    Videos,
    heldout_rho,
    init_rank_state,
    make_rank_step,
    plot_transfer_matrix,
    train_ranker,
    transfer_matrix,
)

MODEL = FrameRankerConfig(convolutions=((8, 4, 4),), width=16, blocks=1, heads=2, hidden=32)
CONFIG = RankConfig(
    steps=80,
    batch_size=16,
    learning_rate=3e-3,
    evaluate_every=40,
    evaluation_clips=64,
    clips=ClipConfig(length=8),
)
KEY = jax.random.key(0)


def moving_dots(seed, backwards=False, count=16, steps=20, size=16):
    """Videos of a dot that moves from left to right in a random row, with one noisy pixel a frame.

    Brightness says nothing about time, and every video has its own row and length.
    """
    generator = np.random.default_rng(seed)
    frames = np.full((count, steps, size, size, 1), 255, np.uint8)
    lengths = generator.integers(8, steps + 1, count).astype(np.int32)
    for video, length in zip(frames, lengths, strict=True):
        row = generator.integers(0, size - 1)
        for time in range(length):
            column = round(time * (size - 3) / (length - 1))
            video[time, row : row + 2, column : column + 3] = 0
            video[time, generator.integers(size), generator.integers(size)] = generator.integers(256)
        if backwards:
            video[:length] = video[:length][::-1]
    return Videos(frames, lengths, np.ones(count, np.float32))


@pytest.fixture(scope="module")
def trained():
    """One GRPO run with its states and records at steps 40 and 80."""
    saved = []
    heldout = {"forwards": moving_dots(1), "backwards": moving_dots(1, backwards=True)}
    result = train_ranker(CONFIG, MODEL, moving_dots(0), heldout, KEY, lambda *row: saved.append(row))
    return result, saved, heldout


def test_grpo_learns_to_order_unseen_videos(trained):
    result, saved, _ = trained
    assert result.heldout_rho["forwards"] > 0.9
    assert result.heldout_rho["backwards"] < -0.7
    assert [record for _, record in saved] == result.history
    assert [record["step"] for record in result.history] == [40, 80]
    assert result.history[0]["reward"] < result.history[1]["reward"] > 0.8
    assert result.model.frame_shape == (16, 16)


def test_resuming_equals_an_uninterrupted_run_bit_for_bit(trained):
    whole, saved, heldout = trained
    resumed = train_ranker(CONFIG, MODEL, moving_dots(0), heldout, KEY, state=saved[0][0])
    unkeyed = lambda state: state.replace(key=jax.random.key_data(state.key))  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, unkeyed(resumed.state), unkeyed(whole.state))
    assert resumed.history == whole.history[1:] and int(resumed.state.step) == 80
    done = train_ranker(CONFIG, MODEL, moving_dots(0), heldout, KEY, state=whole.state)
    assert done.history == [] and done.heldout_rho == {}


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "grpo"])
def test_supervised_objectives_learn_to_order_unseen_videos(objective):
    config = dataclasses.replace(CONFIG, objective=objective, epochs=1, decay="cosine", evaluate_every=80)
    result = train_ranker(config, MODEL, moving_dots(0), {"new": moving_dots(1)}, KEY)
    assert result.heldout_rho["new"] > 0.8


def test_untrained_rankers_know_nothing_on_average():
    """Over random networks the mean correlation is about zero, for the dots are symmetric in time."""
    scorer, videos = CompactRanker(dataclasses.replace(MODEL, frame_shape=(16, 16))), moving_dots(1)
    rhos = [
        heldout_rho(scorer, scorer.init(key, (16, 16, 1)), videos, KEY, clips=64, clip_config=CONFIG.clips)
        for key in jax.random.split(KEY, 16)
    ]
    assert abs(np.mean(rhos)) < 0.3 and max(rhos) < 0.9


def test_the_initial_policy_as_reference():
    """Against the policy at the start the KL is positive, and the adaptive coefficient moves."""
    config = dataclasses.replace(CONFIG, steps=6, epochs=1, evaluate_every=6, kl_reference="initial")
    result = train_ranker(config, MODEL, moving_dots(0), {}, KEY)
    assert result.history[-1]["kl"] > 0 and result.state.kl_coefficient != np.float32(0.05)
    initial = init_rank_state(config, result.model, jax.random.split(KEY)[0])
    jax.tree.map(np.testing.assert_array_equal, result.state.reference, initial.params)


def test_clips_without_an_order_teach_nothing_and_are_counted():
    """Videos of two frames have one ranked frame: no order, reward 0, no gradient, no division by zero."""
    videos = moving_dots(0)._replace(lengths=np.full(16, 2, np.int32))
    model = dataclasses.replace(MODEL, frame_shape=(16, 16))
    state = init_rank_state(CONFIG, model, KEY)
    after, metrics = make_rank_step(CONFIG, model, None)(state, jax.tree.map(jnp.asarray, videos))
    assert metrics["zero_variance_groups"] == 1.0 and metrics["reward"] == 0.0
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


class BrightnessScorer:
    """Scores a frame by its mean brightness; not jittable, as a remote model would be."""

    jittable = False
    permutation_equivariant = True

    def __init__(self, valid=True):
        self.valid = valid

    def prepare(self, params, task):
        return task

    def score(self, params, context, frames, where, key):
        assert context == "get brighter" and not isinstance(frames, jax.core.Tracer)
        values = params * jnp.mean(frames.astype(jnp.float32), (2, 3, 4))
        return Scores(values, jnp.full(len(frames), self.valid), jnp.zeros(len(frames), jnp.int32))


def test_heldout_rho_is_scipys_spearman_with_the_known_order():
    values = np.array([10, 40, 20, 90, 60, 70], np.uint8)
    frames = np.broadcast_to(values[None, :, None, None, None], (1, 6, 4, 4, 1))
    videos = Videos(frames, np.array([6], np.int32), np.ones(1, np.float32))
    config = ClipConfig(length=6, stride="whole")
    rho = lambda scorer, sign: heldout_rho(  # noqa: E731
        scorer, sign, videos, KEY, clips=3, clip_config=config, task="get brighter"
    )
    expected = scipy.stats.spearmanr(values[1:], range(5)).statistic
    np.testing.assert_allclose(rho(BrightnessScorer(), 1.0), expected, rtol=1e-6)
    np.testing.assert_allclose(rho(BrightnessScorer(), -1.0), -expected, rtol=1e-6)
    assert rho(BrightnessScorer(), 0.0) == 0.0
    assert rho(BrightnessScorer(valid=False), 1.0) == -1.0


def test_transfer_matrix_and_its_picture(tmp_path):
    class Untasked(BrightnessScorer):
        def score(self, params, context, frames, where, key):
            return super().score(params, "get brighter", frames, where, key)

    ramp = np.broadcast_to(np.arange(8, dtype=np.uint8)[None, :, None, None, None], (1, 8, 4, 4, 1))
    sets = {
        name: Videos(frames, np.array([8], np.int32), np.ones(1, np.float32))
        for name, frames in {"brighter": ramp, "darker": ramp[:, ::-1]}.items()
    }
    matrix = transfer_matrix({"up": (Untasked(), 1.0), "down": (Untasked(), -1.0)}, sets, KEY, clips=4)
    np.testing.assert_allclose(matrix, [[1, -1], [-1, 1]], rtol=1e-6)
    path = tmp_path / "transfer.png"
    plot_transfer_matrix(matrix, ["up", "down"], list(sets), path)
    picture = np.asarray(Image.open(path).convert("RGB"))
    assert min(picture.shape[:2]) > 200 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 50


def test_compact_frames_are_rendered_before_they_are_scored():
    """Videos may hold anything that `render` turns into pixels; here 4x4 cells drawn four pixels wide."""

    def render(cells):
        return jnp.repeat(jnp.repeat(cells, 4, axis=-3), 4, axis=-2)

    cells = np.zeros((3, 6, 4, 4, 1), np.uint8)
    for time in range(6):
        cells[:, time, 1, min(time, 3)] = 250 - time
    videos = Videos(cells, np.full(3, 6, np.int32), np.ones(3, np.float32))
    drawn = videos._replace(frames=np.asarray(render(cells)))
    model = dataclasses.replace(MODEL, frame_shape=(16, 16))
    scorer = CompactRanker(model)
    params = scorer.init(KEY, (16, 16, 1))
    rho = lambda set_, **options: heldout_rho(  # noqa: E731
        scorer, params, set_, KEY, clips=64, clip_config=CONFIG.clips, **options
    )
    assert rho(videos, render=render) == rho(drawn)
    # Training draws them too: without it, the network would refuse pictures of 4x4 pixels.
    state = init_rank_state(CONFIG, model, KEY)
    jax.eval_shape(make_rank_step(CONFIG, model, render), state, jax.tree.map(jnp.asarray, videos))
    with pytest.raises(ModelError, match="4x4 pixels"):
        jax.eval_shape(make_rank_step(CONFIG, model, None), state, jax.tree.map(jnp.asarray, videos))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": np.zeros((2, 5, 4, 4), np.uint8)}, r"\[V, T, H, W, C\]"),
        ({"lengths": np.array([5, 6], np.int32)}, "within 1..5"),
        ({"lengths": np.array([0, 5], np.int32)}, "lengths from 0"),
        ({"lengths": np.array([2, 1], np.int32)}, "no video has more than 2"),
        ({"weights": np.ones(3, np.float32)}, "weights"),
    ],
)
def test_unsuitable_videos_are_named(changes, message):
    videos = Videos(np.zeros((2, 5, 4, 4, 1), np.uint8), np.full(2, 5, np.int32), np.ones(2, np.float32))
    with pytest.raises(DataError, match=message):
        train_ranker(CONFIG, MODEL, videos._replace(**changes), {}, KEY)
    with pytest.raises(DataError, match="held-out set 'new'"):
        train_ranker(CONFIG, MODEL, videos, {"new": videos._replace(**changes)}, KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"objective": "grop"}, "'grop'"), ({"group_size": 1}, "group_size"), ({"steps": 0}, "rank.steps: 0")],
)
def test_unsuitable_settings_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        RankConfig(**changes)
