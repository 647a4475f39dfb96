"""Loading and saving of model folders: values against the safetensors library, and bad input."""

import dataclasses
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxreward.errors import ModelError, StorageError
from jaxreward.models import weights
from jaxreward.models.weights import Architecture, Stored

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
TORCH = os.environ.get("JAXREWARD_TORCH_PYTHON")  # a Python with torch and transformers


def leaves(params):
    return {"/".join(k.key for k in path[1:]): x for path, x in jax.tree.leaves_with_path(params)}


def assert_same(params, others):
    params, others = leaves(params), leaves(others)
    assert params.keys() == others.keys()
    for name, x in params.items():
        assert x.dtype == others[name].dtype, name
        np.testing.assert_array_equal(x, others[name], err_msg=name)


@pytest.fixture(scope="module")
def llama():
    return weights.load(GOLDEN / "llama")


@pytest.fixture
def folder(tmp_path):
    """A copy of a small Llama that may be damaged."""
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))


def change(folder, **changes):
    """Replaces tensors of a folder; None removes one."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file) | {k.replace("__", "."): v for k, v in changes.items()}
    safetensors.numpy.save_file({k: v for k, v in tensors.items() if v is not None}, file)


def refusal(folder, **options):
    """The one line with which a folder is refused."""
    with pytest.raises(ModelError) as error:
        weights.load(folder, **options)
    text = str(error.value)
    assert "\n" not in text and len(text) < 900
    assert type(error.value) is ModelError
    return text


# --- what is read ----------------------------------------------------------------------------------------


def test_every_form_of_a_parameter(llama):
    stored = safetensors.numpy.load_file(GOLDEN / "llama" / "model.safetensors")
    params = leaves(llama.params)
    by_name = {}
    for path, how in llama.architecture.tensors.items():
        for layer, name in enumerate(how.names()):
            value = np.asarray(params[path][layer] if how.layers else params[path])
            by_name[name] = value.T if how.form == "linear" else value
    assert by_name.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(by_name[name], value, err_msg=name)


class Forms(nn.Module):
    """One parameter of each form."""

    @nn.compact
    def __call__(self):
        for name, shape in (
            ("scalar", ()),
            ("gains", (2,)),
            ("row", (3,)),
            ("conv", (24, 5)),
            ("stack", (2, 24, 5)),
        ):
            self.param(name, nn.initializers.zeros_init(), shape)


FORMS = Architecture(
    Forms(),
    {
        "scalar": Stored("scale", ()),
        "gains": Stored("blocks.{}.gain", ("layers",), layers=2, first=4),
        "row": Stored("token", (None,), shape=(1, 1, 3)),
        "conv": Stored("patch.weight", (None, "embed"), "convolution", shape=(5, 3, 2, 4)),
        "stack": Stored(
            "blocks.{}.w", ("layers", None, "embed"), "convolution", layers=2, shape=(5, 3, 2, 4), first=4
        ),
    },
    lambda key: Forms().init(key),
    aliases={"": "nowhere.", "old.": "blocks.", "old.patch.": "patch."},
    ignored=(r"position_ids$",),
)


@pytest.fixture
def forms(tmp_path, monkeypatch):
    """A folder of the module above, and what is in it; its names need every kind of alias."""
    monkeypatch.setattr(weights, "build", lambda *_, **__: FORMS)
    rng = np.random.default_rng(0)
    shapes = {
        "scale": (),
        "blocks.4.gain": (),
        "blocks.5.gain": (),
        "token": (1, 1, 3),
        "old.patch.weight": (5, 3, 2, 4),
        "old.4.w": (5, 3, 2, 4),
        "blocks.5.w": (5, 3, 2, 4),
    }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors | {"x.position_ids": np.arange(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path, tensors


@pytest.mark.parametrize("read_bytes", [1, 50, 10**9])
def test_scalars_convolutions_aliases_and_ignored_names(forms, monkeypatch, read_bytes):
    folder, tensors = forms
    monkeypatch.setattr(weights, "READ_BYTES", read_bytes)
    params = weights.load(folder).params["params"]
    assert float(params["scalar"]) == tensors["scale"]
    assert params["gains"].tolist() == [tensors["blocks.4.gain"], tensors["blocks.5.gain"]]
    np.testing.assert_array_equal(params["row"], tensors["token"][0, 0])
    flat = {name: x.reshape(5, 24).T for name, x in tensors.items() if x.ndim == 4}
    np.testing.assert_array_equal(params["conv"], flat["old.patch.weight"])
    np.testing.assert_array_equal(params["stack"], [flat["old.4.w"], flat["blocks.5.w"]])


def test_saving_undoes_every_form(forms, tmp_path):
    folder, tensors = forms
    weights.save(tmp_path / "saved", weights.load(folder))
    found = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    renamed = {"old.patch.weight": "patch.weight", "old.4.w": "blocks.4.w"}
    assert found.keys() == {renamed.get(name, name) for name in tensors}
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[renamed.get(name, name)], x)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_are_cast_as_numpy_casts(folder, stored, dtype):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {name: x.astype(stored) for name, x in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    model = weights.load(folder, dtype=dtype)
    params = leaves(model.params)
    assert {x.dtype for x in params.values()} == {jnp.dtype(dtype)}
    expected = tensors["model.layers.1.mlp.up_proj.weight"].astype(jnp.dtype(dtype)).T
    found = next(x for name, x in params.items() if name.endswith("layers/up/kernel"))
    np.testing.assert_array_equal(found[1], expected)


def test_float32_parameters_of_a_bfloat16_model_widen_nothing_that_is_stored_narrow():
    half = [dataclasses.replace(entry("x"), dtype="BF16")]
    assert weights._target_dtype(jnp.float32, "bfloat16", half) == jnp.bfloat16
    assert weights._target_dtype(jnp.float32, "bfloat16", [*half, entry("y")]) == jnp.float32
    assert weights._target_dtype(jnp.bfloat16, "bfloat16", [entry("y")]) == jnp.bfloat16
    assert weights._target_dtype(jnp.float32, "float32", half) == jnp.float32


def entry(name):
    return weights.TensorEntry(Path("file"), name, "F32", (2,), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_comes_back(family, tmp_path):
    model = weights.load(GOLDEN / family)
    assert set(leaves(model.params)) == set(model.architecture.tensors)
    assert model.config == json.loads((GOLDEN / family / "config.json").read_text())
    weights.save(tmp_path / "saved", model, max_shard_bytes=40_000)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    again = weights.load(tmp_path / "saved")
    assert_same(again.params, model.params)
    assert again.end_tokens == model.end_tokens


def test_shards_without_an_index(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for shard in range(3):
        part = {name: tensors[name] for name in names[shard::3]}
        safetensors.numpy.save_file(part, folder / f"part{shard}.safetensors")
    assert_same(weights.load(folder).params, weights.load(GOLDEN / "llama").params)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, (7, 9)),
        ({}, {"eos_token_id": 3}, (3,)),
        (None, {"text_config": {"eos_token_id": 5}}, (5,)),
        (None, {}, ()),
    ],
)
def test_end_tokens(tmp_path, generation, config, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert weights.read_end_tokens(tmp_path, config) == expected


# --- bad input -------------------------------------------------------------------------------------------


def test_folders_that_are_no_models(tmp_path):
    assert "no such model folder" in refusal(tmp_path / "none")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "[" * 100_000, "\xff", '"text"', "[]", "null"])
def test_a_config_that_is_no_json_object(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt2"}, {"model_type": ["llama"]}])
def test_an_architecture_that_is_not_supported(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    text = refusal(folder)
    assert all(name in text for name in weights.FAMILIES)


def test_another_dtype(folder):
    assert "float16" in refusal(folder, dtype="float16")


def test_a_pickle_is_never_opened(folder):
    (folder / "model.safetensors").unlink()
    assert "no weights at all" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    text = refusal(folder)
    assert "pytorch_model.bin" in text and "convert" in text


def test_a_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated" in refusal(folder)


def test_missing_and_unexpected_tensors_up_to_five(folder):
    change(folder, model__norm__weight=None, stray=np.zeros(2, np.float32))
    text = refusal(folder)
    assert "missing model.norm.weight" in text and "unexpected stray" in text
    change(folder, **{f"stray{i}": np.zeros(2, np.float32) for i in range(7)})
    text = refusal(folder)
    assert "stray, stray0, stray1, stray2, stray3 and 3 more" in text


def test_fewer_layers_than_the_config_says(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "missing model.layers.2.input_layernorm.weight" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    assert "1000000000 layers" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("head_dim", 10**12), ("vocab_size", 2**70), ("vocab_size", 10**12)]
)
def test_sizes_that_no_memory_holds(folder, field, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    assert "too large" in refusal(folder)


def test_sizes_that_do_not_fit_together(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "qwen3_vl", tmp_path / "qwen"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["spatial_merge_size"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert "do not fit together" in refusal(folder)


def test_misshapen_tensors_are_found_before_anything_is_read(folder, monkeypatch):
    change(folder, model__norm__weight=np.full(3, np.nan, np.float32))
    monkeypatch.setattr(weights.TensorReader, "read", lambda *_: pytest.fail("a tensor was read"))
    assert "model.norm.weight is [3] instead of [48]" in refusal(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_weights_that_are_not_finite(folder, value, stored):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    broken = tensors["model.layers.1.mlp.up_proj.weight"].astype(stored)
    broken[3, 4] = value
    change(folder, model__layers__1__mlp__up_proj__weight=broken)
    assert "NaN or infinity in model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_the_largest_finite_numbers_pass(folder):
    norm = np.full(48, np.finfo(np.float32).max, np.float32)
    norm[::2] = -65504.0
    change(folder, model__norm__weight=norm)
    assert "NaN" in refusal(folder, dtype="bfloat16")  # they round up to infinity there
    weights.load(folder)


@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.float8_e4m3fn])
def test_quantised_weights(folder, dtype):
    change(folder, model__norm__weight=np.ones(48, dtype))
    text = refusal(folder)
    assert "model.norm.weight in" in text and "unquantised" in text


@pytest.fixture
def sharded(llama, tmp_path):
    """A folder of several shards and an index."""
    weights.save(tmp_path / "sharded", llama, max_shard_bytes=40_000)
    return tmp_path / "sharded"


def rewrite_index(folder, function):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    function(index)
    file.write_text(json.dumps(index))


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    shard.unlink()
    text = refusal(sharded)
    assert shard.name in text and "missing shards" in text


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", ".safetensors", "x.bin", ""],
)
def test_an_index_that_points_elsewhere(sharded, name):
    rewrite_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    assert "in the same folder" in refusal(sharded)


@pytest.mark.parametrize("listed", [None, [], {"a": 1}, {"a": None}])
def test_an_index_without_a_map(sharded, listed):
    rewrite_index(sharded, lambda index: index.update(weight_map=listed))
    assert "no weight_map" in refusal(sharded)


def test_an_index_that_names_the_wrong_shard(sharded):
    def swap(index):
        first = index["weight_map"]["model.norm.weight"]
        others = sorted(set(index["weight_map"].values()) - {first})
        index["weight_map"]["model.norm.weight"] = others[0]

    rewrite_index(sharded, swap)
    assert "model.norm.weight not in the shard" in refusal(sharded)


def test_a_tensor_in_two_shards(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    shutil.copy(sorted(sharded.glob("model-*.safetensors"))[0], sharded / "copy.safetensors")
    assert "another file" in refusal(sharded)


@pytest.mark.parametrize("found", ["2", 1.5, -1, [1, None], True])
def test_end_tokens_that_are_no_ids(folder, found):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    assert "eos_token_id" in refusal(folder)


def test_a_map_that_does_not_fit_the_module():
    wrong = dataclasses.replace(FORMS, tensors={**FORMS.tensors, "more": Stored("more", ())})
    with pytest.raises(ModelError, match="differ in more"):
        weights.parameter_shapes(wrong)
    wrong = dataclasses.replace(FORMS, tensors=FORMS.tensors | {"row": Stored("row", ())})
    with pytest.raises(ModelError, match="differ in row"):
        weights.parameter_shapes(wrong)


# --- saving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 20_000, 10**9])
def test_shards_and_their_index(llama, tmp_path, limit):
    weights.save(tmp_path / "saved", llama, max_shard_bytes=limit)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    contents = [safetensors.numpy.load_file(file) for file in files]
    for content in contents:
        assert len(content) == 1 or sum(x.nbytes for x in content.values()) <= limit
    if limit == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    expected = {name: file.name for file, content in zip(files, contents, strict=True) for name in content}
    assert index["weight_map"] == expected
    assert index["metadata"]["total_size"] == sum(x.nbytes for c in contents for x in c.values())


def test_saving_other_parameters_in_another_dtype(llama, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    model = dataclasses.replace(llama, path=tmp_path)
    tuned = jax.tree.map(lambda x: x + 1, llama.params)
    weights.save(tmp_path / "saved", model, params=tuned, dtype="bfloat16")
    again = weights.load(tmp_path / "saved")
    assert_same(again.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), tuned))
    assert again.config == llama.config | {"dtype": "bfloat16"}
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"
    assert set(os.listdir(tmp_path)) == {"saved", "tokenizer.json"}


def test_saving_other_shapes_or_dtypes_is_refused(llama, tmp_path):
    with pytest.raises(ModelError, match="float8"):
        weights.save(tmp_path / "saved", llama, dtype="float8")
    with pytest.raises(ModelError, match="differ"):
        weights.save(tmp_path / "saved", llama, params=jax.tree.map(lambda x: x[:1], llama.params))
    with pytest.raises(ModelError, match="differ"):
        weights.save(tmp_path / "saved", llama, params={"params": {"embedding": jnp.zeros(3)}})
    assert not os.listdir(tmp_path)


def test_a_folder_in_use_is_not_overwritten(llama, tmp_path):
    (tmp_path / "saved").mkdir()
    weights.save(tmp_path / "saved", llama)
    with pytest.raises(StorageError, match="not empty"):
        weights.save(tmp_path / "saved", llama)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose"):
        weights.save(tmp_path / "file", llama)
    with pytest.raises(StorageError, match="choose"):
        weights.save(tmp_path / "file" / "inside", llama)
    assert sorted(os.listdir(tmp_path)) == ["file", "saved"]


def test_a_full_disk_leaves_nothing_behind(llama, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="cannot be written"):
            weights.save(tmp_path / "saved", llama)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)


PYTORCH = """
import pathlib
import sys
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

