"""Llama against PyTorch: tests/models/golden/make_llama.py makes the folder and the numbers."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.errors import ModelError
from jaxreward.models import decoder, weights
from jaxreward.models.decoder import empty_cache
from jaxreward.models.llama import Llama, LlamaConfig, architecture
from jaxreward.models.vision_language import ImageFeatures, VisionLanguageModel

FOLDER = pathlib.Path(__file__).parent / "golden" / "llama"
CONFIG = json.loads((FOLDER / "config.json").read_text())
TOLERANCE = 1e-5  # relative to the largest absolute value


def read(module, tokens, positions, where, cache=None, empty=True):
    embeddings, extra = module.embed(tokens)
    hidden, cache = module(embeddings, positions, where, cache, empty=empty, extra=extra)
    return hidden, module.logits(hidden), cache


def positions_of(where):
    return jnp.broadcast_to(jnp.maximum(jnp.cumsum(where, 1) - 1, 0), (3, *where.shape))


def error(found, golden, where):
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


# The structure is static: what differs only in numbers is compiled once.
@functools.partial(jax.jit, static_argnums=0)
def apply(config, params, inputs):
    return Llama(config).apply(params, **inputs, method=read)


def outputs(params, golden, config=None, **changes):
    config = config or LlamaConfig.from_dict(CONFIG)
    inputs = {"tokens": golden["tokens"], "where": golden["where"]} | changes
    inputs.setdefault("positions", positions_of(inputs["where"]))
    return apply(config, params, inputs)[:2]


def test_equals_pytorch(params, golden):
    hidden, logits = outputs(params, golden)
    assert hidden.dtype == logits.dtype == jnp.float32
    assert error(hidden, golden["hidden"], golden["where"]) < TOLERANCE
    assert error(logits, golden["logits"], golden["where"]) < TOLERANCE


def test_generates_what_pytorch_generates(params, golden):
    module = Llama(LlamaConfig.from_dict(CONFIG))
    step = jax.jit(lambda *inputs, empty: module.apply(*inputs, empty, method=read), static_argnames="empty")
    tokens, where = jnp.asarray(golden["tokens"]), jnp.asarray(golden["where"])
    cache = empty_cache(module.decoder_config, 2, tokens.shape[1] + 8)
    positions = positions_of(where)
    _, logits, cache = step(params, tokens, positions, where, cache, empty=True)
    found = []
    for _ in range(8):
        found.append(jnp.argmax(logits[:, -1], -1))
        positions = positions[..., -1:] + 1
        now = jnp.ones((2, 1), bool)
        _, logits, cache = step(params, found[-1][:, None], positions, now, cache, empty=False)
    np.testing.assert_array_equal(np.stack(found, 1), golden["greedy"])


@pytest.mark.parametrize(
    "mutation",
    [
        {"rope_theta": 1000.0},
        {"norm_epsilon": 1e-2},
    ],
)
def test_another_structure_gives_other_numbers(params, golden, mutation):
    config = LlamaConfig.from_dict(CONFIG)
    mutated = LlamaConfig(dataclasses.replace(config.decoder, **mutation))
    _, logits = outputs(params, golden, mutated)
    assert error(logits, golden["logits"], golden["where"]) > 100 * TOLERANCE


def test_padding_matters_where_it_is_taken_for_text(params, golden):
    _, logits = outputs(params, golden, where=np.ones_like(golden["where"]))
    assert error(logits, golden["logits"], golden["where"]) > 100 * TOLERANCE
    late = positions_of(golden["where"])
    _, logits = outputs(params, golden, positions=late * 2)
    assert error(logits, golden["logits"], golden["where"]) > 100 * TOLERANCE


def test_rotated_pairs_matter(params, golden, monkeypatch):
    """A rotation of neighbours (j, j + 1), as the papers and GGUF have it, is another model."""

    def neighbours(x, angles):
        apart = jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1)
        turned = jnp.split(rotate(apart, angles), 2, -1)
        return jnp.stack(turned, -1).reshape(x.shape)

    rotate = decoder.rotate
    monkeypatch.setattr(decoder, "rotate", neighbours)
    apply.clear_cache()
    _, logits = outputs(params, golden)
    apply.clear_cache()
    assert error(logits, golden["logits"], golden["where"]) > 100 * TOLERANCE


def test_every_parameter_is_stored():
    for tied in (True, False):
        made = architecture(CONFIG | {"tie_word_embeddings": tied}, dtype="bfloat16")
        shapes = jax.eval_shape(made.initialise, jax.random.key(0))["params"]
        paths = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree.leaves_with_path(shapes)}
        assert set(paths) == set(made.tensors)
        assert all(
            leaf.dtype == jnp.bfloat16 for path, leaf in paths.items() if path != "decoder/output/kernel"
        )
        assert isinstance(made.module, VisionLanguageModel)


def test_the_layout_of_older_writers_reads_alike():
    older = {key: value for key, value in CONFIG.items() if key not in ("rope_parameters", "head_dim")}
    older |= {"rope_theta": 500.0, "rope_scaling": None, "hidden_size": 64}
    newer = LlamaConfig.from_dict(CONFIG | {"hidden_size": 64})
    assert LlamaConfig.from_dict(older) == newer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mamba"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("vocab_size", "many"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(field, value):
    with pytest.raises(ModelError, match=field):
        LlamaConfig.from_dict(CONFIG | {field: value})


def test_images_are_refused():
    module = Llama(LlamaConfig.from_dict(CONFIG))
    with pytest.raises(TypeError, match="text alone"):
        module.encode_images(None)
    with pytest.raises(TypeError, match="text alone"):
        module.embed(jnp.zeros((1, 1), jnp.int32), None, ImageFeatures(jnp.zeros((1, 48))))
