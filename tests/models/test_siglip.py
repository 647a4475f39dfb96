"""SigLIP and SigLIP 2 against PyTorch: tests/models/golden/make_siglip*.py make the folders and numbers."""

import copy
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxreward.errors import ModelError
from jaxreward.models import siglip, weights
from jaxreward.models.encoder_layers import Encoder, unit_length
from jaxreward.models.siglip import SigLIP, SigLIPConfig, architecture, resample_positions

FOLDERS = {name: Path(__file__).parent / "golden" / name for name in ("siglip", "siglip2")}
CONFIGS = {name: json.loads((folder / "config.json").read_text()) for name, folder in FOLDERS.items()}
TOLERANCE = 1e-5  # relative to the largest absolute value
# almost all programs here run once: compiling them is what takes time
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
FAMILIES = pytest.mark.parametrize("family", FOLDERS)


def changed(family, tower, **fields):
    """The config with some fields of one tower changed."""
    config = copy.deepcopy(CONFIGS[family])
    config[f"{tower}_config"].update(fields)
    return config


def program(config):
    """`encode_image` of a config."""
    module = SigLIP(SigLIPConfig.from_dict(config))
    return compiled(functools.partial(module.apply, method="encode_image"))


def with_parameter(params, path, change):
    """The parameters with one of them changed."""
    flat = flatten_dict(params["params"], sep="/")
    return {"params": unflatten_dict(flat | {path: change(flat[path])}, sep="/")}


def error(found, golden, where=...):
    """Largest difference, relative to the largest absolute value."""
    assert found.shape == golden.shape
    return np.abs(np.asarray(found) - golden)[where].max() / np.abs(golden[where]).max()


def images_of(golden):
    """The arguments of `encode_image`."""
    return (
        (golden["images"],) if "images" in golden else (golden["patches"], golden["where"], golden["shapes"])
    )


