"""The contract of the protocol on this project's own environments, and that it notices breaches."""

import jax
import jax.numpy as jnp
import pytest

from jaxreward.envs.catrap.environment import Catrap, CatrapConfig
from jaxreward.envs.probe import make_probe
from jaxreward.envs.testing import check_environment


@pytest.mark.parametrize("name", ["action", "remember", "endless", "target"])
def test_probes(name):
    check_environment(make_probe(name, num_envs=8), steps=24, varied_starts=False)


def test_catrap():
    config = CatrapConfig(level="1", num_envs=3, max_episode_steps=12)
    check_environment(Catrap(config), steps=30, varied_starts=False)


class Broken:
    """A probe of which one answer is changed."""

    on_device = True
    can_save = True

    def __init__(self, change):
        self._inner = make_probe("delayed", num_envs=4)
        self._change = change
        self.spec = self._inner.spec

    def reset(self, key):
        return self._inner.reset(key)

    def step(self, state, action):
        state, timestep = self._inner.step(state, action)
        return state, timestep.replace(**self._change(timestep))

    def render(self, frame):
        return self._inner.render(frame)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"truncated": t.done}, "terminated and truncated"),
        (lambda t: {"first": ~t.first}, "first is not"),
        (lambda t: {"episode_step": t.episode_step + 1}, "episode_step does not count"),
        (lambda t: {"final_observation": t.final_observation + 1}, "final observation"),
        (lambda t: {"env_reward": t.env_reward.astype(jnp.float16)}, "env_reward is"),
        (lambda t: {"env_reward": t.env_reward * jnp.nan}, "not finite"),
        (lambda t: {"info": {"success": t.env_reward}}, "success"),
        (lambda t: {"terminated": t.terminated & False}, "no episode ended|truncated"),
    ],
)
def test_breaches_are_noticed(change, message):
    check_environment(Broken(lambda t: {}), steps=12, varied_starts=False)
    with pytest.raises(AssertionError, match=message):
        check_environment(Broken(change), steps=12, varied_starts=False)


def test_a_repeated_first_state_is_noticed():
    class Frozen(Broken):
        def reset(self, key):
            return self._inner.reset(jax.random.key(0))

    with pytest.raises(AssertionError, match="two keys gave the same"):
        check_environment(Frozen(lambda t: {}), steps=12)
