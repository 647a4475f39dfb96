"""CLIP against PyTorch: tests/models/golden/make_clip.py makes the folder and the numbers."""

import copy
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxreward.errors import ModelError
from jaxreward.models import clip, encoder_layers, weights
from jaxreward.models.clip import CLIP, CLIPConfig, architecture
from jaxreward.models.encoder_layers import image_to_patches, text_mask, unit_length

FOLDER = Path(__file__).parent / "golden" / "clip"
CONFIG = json.loads((FOLDER / "config.json").read_text())
TOLERANCE = 1e-5  # relative to the largest absolute value
# almost all programs here run once: compiling them is what takes time
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def changed(tower, **fields):
    """The config with some fields of one tower changed."""
    config = copy.deepcopy(CONFIG)
    config[f"{tower}_config"].update(fields)
    return config


def error(found, golden, where=...):
    """Largest difference, relative to the largest absolute value."""
    assert found.shape == golden.shape
    return np.abs(np.asarray(found) - golden)[where].max() / np.abs(golden[where]).max()


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
    """Error of one tower's embeddings; config and inputs are the golden ones unless given."""

    def compare(tower, config=CONFIG, **inputs):
        given = golden | inputs
        module = CLIP(CLIPConfig.from_dict(config))
        if tower == "vision":
            found = compiled(lambda p, x: module.apply(p, x, method="encode_image"))(params, given["images"])
            return error(found, given["image_embeddings"])
        encode = compiled(lambda p, x, where: module.apply(p, x, where, method="encode_text"))
        return error(encode(params, given["tokens"], given["where"]), given["text_embeddings"])

    return compare


def test_every_parameter_is_stored_and_every_axis_named():
    made = architecture(CONFIG, dtype="bfloat16")
    shapes = jax.eval_shape(made.initialise, jax.random.key(0))
    flat = flatten_dict(shapes["params"], sep="/")
    assert set(flat) == set(made.tensors)
    for path, leaf in flat.items():
        assert len(made.tensors[path].axes) == leaf.ndim, path
        assert leaf.dtype == (jnp.float32 if path == "logit_scale" else jnp.bfloat16), path


def test_hidden_states_embeddings_and_logits_equal_pytorch(params, golden):
    module = CLIP(CLIPConfig.from_dict(CONFIG))
    run = compiled(functools.partial(module.apply, capture_intermediates=True, mutable=["intermediates"]))
    logits, state = run(params, golden["images"], golden["tokens"], golden["where"])
    outputs = state["intermediates"]
    assert error(logits, golden["logits"]) < TOLERANCE
    assert error(outputs["image_projection"]["__call__"][0], golden["image_embeddings"]) < TOLERANCE
    assert error(outputs["text_projection"]["__call__"][0], golden["text_embeddings"]) < TOLERANCE
    for tower, first, name, where in (
        ("vision", "embedding_norm", "image_hidden", ...),
        ("text", "embedding", "text_hidden", (slice(None), golden["where"])),
    ):
        layers = outputs[tower]["encoder"]["layers"]["__call__"][0][0]
        hidden = np.concatenate([outputs[tower][first]["__call__"][0][None], layers])
        assert error(hidden, golden[name], where) < TOLERANCE


def test_end_token_2_means_the_highest_id(compare, golden):
    expected = golden["legacy_text_embeddings"]
    assert error(golden["text_embeddings"], expected) > 100 * TOLERANCE
    assert compare("text", changed("text", eos_token_id=2), text_embeddings=expected) < TOLERANCE


@pytest.mark.parametrize(
    ("tower", "fields"),
    [
        ("text", {"hidden_act": "gelu"}),
        ("text", {"num_attention_heads": 2}),
        ("text", {"eos_token_id": 511}),
        ("text", {"layer_norm_eps": 0.1}),
        ("vision", {"hidden_act": "quick_gelu"}),
        ("vision", {"num_attention_heads": 4}),
    ],
)
def test_a_changed_config_is_noticed(compare, tower, fields):
    assert compare(tower, changed(tower, **fields)) > 100 * TOLERANCE


def test_a_dropped_causal_mask_is_noticed(compare, monkeypatch):
    monkeypatch.setattr(
        clip, "text_mask", lambda where, length, causal: text_mask(where, length, causal=False)
    )
    assert compare("text") > 100 * TOLERANCE


def test_a_dropped_padding_mask_is_noticed(compare, golden):
    assert compare("text", where=np.ones_like(golden["where"])) > 100 * TOLERANCE


def test_swapped_image_axes_are_noticed(compare, golden):
    assert compare("vision", images=golden["images"].swapaxes(1, 2)) > 100 * TOLERANCE


def test_channels_last_patches_are_noticed(compare, monkeypatch):
    def channels_last(images, size):
        patches = image_to_patches(images, size)
        return patches.reshape(*patches.shape[:2], 3, -1).swapaxes(-1, -2).reshape(patches.shape)

    monkeypatch.setattr(clip, "image_to_patches", channels_last)
    assert compare("vision") > 100 * TOLERANCE


