"""Qwen2.5-VL and Qwen3-VL against PyTorch: golden/make_qwen_vl.py makes the folders and the numbers."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxreward.models import qwen_vl, weights
from jaxreward.models.decoder import empty_cache
from jaxreward.models.qwen_inputs import rope_positions, vision_inputs
from jaxreward.models.qwen_vl import QwenVL, architecture, attend_in_segments
from jaxreward.models.vision_language import ImageFeatures, VisionLanguageModel

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
IMAGES = (1, 2)  # of each prompt
TOLERANCE = 1e-5  # relative to the largest absolute value
WRONG = 100 * TOLERANCE  # what a mistake must change at least


@dataclasses.dataclass
class Case:
    """A family's folder, its model and what PyTorch computed."""

    config: dict
    golden: dict
    variables: dict
    module: QwenVL

    @property
    def images(self):
        return vision_inputs(self.module.config, self.golden["patches"], self.golden["grids"])

    @property
    def image_rows(self):
        image = self.golden["tokens"] == self.module.config.image_token
        return np.where(image, np.cumsum(image).reshape(image.shape) - 1, -1)


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    return load(request.param)


@functools.cache
def load(family):
    model = weights.load(GOLDEN / family)
    golden = dict(np.load(GOLDEN / family / "golden.npz"))
    return Case(model.config, golden, model.params, model.architecture.module)


# These programs run for less time than it takes to optimise them.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(jit, static_argnums=0)
def encode(module, variables, images):
    return module.apply(variables, images, method="encode_images")


def _read(module, tokens, image_rows, positions, where, features, cache):
    embeddings, extra = module.embed(tokens, image_rows, features)
    empty = cache is None or tokens.shape[1] > 1
    hidden, cache = module(embeddings, positions, where, cache, empty=empty, extra=extra)
    return hidden, module.logits(hidden[:, -4:]), cache


@functools.partial(jit, static_argnums=0)
def read(module, variables, tokens, image_rows, positions, where, features=None, cache=None):
    return module.apply(variables, tokens, image_rows, positions, where, features, cache, method=_read)


def read_golden(case, features, module=None, **changes):
    """The hidden states of the golden prompts."""
    inputs = {name: case.golden[name] for name in ("tokens", "positions", "where")}
    inputs |= {"image_rows": case.image_rows, "features": features} | changes
    return read(module or case.module, case.variables, **inputs)


def error(found, golden, where=...):
    """Largest difference where it matters, relative to the largest absolute value."""
    golden = np.asarray(golden)
    return np.abs(np.asarray(found) - golden)[where].max() / np.abs(golden[where]).max()


def golden_features(case):
    extra = case.golden.get("deepstack")
    return ImageFeatures(jnp.asarray(case.golden["vision"]), None if extra is None else jnp.asarray(extra))


def replaced(case, part, **fields):
    """The module with other structure in its 'vision' or 'decoder'."""
    config = case.module.config
    return QwenVL(dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **fields)}))


def test_images_equal_pytorch(case):
    features = encode(case.module, case.variables, case.images)
    assert error(features.rows, case.golden["vision"]) < TOLERANCE
    assert (features.extra is None) == (case.module.config.family == "qwen2_5_vl")
    if features.extra is not None:
        assert error(features.extra, case.golden["deepstack"]) < TOLERANCE


def test_prompts_with_images_equal_pytorch(case):
    features = encode(case.module, case.variables, case.images)
    hidden, logits, _ = read_golden(case, features)
    assert error(hidden, case.golden["hidden"], case.golden["where"]) < TOLERANCE
    assert error(logits, case.golden["last_logits"]) < TOLERANCE
    assert logits.dtype == jnp.float32


def test_text_alone_equals_pytorch(case):
    tokens, where = case.golden["text_tokens"], case.golden["text_where"]
    positions = np.broadcast_to(np.maximum(np.cumsum(where, 1) - 1, 0), (3, *where.shape))
    _, logits, _ = read(case.module, case.variables, tokens, np.full(tokens.shape, -1), positions, where)
    assert error(logits, case.golden["text_logits"][:, -4:], where[:, -4:]) < TOLERANCE


def test_greedy_generation_through_the_cache_equals_pytorch(case):
    golden = case.golden
    (batch, length), steps = golden["tokens"].shape, golden["generated"].shape[1]
    cache = empty_cache(case.module.decoder_config, batch, length + steps)
    _, logits, cache = read_golden(case, golden_features(case), cache=cache)
    tokens = [np.argmax(logits[:, -1], -1)]
    for step in range(steps - 1):
        positions = np.broadcast_to(golden["next_position"][:, None] + step, (3, batch, 1))
        _, logits, cache = read(
            case.module,
            case.variables,
            tokens[-1][:, None],
            np.full((batch, 1), -1),
            positions,
            np.ones((batch, 1), bool),
            cache=cache,
        )
        tokens.append(np.argmax(logits[:, -1], -1))
    np.testing.assert_array_equal(np.stack(tokens, 1), golden["generated"])


