"""Rank-Then-Act on Catrap (paper sections 4.1, 4.2 and A.5), on the cartridge and in JAX, with controls."""

from __future__ import annotations

import dataclasses

from jaxreward.agents.networks import NetworkConfig
from jaxreward.agents.ppo import PPOConfig
from jaxreward.envs.catrap.environment import CatrapConfig
from jaxreward.envs.pyboy import CartridgeConfig
from jaxreward.rewards.constant import ConstantConfig
from jaxreward.rewards.rank_then_act import RankThenActConfig
from jaxreward.rewards.success import SuccessConfig
from jaxreward.training.experiment import ExperimentConfig
from jaxreward.training.prepare_scorer import VideoConfig

AGENT = PPOConfig(
    discount=0.99,
    trace=0.98,
    advantage_floor=0.05,
    network=NetworkConfig(body="cnn", cnn_layers=((16, 4, 4),)),
)
SYMBOLIC_AGENT = dataclasses.replace(AGENT, network=NetworkConfig(body="cnn", cnn_layers=((8, 1, 1),)))

CARTRIDGE = ExperimentConfig(
    description="Catrap on a Game Boy cartridge: rank a scorer from expert videos, act on it with PPO",
    env=CartridgeConfig(level="2"),
    reward=RankThenActConfig(mode="episode"),
    agent=AGENT,
    videos=VideoConfig(held_out_levels=("03", "04")),
)
JAX = dataclasses.replace(
    CARTRIDGE,
    description="The same in pure JAX, from the same pixels",
    env=CatrapConfig(level="2"),
)


def _variant(base: ExperimentConfig, description: str, **changes) -> ExperimentConfig:
    return dataclasses.replace(base, description=description, **changes)


CONFIGS = {
    "catrap_rta": CARTRIDGE,
    "catrap_rta_window": _variant(
        CARTRIDGE,
        "catrap_rta with a reward every 15 steps (section 3.3) in place of one at the end",
        reward=RankThenActConfig(mode="window"),
    ),
    "catrap_success": _variant(
        CARTRIDGE, "The sparse oracle on the cartridge (table 1, oracle reward)", reward=SuccessConfig()
    ),
    "catrap_constant": _variant(
        CARTRIDGE, "Control: a constant reward at the end of every episode", reward=ConstantConfig()
    ),
    "catrap_jax_rta": JAX,
    "catrap_jax_rta_window": _variant(
        JAX,
        "catrap_jax_rta with a reward every 15 steps (section 3.3)",
        reward=RankThenActConfig(mode="window"),
    ),
    "catrap_jax_rta_window_mean": _variant(
        JAX,
        "catrap_jax_rta with the mean of an episode's windows, which does not pay for dawdling",
        reward=RankThenActConfig(mode="window", aggregate="mean"),
    ),
    "catrap_jax_untrained": _variant(
        JAX, "Control: catrap_jax_rta with a scorer that was never trained", scorer="untrained"
    ),
    "catrap_jax_success": _variant(JAX, "The sparse oracle on the JAX Catrap", reward=SuccessConfig()),
    "catrap_jax_constant": _variant(
        JAX, "Control: a constant reward at the end of every episode", reward=ConstantConfig()
    ),
    "catrap_jax_rta_symbolic": _variant(
        JAX,
        "catrap_jax_rta with a policy that reads the cells instead of the picture",
        env=CatrapConfig(level="2", observation="symbolic"),
        agent=SYMBOLIC_AGENT,
    ),
}
