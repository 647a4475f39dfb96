"""PPO learns on each kind of foreign environment, with the environment's own reward."""

import jax
import numpy as np
import pytest

from jaxreward.configs import CONFIGS
from jaxreward.envs import registry
from jaxreward.training.experiment import make_loop, make_reward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "updates", "least"),
    [("gymnax_cartpole", 80, 300.0), ("brax_inverted_pendulum", 60, 150.0), ("gymnasium_cartpole", 30, 60.0)],
)
def test_return_rises_far_above_random_play(name, updates, least):
    config = CONFIGS[name]
    environment = registry.make(config.env)
    try:
        loop = make_loop(config, environment, make_reward(config.reward, None), None)
        state, returns = loop.init(jax.random.key(0)), []
        for _ in range(updates):
            state, metrics, _ = loop.update(state)
            returns.append(float(metrics["env_return"]))
    finally:
        if not environment.on_device:
            environment.close()
    assert returns[0] < 40.0  # random play
    assert np.nanmean(returns[-10:]) > least