@pytest.fixture(scope="module", autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def golden():
    return {name: dict(np.load(folder / "golden.npz")) for name, folder in FOLDERS.items()}


@pytest.fixture(scope="module")
def params():
    return {name: weights.load(folder).params for name, folder in FOLDERS.items()}


@pytest.fixture(scope="module")
def image_error(params, golden):
    """Error of the images' embeddings; parameters and inputs are the golden ones unless given.

    A config, or `traced_anew`, has the program traced anew.
    """
    unchanged = {family: program(config) for family, config in CONFIGS.items()}

    def image_error(family, config=None, traced_anew=False, params=params, **inputs):
        anew = config or traced_anew
        encode = program(config or CONFIGS[family]) if anew else unchanged[family]
        found = encode(params[family], *images_of(golden[family] | inputs))
        return error(found, golden[family]["image_embeddings"])

    return image_error


@FAMILIES
def test_every_parameter_is_stored_and_every_axis_named(family):
    made = architecture(CONFIGS[family], dtype="bfloat16")
    shapes = jax.eval_shape(made.initialise, jax.random.key(0))
    flat = flatten_dict(shapes["params"], sep="/")
    assert set(flat) == set(made.tensors)
    for path, leaf in flat.items():
        assert len(made.tensors[path].axes) == leaf.ndim, path
        assert leaf.dtype == (jnp.float32 if path.startswith("logit") else jnp.bfloat16), path


@FAMILIES
def test_hidden_states_embeddings_and_logits_equal_pytorch(params, golden, family):
    module = SigLIP(SigLIPConfig.from_dict(CONFIGS[family]))
    numbers = golden[family]
    images, *shapes = images_of(numbers)
    run = compiled(functools.partial(module.apply, capture_intermediates=True, mutable=["intermediates"]))
    logits, state = run(params[family], images, numbers["tokens"], *shapes)
    outputs = state["intermediates"]
    assert error(logits, numbers["logits"]) < TOLERANCE
    assert error(outputs["vision"]["__call__"][0], numbers["image_embeddings"]) < TOLERANCE
    assert error(outputs["text"]["__call__"][0], numbers["text_embeddings"]) < TOLERANCE
    for tower, name in (("vision", "image_hidden"), ("text", "text_hidden")):
        layers = outputs[tower]["encoder"]["layers"]["__call__"][0][0]
        hidden = np.concatenate([outputs[tower]["embedding"]["__call__"][0][None], layers])
        assert error(hidden, numbers[name]) < TOLERANCE


def test_positions_are_resampled_as_pytorch_does(params, golden):
    table = params["siglip2"]["params"]["vision"]["embedding"]["positions"].reshape(6, 6, 24)
    shapes = golden["siglip2"]["resampling_shapes"]
    found = resample_positions(table, shapes, 40)
    parts = [part[: rows * columns] for part, (rows, columns) in zip(found, shapes, strict=True)]
    assert error(np.concatenate(parts), golden["siglip2"]["resampled"]) < TOLERANCE
    np.testing.assert_allclose(found[0, :36], table.reshape(36, 24), atol=1e-6)  # its own shape


TABLE = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
resample_table = jax.jit(lambda shapes: resample_positions(jnp.asarray(TABLE)[..., None], shapes, 256))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 256).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, 256 // rows))))
def test_positions_are_resampled_as_pillow_does(shape):
    rows, columns = shape
    found = resample_table(jnp.asarray([shape], jnp.int32))[0, : rows * columns, 0]
    resized = Image.fromarray(TABLE).resize((columns, rows), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(found, np.asarray(resized).reshape(-1), atol=1e-5)


def test_shapes_are_data_and_an_empty_image_is_finite():
    before = resample_table._cache_size()
    shapes = jnp.asarray([[0, 0]], jnp.int32)
    assert np.isfinite(resample_table(shapes)).all()
    resample_table(jnp.asarray([[3, 5]], jnp.int32))
    assert resample_table._cache_size() <= max(before, 1)


@FAMILIES
@pytest.mark.parametrize(
    "fields", [{"hidden_act": "quick_gelu"}, {"num_attention_heads": 4}, {"layer_norm_eps": 0.1}]
)
def test_a_changed_vision_config_is_noticed(image_error, family, fields):
    assert image_error(family, changed(family, "vision", **fields)) > 100 * TOLERANCE


def test_exact_gelu_and_its_approximation_differ(image_error):
    # by 5e-4 at most, in an MLP's inner values
    assert image_error("siglip2", changed("siglip2", "vision", hidden_act="gelu")) > 5 * TOLERANCE


def test_a_padding_mask_dropped_in_the_encoder_is_noticed(image_error, monkeypatch):
    monkeypatch.setattr(
        siglip, "Encoder", lambda config, name: lambda hidden, mask: Encoder(config, name=name)(hidden)
    )
    assert image_error("siglip2", traced_anew=True) > 100 * TOLERANCE


def test_a_padding_mask_dropped_in_the_head_is_noticed(image_error, monkeypatch):
    attend = siglip.attend
    monkeypatch.setattr(siglip, "attend", lambda query, key, value, where: attend(query, key, value, None))
    assert image_error("siglip2", traced_anew=True) > 100 * TOLERANCE


def test_aligned_corners_are_noticed(image_error, monkeypatch):
    def aligned(size, index, grid):
        size = size.astype(jnp.float32)[:, None]
        centre = index * (grid - 1) / jnp.maximum(size - 1, 1)
        weights = jnp.maximum(1 - jnp.abs(jnp.arange(grid) - centre[..., None]), 0)
        return weights / jnp.sum(weights, -1, keepdims=True)

    monkeypatch.setattr(siglip, "resampling_weights", aligned)
    assert image_error("siglip2", traced_anew=True) > 100 * TOLERANCE


def test_resampling_without_antialiasing_is_noticed(image_error, monkeypatch):
    def sharp(size, index, grid):
        centre = jnp.clip((index + 0.5) * grid / size[:, None] - 0.5, 0, grid - 1)
        return jnp.maximum(1 - jnp.abs(jnp.arange(grid) - centre[..., None]), 0)

    monkeypatch.setattr(siglip, "resampling_weights", sharp)
    assert image_error("siglip2", traced_anew=True) > 100 * TOLERANCE


def test_swapped_rows_and_columns_are_noticed(image_error, golden):
    assert image_error("siglip2", shapes=golden["siglip2"]["shapes"][:, ::-1]) > 100 * TOLERANCE
    assert image_error("siglip", images=golden["siglip"]["images"].swapaxes(1, 2)) > 100 * TOLERANCE


def test_the_packed_projection_is_queries_then_keys_then_values(image_error, params):
    def rotated(kernel):
        return jnp.roll(kernel, 24, axis=-1)

    path = "vision/head/query_key_value/kernel"
    assert (
        image_error("siglip", params={"siglip": with_parameter(params["siglip"], path, rotated)})
        > 100 * TOLERANCE
    )


def test_a_text_mask_and_another_pooled_position_are_noticed(params, golden):
    module, numbers = SigLIP(SigLIPConfig.from_dict(CONFIGS["siglip"])), golden["siglip"]
    encode = compiled(functools.partial(module.apply, method="encode_text"))
    everywhere = np.ones(numbers["tokens"].shape, bool)
    masked = everywhere.copy()
    masked[:, 3] = False
    plain = encode(params["siglip"], numbers["tokens"], everywhere)
    assert error(plain, numbers["text_embeddings"]) < TOLERANCE
    assert (
        error(encode(params["siglip"], numbers["tokens"], masked), numbers["text_embeddings"])
        > 100 * TOLERANCE
    )
    rolled = encode(params["siglip"], np.roll(numbers["tokens"], 1, axis=1), everywhere)
    assert error(rolled, numbers["text_embeddings"]) > 100 * TOLERANCE


def test_padding_patches_change_nothing(image_error, golden):
    numbers = golden["siglip2"]
    noisy = np.where(numbers["where"][..., None], numbers["patches"], 7.0)
    assert image_error("siglip2", patches=noisy) < TOLERANCE


def test_cosine_similarity_under_jit_vmap_and_grad(params, golden):
    """Its derivative along every parameter is far from zero, but for keys' biases, which cancel."""
    module, numbers = SigLIP(SigLIPConfig.from_dict(CONFIGS["siglip2"])), golden["siglip2"]

    def cosine(params, patches, where, shape):
        image = module.apply(params, patches[None], where[None], shape[None], method="encode_image")
        text = module.apply(params, numbers["tokens"][:1], method="encode_text")
        return jnp.sum(unit_length(image) * unit_length(text))

    of_parameters_and_patches = jax.value_and_grad(cosine, argnums=(0, 1))
    run = compiled(jax.vmap(of_parameters_and_patches, in_axes=(None, 0, 0, 0)))
    values, (gradients, patch_gradients) = run(params["siglip2"], *images_of(numbers))
    np.testing.assert_allclose(values, (numbers["logits"][:, 0] + 0.7) / np.exp(1.3), atol=1e-5)
    norms = jnp.linalg.norm(patch_gradients, axis=-1)
    assert (norms[numbers["where"]] > 0).all()
    assert (norms[~numbers["where"]] == 0).all()
    parameters = flatten_dict(params["siglip2"]["params"], sep="/")
    for path, gradient in flatten_dict(gradients["params"], sep="/").items():
        if not path.startswith("logit"):
            effect = float(jnp.linalg.norm(gradient) * jnp.linalg.norm(parameters[path]))
            assert effect < 1e-4 if path.endswith("key/bias") else effect > 1e-2, (path, effect)


def test_hub_configs_with_few_fields():
    fixed = SigLIPConfig.from_dict(
        {"model_type": "siglip", "vision_config": {"image_size": 384, "patch_size": 14}}
    )
    assert (fixed.vision.grid, fixed.vision.resolution, fixed.text.positions) == (27, 384, 64)
    hub = {"model_type": "siglip2", "text_config": {"vocab_size": 256000}}
    naflex = SigLIPConfig.from_dict(hub)
    assert (naflex.vision.grid, naflex.vision.resolution, naflex.vision.patch) == (16, None, 16)
    shapes = jax.eval_shape(architecture(hub, dtype="float32").initialise, jax.random.key(0))
    # siglip2-base has 375 million, most of them embeddings of the 256,000 tokens
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) // 10**6 == 375


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("siglip2", "vision", num_patches=35), "vision_config.num_patches is 35; a square number"),
        (changed("siglip", "vision", image_size=3), "vision_config.image_size is 3; at least patch_size 4"),
        (
            changed("siglip", "vision", vision_use_head=False),
            "vision_use_head is False; true: without its head",
        ),
        (
            changed("siglip", "text", projection_size=32),
            "text_config.projection_size is 32; the width of the",
        ),
        (CONFIGS["siglip"] | {"model_type": "clip"}, "model_type is 'clip'; one of siglip, siglip2"),
    ],
)
def test_a_wrong_field_is_named(config, message):
    with pytest.raises(ModelError) as caught:
        SigLIPConfig.from_dict(config)
    assert message in str(caught.value)


def test_wrong_inputs_are_refused(params, golden):
    fixed = SigLIP(SigLIPConfig.from_dict(CONFIGS["siglip"]))
    naflex = SigLIP(SigLIPConfig.from_dict(CONFIGS["siglip2"]))
    patches, where, shapes = images_of(golden["siglip2"])
    with pytest.raises(ModelError, match="exactly 12 positions, as in its training: pad or shorten"):
        fixed.apply(params["siglip"], jnp.zeros((1, 11), jnp.int32), method="encode_text")
    with pytest.raises(ModelError, match=r"give images \[N, 18, 18, 3\] alone"):
        fixed.apply(params["siglip"], patches, where, shapes, method="encode_image")
    with pytest.raises(ModelError, match=r"this model reads \[N, 18, 18, 3\]"):
        fixed.apply(params["siglip"], golden["siglip"]["images"][:, :16], method="encode_image")
    for wrong in (
        (patches,),
        (patches[..., :40], where, shapes),
        (golden["siglip"]["images"], where, shapes),
    ):
        with pytest.raises(ModelError, match=r"NaFlex reads patches \[N, L, 48\]"):
            naflex.apply(params["siglip2"], *wrong, method="encode_image")
