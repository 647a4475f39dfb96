"""The loop: act, ask, score, settle, learn.

    rollout        = unroll(environment, agent)
    queries        = reward.propose(rollout)
    scores         = scorer.score(queries)
    rewards        = reward.settle(queries, scores)
    experience     = buffer.sample(buffer.add(rollout, rewards))
    agent, reward  = agent.learn(experience), reward.learn(experience)

A pure-JAX environment with a jittable scorer runs as ONE program (`fused`), which also vmaps over
seeds and settings; otherwise the same pure functions run as three programs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.agents.buffers import OnPolicy
from jaxreward.errors import ConfigError
from jaxreward.training.episodes import EpisodeTally, empty_tally, tally_episodes
from jaxreward.training.scoring import score_queries, score_queries_on_host
from jaxreward.training.unroll import make_host_unroll, unroll
from jaxreward.types import Array, Experience, PyTree, Rollout, TimeStep


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Settings of the loop.

    Attributes:
      rollout_length: T, steps of every environment between two updates.
      score_chunk: queries in one call of the scorer.
      fused: one program for everything ('on'), a jitted call a minibatch ('off'), or by device
        ('auto': off on CPU, where convolution gradients inside a scan are many times slower).
    """

    rollout_length: int = 64
    score_chunk: int = 64
    fused: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        for field in ("rollout_length", "score_chunk"):
            found = getattr(self, field)
            if found < 1:
                raise ConfigError(f"loop.{field} is {found}; expected at least 1")


@struct.dataclass
class TrainingState:
    """Everything that resuming needs."""

    agent: PyTree
    reward: PyTree
    buffer: PyTree
    environment: PyTree
    timestep: TimeStep  # [B, ...] the latest
    memory: PyTree  # [B, ...] the agent's
    tally: EpisodeTally
    key: Array  # typed key []
    update: Array  # int32 [], updates done; environment steps are counted on the host as update * T * B


