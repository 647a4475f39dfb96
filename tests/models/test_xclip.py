"""X-CLIP against PyTorch: tests/models/golden/make_xclip.py makes the folder and the numbers."""

import copy
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxreward.errors import ModelError
from jaxreward.models import weights, xclip
from jaxreward.models.encoder_layers import Attention, Encoder, EncoderLayer, unit_length
from jaxreward.models.xclip import XCLIP, XCLIPConfig, architecture

FOLDER = Path(__file__).parent / "golden" / "xclip"
CONFIG = json.loads((FOLDER / "config.json").read_text())
TOLERANCE = 1e-5  # relative to the largest absolute value
# almost all programs here run once: compiling them is what takes time
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def changed(tower=None, **fields):
    """The config with some fields changed, of one tower or at the top."""
    config = copy.deepcopy(CONFIG)
    (config[f"{tower}_config"] if tower else config).update(fields)
    return config


def module_of(config):
    return XCLIP(XCLIPConfig.from_dict(config))


MODULE = module_of(CONFIG)


def program(module, method):
    """A method, traced anew."""
    return compiled(functools.partial(module.apply, method=method))


def with_parameter(params, path, change):
    """The parameters with one of them changed."""
    flat = flatten_dict(params["params"], sep="/")
    return {"params": unflatten_dict(flat | {path: change(flat[path])}, sep="/")}


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
def outputs(params, golden):
    """What every module gave, and the logits."""
    run = compiled(functools.partial(MODULE.apply, capture_intermediates=True, mutable=["intermediates"]))
    logits, state = run(params, golden["videos"], golden["tokens"], golden["where"])
    return state["intermediates"] | {"logits": logits}


@pytest.fixture(scope="module")
def video_error(params, golden):
    """Error of the videos' embeddings; config, parameters and videos are the golden ones unless given."""
    unchanged = program(MODULE, "encode_video")

    def video_error(module=None, params=params, videos=golden["videos"]):
        found, _ = (program(module, "encode_video") if module else unchanged)(params, videos)
        return error(found, golden["integrated"])

    return video_error


@pytest.fixture(scope="module")
def prompt_error(params, golden, outputs):
    """Error of the prompted texts, given right texts and patches."""
    texts = jnp.asarray(golden["text_embeddings"])
    patches = jnp.mean(outputs["patch_projection"]["__call__"][0].reshape(2, 4, 9, 20), axis=1)

    unchanged = program(MODULE, "prompt")

    def prompt_error(module=None, params=params):
        found = (program(module, "prompt") if module else unchanged)(params, texts, patches)
        return error(unit_length(found), golden["prompted_embeddings"])

    return prompt_error


def test_every_parameter_is_stored_and_every_axis_named():
    made = architecture(CONFIG, dtype="bfloat16")
    shapes = jax.eval_shape(made.initialise, jax.random.key(0))
    flat = flatten_dict(shapes["params"], sep="/")
    assert set(flat) == set(made.tensors)
    for path, leaf in flat.items():
        assert len(made.tensors[path].axes) == leaf.ndim, path
        assert leaf.dtype == (jnp.float32 if path == "logit_scale" else jnp.bfloat16), path


def test_hidden_states_equal_pytorch(outputs, golden):
    for tower, first, name in (
        ("vision", "embedding_norm", "frame_hidden"),
        ("text", "embedding", "text_hidden"),
    ):
        layers = outputs[tower]["encoder"]["layers"]["__call__"][0][0]
        hidden = np.concatenate([outputs[tower][first]["__call__"][0][None], layers])
        assert error(hidden, golden[name]) < TOLERANCE


def test_embeddings_and_logits_equal_pytorch(outputs, golden, prompt_error):
    assert error(outputs["logits"], golden["logits"]) < TOLERANCE
    assert error(outputs["text_projection"]["__call__"][0], golden["text_embeddings"]) < TOLERANCE
    video = outputs["integration"]["__call__"][0]
    assert error(video, golden["integrated"]) < TOLERANCE
    assert error(unit_length(video), golden["video_embeddings"]) < TOLERANCE
    assert prompt_error() < TOLERANCE


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu"},
        {"num_attention_heads": 4},
        {"mit_num_attention_heads": 4},
    ],
)
def test_a_changed_vision_config_is_noticed(video_error, fields):
    assert video_error(module_of(changed("vision", **fields))) > 100 * TOLERANCE


