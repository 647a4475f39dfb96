"""Vision-language models as scorers: a tiny random Qwen3-VL with a real tokenizer, and scripted answers."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models.generate import Buckets, GenerateConfig
from jaxreward.scorers import prompts
from jaxreward.scorers.base import Scorer
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.gvl import GVL, value_order_correlation
from jaxreward.scorers.topreward import TOPReward
from jaxreward.scorers.vlm_ranker import VLMRanker, VLMRankerConfig

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
FRAMES = RNG.integers(0, 256, (6, 24, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def chat_model(tiny_chat_folder):
    sizes = Buckets(prompts=(2, 8, 64), prompt_tokens=(512, 1024), new_tokens=(16,))
    return ChatModel.load(tiny_chat_folder, buckets=sizes, cached_frames=16)


def chat(words, images):
    content = [{"type": "text", "text": words}, *[{"type": "image"}] * images]
    return [{"role": "user", "content": content}]


def test_answers_are_reproducible_and_say_no_image(chat_model):
    chats = [chat("the first", 2), chat("and another, longer one", 1)]
    config = GenerateConfig(temperature=1.0, max_new_tokens=16)
    texts, generated = chat_model.answer(chat_model.model.params, chats, FRAMES[:3], KEY, config)
    again, _ = chat_model.answer(chat_model.model.params, chats, FRAMES[:3], KEY, config)
    assert texts == again
    assert len(texts) == 2
    assert not set(generated.tokens.ravel().tolist()) & set(chat_model.forbidden_tokens)
    image = chat_model.tokenizer.get_vocab()["<|image_pad|>"]
    assert image in chat_model.forbidden_tokens
    assert set(chat_model.stop_tokens) == {chat_model.tokenizer.eos_token_id}


def test_every_frame_matters_and_is_encoded_once(chat_model):
    cache = chat_model._frames_of(FRAMES.shape[1:])[1]
    chats, answers = [chat("what is this", 3)], ["True"]
    before = cache.encoded
    first = chat_model.log_probabilities(chat_model.model.params, chats, FRAMES[[3, 4, 5]], answers)
    assert cache.encoded - before == 3
    programs = chat_model.generator.compilations
    shuffled = chat_model.log_probabilities(chat_model.model.params, chats, FRAMES[[5, 3, 4]], answers)
    assert cache.encoded - before == 3
    assert chat_model.generator.compilations == programs
    assert abs(first - shuffled).max() > 1e-4
    alone = chat_model.log_probabilities(
        chat_model.model.params, [*chats, chat("shorter", 1)], FRAMES[[3, 4, 5, 0]], ["True", "a"]
    )
    np.testing.assert_allclose(alone[0], first[0], rtol=1e-5)


def test_another_vision_tower_forgets_the_frames(chat_model):
    params = chat_model.model.params
    chats, answers = [chat("what is this", 1)], ["True"]
    before = chat_model.log_probabilities(params, chats, FRAMES[:1], answers)
    changed = dict(params["params"])
    changed["vision"] = jax.tree.map(lambda x: x * 1.5, changed["vision"])
    after = chat_model.log_probabilities({"params": changed}, chats, FRAMES[:1], answers)
    assert abs(before - after).max() > 1e-4
    np.testing.assert_allclose(
        chat_model.log_probabilities(params, chats, FRAMES[:1], answers), before, rtol=1e-6
    )


def test_topreward_is_the_probability_of_the_answer_s_token(chat_model):
    """Against the logits of the whole prompt, computed without the generator's padding."""
    scorer = TOPReward(chat_model)
    params, where = chat_model.model.params, np.array([[True, True, False]])
    scores = scorer.score(params, scorer.prepare(params, "Win."), FRAMES[None, :3], where, KEY)
    assert scores.values.shape == (1, 3)
    assert scores.values[0, 2] == 0
    assert bool(scores.valid.all())
    batch, features = chat_model.prompts(params, [prompts.is_completed("Win.", 2)], FRAMES[:2])

    def logits(module):
        embeddings, extra = module.embed(batch.tokens, batch.image_rows, features)
        return module.logits(module(embeddings, batch.positions, batch.where, extra=extra)[0])

    last = np.asarray(chat_model.module.apply(params, method=logits), np.float64)[0, -1]
    (token, *more) = chat_model.tokenizer("True", add_special_tokens=False)["input_ids"]
    expected = last[token] - scipy.special.logsumexp(last)
    if not more:
        np.testing.assert_allclose(scores.values[0, 1], expected, rtol=1e-4)
    else:
        assert scores.values[0, 1] < expected