class Loop:
    """Wires the five parts into one training step.

    Attributes:
      fused: whether `update` is one program.
    """

    def __init__(self, config: LoopConfig, environment, agent, reward, scorer=None, *, total_updates: int):
        """Checks that the parts fit each other.

        Args:
          config: the loop's settings.
          environment: the environment.
          agent: the agent.
          reward: the reward.
          scorer: the scorer, or None for a reward that needs none.
          total_updates: the length of the whole run, for schedules.

        Raises:
          ConfigError: a reward that needs a scorer has none, or the parts cannot be fused.
        """
        if reward.needs_scorer and scorer is None:
            raise ConfigError(f"{type(reward).__name__} needs a scorer and none was given")
        self.config, self.environment, self.agent = config, environment, agent
        self.reward, self.scorer, self.buffer = reward, scorer, OnPolicy()
        self.total_updates = total_updates
        can_fuse = environment.on_device and (scorer is None or scorer.jittable)
        if config.fused == "on" and not can_fuse:
            raise ConfigError(
                "loop.fused is 'on', but the environment or the scorer runs on the host; use 'auto' or 'off'"
            )
        on_cpu = jax.default_backend() == "cpu"
        self.fused = can_fuse and (config.fused == "on" or (config.fused == "auto" and not on_cpu))
        self._update = jax.jit(self.update_program, donate_argnums=0)
        self._act = self._make_unroll()
        self._assess = jax.jit(self.assess, donate_argnums=0)
        self._settle = jax.jit(self._settle_program)
        self._propose = jax.jit(self.reward.propose)
        self._finish = jax.jit(self._finish_program)

    @property
    def steps_per_update(self) -> int:
        """Environment steps in one update: T * B."""
        return self.config.rollout_length * self.environment.spec.num_envs

    def init(self, key: Array) -> TrainingState:
        """Starts a run: new parameters, new episodes."""
        agent_key, reward_key, environment_key, key = jax.random.split(key, 4)
        spec = self.environment.spec
        environment, timestep = self.environment.reset(environment_key)
        reward = self.reward.start(self.reward.init(reward_key, spec), timestep)
        state = TrainingState(
            agent=self.agent.init(agent_key, spec, self.total_updates),
            reward=reward,
            buffer=self.buffer.init(),
            environment=environment,
            timestep=timestep,
            memory=self.agent.memory(spec.num_envs),
            tally=empty_tally(spec.num_envs),
            key=key,
            update=jnp.int32(0),
        )
        return _own_buffers(state)

    def restart_episodes(self, state: TrainingState) -> TrainingState:
        """Starts new episodes everywhere, as a simulator that cannot be saved needs after a checkpoint."""
        environment_key, key = jax.random.split(state.key)
        environment, timestep = self.environment.reset(environment_key)
        num_envs = self.environment.spec.num_envs
        state = state.replace(
            environment=environment,
            timestep=timestep,
            reward=self.reward.start(state.reward, timestep),
            memory=self.agent.memory(num_envs),
            tally=empty_tally(num_envs),
            key=key,
        )
        return _own_buffers(state)

    def update_program(
        self, state: TrainingState, params: PyTree, context: PyTree
    ) -> tuple[TrainingState, dict[str, Array]]:
        """One update as a pure function: jit it, scan it, vmap it over seeds and settings.

        Args:
          state: the training state.
          params: the scorer's parameters (None without a scorer).
          context: what the scorer's `prepare` returned.

        Returns:
          The next state and scalar metrics.
        """
        keys = self._keys(state)
        environment, timestep, memory, rollout = unroll(
            self.environment,
            self.agent,
            state.agent,
            state.environment,
            state.timestep,
            state.memory,
            keys["act"],
            length=self.config.rollout_length,
        )
        state = state.replace(environment=environment, timestep=timestep, memory=memory)
        state, experience, metrics = self.assess(state, rollout, params, context)
        agent, learn_metrics = self.agent.learn(state.agent, experience, keys["learn"])
        state, reward_metrics = self._finish_program(state, agent, experience)
        return state, {**metrics, **learn_metrics, **reward_metrics}

    def assess(
        self, state: TrainingState, rollout: Rollout, params: PyTree, context: PyTree
    ) -> tuple[TrainingState, Experience, dict[str, Array]]:
        """Proposes, scores and settles a rollout, and tallies its episodes; jittable."""
        programs = (self.reward.propose, score_queries, self._settle_program)
        return self._assess_by(*programs, state, rollout, params, context)

    def update(
        self, state: TrainingState, params: PyTree = None, context: PyTree = None
    ) -> tuple[TrainingState, dict[str, Array], dict[str, float]]:
        """One update by the fastest way for the parts at hand; `state` is consumed.

        Returns:
          The next state, scalar metrics (on device, not yet waited for), and wall seconds by phase.

        Raises:
          SimulatorError: the host simulator failed.
        """
        if self.fused:
            state, metrics = self._update(state, params, context)
            return state, metrics, {}
        keys = self._keys(state)
        start = time.perf_counter()
        environment, timestep, memory, rollout = self._act(
            state.agent, state.environment, state.timestep, state.memory, keys["act"]
        )
        jax.block_until_ready(rollout)
        if not self.environment.on_device:
            self.environment.raise_if_failed(environment)
        acted = time.perf_counter()
        state = state.replace(environment=environment, timestep=timestep, memory=memory)
        state, experience, metrics = jax.block_until_ready(
            self._assess_anywhere(state, rollout, params, context)
        )
        scored = time.perf_counter()
        agent, learn_metrics = self.agent.learn_stepwise(state.agent, experience, keys["learn"])
        state, reward_metrics = self._finish(state, agent, experience)
        jax.block_until_ready(state.agent)
        learned = time.perf_counter()
        seconds = {"act": acted - start, "score": scored - acted, "learn": learned - scored}
        return state, {**metrics, **learn_metrics, **reward_metrics}, seconds

    def _assess_anywhere(self, state, rollout, params, context):
        """`assess` as one program, or with the scorer called from the host between two programs."""
        if self.scorer is None or self.scorer.jittable:
            return self._assess(state, rollout, params, context)
        programs = (self._propose, score_queries_on_host, self._settle)
        return self._assess_by(*programs, state, rollout, params, context)

    def _assess_by(self, propose, score, settle, state, rollout, params, context):
        keys, scores = self._keys(state), None
        reward_state, queries = propose(state.reward, rollout, keys["propose"])
        if queries is not None:
            parts = (self.environment, self.scorer, params, context)
            scores = score(*parts, queries, keys["score"], chunk=self.config.score_chunk)
        return settle(state.replace(reward=reward_state), rollout, queries, scores)

    def _settle_program(self, state, rollout, queries, scores):
        settle_key = self._keys(state)["settle"]
        reward_state, rewards, metrics = self.reward.settle(
            state.reward, rollout, queries, scores, settle_key
        )
        tally, episode_metrics = tally_episodes(state.tally, rollout, sum(rewards.values()))
        buffer, experience = self.buffer.sample(self.buffer.add(state.buffer, rollout, rewards))
        state = state.replace(reward=reward_state, tally=tally, buffer=buffer)
        return state, experience, {**metrics, **episode_metrics}

    def _finish_program(self, state, agent, experience):
        keys = self._keys(state)
        reward, metrics = self.reward.learn(state.reward, experience, keys["reward"])
        state = state.replace(agent=agent, reward=reward, key=keys["next"], update=state.update + 1)
        return state, metrics

    def _keys(self, state: TrainingState) -> dict[str, Array]:
        """The keys of one update; every phase derives its own from the state's key."""
        names = ("next", "act", "propose", "score", "settle", "learn", "reward")
        return dict(zip(names, jax.random.split(state.key, len(names)), strict=True))

    def _make_unroll(self):
        length = self.config.rollout_length
        if not self.environment.on_device and self.environment.unroll == "loop":
            return make_host_unroll(self.environment, self.agent, length=length)
        return jax.jit(functools.partial(unroll, self.environment, self.agent, length=length))


def _own_buffers(state: TrainingState) -> TrainingState:
    """Gives every leaf a buffer of its own: a donated buffer must not appear twice."""
    return jax.tree.map(lambda x: x.copy(), state)