def test_swapped_queries_and_keys_are_noticed(compare, monkeypatch):
    attend = encoder_layers.attend
    monkeypatch.setattr(encoder_layers, "attend", lambda q, k, v, where: attend(k, q, v, where))
    assert min(compare("vision"), compare("text")) > 100 * TOLERANCE


def test_cosine_similarity_under_jit_vmap_and_grad(params, golden):
    """Its derivative along every parameter is far from zero, but for keys' biases, which cancel."""
    module = CLIP(CLIPConfig.from_dict(CONFIG))

    def cosine(params, image):
        embedding = module.apply(params, image[None], method="encode_image")
        text = module.apply(params, golden["tokens"][:1], golden["where"][:1], method="encode_text")
        return jnp.sum(unit_length(embedding) * unit_length(text))

    run = compiled(jax.vmap(jax.value_and_grad(cosine, argnums=(0, 1)), in_axes=(None, 0)))
    images = jnp.asarray(golden["images"])
    values, (gradients, image_gradients) = run(params, images)
    np.testing.assert_allclose(values, golden["logits"][:, 0] / np.exp(1.3), atol=1e-5)
    # along the gradient the similarity rises as fast as the gradient says
    slopes = jnp.linalg.norm(image_gradients.reshape(3, -1), axis=1)
    step = 1e-2 * image_gradients / slopes[:, None, None, None]
    higher, lower = run(params, images + step)[0], run(params, images - step)[0]
    np.testing.assert_allclose((higher - lower) / 2e-2, slopes, rtol=2e-2)
    parameters = flatten_dict(params["params"], sep="/")
    for path, gradient in flatten_dict(gradients["params"], sep="/").items():
        if path != "logit_scale":
            effect = float(jnp.linalg.norm(gradient) * jnp.linalg.norm(parameters[path]))
            assert effect < 1e-4 if path.endswith("key/bias") else effect > 1e-2, (path, effect)


def test_bfloat16_stays_near_float32(golden):
    model = weights.load(FOLDER, dtype="bfloat16")
    encode = compiled(lambda p, x: model.architecture.module.apply(p, x, method="encode_image"))
    found = encode(model.params, golden["images"])
    assert found.dtype == jnp.bfloat16
    cosine = np.sum(unit_length(found) * unit_length(jnp.asarray(golden["image_embeddings"])), axis=-1)
    assert cosine.min() > 0.999


def test_the_buffers_of_old_checkpoints_are_ignored(params, tmp_path):
    stored = load_file(FOLDER / "model.safetensors")
    for tower, length in (("text", 16), ("vision", 17)):
        stored[f"{tower}_model.embeddings.position_ids"] = np.arange(length)[None]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path).params, params)


def test_a_hub_config_with_few_fields_is_vit_b_32():
    hub = {
        "model_type": "clip",
        "projection_dim": 512,
        "text_config": {"eos_token_id": 2, "hidden_size": 999},
        "text_config_dict": None,
        "vision_config": {"patch_size": 99},
        "vision_config_dict": {"patch_size": 32},
    }
    config = CLIPConfig.from_dict(hub | {"text_config": {"eos_token_id": 2}})
    assert (config.text.encoder.width, config.text.encoder.heads, config.text.end_token) == (512, 8, None)
    assert (config.vision.encoder.width, config.vision.patch, config.vision.resolution) == (768, 32, 224)
    shapes = jax.eval_shape(
        architecture(hub | {"text_config": {}}, dtype="float32").initialise, jax.random.key(0)
    )
    # 151,277,313 parameters: the count that OpenAI's ViT-B/32 has
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 151_277_313


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("text", hidden_size="32"), "text_config.hidden_size is '32'; an integer of at least 1"),
        (
            changed("text", num_attention_heads=5),
            "text_config.num_attention_heads is 5; a divisor of the width 32",
        ),
        (changed("vision", hidden_act="mish"), "vision_config.hidden_act is 'mish'; one of gelu, "),
        (changed("vision", patch_size=17), "vision_config.image_size is 16; at least patch_size 17"),
        (changed("vision", num_channels=1), "vision_config.num_channels is 1; 3 was expected"),
        (changed("vision", layer_norm_eps=True), "vision_config.layer_norm_eps is True; a number"),
        (CONFIG | {"text_config": [1]}, "text_config is [1]; a JSON object was expected"),
        (CONFIG | {"projection_dim": 0}, "projection_dim is 0; an integer of at least 1"),
    ],
)
def test_a_wrong_field_is_named(config, message):
    with pytest.raises(ModelError) as caught:
        CLIPConfig.from_dict(config)
    assert message in str(caught.value)


def test_wrong_inputs_are_refused(params, golden):
    module = CLIP(CLIPConfig.from_dict(CONFIG))
    with pytest.raises(ModelError, match="a text of 17 tokens found; this model reads 16 at most"):
        module.apply(params, jnp.zeros((1, 17), jnp.int32), method="encode_text")
    with pytest.raises(ModelError, match=r"images of shape \(3, 3, 16, 16\) found"):
        module.apply(params, golden["images"].transpose(0, 3, 1, 2), method="encode_image")
