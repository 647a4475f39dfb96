"""LoRA against the merged model, the frozen base, PEFT's files and, where there is one, PEFT itself.

Where JAXREWARD_TORCH_PYTHON names an interpreter that has torch, transformers and peft, PEFT reads our files.
"""

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from jaxreward.errors import ConfigError, ModelError, StorageError
from jaxreward.models import lora, weights
from jaxreward.models.lora import LoRAConfig

GOLDEN = Path(__file__).parent / "golden"
TORCH = os.environ.get("JAXREWARD_TORCH_PYTHON")
CONFIG = LoRAConfig(rank=4, alpha=6.0)
TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 3, 320)
MAPS = {"query", "key", "value", "attention_out", "gate", "up", "down"}

# These programs run for less time than it takes to optimise them.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module", autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model():
    return weights.load(GOLDEN / "llama")


@pytest.fixture(scope="module")
def logits(model):
    return jit(functools.partial(model.architecture.module.apply, tokens=TOKENS, method="read"))


@pytest.fixture(scope="module")
def trained(model):
    """An adapter with A and B that both matter."""
    adapter = lora.init(jax.random.key(1), model.params, CONFIG)
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32), adapter)


def with_adapter(model, adapter, config=CONFIG):
    return {**model.params, **lora.collection(adapter, config)}


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def test_a_new_adapter_changes_no_bit(model, logits):
    adapter = lora.init(jax.random.key(1), model.params, CONFIG)
    np.testing.assert_array_equal(logits(with_adapter(model, adapter)), logits(model.params))


def test_what_a_new_adapter_holds(model):
    adapter = flat(lora.init(jax.random.key(1), model.params, CONFIG))
    assert {path.split("/")[2] for path in adapter} == MAPS
    for path, x in adapter.items():
        kernel = flat(model.params["params"])[f"{path[:-2]}/kernel"]
        layers, inputs, outputs = kernel.shape
        assert x.dtype == jnp.float32
        if path.endswith("/b"):
            assert x.shape == (layers, 4, outputs) and not np.asarray(x).any()
        else:
            assert x.shape == (layers, inputs, 4)
            assert 0.8 < np.abs(x).max() * math.sqrt(inputs) <= 1
            np.testing.assert_allclose(np.std(x) * math.sqrt(3 * inputs), 1, atol=0.15)
    # rank * (inputs + outputs) of seven maps in two layers: width 48, heads 64, two key heads 32, MLP 72
    expected = 2 * 4 * ((48 + 64) + 2 * (48 + 32) + (64 + 48) + 2 * (48 + 72) + (72 + 48))
    assert lora.count(lora.init(jax.random.key(1), model.params, CONFIG)) == expected
    shapes = jax.eval_shape(model.architecture.initialise, jax.random.key(0))
    assert jax.tree.structure(lora.init(jax.random.key(1), shapes, CONFIG)) == jax.tree.structure(
        lora.init(jax.random.key(1), model.params, CONFIG)
    )


def test_training_moves_the_adapter_and_nothing_else(model, logits):
    """Also under remat; the first gradient reaches B alone, since B is 0."""
    structure = model.architecture.module.config
    decoder = dataclasses.replace(structure.decoder, remat=True)
    module = type(model.architecture.module)(dataclasses.replace(structure, decoder=decoder))

    @jit
    def step(adapter, base):
        def loss(adapter):
            found = module.apply({**base, **lora.collection(adapter, CONFIG)}, TOKENS, method="read")
            return -jnp.mean(jax.nn.log_softmax(found)[..., 7])

        value, gradient = jax.value_and_grad(loss)(adapter)
        return jax.tree.map(lambda x, g: x - 0.5 * g, adapter, gradient), gradient, value

    before = jax.tree.map(np.array, model.params)
    reference = np.array(logits(model.params))
    start = adapter = lora.init(jax.random.key(1), model.params, CONFIG)
    losses = []
    for number in range(4):
        adapter, gradient, value = step(adapter, model.params)
        losses.append(float(value))
        moved = {path: np.abs(x).max() > 0 for path, x in flat(gradient).items()}
        assert all(moved[path] for path in moved if path.endswith("/b"))
        assert all(moved[path] == (number > 0) for path in moved if path.endswith("/a"))
    assert losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, before, model.params)
    np.testing.assert_array_equal(reference, logits(model.params))
    for path, x in flat(adapter).items():
        assert not np.array_equal(x, flat(start)[path])


