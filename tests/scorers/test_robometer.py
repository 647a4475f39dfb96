"""Robometer on a tiny random backbone: both layouts of its files, heads against float64 NumPy."""

import functools
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
from jaxreward.models.generate import Buckets
from jaxreward.models.tokenizer import load_tokenizer, render_chat
from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scorer
from jaxreward.scorers.robometer import Robometer

KEY = jax.random.key(0)
FRAMES = np.random.default_rng(0).integers(0, 256, (10, 24, 32, 3), np.uint8)
ADDED = ("<|split_token|>", "<|reward_token|>", "<|pref_token|>", "<|sim_token|>", "<|prog_token|>")
TASK = "Open the <|prog_token|> drawer."
SIZES = Buckets(prompts=(2,), prompt_tokens=(384, 640))
EMBEDDING = "model.language_model.embed_tokens.weight"
# What Qwen3-VL's template does with images and `add_vision_id`.
TEMPLATE = (
    "{%- set images = namespace(value=0) -%}{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content -%}"
    "{%- if part.type == 'image' -%}{%- set images.value = images.value + 1 -%}"
    "{%- if add_vision_id -%}Picture {{ images.value }}: {% endif -%}"
    "<|vision_start|><|image_pad|><|vision_end|>{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}<|im_end|>\n{% endfor -%}"
)


def make_folder(base, parent, bins):
    """The authors' layout: the backbone's config.json, no output layer, heads beside 'model.'."""
    copied = parent / "backbone"
    shutil.copytree(base, copied)
    tokenizer = load_tokenizer(copied)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED)}, False)
    tokenizer.save_pretrained(copied)
    backbone = weights.read_config(copied)
    backbone["text_config"]["vocab_size"] = max(448, max(tokenizer.get_vocab().values()) + 1)
    config = {"model_type": "robometer", "vlm_config": backbone, "progress_bins": bins}
    architecture = weights.build(config)
    rng = np.random.default_rng(3)
    params = {
        tuple(path.split("/")): (0.2 * rng.normal(size=s.shape) + path.endswith("scale")).astype("float32")
        for path, s in weights.parameter_shapes(architecture).items()
    }
    made = weights.Model(architecture, config, {"params": traverse_util.unflatten_dict(params)}, copied)
    saved = parent / "robometer"
    weights.save(saved, made)
    (saved / "config.json").write_text(json.dumps(backbone))
    return saved


@pytest.fixture(scope="module")
def folder(tiny_chat_folder, tmp_path_factory):
    return make_folder(tiny_chat_folder, tmp_path_factory.mktemp("ten"), 10)


@pytest.fixture(scope="module")
def scorer(folder):
    return Robometer.load(folder, buckets=SIZES, cached_frames=16, max_frames=5)


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def copy(folder, to, tensors=None, config=None):
    """A copy of a folder with other tensors or another config.json."""
    shutil.copytree(folder, to)
    if tensors is not None:
        safetensors.numpy.save_file(tensors, to / "model.safetensors")
    if config is not None:
        (to / "config.json").write_text(json.dumps(config))
    return to


def head(tensors, name, hidden):
    """torch.nn.Sequential(Linear, LayerNorm, GELU, Dropout, Linear) in float64."""
    part = {key: tensors[f"{name}_head.{key}"].astype(np.float64) for key in
            ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")}  # fmt: skip
    x = hidden @ part["0.weight"].T + part["0.bias"]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * part["1.weight"] + part["1.bias"]
    x = 0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2)))
    return x @ part["4.weight"].T + part["4.bias"]


@functools.partial(jax.jit, static_argnums=0)
def whole_pass(module, params, batch, features):
    def read(module):
        embeddings, extra = module.embed(batch.tokens, batch.image_rows, features)
        return module(embeddings, batch.positions, batch.where, extra=extra)[0]

    return module.apply(params, method=read)


def hidden_at(scorer, tensors, chats, frames, token):
    """Hidden states at a token, from a whole forward pass without buckets, float64 [n, H]."""
    chat = scorer.chat_model
    params = chat.model.params
    batch, features = chat.prompts(params, chats, frames, add_generation_prompt=False)

    hidden = np.asarray(whole_pass(chat.module, params, batch, features), np.float64)
    hidden = hidden[batch.tokens == chat.tokenizer.convert_tokens_to_ids(token)]
    # The states after the final RMS norm are the ones that count.
    unscaled = hidden / tensors["model.language_model.norm.weight"]
    np.testing.assert_allclose((unscaled**2).mean(-1), 1, atol=1e-3)
    return hidden


