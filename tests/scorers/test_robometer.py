"""Robometer on a tiny random backbone: both layouts of its files, heads against float64 NumPy."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import scipy.special
from flax import traverse_util

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models import weights
from jaxreward.models.tokenizer import load_tokenizer, render_chat
from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scorer
from jaxreward.scorers.robometer import Robometer

KEY = jax.random.key(0)
FRAMES = np.random.default_rng(0).integers(0, 256, (10, 24, 32, 3), np.uint8)
ADDED = ("<|split_token|>", "<|reward_token|>", "<|pref_token|>", "<|sim_token|>", "<|prog_token|>")
TASK = "Open the <|prog_token|> drawer."


@pytest.fixture(scope="module", params=[10, 1])
def folder(tiny_chat_folder, tmp_path_factory, request):
    """The authors' layout: the backbone's config.json, no output layer, heads beside 'model.'."""
    base = tmp_path_factory.mktemp("backbone") / "qwen"
    shutil.copytree(tiny_chat_folder, base)
    tokenizer = load_tokenizer(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED)}, False)
    tokenizer.save_pretrained(base)
    backbone = weights.read_config(base)
    backbone["text_config"]["vocab_size"] = max(448, max(tokenizer.get_vocab().values()) + 1)
    config = {"model_type": "robometer", "vlm_config": backbone, "progress_bins": request.param}
    architecture = weights.build(config)
    rng = np.random.default_rng(3)
    params = {
        tuple(path.split("/")): (0.2 * rng.normal(size=s.shape) + path.endswith("scale")).astype("float32")
        for path, s in weights.parameter_shapes(architecture).items()
    }
    made = weights.Model(architecture, config, {"params": traverse_util.unflatten_dict(params)}, base)
    saved = tmp_path_factory.mktemp("saved") / "robometer"
    weights.save(saved, made)
    (saved / "config.json").write_text(json.dumps(backbone))
    return saved


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def head(tensors, name, hidden):
    """torch.nn.Sequential(Linear, LayerNorm, GELU, Dropout, Linear) in float64."""
    part = {key: tensors[f"{name}_head.{key}"].astype(np.float64) for key in
            ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")}  # fmt: skip
    x = hidden @ part["0.weight"].T + part["0.bias"]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * part["1.weight"] + part["1.bias"]
    x = 0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2)))
    return x @ part["4.weight"].T + part["4.bias"]


def hidden_at(scorer, chats, frames, token):
    """Hidden states at a token, from a whole forward pass without buckets, float64 [n, H]."""
    chat = scorer.chat_model
    params = chat.model.params
    batch, features = chat.prompts(params, chats, frames, add_generation_prompt=False)

    def run(module):
        embeddings, extra = module.embed(batch.tokens, batch.image_rows, features)
        return module(embeddings, batch.positions, batch.where, extra=extra)[0]

    hidden = np.asarray(chat.module.apply(params, method=run), np.float64)
    return hidden[batch.tokens == chat.tokenizer.convert_tokens_to_ids(token)]


def test_progress_and_success_of_every_frame(folder):
    scorer, tensors = Robometer.load(folder), tensors_of(folder)
    assert isinstance(scorer, Scorer)
    params = scorer.chat_model.model.params
    where = np.array([[True] * 3 + [False], [True] * 4, [False] * 4])
    frames = np.stack([FRAMES[:4], FRAMES[4:8], FRAMES[:4]])
    scores = scorer.score(params, scorer.prepare(params, TASK), frames, where, KEY)
    assert scores.values.shape == (3, 4) and not np.any(np.asarray(scores.values)[~where])
    assert bool(scores.valid.all()) and not np.any(scores.tokens)
    success = Robometer(scorer.chat_model, output="success").score(params, TASK, frames, where, KEY)
    for row, count in ((0, 3), (1, 4)):
        chats = [prompts.robometer_progress(TASK, count)]
        hidden = hidden_at(scorer, chats, frames[row, :count], "<|prog_token|>")
        # The task spells the token, too; only those behind the pictures count.
        assert len(hidden) == count
        out = head(tensors, "progress", hidden)
        bins = out.shape[1]
        expected = (
            scipy.special.expit(out[:, 0])
            if bins == 1
            else scipy.special.softmax(out, axis=1) @ np.linspace(0, 1, bins)
        )
        np.testing.assert_allclose(scores.values[row, :count], expected, rtol=1e-4)
        assert np.ptp(expected) > 1e-3
        out = head(tensors, "success", hidden)[:, 0]
        np.testing.assert_allclose(success.values[row, :count], scipy.special.expit(out), rtol=1e-4)


def test_preference_of_two_videos(folder):
    scorer = Robometer.load(folder)
    params = scorer.chat_model.model.params
    found = scorer.preference(params, TASK, FRAMES[:2], FRAMES[2:5])
    chats = [prompts.robometer_preference(TASK, 2, 3)]
    (hidden,) = hidden_at(scorer, chats, FRAMES[:5], "<|pref_token|>")
    (logit,) = head(tensors_of(folder), "preference", hidden)
    np.testing.assert_allclose(found, scipy.special.expit(logit), rtol=1e-4)
    assert abs(found - scorer.preference(params, TASK, FRAMES[2:5], FRAMES[:2])) > 1e-4


def test_long_videos_are_shown_in_part_and_interpolated(folder):
    chat = Robometer.load(folder).chat_model
    scorer, params = Robometer(chat, max_frames=4), chat.model.params
    where = np.ones((1, 10), bool)
    values = np.asarray(scorer.score(params, TASK, FRAMES[None], where, KEY).values)[0]
    shown = np.asarray(scorer.score(params, TASK, FRAMES[None, [0, 3, 6, 9]], where[:, :4], KEY).values)[0]
    np.testing.assert_allclose(values, np.interp(np.arange(10), [0, 3, 6, 9], shown), rtol=1e-5)


def test_the_prompt_is_that_of_qwens_template_with_numbered_pictures(folder):
    scorer = Robometer.load(folder)
    text = render_chat(
        scorer.chat_model.tokenizer, prompts.robometer_progress("Push.", 2),
        image_token="<|image_pad|>", add_generation_prompt=False,
    )  # fmt: skip
    image = "<|vision_start|><|image_pad|><|vision_end|><|prog_token|>"
    assert f"predict 0 progress.Picture 1: {image}Picture 2: {image}<|im_end|>" in text
    assert text.count("The task for the robot is 'Push.'.") == 1


def test_lerobots_layout_and_our_own_hold_the_same(folder, tmp_path):
    first = Robometer.load(folder)
    lerobot = tmp_path / "lerobot"
    shutil.copytree(folder, lerobot)
    tensors = {
        ("model." + name if name.startswith("model.") else name): array
        for name, array in tensors_of(folder).items()
    }
    width = tensors["progress_head.0.weight"].shape[1]
    tensors["model.lm_head.weight"] = np.zeros((448, width), np.float32)
    tensors["frame_pool_attn.weight"] = np.zeros((1, width), np.float32)
    safetensors.numpy.save_file(tensors, lerobot / "model.safetensors")
    config = {
        "type": "robometer",
        "vlm_config": weights.read_config(folder),
        "progress_loss_type": "discrete",
    }
    (lerobot / "config.json").write_text(json.dumps(config))
    weights.save(tmp_path / "own", first.chat_model.model)
    for other in (lerobot, tmp_path / "own"):
        same = Robometer.load(other)
        jax.tree.map(
            np.testing.assert_array_equal, same.chat_model.model.params, first.chat_model.model.params
        )


def test_folders_that_are_no_robometer(folder, tiny_chat_folder, tmp_path):
    with pytest.raises(ModelError, match=r"progress_head\.4\.weight"):
        Robometer.load(tiny_chat_folder)
    wrong = tmp_path / "wrong"
    shutil.copytree(folder, wrong)
    tensors = tensors_of(folder)
    for change, words in (
        ({"success_head.1.weight": None}, r"missing success_head\.1\.weight"),
        ({"success_head.1.bias": np.zeros(3, np.float32)}, r"success_head\.1\.bias is \[3\] instead of"),
        ({"reward_head.weight": np.zeros(3, np.float32)}, r"unexpected reward_head\.weight"),
    ):
        changed = {name: array for name, array in {**tensors, **change}.items() if array is not None}
        safetensors.numpy.save_file(changed, wrong / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            Robometer.load(wrong)
    safetensors.numpy.save_file(tensors, wrong / "model.safetensors")
    for file in tiny_chat_folder.glob("*token*"):
        shutil.copy(file, wrong)
    with pytest.raises(ModelError, match=r"tokenizer without <\|prog_token\|>"):
        Robometer.load(wrong)
    with pytest.raises(ConfigError, match="max_frames 1 found"):
        Robometer(Robometer.load(folder).chat_model, max_frames=1)
