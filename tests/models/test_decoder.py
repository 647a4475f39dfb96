import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.errors import ModelError
from jaxreward.models.decoder import Decoder, DecoderConfig, decoder_tensors, empty_cache, rotary_axes
from jaxreward.models.layers import attend, rotate

CONFIG = DecoderConfig(
    vocabulary=64,
    width=32,
    mlp_width=48,
    layers=3,
    heads=4,
    kv_heads=2,
    head_width=8,
    rope_sections=(2, 1, 1),
    query_norm=True,
)
TOKENS = jax.random.randint(jax.random.key(1), (2, 7), 0, CONFIG.vocabulary)
WHERE = jnp.asarray([[True] * 7, [False, False, True, True, True, True, True]])
POSITIONS = jnp.broadcast_to(jnp.maximum(jnp.cumsum(WHERE, 1) - 1, 0), (3, 2, 7))


def run(module, tokens, positions, where, cache=None, empty=True, extra=None):
    hidden, cache = module(module.embed(tokens), positions, where, cache, empty=empty, extra=extra)
    return module.logits(hidden), cache


def apply(config, variables, *arguments, **options):
    return Decoder(config).apply(variables, *arguments, method=run, **options)


@pytest.fixture(scope="module")
def variables():
    initial = Decoder(CONFIG).init(jax.random.key(0), TOKENS, POSITIONS, WHERE, method=run)
    return jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, initial)


def test_the_cache_changes_no_logit(variables):
    full, _ = apply(CONFIG, variables, TOKENS, POSITIONS, WHERE)
    head, cache = apply(
        CONFIG, variables, TOKENS[:, :4], POSITIONS[..., :4], WHERE[:, :4], empty_cache(CONFIG, 2, 9)
    )
    parts = [head]
    for t in range(4, 7):
        now = slice(t, t + 1)
        logits, cache = apply(
            CONFIG, variables, TOKENS[:, now], POSITIONS[..., now], WHERE[:, now], cache, empty=False
        )
        parts.append(logits)
    assert int(cache.length) == 7
    np.testing.assert_allclose(np.concatenate(parts, 1)[WHERE], np.asarray(full)[WHERE], atol=1e-5)


def test_padding_and_the_future_are_not_seen(variables):
    full, _ = apply(CONFIG, variables, TOKENS, POSITIONS, WHERE)
    other = TOKENS.at[1, :2].add(1).at[:, 6].add(1) % CONFIG.vocabulary
    changed, _ = apply(CONFIG, variables, other, POSITIONS, WHERE)
    np.testing.assert_array_equal(np.asarray(full)[WHERE][:6], np.asarray(changed)[WHERE][:6])
    np.testing.assert_array_equal(np.asarray(full)[1, 2:6], np.asarray(changed)[1, 2:6])
    assert np.abs(np.asarray(full - changed)[:, 6]).max() > 1e-3
    assert np.isfinite(full).all()


def test_extra_features_enter_after_the_layer_that_they_belong_to(variables):
    """With extra on the last layer only, the result is that of adding to the input of the final norm."""
    extra = jnp.zeros((3, 2, 7, 32)).at[2].set(jax.random.normal(jax.random.key(2), (2, 7, 32)))

    def before_norm(module, tokens, positions, where):
        hidden, _ = module(module.embed(tokens), positions, where)
        return hidden

    unit = jax.tree.map(lambda x: x, variables)
    unit["params"]["final_norm"]["scale"] = jnp.ones(32)
    normed, _ = apply(CONFIG, unit, TOKENS, POSITIONS, WHERE, extra=extra)
    plain = Decoder(CONFIG).apply(unit, TOKENS, POSITIONS, WHERE, method=before_norm)
    early, _ = apply(CONFIG, unit, TOKENS, POSITIONS, WHERE, extra=extra[2:])
    assert np.abs(np.asarray(normed - early)).max() > 1e-3
    none, _ = apply(CONFIG, unit, TOKENS, POSITIONS, WHERE, extra=jnp.zeros_like(extra))
    expected = plain @ unit["params"]["output"]["kernel"]
    np.testing.assert_allclose(none, expected, atol=1e-5)


def test_remat_and_the_compute_dtype_change_no_gradient_by_much(variables):
    def loss(variables, config):
        return jnp.mean(jnp.square(apply(config, variables, TOKENS, POSITIONS, WHERE)[0]))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain = gradient(variables, CONFIG)
    remat = gradient(variables, dataclasses.replace(CONFIG, remat=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, remat)
    half = gradient(variables, dataclasses.replace(CONFIG, dtype="bfloat16"))
    whole = jnp.concatenate([x.ravel() for x in jax.tree.leaves(plain)])
    rough = jnp.concatenate([x.ravel() for x in jax.tree.leaves(half)])
    assert jnp.vdot(whole, rough) / jnp.linalg.norm(whole) / jnp.linalg.norm(rough) > 0.99


def test_every_parameter_has_its_place_in_a_checkpoint(variables):
    paths, _ = jax.tree_util.tree_flatten_with_path(variables["params"])
    tensors = decoder_tensors(CONFIG, model="model.", head="lm_head.weight", into="")
    assert {"/".join(key.key for key in path) for path, _ in paths} == set(tensors)
    for path, leaf in paths:
        assert len(tensors["/".join(key.key for key in path)].axes) == leaf.ndim


def test_rotary_axes_by_hand():
    qwen25 = dataclasses.replace(CONFIG, head_width=16, rope_sections=(2, 3, 3))
    assert rotary_axes(qwen25).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    qwen3 = dataclasses.replace(CONFIG, head_width=16, rope_sections=(4, 2, 2), rope_interleaved=True)
    assert rotary_axes(qwen3).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def test_a_rotation_by_a_right_angle():
    x = jnp.asarray([[[1.0, 2.0, 3.0, 4.0]]])
    turned = rotate(x, jnp.asarray([[np.pi / 2, 0.0]]))
    np.testing.assert_allclose(turned, [[[-3.0, 2.0, 1.0, 4.0]]], atol=1e-6)


def test_attention_against_float64():
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(2, 3, 4, 8)),
        rng.normal(size=(2, 5, 2, 8)),
        rng.normal(size=(2, 5, 2, 8)),
    )
    where = rng.random((2, 1, 3, 5)) < 0.7
    where[..., 0] = True
    logits = np.einsum("bthd,bshd->bhts", query, key.repeat(2, 2)) / np.sqrt(8)
    weights = np.exp(logits) * where
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhts,bshd->bthd", weights, value.repeat(2, 2)).reshape(2, 3, 32)
    found = attend(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)), jnp.asarray(where))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    blind = attend(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)), jnp.zeros((2, 1, 3, 5), bool))
    assert np.isfinite(blind).all()


@pytest.mark.parametrize("fields", [{"kv_heads": 3}, {"head_width": 7}, {"rope_sections": (1, 1, 1)}])
def test_impossible_shapes_are_refused(fields):
    with pytest.raises(ModelError, match="found"):
        dataclasses.replace(CONFIG, **fields)