encoders = ("clip", "minilm", "siglip", "siglip2", "xclip")
saved, golden = map(pathlib.Path, sys.argv[1:])
for folder in sorted(saved.iterdir()):
    kind = AutoModel if folder.name in encoders else AutoModelForImageTextToText
    kind = AutoModelForCausalLM if folder.name == "llama" else kind
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    # sentence embeddings are a mean over tokens, so that our MiniLM has no pooler
    unused = {name for name in info["missing_keys"] if folder.name == "minilm" and "pooler" in name}
    assert info["missing_keys"] == unused and not info["unexpected_keys"], (folder.name, info)
    assert not info["mismatched_keys"], (folder.name, info)
    expected = dict(kind.from_pretrained(golden / folder.name).named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys(), folder.name
    for name in found.keys() - unused:
        assert torch.equal(found[name], expected[name]), (folder.name, name)
    print(folder.name)
"""


@pytest.mark.slow
@pytest.mark.skipif(not TORCH, reason="JAXREWARD_TORCH_PYTHON names no Python with torch and transformers")
def test_pytorch_transformers_loads_what_is_saved(tmp_path):
    for family in FAMILIES:
        weights.save(tmp_path / family, weights.load(GOLDEN / family), max_shard_bytes=40_000)
    command = [TORCH, "-c", PYTORCH, str(tmp_path), str(GOLDEN)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == FAMILIES