def test_progress_and_success_of_every_frame(folder, scorer):
    tensors = tensors_of(folder)
    assert isinstance(scorer, Scorer) and Robometer(scorer.chat_model).max_frames == 8
    params = scorer.chat_model.model.params
    where = np.array([[True] * 3 + [False], [True] * 4, [False] * 4])
    frames = np.stack([FRAMES[:4], FRAMES[4:8], FRAMES[:4]])
    scores = scorer.score(params, scorer.prepare(params, TASK), frames, where, KEY)
    assert scores.values.shape == (3, 4) and scores.values.dtype == np.float32
    assert not np.any(np.asarray(scores.values)[~where])
    assert bool(scores.valid.all()) and not np.any(scores.tokens)
    judge = Robometer(scorer.chat_model, output="success", max_frames=5)
    success = judge.score(params, TASK, frames, where, KEY)
    for row, count in ((0, 3), (1, 4)):
        chats = [prompts.robometer_progress(TASK, count)]
        hidden = hidden_at(scorer, tensors, chats, frames[row, :count], "<|prog_token|>")
        # The task spells the token, too; only those behind the pictures count.
        assert len(hidden) == count
        expected = scipy.special.softmax(head(tensors, "progress", hidden), axis=1) @ np.linspace(0, 1, 10)
        np.testing.assert_allclose(scores.values[row, :count], expected, rtol=1e-4)
        assert np.ptp(expected) > 1e-3
        out = head(tensors, "success", hidden)[:, 0]
        np.testing.assert_allclose(success.values[row, :count], scipy.special.expit(out), rtol=1e-4)


def test_a_progress_head_of_one_number_ends_in_a_sigmoid(tiny_chat_folder, tmp_path):
    folder = make_folder(tiny_chat_folder, tmp_path, 1)
    model, tensors = Robometer.load(folder).chat_model.model, tensors_of(folder)
    hidden = np.random.default_rng(1).normal(size=(4, tensors["progress_head.0.weight"].shape[1]))
    found = model.architecture.module.apply(model.params, hidden.astype(np.float32), method="progress")
    expected = scipy.special.expit(head(tensors, "progress", hidden)[:, 0])
    # A tanh GELU in place of the exact one moves them by more than 1e-4.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_preference_of_two_videos(folder, scorer):
    params, tensors = scorer.chat_model.model.params, tensors_of(folder)
    found = scorer.preference(params, TASK, FRAMES[:2], FRAMES[2:5])
    chats = [prompts.robometer_preference(TASK, 2, 3)]
    (hidden,) = hidden_at(scorer, tensors, chats, FRAMES[:5], "<|pref_token|>")
    (logit,) = head(tensors, "preference", hidden)
    np.testing.assert_allclose(found, scipy.special.expit(logit), rtol=1e-4)
    assert abs(found - scorer.preference(params, TASK, FRAMES[2:5], FRAMES[:2])) > 1e-4


def test_long_videos_are_shown_in_part_and_interpolated(scorer):
    params, where, places = scorer.chat_model.model.params, np.ones((1, 10), bool), [0, 2, 4, 7, 9]
    values = np.asarray(scorer.score(params, TASK, FRAMES[None], where, KEY).values)[0]
    shown = np.asarray(scorer.score(params, TASK, FRAMES[None, places], where[:, :5], KEY).values)[0]
    np.testing.assert_allclose(values, np.interp(np.arange(10), places, shown), rtol=1e-5)


def test_more_queries_and_frames_compile_nothing_new(scorer):
    params = scorer.chat_model.model.params
    where = np.tril(np.ones((5, 5), bool))
    scorer.score(params, TASK, FRAMES[None, :2], where[1:2, :2], KEY)
    programs = scorer._read._cache_size()
    values = scorer.score(params, TASK, np.stack([FRAMES[:5]] * 5), where, KEY).values
    assert scorer._read._cache_size() == programs
    alone = scorer.score(params, TASK, FRAMES[None, :5], where[4:], KEY).values[0]
    np.testing.assert_allclose(values[4], alone, rtol=1e-4)


