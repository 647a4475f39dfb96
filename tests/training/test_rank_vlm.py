"""Stage 1 on a vision-language model: a tiny random one shows the machinery, resuming and bad input.

That it learns is shown by benchmarks/catrap_text_ranker.py, with a model that can read.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jaxreward.agents.token_grpo import TokenGRPOConfig
from jaxreward.correlation import spearman
from jaxreward.data.clips import ClipConfig
from jaxreward.errors import ConfigError, DataError, ModelError
from jaxreward.models.lora import LoRAConfig
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.parsing import parse_ranks
from jaxreward.scorers.prompts import rank_answer
from jaxreward.scorers.vlm_ranker import VLMRanker, VLMRankerConfig
from jaxreward.training.rank import Videos, clip_rewards
from jaxreward.training.rank_vlm import VLMRankConfig, VLMRankTrainer, train_vlm_ranker

KEY = jax.random.key(0)
CONFIG = VLMRankConfig(
    steps=2,
    batch_size=2,
    group_size=2,
    format_steps=2,
    format_learning_rate=1e-2,
    lora=LoRAConfig(rank=4),
    grpo=TokenGRPOConfig(learning_rate=1e-3, warmup_steps=1),
    clips=ClipConfig(length=4),
    evaluate_every=1,
    evaluation_clips=2,
)


@pytest.fixture(scope="module")
def ranker(tiny_chat_folder):
    config = VLMRankerConfig(describe=False, max_new_tokens=48, dtype="float32")
    return VLMRanker(ChatModel.load(tiny_chat_folder), config)


def videos(count=3, frames=7):
    """Pictures that grow brighter."""
    rng = np.random.default_rng(1)
    shade = np.linspace(0, 200, frames).astype(np.uint8)[None, :, None, None, None]
    pixels = shade + rng.integers(0, 40, (count, frames, 16, 16, 3), np.uint8)
    return Videos(pixels, np.full(count, frames, np.int32), np.ones(count, np.float32))


@pytest.fixture(scope="module")
def trained(ranker):
    seen = []
    result = train_vlm_ranker(
        CONFIG, ranker, videos(), {"new": videos(2)}, KEY,
        lambda state, record, samples: seen.append((state, record, samples)), task="Grow.",
    )  # fmt: skip
    return result, seen


def test_records_and_samples(trained):
    result, seen = trained
    assert [record["step"] for record in result.history] == [0.0, 1.0, 2.0, 3.0, 4.0]
    before, *formats = result.history[:3]
    assert set(before) == {"step", "rho/new", "parse_failures/new"}
    updates = result.history[3:]
    assert all("format_loss" in record and "reward" not in record for record in formats)
    assert formats[1]["format_loss"] < formats[0]["format_loss"]
    for record in updates:
        assert -1.0 <= record["reward"] <= 1.0
        assert 0.0 <= record["parse_failures"] <= 1.0
        assert 1.0 <= record["answer_tokens"] <= 48.0
        assert record["log_prob_gap"] < 1e-4
        assert set(record) >= {"kl", "clip_fraction", "zero_variance_groups", "truncated", "reward_std"}
    assert set(result.heldout_rho) == {"new"}
    for _, _, samples in seen[3:]:
        assert len(samples) == 2
        for sample in samples:
            assert (sample["reward"] == -1.0) == bool(sample["reason"])


def test_the_reference_is_the_policy_that_knows_the_format(trained):
    _, seen = trained
    after_format, at_the_end = seen[2][0].learner, seen[-1][0].learner
    jax.tree.map(np.testing.assert_array_equal, after_format.adapter, after_format.reference)
    jax.tree.map(np.testing.assert_array_equal, after_format.reference, at_the_end.reference)
    # The first update starts from the reference itself.
    assert seen[3][1]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_going_on_gives_the_same_adapter_bit_for_bit(ranker, trained, done):
    result, seen = trained
    state = seen[done][0]
    again = train_vlm_ranker(CONFIG, ranker, videos(), {"new": videos(2)}, KEY, task="Grow.", state=state)
    jax.tree.map(np.testing.assert_array_equal, result.adapter, again.adapter)
    assert again.history == result.history[done + 1 :]


def test_rewards_are_spearman_with_time_and_minus_one_for_what_cannot_be_read():
    position = np.array([[4, 9, 2, 7], [4, 9, 2, 7], [1, 2, 0, 0]])
    where = np.array([[True] * 4, [True] * 4, [True, True, False, False]])
    answers = [rank_answer([2, 4, 1, 3]), "Frame 1: Rank: 1", rank_answer([2, 1])]
    parsed = [parse_ranks(text, int(own.sum())) for text, own in zip(answers, where, strict=True)]
    assert [one.ok for one in parsed] == [True, False, True]
    values = np.zeros((3, 4), np.float32)
    for row, one in zip(values, parsed, strict=True):
        row[: len(one.values)] = one.values
    found = clip_rewards(values, np.array([one.ok for one in parsed]), position, where)
    np.testing.assert_allclose(found, [1.0, -1.0, -1.0], atol=1e-6)
    np.testing.assert_allclose(spearman(values[2], position[2], where=where[2]), -1.0, atol=1e-6)


def test_without_a_warm_up_the_model_itself_is_the_reference(ranker):
    trainer = VLMRankTrainer(dataclasses.replace(CONFIG, format_steps=0), ranker)
    state = trainer.init(KEY)
    assert state.learner.reference == ()
    assert state.format_optimizer == ()


def test_bad_settings_and_videos_are_refused(ranker):
    for field, value in (
        ("steps", 0), ("batch_size", 0), ("group_size", 1), ("format_steps", -1), ("temperature", 0.0),
        ("evaluate_every", 0), ("evaluation_clips", 0), ("format_learning_rate", 0.0),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"vlm_rank.{field}"):
            dataclasses.replace(CONFIG, **{field: value})
    tower = dataclasses.replace(CONFIG, lora=LoRAConfig(4, targets=(r"vision/layers/[^/]+/kernel",)))
    with pytest.raises(ConfigError, match="vision"):
        VLMRankTrainer(tower, ranker)
    short = VLMRanker(ranker.chat_model, dataclasses.replace(ranker.config, max_new_tokens=8))
    with pytest.raises(ModelError, match=r"vlm\.max_new_tokens is 8"):
        VLMRankTrainer(CONFIG, short)
    with pytest.raises(DataError, match="no video has more than 2 frames"):
        train_vlm_ranker(CONFIG, ranker, videos(frames=2), {}, KEY)