def test_rope_positions_equal_pytorch(case):
    golden, config = case.golden, case.module.config
    first = 0
    for row, count in enumerate(IMAGES):
        where = golden["where"][row]
        positions, following = rope_positions(
            golden["tokens"][row][where], golden["grids"][first : first + count], config
        )
        np.testing.assert_array_equal(positions, golden["positions"][:, row, where])
        assert following == golden["next_position"][row]
        first += count
    positions, following = rope_positions(
        golden["video_tokens"], golden["video_grids"], config, seconds_per_grid=[1, 0.5, 1.7, 1, 1]
    )
    np.testing.assert_array_equal(positions, golden["video_positions"])
    assert following == golden["video_next"]


def test_an_image_changes_the_prompts_that_show_it_and_no_other(case):
    changed = case.golden["patches"].copy()
    changed[: case.golden["grids"][0].prod()] += 1
    images = vision_inputs(case.module.config, changed, case.golden["grids"])
    _, before, _ = read_golden(case, encode(case.module, case.variables, case.images))
    _, after, _ = read_golden(case, encode(case.module, case.variables, images))
    assert error(after[0], before[0]) > WRONG
    assert error(after[1], before[1]) < 1e-6


def test_padding_to_a_bucket_changes_no_image(case):
    patches, grids = case.golden["patches"], case.golden["grids"]
    padded = vision_inputs(case.module.config, patches, grids, bucket=2 * len(patches))
    rows = encode(case.module, case.variables, padded)
    assert rows.rows.shape[0] == len(patches) // 2
    assert np.isfinite(rows.rows).all()
    assert error(rows.rows[: len(patches) // 4], case.golden["vision"]) < TOLERANCE
    if rows.extra is not None:
        assert error(rows.extra[:, : len(patches) // 4], case.golden["deepstack"]) < TOLERANCE


def mistakes_of_reading(tokens, positions, where, image_rows):
    """Inputs of the decoder with one mistake each."""
    yield "axes of the positions swapped", {"positions": positions[[0, 2, 1]]}
    counted = np.broadcast_to(np.cumsum(where, 1) - 1, positions.shape)
    yield "text positions for images", {"positions": counted}
    padding = np.sum(~where, axis=1)
    shifted = [np.roll(positions[:, row], -count, -1) for row, count in enumerate(padding)]
    yield "positions that forget the padding", {"positions": np.stack(shifted, 1)}
    yield "padding seen", {"where": np.ones_like(where)}
    yield "image tokens one row late", {"image_rows": np.where(image_rows > 0, image_rows - 1, image_rows)}
    yield "images left out", {"image_rows": np.full_like(image_rows, -1)}


def test_a_mistake_in_reading_shows(case):
    inputs = [case.golden[name] for name in ("tokens", "positions", "where")]
    for mistake, changes in mistakes_of_reading(*inputs, case.image_rows):
        hidden, _, _ = read_golden(case, golden_features(case), **changes)
        assert error(hidden, case.golden["hidden"], case.golden["where"]) > WRONG, mistake


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_of_m_rope_shows(family):
    case = load(family)
    interleaved = case.module.decoder_config.rope_interleaved
    hidden, _, _ = read_golden(
        case, golden_features(case), replaced(case, "decoder", rope_interleaved=not interleaved)
    )
    assert error(hidden, case.golden["hidden"], case.golden["where"]) > WRONG


def test_deepstack_one_layer_late_shows():
    case = load("qwen3_vl")
    extra = case.golden["deepstack"]
    for wrong in (np.stack([0 * extra[0], extra[0]]), extra[::-1]):
        hidden, _, _ = read_golden(case, ImageFeatures(case.golden["vision"], wrong))
        assert error(hidden, case.golden["hidden"], case.golden["where"]) > WRONG
    late = replaced(case, "vision", deepstack_layers=(1, 3))
    assert error(encode(late, case.variables, case.images).extra, case.golden["deepstack"]) > WRONG


@pytest.mark.parametrize("full_layers", [(0, 1, 2, 3), (0, 2)], ids=["all full", "early"])
def test_the_choice_of_windows_shows(full_layers):
    case = load("qwen2_5_vl")
    features = encode(replaced(case, "vision", full_layers=full_layers), case.variables, case.images)
    assert error(features.rows, case.golden["vision"]) > WRONG


def mistakes_of_layout(images, side):
    """Layouts with one mistake each, all of the right shapes."""
    yield "one frame", images.replace(segments=np.minimum(images.segments, 0))
    yield "columns for rows", images.replace(positions=images.positions[..., ::-1])
    yield "another order", images.replace(order=images.order[::-1])
    if images.windows is not None:
        yield "windows of another patch", images.replace(windows=np.roll(images.windows, 1, -2))
        yield "results of another window", images.replace(in_window=np.roll(images.in_window, 16, -1))
    if images.table_rows is not None:
        turned = images.table_rows % side * side + images.table_rows // side
        yield "a turned table", images.replace(table_rows=turned)
        yield "the nearest neighbour", images.replace(table_weights=np.round(images.table_weights))


def test_a_mistake_in_the_layout_shows(case):
    for mistake, images in mistakes_of_layout(case.images, case.module.config.vision.table):
        features = encode(case.module, case.variables, images)
        assert error(features.rows, case.golden["vision"]) > WRONG, mistake


@pytest.mark.parametrize("limit", [4 * 96 * 96, 16 * 96, 200], ids=["two rows", "blocks", "odd blocks"])
def test_attention_in_parts_is_that_of_the_whole(monkeypatch, limit):
    """Values and a directional derivative against float64."""
    monkeypatch.setattr(qwen_vl, "MAX_LOGITS", limit)
    rng = np.random.default_rng(0)
    operands, direction = rng.normal(size=(2, 3, 4, 96, 2, 8))
    segments = np.repeat([[0, 1, -1], [2, 3, -1], [4, 5, -1], [6, 7, -1]], [40, 30, 26], axis=1)

    def truth(query, key, value):
        logits = np.einsum("rthd,rshd->rhts", query, key) / np.sqrt(8)
        weight = np.exp(logits) * (segments[:, None, :, None] == segments[:, None, None, :])
        out = np.einsum("rhts,rshd->rthd", weight / weight.sum(-1, keepdims=True), value)
        return out.reshape(4, 96, 16)

    @jit
    def value_and_gradient(operands):
        def loss(operands):
            out = attend_in_segments(*operands, jnp.asarray(segments))
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, has_aux=True)(operands)

    gradient, out = value_and_gradient(jnp.asarray(operands, jnp.float32))
    np.testing.assert_allclose(out, truth(*operands), atol=1e-5)
    ends = [np.sin(truth(*(operands + step * direction))).sum() for step in (1e-5, -1e-5)]
    assert np.vdot(gradient, direction) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


def test_windows_in_parts_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(qwen_vl, "MAX_LOGITS", 5 * 2 * 16 * 16)
    case = load("qwen2_5_vl")
    features = jit(lambda v, x: case.module.apply(v, x, method="encode_images"))(case.variables, case.images)
    assert error(features.rows, case.golden["vision"]) < TOLERANCE


def test_the_gradient_of_the_tower():
    """With windows and remat, along a random direction of its parameters, against central differences."""
    case = load("qwen2_5_vl")
    module = replaced(case, "vision", remat=True)

    @jit
    def gradient(variables):
        def loss(variables):
            features = module.apply(variables, case.images, method="encode_images")
            return sum(jnp.mean(jnp.sin(x)) for x in jax.tree.leaves(features))

        return jax.grad(loss)(variables)

    def value(variables):
        features = encode(case.module, variables, case.images)
        return sum(np.mean(np.sin(np.asarray(x, np.float64))) for x in jax.tree.leaves(features))

    rng, variables = np.random.default_rng(0), jax.device_get(case.variables)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), variables)
    found = gradient(variables)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(found["params"]["vision"]))
    slope = sum(np.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (found, direction)), strict=True))
    ends = [
        value(jax.tree.map(lambda x, d, h=h: x + h * d, case.variables, direction)) for h in (1e-3, -1e-3)
    ]
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=1e-2)


