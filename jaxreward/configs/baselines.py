"""PPO on the environment's own reward: checks of the learner and of the adapters, no reward of ours."""

from __future__ import annotations

import dataclasses

from jaxreward.agents.networks import NetworkConfig
from jaxreward.agents.ppo import PPOConfig
from jaxreward.envs.brax import BraxConfig
from jaxreward.envs.gymnasium import GymnasiumConfig
from jaxreward.envs.gymnax import GymnaxConfig
from jaxreward.rewards.environment_reward import EnvironmentRewardConfig
from jaxreward.training.act import ActConfig
from jaxreward.training.experiment import ExperimentConfig
from jaxreward.training.loop import LoopConfig

MLP = NetworkConfig(body="mlp", mlp_layers=(64,), width=64, activation="tanh")
AGENT = PPOConfig(
    discount=0.99,
    trace=0.95,
    learning_rate=1e-3,
    final_learning_rate=2.5e-4,
    entropy_coefficient=0.01,
    final_entropy_coefficient=0.01,
    epochs=4,
    minibatches=4,
    horizon="bootstrap",
    network=MLP,
)

CONFIGS = {
    "gymnax_cartpole": ExperimentConfig(
        description="PPO on gymnax CartPole-v1 with the environment's reward",
        env=GymnaxConfig(name="CartPole-v1", num_envs=64),
        reward=EnvironmentRewardConfig(),
        agent=AGENT,
        loop=LoopConfig(rollout_length=64),
        act=ActConfig(updates=80, checkpoint_every=20),
    ),
    "brax_inverted_pendulum": ExperimentConfig(
        description="PPO on Brax's inverted pendulum with the environment's reward",
        env=BraxConfig(name="inverted_pendulum", backend="spring", num_envs=64),
        reward=EnvironmentRewardConfig(),
        agent=dataclasses.replace(AGENT, learning_rate=2.5e-3),
        loop=LoopConfig(rollout_length=32),
        act=ActConfig(updates=60, checkpoint_every=20),
    ),
    "gymnasium_cartpole": ExperimentConfig(
        description="PPO on Gymnasium's CartPole-v1 with the environment's reward",
        env=GymnasiumConfig(id="CartPole-v1", num_envs=16),
        reward=EnvironmentRewardConfig(),
        agent=AGENT,
        loop=LoopConfig(rollout_length=128),
        act=ActConfig(updates=60, checkpoint_every=20),
    ),
}
