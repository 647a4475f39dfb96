"""A frame is encoded once, whatever the order and the overlap of the windows that show it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models.frame_cache import FrameCache
from jaxreward.models.vision_language import ImageFeatures

TOKENS, WIDTH = 3, 5
FRAMES = np.random.default_rng(0).integers(0, 256, (40, 2, 4, 3)).astype(np.uint8)


class Tower:
    """Features that tell each frame, token and layer apart; remembers in which batches it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, frames):
        self.calls.append(len(frames))
        return self.features(frames)

    @staticmethod
    def features(frames):
        sums = frames.reshape(len(frames), -1).astype(np.float32) @ np.arange(1, 25, dtype=np.float32)
        rows = sums[:, None, None] + 0.1 * np.arange(TOKENS)[:, None] + 0.01 * np.arange(WIDTH)
        rows = rows.reshape(-1, WIDTH).astype(np.float32)
        return ImageFeatures(jnp.asarray(rows), jnp.asarray(np.stack([rows + 1000, rows + 2000])))


def check(table, first, frames):
    """What the cache holds for frames is what the tower gives for each of them alone."""
    assert first.dtype == np.int32 and first.shape == (len(frames),)
    at = (first[:, None] + np.arange(TOKENS)).ravel()
    expected = Tower.features(frames)
    np.testing.assert_array_equal(np.asarray(table.rows)[at], expected.rows)
    np.testing.assert_array_equal(np.asarray(table.extra)[:, at], expected.extra)


def test_overlapping_shuffled_windows_encode_each_frame_once():
    tower = Tower()
    cache = FrameCache(tower, tokens_per_frame=TOKENS, capacity=40)
    rng = np.random.default_rng(1)
    for start in range(0, 26, 5):
        for _ in range(3):
            frames = FRAMES[start : start + 15][rng.permutation(15)]
            check(*cache.lookup(frames), frames)
    assert cache.encoded == 40
    assert tower.calls == [16, 8, 8, 8, 8, 8]
    assert cache.compilations == 2
    twice = FRAMES[[7, 7, 3, 7]]
    table, first = cache.lookup(twice)
    check(table, first, twice)
    assert len(set(first.tolist())) == 2 and cache.encoded == 40
    assert table.rows.shape == (40 * TOKENS, WIDTH) and table.extra.shape == (2, 40 * TOKENS, WIDTH)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=6), min_size=1, max_size=12))
def test_a_small_cache_drops_the_longest_unused(lookups):
    tower = Tower()
    cache = FrameCache(tower, tokens_per_frame=TOKENS, capacity=6, batches=(1, 4))
    recent, misses = [], 0
    for lookup in lookups:
        distinct = list(dict.fromkeys(lookup))
        misses += sum(frame not in recent for frame in distinct)
        # those that were there count as used before those that had to be encoded
        used = [f for f in distinct if f in recent] + [f for f in distinct if f not in recent]
        recent = ([f for f in recent if f not in used] + used)[-6:]
        check(*cache.lookup(FRAMES[lookup]), FRAMES[lookup])
        assert cache.encoded == misses
    assert set(tower.calls) <= {1, 4}


def test_clear_forgets_the_frames():
    tower = Tower()
    cache = FrameCache(tower, tokens_per_frame=TOKENS, capacity=4)
    cache.lookup(FRAMES[:3])
    cache.clear()
    check(*cache.lookup(FRAMES[1:5]), FRAMES[1:5])
    assert cache.encoded == 7 and tower.calls == [4, 4]


def test_the_table_is_written_in_place():
    cache = FrameCache(Tower(), tokens_per_frame=TOKENS, capacity=4)
    table, _ = cache.lookup(FRAMES[:2])
    cache.lookup(FRAMES[1:3])
    assert all(x.is_deleted() for x in jax.tree.leaves(table))


def test_what_cannot_be_used():
    cache = FrameCache(Tower(), tokens_per_frame=TOKENS, capacity=4)
    cache.lookup(FRAMES[:2])
    for frames, message in (
        (FRAMES[:5], "5 different frames found in one lookup, but the cache holds 4"),
        (FRAMES[:0], "expected uint8"),
        (FRAMES[:2].astype(np.float32), "expected uint8"),
        (FRAMES[0], "expected uint8"),
        (FRAMES[:2, :1], "one cache for each size"),
    ):
        with pytest.raises(ModelError, match=message):
            cache.lookup(frames)
    check(*cache.lookup(FRAMES[:4]), FRAMES[:4])
    with pytest.raises(ModelError, match="12 rows of features for 4 frames found; expected 16"):
        FrameCache(Tower(), tokens_per_frame=4, capacity=4).lookup(FRAMES[:3])
    for fields in ({"capacity": 0}, {"tokens_per_frame": 0}, {"batches": (4, 2)}, {"batches": ()}):
        with pytest.raises(ConfigError, match="found; expected"):
            FrameCache(Tower(), **{"capacity": 4, "tokens_per_frame": 3, **fields})
