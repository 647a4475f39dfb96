"""Rank-Then-Act on Catrap (paper sections 4.1, 4.2 and A.5), on the cartridge and in JAX, with controls."""

from __future__ import annotations

import dataclasses

from jaxreward.agents.networks import NetworkConfig
from jaxreward.agents.ppo import PPOConfig
from jaxreward.agents.token_grpo import TokenGRPOConfig
from jaxreward.envs.catrap.environment import CatrapConfig
from jaxreward.envs.pyboy import CartridgeConfig
from jaxreward.rewards.constant import ConstantConfig
from jaxreward.rewards.rank_then_act import RankThenActConfig
from jaxreward.rewards.success import SuccessConfig
from jaxreward.scorers.vlm_ranker import VLMRankerConfig
from jaxreward.training.act import ActConfig
from jaxreward.training.experiment import ExperimentConfig
from jaxreward.training.loop import LoopConfig
from jaxreward.training.prepare_scorer import VideoConfig
from jaxreward.training.rank_vlm import VLMRankConfig

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
# For a model of a million parameters, which knows the form of the answers: the paper's settings (the
# defaults) are for seven billion.
VLM_RANK = VLMRankConfig(
    steps=150,
    batch_size=32,
    group_size=8,
    evaluate_every=10,
    grpo=TokenGRPOConfig(learning_rate=1e-3, epochs=2, minibatch_size=8, kl_coefficient=0.0, remat=False),
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
    "catrap_vlm_rta": _variant(
        JAX,
        "The paper's path with text: GRPO teaches a small Qwen3-VL to write ranks, which then reward PPO",
        vlm=VLMRankerConfig(
            model="catrap_reader", describe=True, max_new_tokens=128, dtype="float32", cached_frames=4096
        ),
        vlm_rank=VLM_RANK,
        loop=LoopConfig(score_chunk=256),
        act=ActConfig(updates=40),
    ),
    "catrap_jax_rta_symbolic": _variant(
        JAX,
        "catrap_jax_rta with a policy that reads the cells instead of the picture",
        env=CatrapConfig(level="2", observation="symbolic"),
        agent=SYMBOLIC_AGENT,
    ),
}
