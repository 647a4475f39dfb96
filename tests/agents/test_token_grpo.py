"""Token-level GRPO against the plain formula on the whole batch, and against a policy that must improve."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxreward.agents import grpo
from jaxreward.agents.supervised_fine_tuning import make_step, negative_log_likelihood
from jaxreward.agents.token_grpo import TokenGRPO, TokenGRPOConfig
from jaxreward.errors import ConfigError
from jaxreward.models import lora
from jaxreward.models.generate import GenerateConfig, Generated, log_probabilities
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.prompts import rank_frames

FRAMES = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), np.uint8)
LORA = lora.LoRAConfig(rank=4)
KEY = jax.random.key(2)


@pytest.fixture(scope="module")
def chat(tiny_chat_folder):
    return ChatModel.load(tiny_chat_folder)


@pytest.fixture(scope="module")
def asked(chat):
    """Two prompts of different lengths, each with four answers at temperature 0.7."""
    chats = [rank_frames("Win.", 3, describe=False), rank_frames("", 1, describe=True)]
    prompts, features = chat.prompts(chat.model.params, chats, FRAMES)
    config = GenerateConfig(0.7, 12, 4, (5, 17, 29, 33, 40, 71), chat.forbidden_tokens)
    generated = chat.generator.generate(chat.model.params, prompts, features, KEY, config)
    return prompts, features, generated


def adapter_of(chat, scale=0.05):
    """An adapter that changes the model."""
    adapter = lora.init(KEY, chat.model.params, LORA)
    leaves, tree = jax.tree.flatten(adapter)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    return jax.tree.unflatten(
        tree, [x + scale * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


def make(chat, **changes):
    config = TokenGRPOConfig(**{"learning_rate": 1e-2, "warmup_steps": 0, **changes})
    return TokenGRPO(chat.module, LORA, config, temperature=0.7, forbidden_tokens=chat.forbidden_tokens)


REWARDS = np.array([[0.1, 0.9, -1.0, 0.4], [0.5, 0.5, 0.5, 0.5]], np.float32)


def plain_gradients(chat, asked, adapter, coefficient):
    """`grpo.grpo_loss` over all answers at once."""
    prompts, features, generated = asked
    grouped = lambda x: jnp.swapaxes(jnp.asarray(x).reshape(2, 4, -1), 0, 1)  # noqa: E731

    def passed(variables):
        return grouped(
            log_probabilities(
                chat.module, variables, prompts, features, generated.tokens, generated.where,
                temperature=0.7, forbidden_tokens=chat.forbidden_tokens,
            )
        )  # fmt: skip

    advantages, varies = grpo.group_advantages(jnp.asarray(REWARDS.T))
    reference = passed(chat.model.params)

    def loss(adapter):
        found = passed({**chat.model.params, **lora.collection(adapter, LORA)})
        return grpo.grpo_loss(
            found, jax.lax.stop_gradient(found), reference, advantages, varies, grouped(generated.where),
            clip=0.2, kl_coefficient=coefficient,
        )  # fmt: skip

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(adapter)


@pytest.mark.parametrize("size", [1, 2])
def test_accumulated_gradients_are_those_of_the_whole_batch(chat, asked, size):
    learner = make(chat, minibatch_size=size, kl_coefficient=0.3)
    adapter = adapter_of(chat)
    (value, metrics), gradients = plain_gradients(chat, asked, adapter, 0.3)
    # One step of plain gradient descent shows the gradient.
    learner._optimizer = optax.sgd(1.0)
    state, found = learner.update(learner.init(adapter), chat.model.params, *asked, REWARDS)
    moved = jax.tree.map(lambda a, b: a - b, adapter, state.adapter)
    for ours, plain in zip(jax.tree.leaves(moved), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5 * float(jnp.abs(plain).max() + 1e-3))
    assert found["loss"] == pytest.approx(float(value), rel=1e-3)
    assert found["kl"] == pytest.approx(float(metrics["kl"]), rel=1e-3)
    assert found["kl"] > 0
    assert found["zero_variance_groups"] == 0.5
    assert found["clip_fraction"] == 0.0


def test_minibatches_of_any_size_take_the_same_steps(chat, asked):
    twice = [make(chat, minibatch_size=size, epochs=2, clip=0.01) for size in (1, 2)]
    results = [
        learner.update(learner.init(adapter_of(chat)), chat.model.params, *asked, REWARDS)
        for learner in twice
    ]
    (first, metrics), (second, _) = results
    # Adam divides by the gradient's size, so that rounding of tiny gradients shows: compare the policies.
    likelihoods = [
        log_probabilities(
            chat.module, twice[0].variables(chat.model.params, state.adapter), *asked[:2],
            asked[2].tokens, asked[2].where,
        )
        for state in (first, second)
    ]  # fmt: skip
    np.testing.assert_allclose(*likelihoods, atol=2e-3)
    assert metrics["clip_fraction"] > 0  # the second epoch's ratios have left the clip range


def test_only_the_adapter_is_trained(chat, asked):
    learner = make(chat)
    before = jax.tree.map(np.array, chat.model.params)
    state = learner.init(lora.init(KEY, chat.model.params, LORA))
    after, metrics = learner.update(state, chat.model.params, *asked, REWARDS)
    jax.tree.map(np.testing.assert_array_equal, before, chat.model.params)
    changed = [
        bool((a != b).any())
        for a, b in zip(*map(jax.tree.leaves, (state.adapter, after.adapter)), strict=True)
    ]
    assert any(changed)
    trained = lora.count(state.adapter)
    moments = sum(x.size for x in jax.tree.leaves(after.optimizer))
    assert 2 * trained <= moments <= 2 * trained + 10
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)  # the adapter changed nothing yet
    assert metrics["log_prob_gap"] < 1e-5


def test_the_gap_tells_of_answers_of_another_policy(chat, asked):
    learner = make(chat)
    state = learner.init(adapter_of(chat, 0.2))
    _, metrics = learner.update(state, chat.model.params, *asked, REWARDS)
    assert metrics["log_prob_gap"] > 0.01


def test_the_kl_coefficient_follows_its_target(chat, asked):
    adapter = adapter_of(chat, 0.2)
    for target, sign in ((1e-6, 1), (1e3, -1)):
        learner = make(chat, kl_coefficient=0.5, kl_target=target)
        state, _ = learner.update(learner.init(adapter), chat.model.params, *asked, REWARDS)
        assert sign * (float(state.kl_coefficient) - 0.5) > 0.04
    reference = make(chat, kl_coefficient=0.5)
    _, metrics = reference.update(
        reference.init(adapter, reference=adapter), chat.model.params, *asked, REWARDS
    )
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_policy_learns_to_say_a_word(chat):
    """The reward is 1 for a token on one side of the embedding space: from a half to nearly always."""
    side = np.asarray(chat.model.params["params"]["decoder"]["embedding"])[:, 0] > 0
    chats = [rank_frames("Win.", 1, describe=False)] * 4
    prompts, features = chat.prompts(chat.model.params, chats, np.concatenate([FRAMES[:2]] * 4))
    sampling = GenerateConfig(0.1, 1, 8, (), chat.forbidden_tokens)
    learner = TokenGRPO(
        chat.module, LORA,
        TokenGRPOConfig(learning_rate=1e-2, warmup_steps=2, minibatch_size=4, kl_coefficient=0.0),
        temperature=0.1, forbidden_tokens=chat.forbidden_tokens,
    )  # fmt: skip
    state, means = learner.init(lora.init(KEY, chat.model.params, LORA)), []
    for step in range(20):
        variables = learner.variables(chat.model.params, state.adapter)
        generated = chat.generator.generate(
            variables, prompts, features, jax.random.fold_in(KEY, step), sampling
        )
        rewards = side[generated.tokens[:, 0]].astype(np.float32).reshape(4, 8)
        means.append(rewards.mean())
        state, _ = learner.update(state, chat.model.params, prompts, features, generated, rewards)
    assert np.mean(means[:2]) < 0.75
    assert np.mean(means[-4:]) > 0.95
    assert learner.compilations == 1


def test_supervised_steps_raise_the_likelihood_of_given_answers(chat):
    chats = [rank_frames("Win.", 2, describe=False)]
    prompts, features = chat.prompts(chat.model.params, chats, FRAMES[:3])
    tokens, where = chat.answer_tokens(["Frame 1: Rank: 2\nFrame 2: Rank: 1"])
    learner = make(chat)
    optimizer = optax.adam(3e-2)
    step = make_step(chat.module, optimizer, learner.variables)
    adapter = lora.init(KEY, chat.model.params, LORA)
    state, losses = optimizer.init(adapter), []
    for _ in range(30):
        adapter, state, loss = step(adapter, state, chat.model.params, prompts, features, tokens, where)
        losses.append(float(loss))
    plain = negative_log_likelihood(chat.module, chat.model.params, prompts, features, tokens, where)
    assert losses[0] == pytest.approx(float(plain), rel=1e-5)
    assert losses[-1] < losses[0] - 1.0  # nats a token; the random model's logits are small


def test_what_cannot_be_learnt_is_refused(chat):
    with pytest.raises(ConfigError, match="temperature 0"):
        TokenGRPO(chat.module, LORA, TokenGRPOConfig(), temperature=0.0)
    for field, value in (
        ("epochs", 0), ("minibatch_size", 0), ("learning_rate", 0.0), ("clip", -0.1),
        ("kl_coefficient", -1.0), ("kl_target", 0.0), ("warmup_steps", -1), ("max_grad_norm", 0.0),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"grpo.{field}"):
            TokenGRPOConfig(**{field: value})


def test_groups_without_differences_move_nothing(chat, asked):
    prompts, features, generated = asked
    learner = make(chat, kl_coefficient=0.0)
    state = learner.init(adapter_of(chat))
    same, metrics = learner.update(
        state, chat.model.params, prompts, features, generated, np.full((2, 4), -1.0, np.float32)
    )
    jax.tree.map(np.testing.assert_array_equal, state.adapter, same.adapter)
    assert metrics["zero_variance_groups"] == 1.0
    assert isinstance(generated, Generated)
