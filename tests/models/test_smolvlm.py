"""SmolVLM against PyTorch: tests/models/golden/make_smolvlm.py makes the folder and the numbers."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.errors import ModelError
from jaxreward.models import smolvlm, weights
from jaxreward.models.decoder import empty_cache
from jaxreward.models.smolvlm import SmolVLM, SmolVLMConfig, Tiles, architecture, patch_positions
from jaxreward.models.vision_language import VisionLanguageModel

FOLDER = pathlib.Path(__file__).parent / "golden" / "smolvlm"
CONFIG = json.loads((FOLDER / "config.json").read_text())
STRUCTURE = SmolVLMConfig.from_dict(CONFIG)
TOLERANCE = 1e-5  # relative to the largest absolute value


def read(module, tokens, image_rows, where, features):
    embeddings, extra = module.embed(tokens, image_rows, features)
    hidden, _ = module(embeddings, positions_of(where), where, extra=extra)
    return hidden, module.logits(hidden)


def look_and_read(module, tiles, tokens, image_rows, where):
    features = module.encode_images(tiles)
    return features.rows, *read(module, tokens, image_rows, where, features)


def positions_of(where):
    return jnp.broadcast_to(jnp.maximum(jnp.cumsum(where, 1) - 1, 0), (3, *where.shape))


def rows_of(tokens):
    """Image tokens numbered over the whole batch, -1 for text."""
    image = np.asarray(tokens) == STRUCTURE.image_token
    return np.where(image, np.cumsum(image).reshape(image.shape) - 1, -1).astype(np.int32)


def error(found, golden, where=...):
    """Largest difference at real tokens, relative to the largest absolute value."""
    return np.abs(np.asarray(found) - golden)[where].max() / np.abs(golden[where]).max()


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(FOLDER / "golden.npz"))


@pytest.fixture(scope="module")
def params():
    return weights.load(FOLDER).params


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


# The first two arguments are static: what differs only in numbers is compiled once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def apply(structure, method, params, inputs):
    return SmolVLM(structure).apply(params, **inputs, method=method)


def encode(params, tiles, structure=STRUCTURE):
    """Compiles anew at each call, so that monkeypatched functions count."""
    return jax.jit(lambda p, x: SmolVLM(structure).apply(p, x, method="encode_images").rows)(params, tiles)


def outputs(params, golden, structure=STRUCTURE, **changes):
    inputs = {key: jnp.asarray(golden[key]) for key in ("tokens", "where")}
    inputs["tiles"] = Tiles(golden["pixels"], golden["pixel_where"])
    inputs["image_rows"] = rows_of(golden["tokens"])
    inputs |= changes
    return apply(structure, look_and_read, params, inputs)


@pytest.fixture(scope="module")
def found(params, golden):
    return outputs(params, golden)


def test_equals_pytorch(found, golden):
    features, hidden, logits = found
    assert error(features, golden["features"]) < TOLERANCE
    assert error(hidden, golden["hidden"], golden["where"]) < TOLERANCE
    assert error(logits, golden["logits"], golden["where"]) < TOLERANCE


def test_the_tower_equals_pytorch(params, golden):
    tower = smolvlm.VisionTower(STRUCTURE)
    tiles = Tiles(golden["pixels"], golden["pixel_where"])
    hidden = jax.jit(tower.apply)({"params": params["params"]["vision"]}, tiles)
    assert error(hidden.reshape(golden["tower"].shape), golden["tower"]) < TOLERANCE


def test_tiles_without_a_mask_and_empty_tiles(params, golden):
    """A tile that only fills a bucket changes no other tile, and nothing becomes NaN."""
    pixels = np.concatenate([golden["pixels"], np.zeros_like(golden["pixels"][:2])])
    rows = encode(params, Tiles(pixels))
    assert error(rows[:36], golden["features_without_mask"]) < TOLERANCE
    where = np.concatenate([golden["pixel_where"], np.zeros_like(golden["pixel_where"][:2])])
    rows = encode(params, Tiles(pixels, where))
    assert error(rows[:36], golden["features"]) < TOLERANCE
    assert np.isfinite(rows).all()


def test_text_without_images(params, golden):
    tokens = golden["text"]
    where = np.ones(tokens.shape, bool)
    inputs = {"tokens": tokens, "image_rows": np.full(tokens.shape, -1), "where": where, "features": None}
    _, logits = apply(STRUCTURE, read, params, inputs)
    assert error(logits, golden["text_logits"]) < TOLERANCE


def test_generates_what_pytorch_generates(params, golden):
    module = SmolVLM(STRUCTURE)
    tokens, where = jnp.asarray(golden["tokens"]), jnp.asarray(golden["where"])
    tiles = Tiles(golden["pixels"], golden["pixel_where"])

    @jax.jit
    def prefill(params, tokens, where):
        features = module.apply(params, tiles, method="encode_images")
        embeddings, _ = module.apply(params, tokens, rows_of(golden["tokens"]), features, method="embed")
        cache = empty_cache(module.decoder_config, 2, tokens.shape[1] + 8)
        hidden, cache = module.apply(params, embeddings, positions_of(where), where, cache)
        return jnp.argmax(module.apply(params, hidden[:, -1], method="logits"), -1), cache

    @jax.jit
    def step(params, token, position, cache):
        embeddings, _ = module.apply(params, token[:, None], jnp.full((2, 1), -1), None, method="embed")
        positions = jnp.broadcast_to(position[:, None], (3, 2, 1))
        now = jnp.ones((2, 1), bool)
        hidden, cache = module.apply(params, embeddings, positions, now, cache, empty=False)
        return jnp.argmax(module.apply(params, hidden[:, -1], method="logits"), -1), cache

    token, cache = prefill(params, tokens, where)
    found = [token]
    for i in range(7):
        token, cache = step(params, token, jnp.sum(where, 1) + i, cache)
        found.append(token)
    np.testing.assert_array_equal(np.stack(found, 1), golden["greedy"])


def test_an_image_changes_the_logits_of_its_own_prompt_alone(params, golden, found):
    pixels = golden["pixels"].copy()
    pixels[1] = np.flip(pixels[1], 2) * golden["pixel_where"][1, ..., None]
    _, _, logits = outputs(params, golden, tiles=Tiles(pixels, golden["pixel_where"]))
    before = np.asarray(found[2])
    assert error(logits[0], before[0], np.s_[-3:]) > 100 * TOLERANCE
    np.testing.assert_array_equal(logits[1], before[1])


def transposed_shuffle(patches, factor):
    tiles, height, width, channels = patches.shape
    split = patches.reshape(tiles, height // factor, factor, width // factor, factor, channels)
    return split.transpose(0, 1, 3, 4, 2, 5).reshape(tiles, -1, factor * factor * channels)


def positions_from_the_top_left(where, side):
    places = jnp.arange(where.shape[1])[:, None] * side + jnp.arange(where.shape[2])
    return jnp.where(where, places, 0)


def swapped_positions(where, side):
    return patch_positions(where.swapaxes(1, 2), side).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("name", "mutated"),
    [
        ("pixel_shuffle", transposed_shuffle),
        ("patch_positions", positions_from_the_top_left),
        ("patch_positions", swapped_positions),
        ("image_to_patches", lambda images, size: channels_last_patches(images, size)),
    ],
)
def test_the_order_of_pixels_and_patches_matters(params, golden, monkeypatch, name, mutated):
    monkeypatch.setattr(smolvlm, name, mutated)
    features = encode(params, Tiles(golden["pixels"], golden["pixel_where"]))
    assert error(features, golden["features"]) > 100 * TOLERANCE


def channels_last_patches(images, size):
    batch, height, width, channels = images.shape
    split = images.reshape(batch, height // size, size, width // size, size, channels)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)


@pytest.mark.parametrize("change", [{"activation": "quick_gelu"}, {"norm_epsilon": 1e-2}])
def test_another_tower_gives_other_features(params, golden, change):
    mutated = dataclasses.replace(STRUCTURE, vision=dataclasses.replace(STRUCTURE.vision, **change))
    features = encode(params, Tiles(golden["pixels"], golden["pixel_where"]), mutated)
    assert error(features, golden["features"]) > 100 * TOLERANCE


def test_rows_and_masks_matter(params, golden):
    features = encode(params, Tiles(golden["pixels"]))
    assert error(features, golden["features"]) > 100 * TOLERANCE
    shifted = rows_of(golden["tokens"])
    shifted = np.where(shifted >= 0, (shifted + 1) % 36, -1)
    everything = np.ones_like(golden["where"])
    for change in ({"image_rows": shifted}, {"where": everything}):
        _, _, logits = outputs(params, golden, **change)
        assert error(logits, golden["logits"], golden["where"]) > 100 * TOLERANCE


@pytest.mark.parametrize("side", [14, 16, 24, 26, 27, 32])
def test_positions_equal_those_of_transformers_on_released_sizes(golden, side):
    expected = golden[f"positions_{side}"]
    where = np.zeros((side + 1, side, side), bool)
    for n in range(1, side + 1):
        where[n, :, :n] = True
    found = np.asarray(jax.jit(patch_positions, static_argnums=1)(where, side))
    for n in range(1, side + 1):
        np.testing.assert_array_equal(found[n, 0, :n], expected[n, :n])
    np.testing.assert_array_equal(found[side].ravel(), np.arange(side**2))
    assert not found[0].any()


def test_every_parameter_is_stored():
    for tied in (True, False):
        made = architecture(CONFIG | {"tie_word_embeddings": tied}, dtype="bfloat16")
        shapes = jax.eval_shape(made.initialise, jax.random.key(0))["params"]
        paths = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree.leaves_with_path(shapes)}
        assert set(paths) == set(made.tensors)
        assert isinstance(made.module, VisionLanguageModel)


# What the hub's SmolVLM-256M-Instruct says of its structure; the rest is default.
SMOLVLM_256M = {
    "model_type": "idefics3",
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
    },
    "vision_config": {"hidden_size": 768, "image_size": 512, "patch_size": 16, "num_attention_heads": 12},
}


def test_the_size_of_smolvlm_256m():
    made = architecture(SMOLVLM_256M, dtype="bfloat16")
    shapes = jax.eval_shape(made.initialise, jax.random.key(0))["params"]
    count = {part: sum(x.size for x in jax.tree.leaves(tree)) for part, tree in shapes.items()}
    # By hand: patches 768 (3 16^2 + 1), positions 32^2 768, 12 layers, one norm.
    layer = 4 * 768 * 769 + 768 * 3072 + 3072 + 3072 * 768 + 768 + 4 * 768
    assert count["vision"] == 768 * 769 + 1024 * 768 + 12 * layer + 2 * 768
    assert count["projection"] == 16 * 768 * 576
    text = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert count["decoder"] == 2 * 49280 * 576 + 30 * text + 576
    assert made.module.config.tokens_per_tile == 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llava"}, "model_type"),
        ({"text_config": None}, "text_config"),
        ({"text_config": {"model_type": "mistral"}}, "text_config.model_type"),
        ({"text_config": {"num_key_value_heads": 5}}, "text_config.num_key_value_heads"),
        ({"vision_config": {"num_channels": 1}}, "vision_config.num_channels"),
        ({"vision_config": {"image_size": 20, "patch_size": 32}}, "scale_factor"),
        ({"scale_factor": 4}, "scale_factor"),
        ({"image_token_id": -1}, "image_token_id"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(change, named):
    with pytest.raises(ModelError, match=named):
        SmolVLMConfig.from_dict(CONFIG | change)


@pytest.mark.parametrize("shape", [(26, 26, 3), (1, 26, 13, 3), (1, 26, 26, 1), (1, 3, 3, 3), (1, 12, 12, 3)])
def test_tiles_of_another_shape_are_refused(shape):
    module = SmolVLM(STRUCTURE)
    with pytest.raises(ModelError, match="tiles of shape"):
        module.apply({}, Tiles(jnp.zeros(shape)), method="encode_images")
