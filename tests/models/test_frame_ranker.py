"""The frame ranker: symmetries that must hold for any parameters, and its input adaptation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models.frame_ranker import FrameRanker, FrameRankerConfig, block_mean, to_grey

CONFIG = FrameRankerConfig(convolutions=((8, 4, 4),), width=16, blocks=1, heads=2, hidden=32)


def random_frames(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


@pytest.fixture(scope="module")
def ranker():
    network = FrameRanker(CONFIG)
    frames, where = random_frames(0, 1, 2, 8, 12, 3), jnp.ones((1, 2), bool)
    params = jax.jit(network.init)(jax.random.key(0), frames, where)
    # Larger weights than the initial ones, so that attention and embeddings matter visibly.
    params = jax.tree.map(lambda leaf: 2.0 * leaf, params)
    return params, jax.jit(network.apply)


def test_shuffling_frames_shuffles_scores(ranker):
    params, apply = ranker
    frames, where = random_frames(1, 3, 7, 8, 12, 3), jnp.ones((3, 7), bool)
    order = jnp.array([0, 4, 2, 6, 1, 5, 3])
    shuffled = apply(params, frames[:, order], where)
    np.testing.assert_allclose(shuffled, apply(params, frames, where)[:, order], rtol=1e-4, atol=1e-5)


def test_masked_slots_are_as_if_deleted(ranker):
    params, apply = ranker
    frames = random_frames(2, 2, 7, 8, 12, 3)
    where = jnp.arange(7)[None] < jnp.array([[4], [4]])
    masked = apply(params, frames, where)
    deleted = apply(params, frames[:, :4], jnp.ones((2, 4), bool))
    np.testing.assert_allclose(masked[:, :4], deleted, rtol=1e-4, atol=1e-5)
    changed = apply(params, frames.at[:, 4:].set(7), where)
    assert (changed[:, :4] == masked[:, :4]).all() and np.isfinite(masked).all()


def test_anchor_is_told_from_the_others_and_queries_from_one_another(ranker):
    params, apply = ranker
    frames, where = random_frames(3, 2, 5, 8, 12, 3), jnp.ones((2, 5), bool)
    scores = apply(params, frames, where)
    swapped = apply(params, frames[:, jnp.array([1, 0, 2, 3, 4])], where)
    assert np.abs(swapped[:, 2:] - scores[:, 2:]).max() > 1e-3
    other = apply(params, frames.at[1].set(0), where)
    np.testing.assert_allclose(other[0], scores[0], rtol=1e-5)


def test_equal_frames_get_equal_scores(ranker):
    params, apply = ranker
    frames = jnp.broadcast_to(random_frames(4, 1, 1, 8, 12, 3), (1, 6, 8, 12, 3))
    scores = np.asarray(apply(params, frames, jnp.ones((1, 6), bool)))[0, 1:]
    assert (scores == scores[0]).all()


def test_grey_and_equal_rgb_are_the_same(ranker):
    params, apply = ranker
    grey, where = random_frames(5, 2, 4, 8, 12, 1), jnp.ones((2, 4), bool)
    assert (apply(params, grey, where) == apply(params, jnp.repeat(grey, 3, -1), where)).all()
    np.testing.assert_array_equal(to_grey(jnp.repeat(grey, 3, -1)), grey)
    assert to_grey(jnp.array([[10, 20, 31]], jnp.uint8)).tolist() == [[20]]


def test_frames_of_a_multiple_size_are_reduced_by_block_means(ranker):
    params, _ = ranker
    small, where = random_frames(6, 2, 3, 8, 12, 1), jnp.ones((2, 3), bool)
    large = jnp.repeat(jnp.repeat(small, 4, axis=2), 4, axis=3)
    apply = jax.jit(FrameRanker(dataclasses.replace(CONFIG, frame_shape=(8, 12))).apply)
    np.testing.assert_array_equal(apply(params, large, where), apply(params, small, where))
    with pytest.raises(ModelError, match="10x12 pixels found, 8x12"):
        apply(params, random_frames(0, 2, 3, 10, 12, 1), where)
    blocks = jnp.array([[1, 2, 9, 9], [3, 5, 9, 8]], jnp.uint8)[..., None]
    assert block_mean(blocks, (1, 2))[..., 0].tolist() == [[2, 8]]  # 11 / 4 and 35 / 4, rounded down


def test_colour_rankers_read_colour():
    network = FrameRanker(dataclasses.replace(CONFIG, channels=3))
    frames, where = random_frames(7, 1, 4, 8, 12, 3), jnp.ones((1, 4), bool)
    params, apply = jax.jit(network.init)(jax.random.key(0), frames, where), jax.jit(network.apply)
    assert not np.allclose(apply(params, frames, where), apply(params, frames[..., ::-1], where))
    grey = frames[..., :1]
    np.testing.assert_array_equal(apply(params, grey, where), apply(params, jnp.repeat(grey, 3, -1), where))


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        (jnp.zeros((2, 3, 8, 12, 2), jnp.uint8), jnp.ones((2, 3), bool)),
        (jnp.zeros((2, 3, 8, 12, 3), jnp.float32), jnp.ones((2, 3), bool)),
        (jnp.zeros((3, 8, 12, 3), jnp.uint8), jnp.ones((2, 3), bool)),
        (jnp.zeros((2, 3, 8, 12, 3), jnp.uint8), jnp.ones((2, 4), bool)),
        (jnp.zeros((2, 3, 8, 12, 3), jnp.uint8), jnp.ones((2, 3))),
    ],
)
def test_unsuitable_input_is_refused(ranker, frames, where):
    with pytest.raises(ModelError, match=r"found, .*expected"):
        jax.eval_shape(FrameRanker(CONFIG).apply, ranker[0], frames, where)


def test_unsuitable_structure_is_refused():
    with pytest.raises(ConfigError, match="heads must divide width"):
        FrameRankerConfig(width=30, heads=4)
    with pytest.raises(ConfigError, match="2 channels"):
        FrameRankerConfig(channels=2)
