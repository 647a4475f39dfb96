"""The compact ranker behind the Scorer protocol."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.errors import ModelError
from jaxreward.models.frame_ranker import FrameRankerConfig
from jaxreward.scorers.base import Scorer
from jaxreward.scorers.compact_ranker import CompactRanker

SCORER = CompactRanker(FrameRankerConfig(convolutions=((8, 4, 4),), width=16, blocks=1, heads=2, hidden=32))
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def query():
    frames = np.random.default_rng(0).integers(0, 256, (3, 5, 8, 8, 3), np.uint8)
    where = np.arange(5)[None] < np.array([[5], [3], [1]])
    return jnp.asarray(frames), jnp.asarray(where)


def test_protocol_and_shapes(query):
    assert isinstance(SCORER, Scorer) and SCORER.jittable and SCORER.permutation_equivariant
    params = SCORER.init(KEY, (8, 8, 3))
    scores = SCORER.score(params, SCORER.prepare(params, "reach the door"), *query, KEY)
    assert scores.values.shape == (3, 5) and scores.values.dtype == jnp.float32
    assert scores.valid.tolist() == [True] * 3 and scores.tokens.tolist() == [0] * 3
    assert (np.asarray(scores.values)[~np.asarray(query[1])] == 0).all()
    assert (np.asarray(scores.values)[np.asarray(query[1])] != 0).all()


def test_jit_and_vmap_over_parameters_agree_with_plain_calls(query):
    many = jax.vmap(lambda key: SCORER.init(key, (8, 8, 3)))(jax.random.split(KEY, 2))
    score = lambda params: SCORER.score(params, (), *query, KEY).values  # noqa: E731
    together = jax.jit(jax.vmap(score))(many)
    assert not np.allclose(together[0], together[1])
    second = jax.tree.map(lambda leaf: leaf[1], many)
    np.testing.assert_allclose(together[1], score(second), rtol=1e-4, atol=1e-5)


def test_diverged_parameters_are_reported_and_not_hidden(query):
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, SCORER.init(KEY, (8, 8, 3)))
    scores = SCORER.score(params, (), *query, KEY)
    assert scores.valid.tolist() == [False] * 3


def test_parameters_of_another_network_are_refused(query):
    params = SCORER.init(KEY, (8, 8, 3))
    wider = CompactRanker(dataclasses.replace(SCORER.config, width=32))
    with pytest.raises(ModelError, match="do not fit"):
        jax.eval_shape(wider.score, params, (), *query, KEY)
    deeper = CompactRanker(dataclasses.replace(SCORER.config, blocks=2))
    with pytest.raises(ModelError, match="block_1"):
        jax.eval_shape(deeper.score, params, (), *query, KEY)
    with pytest.raises(ModelError, match="do not fit"):
        jax.eval_shape(SCORER.score, params, (), query[0][:, :, :4], query[1], KEY)