def test_merging_gives_the_same_logits(model, logits, trained):
    base = np.asarray(logits(model.params))
    adapted = np.asarray(logits(with_adapter(model, trained)))
    merged = lora.merge(model.params, trained, CONFIG)
    assert np.abs(adapted - base).max() > 0.1 * np.abs(base).max()
    np.testing.assert_allclose(logits(merged), adapted, atol=1e-5 * np.abs(adapted).max())
    for path, x in flat(merged["params"]).items():
        untouched = flat(model.params["params"])[path]
        assert (x is untouched) == (path.split("/")[-2] not in MAPS)
    # outside truth of one matrix: W + alpha / r A B in float64
    a, b = (np.asarray(trained["decoder"]["layers"]["up"][part], np.float64) for part in "ab")
    kernel = np.asarray(model.params["params"]["decoder"]["layers"]["up"]["kernel"], np.float64)
    found = merged["params"]["decoder"]["layers"]["up"]["kernel"]
    np.testing.assert_allclose(found, kernel + 1.5 * np.einsum("lir,lro->lio", a, b), atol=1e-6)


def test_some_layers_alone(model, logits):
    config = LoRAConfig(2, 2.0, (r".*/query/kernel", "decoder/layers/down/kernel"))
    adapter = lora.init(jax.random.key(1), model.params, config)
    assert {path.split("/")[2] for path in flat(adapter)} == {"query", "down"}
    adapter = jax.tree.map(lambda x: x + 0.1, adapter)
    changed = logits(with_adapter(model, adapter, config))
    merged = logits(lora.merge(model.params, adapter, config))
    assert np.abs(np.asarray(changed - logits(model.params))).max() > 1e-2
    np.testing.assert_allclose(merged, changed, atol=1e-5 * np.abs(np.asarray(changed)).max())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_the_vision_tower_is_left_alone_by_default(family):
    config = json.loads((GOLDEN / family / "config.json").read_text())
    built = weights.build(config)
    shapes = jax.eval_shape(built.initialise, jax.random.key(0))
    paths = lora.target_paths(shapes, LoRAConfig())
    assert {path.rsplit("/", 1)[1] for path in paths} == MAPS
    stored = [built.tensors[f"{path}/kernel"] for path in paths]
    assert all(x.form == "linear" and "vis" not in x.name for x in stored)
    every = lora.target_paths(shapes, LoRAConfig(targets=(r".*/(up|qkv|query)/kernel",)))
    assert any("vis" in built.tensors[f"{path}/kernel"].name for path in every)


def test_peft_files_come_back_as_they_went(model, trained, tmp_path):
    lora.save(tmp_path / "adapter", trained, CONFIG, model.architecture, base_model="tiny")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    query = trained["decoder"]["layers"]["query"]
    np.testing.assert_array_equal(tensors[f"{name}.lora_A.weight"], query["a"][1].T)
    np.testing.assert_array_equal(tensors[f"{name}.lora_B.weight"], query["b"][1].T)
    assert len(tensors) == 2 * 2 * 7
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 6, "tiny")
    assert re.fullmatch(settings["target_modules"], "model.layers.11.mlp.gate_proj")
    assert not re.fullmatch(settings["target_modules"], "model.vision.layers.11.mlp.gate_proj")
    found, config = lora.load(tmp_path / "adapter", model.architecture)
    jax.tree.map(np.testing.assert_array_equal, found, trained)
    assert (config.rank, config.alpha) == (4, 6.0)
    assert lora.target_paths(model.params, config) == lora.target_paths(model.params, CONFIG)
    with pytest.raises(StorageError, match="not empty"):
        lora.save(tmp_path / "adapter", trained, CONFIG, model.architecture)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_the_names_are_those_of_modules_in_transformers(family, tmp_path):
    built = weights.build(json.loads((GOLDEN / family / "config.json").read_text()))
    shapes = jax.eval_shape(built.initialise, jax.random.key(0))
    config = LoRAConfig(
        2, 2.0, (r"decoder/layers/query/kernel", r".*vision.*/down/kernel")[: 1 + ("qwen" in family)]
    )
    adapter = jax.tree.map(lambda x: x + 1, lora.init(jax.random.key(0), shapes, config))
    lora.save(tmp_path / "adapter", adapter, config, built)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    names = sorted(load_file(file))
    text = "text_model" if family == "smolvlm" else "language_model"
    assert f"base_model.model.model.{text}.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert all("model.visual." in name for name in names if text not in name)
    found, _ = lora.load(tmp_path / "adapter", built)
    jax.tree.map(np.testing.assert_array_equal, found, adapter)


def test_rank_stabilised_and_half_precision_files(model, trained, tmp_path):
    lora.save(tmp_path / "adapter", trained, CONFIG, model.architecture)
    file, settings = (tmp_path / "adapter" / name for name in (lora.TENSOR_FILE, lora.CONFIG_FILE))
    save_file({name: x.astype(np.float16) for name, x in load_file(file).items()}, file)
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "use_rslora": True}))
    found, config = lora.load(tmp_path / "adapter", model.architecture)
    np.testing.assert_allclose(config.scale, 6 / math.sqrt(4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), found, trained)


