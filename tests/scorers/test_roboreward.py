"""RoboReward: scripted answers, and a tiny random Qwen3-VL that reads slices of videos."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models import weights
from jaxreward.models.generate import Buckets
from jaxreward.models.qwen_inputs import rope_positions
from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scorer
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.roboreward import RoboReward

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
KEY = jax.random.key(0)
FRAMES = np.random.default_rng(0).integers(0, 256, (4, 16, 24, 3), np.uint8)
WHERE = np.array([[True] * 4, [True, True, True, False], [False] * 4])
VIDEOS = np.stack([np.full((4, 2, 2, 3), 10 * q, np.uint8) for q in range(3)])
VIDEOS += np.arange(1, 5, dtype=np.uint8)[:, None, None, None]


class Scripted:
    """Answers with the last frame's number, and writes what it is told to."""

    def __init__(self, write):
        self.write = write

    def answer(self, variables, chats, shown, key, config):
        assert config.temperature == 0
        assert shown.shape[1:] == (2, 2, 6)
        self.chats, self.videos, texts, start = list(chats), [], [], 0
        for chat in chats:
            count = sum(part["type"] == "image" for part in chat[0]["content"])
            self.videos.append(shown[start : start + count, 0, 0, [0, 3]].ravel().tolist())
            texts.append(self.write(self.videos[-1][-1] % 10))
            start += count
        assert start == len(shown)
        return texts, SimpleNamespace(lengths=np.full(len(texts), 7))


def test_every_prefix_gets_its_own_score():
    model = Scripted(lambda score: f"ANSWER: {score + 1}")
    scorer = RoboReward(model)
    assert isinstance(scorer, Scorer)
    scores = scorer.score((), scorer.prepare((), "Push."), VIDEOS, WHERE, KEY)
    assert scores.values.tolist() == [[0.25, 0.5, 0.75, 1], [0.25, 0.5, 0.75, 0], [0] * 4]
    assert scores.values.dtype == np.float32
    assert scores.valid.tolist() == [True] * 3
    assert scores.tokens.tolist() == [28, 21, 0]
    # A video of an odd length shows its last frame twice.
    assert model.videos[:4] == [[1, 1], [1, 2], [1, 2, 3, 3], [1, 2, 3, 4]]
    assert model.videos[4:] == [[11, 11], [11, 12], [11, 12, 13, 13]]


def test_one_answer_for_a_whole_video():
    model = Scripted(lambda score: f"I think\nANSWER: {score}")
    scores = RoboReward(model, prefixes=False).score((), "Push.", VIDEOS, WHERE, KEY)
    assert scores.values.tolist() == [[0.75] * 4, [0.5, 0.5, 0.5, 0], [0] * 4]
    assert scores.tokens.tolist() == [7, 7, 0]
    assert len(model.chats) == 2


def test_answers_that_cannot_be_read():
    model = Scripted(lambda score: "ANSWER: five" if score == 4 else f"ANSWER: {score}")
    scorer = RoboReward(model)
    scores = scorer.score((), "Push.", VIDEOS, WHERE, KEY)
    assert scores.valid.tolist() == [False, True, True]
    assert scores.values.tolist() == [[0, 0.25, 0.5, 0], [0, 0.25, 0.5, 0], [0] * 4]
    assert [bool(reason) for reason in scorer.reasons] == [False] * 3 + [True] + [False] * 3
    assert scorer.answers[3] == "ANSWER: five"
    kept = RoboReward(model, unreadable_is_one=True).score((), "Push.", VIDEOS, WHERE, KEY)
    assert kept.valid.all()
    np.testing.assert_array_equal(kept.values, scores.values)
    none = scorer.score((), "Push.", VIDEOS[2:], WHERE[2:], KEY)
    assert scorer.answers == [] and bool(none.valid.all())


def test_the_prompt_is_the_published_one():
    (message,) = prompts.roboreward("Push.", 2)
    image, text = prompts.IMAGE, [part.get("text") for part in message["content"]]
    assert message["content"][1] == message["content"][3] == image
    assert text[:-1] == ["<0.5 seconds>", None, "<2.5 seconds>", None]
    lines = text[-1].split("\n")
    assert lines[0].endswith("for the robot in the video in the format: ANSWER: <score>")
    assert lines[1].endswith("(judge only the final state without time limits):")
    assert [line[:4] for line in lines[2:7]] == ["1 - ", "2 - ", "3 - ", "4 - ", "5 - "]
    assert lines[7:] == ["", "Task: Push."]