def test_folders_that_hold_no_chats_are_refused(tiny_chat_folder, tmp_path):
    with pytest.raises(ModelError, match="holds no chats about images"):
        ChatModel.load(GOLDEN / "clip")
    copied = tmp_path / "copied"
    shutil.copytree(tiny_chat_folder, copied)
    (copied / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        ChatModel.load(copied)


class Scripted:
    """A chat model that orders frames by their brightness, and writes what it is told to."""

    def __init__(self, write):
        self.write, self.chats = write, []

    def answer(self, variables, chats, frames, key, config):
        self.chats, texts, start = list(chats), [], 0
        for asked in chats:
            count = sum(part["type"] == "image" for part in asked[0]["content"])
            shown, start = frames[start : start + count], start + count
            texts.append(self.write(shown[1:].mean((1, 2, 3)).argsort().argsort() + 1))
        assert start == len(frames)
        return texts, SimpleNamespace(lengths=np.full(len(texts), 7))


def described(ranks):
    return "\n".join(f"Frame {i}:\nFrame Description: cat {i}\nRank: {r}" for i, r in enumerate(ranks, 1))


QUERIES = np.stack([np.full((4, 2, 2, 3), 0, np.uint8) + v for v in range(3)])
QUERIES[:, :] += np.array([9, 30, 10, 20], np.uint8)[:, None, None, None]
WHERE = np.array([[True] * 4, [True, True, True, False], [True, False, False, False]])


def test_ranks_stand_where_their_frames_do():
    model = Scripted(described)
    scorer = VLMRanker(model)
    assert isinstance(scorer, Scorer)
    scores = scorer.score((), scorer.prepare((), "Win."), QUERIES, WHERE, KEY)
    assert scores.values.tolist() == [[0, 3, 1, 2], [0, 2, 1, 0], [0, 0, 0, 0]]
    assert scores.valid.tolist() == [True, True, True]
    assert scores.tokens.tolist() == [7, 7, 0]
    assert len(model.chats) == 2
    assert "Win." in model.chats[0][0]["content"][0]["text"]
    assert "Frame Description" in model.chats[0][0]["content"][-1]["text"]


def test_answers_that_cannot_be_read_are_not_valid():
    scorer = VLMRanker(Scripted(lambda ranks: described(ranks[:-1])), VLMRankerConfig(describe=False))
    scores = scorer.score((), "", QUERIES, WHERE, KEY)
    assert scores.valid.tolist() == [False, False, True]
    assert not scores.values.any()
    assert "frame 3 is missing" in scorer.reasons[0]
    assert "Frame Description" not in scorer.chat_model.chats[0][0]["content"][-1]["text"]


def test_gvl_reads_percentages_and_no_query_asks_nothing():
    def write(ranks):
        return "\n".join(f"Frame {i}: Task Completion Percentages: {10 * r}%" for i, r in enumerate(ranks, 1))

    scorer = GVL(Scripted(write))
    scores = scorer.score((), "Win.", QUERIES, WHERE, KEY)
    assert scores.values.tolist() == [[0, 30, 10, 20], [0, 20, 10, 0], [0, 0, 0, 0]]
    none = scorer.score((), "Win.", QUERIES[2:], WHERE[2:], KEY)
    assert scorer.answers == []
    assert bool(none.valid.all())


def test_value_order_correlation_is_scipy_s():
    values, time = RNG.integers(0, 4, (5, 9)), np.tile(np.arange(9), (5, 1))
    found = value_order_correlation(jnp.asarray(values), jnp.asarray(time))
    expected = [scipy.stats.spearmanr(v, t).statistic for v, t in zip(values, time, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert value_order_correlation(jnp.ones(5), jnp.arange(5)) == 0


@pytest.mark.parametrize(
    "fields", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_new_tokens": 0}]
)
def test_settings_out_of_range(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        VLMRankerConfig(**fields)
