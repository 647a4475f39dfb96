"""The probes keep the contract of environments and pay what their descriptions say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.envs.probe import PROBES, make_probe
from jaxreward.envs.testing import check_environment
from jaxreward.errors import ConfigError


@pytest.mark.parametrize("name", ["match", "remember", "endless", "target"])
def test_probes_keep_the_contract(name):
    cued = name != "endless"
    played = check_environment(make_probe(name, 8), steps=12, varied_starts=cued)
    assert played.truncated.any() != played.terminated.any()
    assert played.truncated.any() == (name == "endless")


def rewards_of(name, actions):
    """Rewards [T] and observations before each action [T] of one environment."""
    environment = make_probe(name, 1)
    state, timestep = environment.reset(jax.random.key(0))
    rewards, observations = [], []
    for action in actions:
        observations.append(float(timestep.observation[0, 0]))
        state, timestep = environment.step(state, jnp.asarray([action]))
        rewards.append(float(timestep.env_reward[0]))
    return np.array(rewards), np.array(observations)


def test_rewards_by_hand():
    assert list(rewards_of("constant", [0, 1])[0]) == [1.0, 1.0]
    assert list(rewards_of("delayed", [0, 0, 0, 0])[0]) == [0.0, 1.0, 0.0, 1.0]
    assert list(rewards_of("delayed", [0, 0, 0, 0])[1]) == [0.0, 1.0, 0.0, 1.0]
    assert list(rewards_of("action", [0, 1])[0]) == [-1.0, 1.0]
    rewards, observations = rewards_of("observation", [0] * 8)
    np.testing.assert_array_equal(rewards, observations)
    assert set(observations) == {-1.0, 1.0}
    rewards, observations = rewards_of("match", [1] * 8)
    np.testing.assert_array_equal(rewards, observations)
    rewards, observations = rewards_of("remember", [1] * 12)
    np.testing.assert_array_equal(rewards[2::3], observations[::3])
    assert not rewards[0::3].any() and not rewards[1::3].any() and not observations[1::3].any()
    rewards, observations = rewards_of("target", [[1.0]] * 8)
    np.testing.assert_allclose(rewards, -np.square(1.0 - observations))


def test_frames_are_rendered_in_grey():
    picture = make_probe("match", 1).render(jnp.array([[-1.0], [0.0], [1.0]]))
    assert picture.shape == (3, 8, 8, 3) and picture.dtype == jnp.uint8
    np.testing.assert_array_equal(picture[:, 0, 0, 0], [0, 128, 255])


def test_an_unknown_probe_is_named():
    with pytest.raises(ConfigError, match=r"'matsch'.*match"):
        make_probe("matsch", 1)
    assert all(make_probe(name, 2).spec.num_envs == 2 for name in PROBES)
