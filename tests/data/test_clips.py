"""Clips: each frame carries its own video and time, so that whatever comes out can be traced."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.data.clips import STRIDES, ClipConfig, sample_clips
from jaxreward.errors import ConfigError

LONGEST = 40


def traceable(lengths):
    """uint8 [V, T, 1, 1, 2]: pixel 0 is the video + 1, pixel 1 the time + 1; zero is padding."""
    frames = np.zeros((len(lengths), LONGEST, 1, 1, 2), np.uint8)
    for video, length in enumerate(lengths):
        frames[video, :length, 0, 0, 0] = video + 1
        frames[video, :length, 0, 0, 1] = np.arange(length) + 1
    return jnp.asarray(frames), jnp.asarray(lengths, jnp.int32)


draw = jax.jit(sample_clips, static_argnames=("batch", "config"))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=3, max_size=3),
    stride=st.sampled_from(STRIDES),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_clip_is_valid(lengths, stride, seed):
    length = 7
    frames, lengths = traceable(lengths)
    config = ClipConfig(length, stride)
    clips = jax.tree.map(np.asarray, draw(jax.random.key(seed), frames, lengths, jnp.ones(3), 16, config))
    assert clips.frames.shape == (16, length, 1, 1, 2)
    assert (clips.frames.dtype, clips.position.dtype) == (np.uint8, np.int32)
    assert (clips.where.dtype, clips.video.dtype) == (np.bool_, np.int32)
    for clip in range(16):
        total = int(lengths[clips.video[clip]])
        count = min(length, total)
        assert clips.where[clip].tolist() == [True] * count + [False] * (length - count)
        position = clips.position[clip, :count]
        assert len(set(position.tolist())) == count
        assert position[0] == position.min() >= 0
        assert position.max() < total
        gaps = np.diff(np.sort(position))
        # Evenly spaced: whole-numbered gaps that differ by at most one.
        assert count < 3 or gaps.max() - gaps.min() <= 1
        if stride == "consecutive":
            assert (gaps == 1).all()
        if stride == "whole":
            assert count == 1 or (position.min(), position.max()) == (0, total - 1)
        pixels = clips.frames[clip, :, 0, 0]
        np.testing.assert_array_equal(pixels[:count, 0], clips.video[clip] + 1)
        np.testing.assert_array_equal(pixels[:count, 1], position + 1)
        assert not pixels[count:].any()
        assert (clips.position[clip, count:] == -1).all()


@functools.cache
def many(stride, length=4, total=12, batch=24_000):
    frames, lengths = traceable([total])
    clips = draw(jax.random.key(0), frames, lengths, jnp.ones(1), batch, ClipConfig(length, stride))
    return np.asarray(clips.position)


def test_all_orders_are_equally_likely():
    orders = np.argsort(many("mixed")[:, 1:], axis=1)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_consecutive_clips_start_anywhere():
    starts = np.bincount(many("consecutive")[:, 0])
    assert len(starts) == 9
    assert scipy.stats.chisquare(starts).pvalue > 1e-3


def test_between_reaches_from_consecutive_to_whole():
    position = many("between")
    spans = np.bincount(position.max(1) - position.min(1), minlength=12)[3:]
    assert len(spans) == 9  # 3, three neighbours further, to 11, the whole video
    assert scipy.stats.chisquare(spans).pvalue > 1e-3


def test_mixed_is_a_third_of_each():
    position = many("mixed")
    spans = np.bincount(position.max(1) - position.min(1), minlength=12)[3:]
    expected = np.full(9, 1 / 27)
    expected[[0, -1]] += 1 / 3
    assert scipy.stats.chisquare(spans, expected * len(position)).pvalue > 1e-3


def test_videos_are_drawn_by_weight():
    frames, lengths = traceable([5, 5, 5])
    weights = jnp.array([1.0, 0.0, 3.0])
    clips = draw(jax.random.key(0), frames, lengths, weights, 8000, ClipConfig(2, "consecutive"))
    assert not np.asarray(clips.video == 1).any()
    counts = np.bincount(np.asarray(clips.video), minlength=3)
    assert scipy.stats.chisquare(counts[[0, 2]], [2000, 6000]).pvalue > 1e-3


def test_traced_once_and_vmapped_over_keys():
    frames, lengths = traceable([20, 30])
    config = ClipConfig(5)
    traced = chex.assert_max_traces(
        lambda key, weights: sample_clips(key, frames, lengths, weights, 8, config), n=1
    )
    compiled = jax.jit(traced)
    keys = jax.random.split(jax.random.key(1), 3)
    weights = jnp.ones(2)
    one_by_one = [compiled(key, weights) for key in keys]
    at_once = jax.jit(jax.vmap(lambda key: sample_clips(key, frames, lengths, weights, 8, config)))(keys)
    chex.assert_trees_all_equal(jax.tree.map(lambda *x: jnp.stack(x), *one_by_one), at_once)
    assert not np.array_equal(one_by_one[0].position, one_by_one[1].position)


def test_config_out_of_range():
    with pytest.raises(ConfigError, match="length 1"):
        ClipConfig(length=1)
    with pytest.raises(ConfigError, match="stride 'all'"):
        ClipConfig(stride="all")