def test_bfloat16_is_near():
    case = load("qwen3_vl")
    module = architecture(case.config, dtype="bfloat16").module
    variables = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.device_get(case.variables))
    features = encode(module, variables, case.images)
    for found, name in ((features.rows, "vision"), (features.extra, "deepstack")):
        assert found.dtype == jnp.bfloat16
        difference = np.linalg.norm(np.asarray(found, np.float32) - case.golden[name])
        assert difference < 0.05 * np.linalg.norm(case.golden[name])


def test_the_module_is_a_vision_language_model(case):
    assert isinstance(case.module, VisionLanguageModel)


def paths(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def test_every_parameter_has_its_place_in_a_checkpoint(case):
    model = architecture(case.config, dtype="float32")
    shapes = paths(jax.eval_shape(model.initialise, jax.random.key(0))["params"])
    assert set(shapes) == set(model.tensors)
    for path, leaf in shapes.items():
        assert len(model.tensors[path].axes) == leaf.ndim, path
        assert bool(model.tensors[path].layers) == path.split("/")[1].startswith(("layers", "deepstack"))


def test_names_of_other_writers_are_read(case, tmp_path):
    """The prefixes of transformers 4, buffers, and an output layer that repeats the tied embedding."""
    family = case.module.config.family
    stored = load_file(GOLDEN / family / "model.safetensors")
    if family == "qwen2_5_vl":
        old, new = ("visual.", "model."), ("model.visual.", "model.language_model.")
    else:
        old, new = ("model.visual.", "model.language_model."), ("visual.", "language_model.")
        stored["lm_head.weight"] = stored["model.language_model.embed_tokens.weight"]
    renamed = {}
    for name, values in stored.items():
        prefix = next((i for i in range(2) if name.startswith(old[i])), None)
        renamed[name if prefix is None else new[prefix] + name.removeprefix(old[prefix])] = values
    renamed["visual.rotary_pos_emb.inv_freq"] = np.ones(2, np.float32)
    assert not set(renamed) & set(stored) - {"lm_head.weight"}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path).params, case.variables)