def test_prompts_are_those_of_qwens_template_with_numbered_pictures(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE

    def text(part):
        return {"type": "text", "text": part}

    def expected(parts):
        message = [{"role": "user", "content": parts}]
        return tokenizer.apply_chat_template(message, tokenize=False, add_vision_id=True)

    def found(chat):
        return render_chat(tokenizer, chat, image_token="<|image_pad|>", add_generation_prompt=False)

    frame = [{"type": "image"}, text("<|prog_token|>")]
    asked = (
        "The task for the robot is 'Push.'. Given the trajectory video, predict the task progress at each "
        "frame, how far along the robot is towards completing the task, a float between 0 and 1, where 0 is "
        "the starting state and 1 is when the task is completed. If the robot is not performing the same "
        "task, predict 0 progress."
    )
    assert found(prompts.robometer_progress("Push.", 2)) == expected([text(asked), *frame * 2])
    both = prompts.robometer_preference("Push.", 2, 1, progress=False)
    compared = (
        "Given these two trajectories for the task 'Push.', evaluate which one makes more progress towards "
        "the task. Return A for the first trajectory and B for the second trajectory."
    )
    pair = [text(compared), text("This is Trajectory A. "), *frame * 2, text("<|split_token|>")]
    pair += [text("This is Trajectory B. "), *frame]
    pair += [text("Now predict the preference between the two trajectories."), text("<|pref_token|>")]
    assert found(both) == expected(pair)
    assert "Also predict the task progress" in found(prompts.robometer_preference("Push.", 2, 1))


def test_frames_are_sized_as_qwen_vl_utils_does(scorer):
    spec = scorer.chat_model.spec
    assert (spec.min_pixels, spec.max_pixels) == (4 * (4 * 2) ** 2, 16384 * (4 * 2) ** 2)


def test_every_layout_holds_the_same(folder, scorer, tmp_path):
    theirs = {
        ("model." + name if name.startswith("model.") else name): array
        for name, array in tensors_of(folder).items()
    }
    embedding = theirs["model." + EMBEDDING]
    theirs["frame_pool_attn.weight"] = np.zeros((1, embedding.shape[1]), np.float32)
    config = {"type": "robometer", "vlm_config": weights.read_config(folder), "use_multi_image": True}
    untied = {**theirs, "model.lm_head.weight": np.zeros_like(embedding)}
    # Of tensors that share memory, safetensors keeps the first name in the alphabet.
    tied = {**theirs, "model.lm_head.weight": embedding}
    del tied["model." + EMBEDDING]
    weights.save(tmp_path / "own", scorer.chat_model.model)
    for other in (
        copy(folder, tmp_path / "untied", untied, config),
        copy(folder, tmp_path / "tied", tied, config),
        tmp_path / "own",
    ):
        same = Robometer.load(other)
        jax.tree.map(
            np.testing.assert_array_equal, same.chat_model.model.params, scorer.chat_model.model.params
        )
    weights.save(tmp_path / "again", Robometer.load(tmp_path / "tied").chat_model.model)
    assert set(tensors_of(tmp_path / "again")) == set(tensors_of(folder))
    Robometer.load(tmp_path / "again")


def test_an_untied_backbone_needs_its_embedding(folder, tmp_path):
    tensors = tensors_of(folder)
    tensors["model.lm_head.weight"] = tensors.pop(EMBEDDING)
    config = {**weights.read_config(folder), "tie_word_embeddings": False}
    with pytest.raises(ModelError, match=rf"missing {EMBEDDING}"):
        Robometer.load(copy(folder, tmp_path / "untied", tensors, config))


def test_the_authors_settings_are_read(folder, tmp_path):
    settings = copy(folder, tmp_path / "settings") / "config.yaml"
    settings.write_text("model:\n  use_multi_image: true\ntraining:\n  predict_pref_progress: false\n")
    assert Robometer.load(settings.parent).chat_model.model.config["pairs_ask_progress"] is False
    assert Robometer.load(folder).chat_model.model.config["pairs_ask_progress"] is True
    settings.write_text("model:\n  use_per_frame_progress_token: false\n")
    with pytest.raises(ModelError, match=r"settings: field use_per_frame_progress_token is False; expected"):
        Robometer.load(settings.parent)
    config = {"vlm_config": weights.read_config(folder), "use_multi_image": False}
    with pytest.raises(ModelError, match="field use_multi_image is False"):
        Robometer.load(copy(folder, tmp_path / "lerobot", config=config))


def test_folders_that_are_no_robometer(folder, scorer, tiny_chat_folder, tmp_path):
    with pytest.raises(ModelError, match=r"progress_head\.4\.weight"):
        Robometer.load(tiny_chat_folder)
    wrong = copy(folder, tmp_path / "wrong")
    tensors = tensors_of(folder)
    for change, words in (
        ({"success_head.1.weight": None}, r"missing success_head\.1\.weight"),
        ({"success_head.1.bias": np.zeros(3, np.float32)}, r"success_head\.1\.bias is \[3\] instead of"),
        ({"reward_head.weight": np.zeros(3, np.float32)}, r"unexpected reward_head\.weight"),
        ({EMBEDDING: None}, rf"missing {EMBEDDING}"),
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
        Robometer(scorer.chat_model, max_frames=1)
    with pytest.raises(ConfigError, match="output 'reward' found"):
        Robometer(scorer.chat_model, output="reward")