def drop(tensors, settings):
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]


def add(tensors, settings):
    tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((4, 48), np.float32)


def narrow(tensors, settings):
    name = "base_model.model.model.layers.{}.mlp.up_proj.lora_A.weight"
    tensors.update({name.format(layer): np.zeros((3, 48), np.float32) for layer in range(2)})


def uneven(tensors, settings):
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = np.zeros((3, 48), np.float32)


def infinite(tensors, settings):
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"][0, 0] = np.inf


def setting(name, value):
    return lambda tensors, settings: settings.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "missing model.layers.1.mlp.up_proj.lora_B.weight"),
        (add, "unexpected base_model.model.lm_head.lora_A.weight"),
        (narrow, r"adapter of decoder/layers/up with A \(2, 48, 3\)"),
        (uneven, "several shapes"),
        (infinite, "NaN or infinity"),
        (setting("use_dora", True), "use_dora True found"),
        (setting("bias", "all"), "bias all found"),
        (setting("rank_pattern", {"q_proj": 2}), "rank_pattern"),
        (setting("peft_type", "IA3"), "peft_type LORA expected"),
        (setting("r", 0), "r 0 and lora_alpha 6 found"),
        (lambda tensors, settings: tensors.clear(), "unexpected emptiness"),
    ],
)
def test_files_that_cannot_be_used(model, trained, tmp_path, change, message):
    lora.save(tmp_path / "adapter", trained, CONFIG, model.architecture)
    file, settings = (tmp_path / "adapter" / name for name in (lora.TENSOR_FILE, lora.CONFIG_FILE))
    tensors, fields = load_file(file), json.loads(settings.read_text())
    change(tensors, fields)
    save_file(tensors, file)
    settings.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        lora.load(tmp_path / "adapter", model.architecture)


def test_a_folder_without_an_adapter(model, tmp_path):
    with pytest.raises(ModelError, match=r"adapter_config\.json: it cannot be read"):
        lora.load(tmp_path, model.architecture)


def test_settings_that_cannot_be_used(model, trained):
    with pytest.raises(ConfigError, match="match no parameter; the kernels are decoder/layers/attention_out"):
        lora.init(
            jax.random.key(0), model.params, LoRAConfig(targets=(r"decoder/layers/up/kernel", "up/kernel"))
        )
    with pytest.raises(ConfigError, match="match no parameter"):
        lora.init(jax.random.key(0), model.params, LoRAConfig(targets=()))
    with pytest.raises(ConfigError, match="decoder/embedding"):
        lora.init(jax.random.key(0), model.params, LoRAConfig(targets=("decoder/embedding",)))
    for fields in ({"rank": 0}, {"alpha": math.nan}, {"alpha": 0.0}):
        with pytest.raises(ConfigError, match="found; expected"):
            LoRAConfig(**fields)
    with pytest.raises(ConfigError, match="no regular expression"):
        LoRAConfig(targets=("(",))
    with pytest.raises(ModelError, match="no such linear map"):
        lora.merge(model.params, {"tower": trained["decoder"]}, CONFIG)
    with pytest.raises(ModelError, match="another model"):
        lora.merge(model.params, jax.tree.map(lambda x: x[:1], trained), CONFIG)


PEFT = """
import sys, numpy, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, tokens, out, back = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
tokens = torch.from_numpy(numpy.load(tokens).astype("int64"))
with torch.no_grad():
    numpy.save(out, model(tokens).logits.numpy())
model.save_pretrained(back)
"""


@pytest.mark.skipif(
    not TORCH, reason="JAXREWARD_TORCH_PYTHON names no Python with torch, transformers and peft"
)
def test_peft_reads_and_writes_the_same_adapter(model, logits, trained, tmp_path):
    lora.save(tmp_path / "adapter", trained, CONFIG, model.architecture)
    np.save(tmp_path / "tokens.npy", TOKENS)
    arguments = (
        GOLDEN / "llama",
        *(tmp_path / name for name in ("adapter", "tokens.npy", "out.npy", "back")),
    )
    done = subprocess.run(
        [TORCH, "-c", PEFT, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "missing" not in done.stderr.lower(), done.stderr[-3000:]
    expected = np.load(tmp_path / "out.npy")
    found = logits(with_adapter(model, trained))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    adapter, config = lora.load(tmp_path / "back", model.architecture)
    jax.tree.map(np.testing.assert_array_equal, adapter, trained)
    assert (config.rank, config.alpha) == (CONFIG.rank, CONFIG.alpha)