def test_a_message_that_no_token_sees_is_noticed(video_error, monkeypatch):
    def encoder(config, layer=EncoderLayer, name=None):
        unseen = jnp.arange(11) < 10 if layer is xclip.MessageLayer else None
        return lambda hidden: Encoder(config, layer, name=name)(hidden, unseen)

    monkeypatch.setattr(xclip, "Encoder", encoder)
    assert video_error(MODULE) > 100 * TOLERANCE


def test_messages_that_stay_in_their_frame_are_noticed(video_error, monkeypatch):
    def attention(heads, dtype, name):
        return lambda x, context: Attention(heads, dtype, name=name)(x, context, jnp.eye(4, dtype=bool))

    monkeypatch.setattr(xclip, "Attention", attention)
    assert video_error(MODULE) > 100 * TOLERANCE


def test_the_order_of_frames_and_positions_matter(video_error, golden, params):
    assert video_error(videos=golden["videos"][:, ::-1]) > 100 * TOLERANCE
    for change in (jnp.zeros_like, lambda positions: jnp.roll(positions, 1, axis=0)):
        assert video_error(params=with_parameter(params, "integration/positions", change)) > 100 * TOLERANCE


def test_changed_prompts_are_noticed(prompt_error, params, golden):
    assert prompt_error(module_of(changed(prompt_hidden_act="gelu"))) > 100 * TOLERANCE
    assert prompt_error(module_of(changed(prompt_num_attention_heads=2))) > 100 * TOLERANCE
    assert prompt_error(params=with_parameter(params, "prompts/alpha", jnp.ones_like)) > 100 * TOLERANCE
    assert (
        prompt_error(params=with_parameter(params, "prompts/layers/attention/key/kernel", lambda k: k[::-1]))
        > 100 * TOLERANCE
    )
    unprompted = unit_length(jnp.broadcast_to(golden["text_embeddings"], (2, 3, 20)))
    assert error(unprompted, golden["prompted_embeddings"]) > 100 * TOLERANCE
    # texts differ from video to video, so none can be kept from one to the next
    assert error(golden["prompted_embeddings"][:1], golden["prompted_embeddings"][1:]) > 100 * TOLERANCE


def test_texts_pool_at_the_highest_id_whatever_the_config_says():
    assert XCLIPConfig.from_dict(changed("text", eos_token_id=49407)).text.end_token is None


def test_every_parameter_matters(params, golden):
    """The derivative of the logits along every parameter is far from zero; a key's bias alone cancels."""

    def loss(params):
        logits = MODULE.apply(params, golden["videos"], golden["tokens"], golden["where"])
        return jnp.sum(logits * jnp.cos(jnp.arange(logits.size)).reshape(logits.shape))

    gradients = flatten_dict(compiled(jax.grad(loss))(params)["params"], sep="/")
    values = flatten_dict(params["params"], sep="/")
    for path, gradient in gradients.items():
        effect = float(jnp.linalg.norm(gradient) * jnp.linalg.norm(values[path]))
        assert effect < 1e-4 if path.endswith("key/bias") else effect > 1e-2, (path, effect)


def test_the_hubs_base_model_has_as_many_parameters():
    hub = {
        "model_type": "xclip",
        "projection_dim": 512,
        "vision_config": {"patch_size": 32, "num_frames": 8},
    }
    shapes = jax.eval_shape(architecture(hub, dtype="float32").initialise, jax.random.key(0))
    # xclip-base-patch32 has 196.6 million
    assert round(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6, 1) == 196.6


def test_videos_of_another_length_are_refused(params, golden):
    encode = functools.partial(MODULE.apply, params, method="encode_video")
    with pytest.raises(ModelError, match=r"X-CLIP reads \[V, 4, H, W, 3\]: sample 4 frames of each"):
        encode(golden["videos"][:, :3])
    with pytest.raises(ModelError, match="X-CLIP reads"):
        encode(golden["videos"][0])
    with pytest.raises(ModelError, match=r"this model reads \[N, 12, 12, 3\]"):
        encode(golden["videos"][:, :, :8])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("vision", mit_hidden_size=24), "vision_config.mit_hidden_size is 24; projection_dim 20 was"),
        (
            changed(prompt_num_attention_heads=3),
            "prompt_num_attention_heads is 3; a divisor of projection_dim",
        ),
        (changed("vision", num_frames=0), "vision_config.num_frames is 0; an integer of at least 1"),
        (
            changed("vision", mit_num_attention_heads=3),
            "mit_num_attention_heads is 3; a divisor of the width",
        ),
    ],
)
def test_a_wrong_field_is_named(config, message):
    with pytest.raises(ModelError) as caught:
        XCLIPConfig.from_dict(config)
    assert message in str(caught.value)
