"""Actor-critic networks: distributions against SciPy, what each head sees, memory across episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxreward.agents.networks import (
    ActorCritic,
    Categorical,
    DiagonalGaussian,
    NetworkConfig,
    to_action,
)
from jaxreward.errors import ConfigError
from jaxreward.types import Box, Discrete

SMALL = {"body": "mlp", "mlp_layers": (8,), "width": 8}


def build(config, space, shape, dtype=jnp.float32, time_limit=None, batch=3):
    network = ActorCritic(config, space, len(shape), time_limit)
    observation = jax.random.randint(jax.random.key(1), (batch, *shape), 0, 5).astype(dtype)
    memory = jnp.zeros((batch, config.width)) if config.recurrent else ()
    arguments = (memory, observation, jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32))
    variables = network.init(jax.random.key(0), *arguments)
    return network, variables, arguments


def test_categorical_equals_scipy():
    probabilities = np.array([[0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]])
    policy = Categorical(jnp.log(jnp.asarray(probabilities, jnp.float32)) + 5.0)
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy(probabilities, axis=1), rtol=1e-5)
    np.testing.assert_allclose(policy.log_prob(jnp.array([1, 2])), np.log([0.2, 1 / 3]), rtol=1e-5)
    assert policy.mode()[0] == 2 and policy.mode().dtype == jnp.int32
    draws = jax.vmap(policy.sample)(jax.random.split(jax.random.key(0), 4000))
    frequency = np.bincount(np.asarray(draws[:, 0]), minlength=3)
    assert scipy.stats.chisquare(frequency, probabilities[0] * 4000).pvalue > 0.001


def test_gaussian_equals_scipy():
    mean, log_std = np.array([[0.5, -1.0]]), np.array([0.3, -0.7])
    policy = DiagonalGaussian(jnp.asarray(mean, jnp.float32), jnp.asarray(log_std, jnp.float32))
    normal = scipy.stats.norm(mean, np.exp(log_std))
    choice = np.array([[0.1, 0.2]])
    np.testing.assert_allclose(
        policy.log_prob(jnp.asarray(choice, jnp.float32)), normal.logpdf(choice).sum(1), rtol=1e-5
    )
    np.testing.assert_allclose(policy.entropy(), normal.entropy().sum(1), rtol=1e-5)
    draws = jax.vmap(policy.sample)(jax.random.split(jax.random.key(0), 4000))[:, 0]
    assert scipy.stats.kstest(draws[:, 1], scipy.stats.norm(-1.0, np.exp(-0.7)).cdf).pvalue > 0.001


def test_real_valued_choices_are_scaled_and_clipped():
    choice = jnp.array([[-3.0, -1.0, 0.0, 0.5, 2.0]])
    np.testing.assert_allclose(to_action(choice, Box(0.0, 4.0, (5,))), [[0, 0, 2, 3, 4]])
    np.testing.assert_allclose(to_action(choice, Box(-np.inf, 1.0, (5,))), [[-3, -1, 0, 0.5, 1]])
    assert to_action(jnp.zeros((2, 3, 4)), Box(-1.0, 1.0, (2, 2))).shape == (2, 3, 2, 2)


@pytest.mark.parametrize(
    ("config", "shape", "dtype"),
    [
        (NetworkConfig(), (12, 8, 1), jnp.uint8),
        (NetworkConfig(body="impala", impala_sections=(4, 8)), (12, 8, 3), jnp.uint8),
        (NetworkConfig(cnn_layers=((8, 1, 1),), symbols=5), (4, 5), jnp.int8),
        (NetworkConfig(cnn_layers=((8, 1, 1),), symbols=5), (4, 5, 2), jnp.int8),
        (NetworkConfig(cnn_layers=((8, 2, 2),)), (4, 5), jnp.uint8),
        (NetworkConfig(**SMALL), (4, 5), jnp.int8),
        (NetworkConfig(**SMALL), (6,), jnp.float32),
        (NetworkConfig(**SMALL), (), jnp.int32),
        (NetworkConfig(**SMALL), (4,), jnp.bool_),
    ],
)
def test_reads_pixels_symbols_and_vectors(config, shape, dtype):
    network, variables, arguments = build(config, Discrete(4), shape, dtype)
    memory, policy, value = network.apply(variables, *arguments)
    assert memory == () and policy.logits.shape == (3, 4) and value.shape == (3,)
    assert policy.logits.dtype == value.dtype == jnp.float32
    # The first policy is nearly uniform.
    assert float(jnp.min(policy.entropy())) > 0.99 * np.log(4)


def test_symbols_are_one_hot():
    config = NetworkConfig(body="cnn", cnn_layers=((3, 1, 1),), symbols=4)
    _, variables, _ = build(config, Discrete(2), (2, 2, 2), jnp.int8)
    # Two channels of four symbols: eight planes.
    assert variables["params"]["encoder"]["CNN_0"]["Convolution_0"]["kernel"].shape == (1, 1, 8, 3)


def test_only_the_value_sees_the_time():
    network, variables, (memory, observation, first, _) = build(
        NetworkConfig(**SMALL), Discrete(3), (4,), time_limit=10
    )
    assert variables["params"]["value_hidden"]["kernel"].shape == (9, 8)
    assert variables["params"]["policy_hidden"]["kernel"].shape == (8, 8)
    early, late = jnp.zeros(3, jnp.int32), jnp.full(3, 9, jnp.int32)
    _, early_policy, early_value = network.apply(variables, memory, observation, first, early)
    _, late_policy, late_value = network.apply(variables, memory, observation, first, late)
    np.testing.assert_array_equal(early_policy.logits, late_policy.logits)
    assert float(jnp.min(jnp.abs(early_value - late_value))) > 1e-3

    network, variables, _ = build(NetworkConfig(**SMALL), Discrete(3), (4,), time_limit=None)
    _, _, early_value = network.apply(variables, memory, observation, first, early)
    _, _, late_value = network.apply(variables, memory, observation, first, late)
    np.testing.assert_array_equal(early_value, late_value)


def test_memory_is_forgotten_at_the_first_step_of_an_episode():
    config = NetworkConfig(**SMALL, recurrent=True)
    network, variables, _ = build(config, Discrete(3), (4,))
    observation = jax.random.normal(jax.random.key(2), (7, 3, 4))
    steps = jnp.zeros((7, 3), jnp.int32)
    first = jnp.zeros((7, 3), bool).at[4, 1].set(True)
    start = jax.random.normal(jax.random.key(3), (3, 8))

    def unroll(memory, rows, first):
        arguments = (memory, observation[rows], first[rows], steps[rows])
        return network.apply(variables, *arguments, method=ActorCritic.unroll)

    memories, policy, _ = unroll(start, slice(None), first)
    # Environment 1 from step 4 on is what a new episode is; the others remember the steps before.
    _, fresh, _ = unroll(jnp.zeros((3, 8)), slice(4, None), jnp.zeros((7, 3), bool))
    np.testing.assert_allclose(policy.logits[4:, 1], fresh.logits[:, 1], rtol=1e-5, atol=1e-7)
    assert float(jnp.max(jnp.abs(policy.logits[4:, 0] - fresh.logits[:, 0]))) > 1e-6
    np.testing.assert_array_equal(memories.shape, (7, 3, 8))

    memory = start
    for t in range(7):
        memory, one, _ = network.apply(variables, memory, observation[t], first[t], steps[t])
        np.testing.assert_allclose(one.logits, policy.logits[t], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(memory, memories[t], rtol=1e-5, atol=1e-6)


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match=r"network\.body.*'lstm'.*impala"):
        NetworkConfig(body="lstm")
    with pytest.raises(ConfigError, match=r"network\.activation"):
        NetworkConfig(activation="gelu")
    with pytest.raises(ConfigError, match=r"network\.width is 0"):
        NetworkConfig(width=0)
    with pytest.raises(ConfigError, match=r"\(5,\).*'mlp'"):
        build(NetworkConfig(body="cnn"), Discrete(2), (5,))