VISION_2_5 = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
QWEN_2_5 = {
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
}
VISION_3 = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TEXT_3 = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "vocab_size": 151936,
}


def structure(width, mlp, layers, heads):
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def qwen_2_5(width, mlp, layers, heads, kv_heads, vocabulary, tied):
    return (
        QWEN_2_5
        | structure(width, mlp, layers, heads)
        | {"num_key_value_heads": kv_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied}
        | {"vision_config": VISION_2_5 | {"out_hidden_size": width}}
    )


def qwen_3(width, mlp, layers, heads, tied, *, depth, vision_width, vision_mlp, deepstack):
    vision = {
        "depth": depth,
        "hidden_size": vision_width,
        "intermediate_size": vision_mlp,
        "out_hidden_size": width,
        "deepstack_visual_indexes": deepstack,
    }
    return {
        "model_type": "qwen3_vl",
        "text_config": TEXT_3 | structure(width, mlp, layers, heads),
        "vision_config": VISION_3 | vision,
        "tie_word_embeddings": tied,
    }


SMALL_TOWER = {"depth": 24, "vision_width": 1024, "vision_mlp": 4096, "deepstack": [5, 11, 17]}
LARGE_TOWER = {"depth": 27, "vision_width": 1152, "vision_mlp": 4304, "deepstack": [8, 16, 24]}
REAL = {
    "Qwen2.5-VL-3B": (qwen_2_5(2048, 11008, 36, 16, 2, 151936, True), 3754.6),
    "Qwen2.5-VL-7B": (qwen_2_5(3584, 18944, 28, 28, 4, 152064, False), 8292.2),
    "Qwen3-VL-2B": (qwen_3(2048, 6144, 28, 16, True, **SMALL_TOWER), 2127.5),
    "Qwen3-VL-4B": (qwen_3(2560, 9728, 36, 32, True, **SMALL_TOWER), 4437.8),
    "Qwen3-VL-8B": (qwen_3(4096, 12288, 36, 32, False, **LARGE_TOWER), 8767.1),
}


@pytest.mark.parametrize("name", REAL)
def test_the_real_models_have_their_size(name):
    config, millions = REAL[name]
    model = architecture(config, dtype="bfloat16")
    shapes = paths(jax.eval_shape(model.initialise, jax.random.key(0))["params"])
    assert set(shapes) == set(model.tensors)
    assert round(sum(math.prod(x.shape) for x in shapes.values()) / 1e6, 1) == millions


def test_a_long_clip_needs_little_memory():
    """15 frames of 1,104 patches: the logits of all patches with all would take 17 GB."""
    model = architecture(REAL["Qwen2.5-VL-3B"][0], dtype="float32")
    config = model.module.config
    grids = np.tile([1, 24, 46], (15, 1))
    images = vision_inputs(config, np.zeros((15 * 1104, config.vision.patch_values), np.float32), grids)
    variables = jax.eval_shape(model.initialise, jax.random.key(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), images)
    memory = encode.lower(model.module, variables, shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3e9


def test_both_layouts_of_config_json_say_the_same():
    flat = REAL["Qwen2.5-VL-7B"][0]
    text = {key: value for key, value in flat.items() if key not in ("model_type", "vision_config")}
    for name in ("rope_scaling", "rope_theta", "tie_word_embeddings"):
        del text[name]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    vision = {key: value for key, value in VISION_2_5.items() if key != "in_chans"}
    nested = {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": 3584, "in_channels": 3},
        "tie_word_embeddings": False,
    }
    expected = architecture(flat, dtype="float32").module.config
    assert architecture(json.loads(json.dumps(nested)), dtype="float32").module.config == expected
    tied = nested | {"text_config": text | {"tie_word_embeddings": True}}
    assert architecture(tied, dtype="float32").module.decoder_config.tied