@pytest.fixture(scope="module")
def chat_model(tiny_chat_folder):
    sizes = Buckets(prompts=(2,), prompt_tokens=(640,), new_tokens=(16,))
    return ChatModel.load(tiny_chat_folder, buckets=sizes, cached_frames=16, frame_tokens=(1, 64))


def test_slices_are_patches_of_two_frames(chat_model):
    """Frames of whole cells are not resized: rows are cut by hand, each [channel, time, pixel]."""
    spec = chat_model.spec
    layout, _ = chat_model._frames_of((16, 24, 6))
    pair = np.concatenate([FRAMES[:1], FRAMES[1:2]], axis=-1)
    images = layout.inputs(pair)
    pixels = (FRAMES[:2] / 255 - np.array(spec.pixels.mean)) / np.array(spec.pixels.std)
    size, merge = spec.patch_size, spec.merge_size
    edge = size * merge
    rows = [
        pixels[:, y + v * size : y + v * size + size, x + u * size : x + u * size + size]
        .transpose(3, 0, 1, 2)
        .ravel()
        for y in range(0, 16, edge)
        for x in range(0, 24, edge)
        for v in range(merge)
        for u in range(merge)
    ]
    found = np.asarray(images.patches)[np.asarray(images.segments) == 0]
    np.testing.assert_allclose(found, rows, atol=1e-5)
    still, _ = chat_model._frames_of((16, 24, 3))
    twice = np.concatenate([FRAMES[:1]] * 2, axis=-1)
    np.testing.assert_array_equal(layout.inputs(twice).patches, still.inputs(FRAMES[:1]).patches)
    assert layout.tokens == still.tokens == 6


def test_a_model_reads_videos_in_their_order(chat_model):
    params = chat_model.model.params
    scorer = RoboReward(chat_model, max_new_tokens=4, unreadable_is_one=True)
    scores = scorer.score(params, "Push.", FRAMES[None], np.ones((1, 4), bool), KEY)
    assert scores.values.shape == (1, 4) and len(scorer.answers) == 4
    assert 0 < int(scores.tokens[0]) <= 4 * 4
    # Slices stand where images do; the rotary positions of a video of Qwen3-VL are the same.
    config, grid = chat_model.module.config, np.array([2, 4, 6])
    image, video = [7, *[config.image_token] * 6], [7, *[config.video_token] * 6]
    as_images, as_video = (
        rope_positions(np.array(tokens * 2), np.atleast_2d(grids), config)
        for tokens, grids in ((image, [[1, 4, 6]] * 2), (video, grid))
    )
    np.testing.assert_array_equal(as_images[0], as_video[0])
    assert as_images[1] == as_video[1]
    slices = np.concatenate([FRAMES[[0, 2]], FRAMES[[1, 3]]], axis=-1)
    chats = [prompts.roboreward("Push.", 2)]
    first = chat_model.log_probabilities(params, chats, slices, ["ANSWER: 4"])
    for other in (slices[::-1], slices[..., [3, 4, 5, 0, 1, 2]]):
        assert abs(first - chat_model.log_probabilities(params, chats, other, ["ANSWER: 4"])) > 1e-5


def test_folders_and_settings_that_do_not_fit(tiny_chat_folder, tmp_path):
    loaded = RoboReward.load(tiny_chat_folder)
    assert (loaded.chat_model.spec.min_pixels, loaded.chat_model.spec.max_pixels) == (128 * 64, 768 * 64)
    with pytest.raises(ConfigError, match="max_new_tokens 0 found"):
        RoboReward(loaded.chat_model, max_new_tokens=0)
    other = tmp_path / "qwen2_5"
    shutil.copytree(GOLDEN / "qwen2_5_vl", other)
    with pytest.raises(ModelError, match=r"model_type 'qwen2_5_vl' found; expected 'qwen3_vl'"):
        RoboReward.load(other)
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_chat_folder, damaged)
    config = weights.read_config(damaged)
    config["text_config"]["vocab_size"] += 1
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"misshapen .*embed_tokens\.weight"):
        RoboReward.load(damaged)
