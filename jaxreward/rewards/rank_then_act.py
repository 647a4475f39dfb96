"""Rank-Then-Act: the rank correlation of a frozen scorer's progress with time (paper section 3.3).

The reward of a window is Spearman's rho between the scorer's values of its frames and their order in
time. The window's oldest frame is the anchor: the scorer sees it and it is never scored.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.correlation import spearman_with_validity
from jaxreward.errors import ConfigError
from jaxreward.rewards.base import STREAM, FrozenReward, Queries, scatter_steps
from jaxreward.rewards.windows import due_windows, elapsed_steps, empty_history
from jaxreward.scorers.base import Scores
from jaxreward.types import Array, EnvironmentSpec, PyTree, Rollout, TimeStep

PARSE_FAILURE_REWARD = -1.0  # R_min, paper section 3.2


@dataclasses.dataclass(frozen=True)
class RankThenActConfig:
    """Settings of the reward.

    Attributes:
      mode: 'window' pays every `frequency` steps and at the end of the episode (section 3.3);
        'episode' pays once, at the end, over frames sampled uniformly from the whole trajectory
        (the only-end variant of appendix A.5).
      window: m, frames in a window, the anchor included.
      frequency: N, steps between queries.
      frames: frames sampled from an episode in mode 'episode', the anchor included.
      shuffles: L, how many shufflings of a window are averaged; for a scorer whose values do not depend on
        the order in which it is shown frames, only random ties are drawn L times.
      ties: how equal values are ranked: 'random' is the paper's rule, 'expected' its exact expectation.
      aggregate: 'sum' of the windows of an episode (the paper), or their 'mean': a sum pays for
        dawdling, since a longer episode has more windows.
    """

    mode: Literal["window", "episode"] = "episode"
    window: int = 15
    frequency: int = 15
    frames: int = 15
    shuffles: int = 2
    ties: Literal["expected", "average", "random"] = "expected"
    aggregate: Literal["sum", "mean"] = "sum"

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        for field, least in (("window", 2), ("frequency", 1), ("frames", 2), ("shuffles", 1)):
            found = getattr(self, field)
            if found < least:
                raise ConfigError(f"reward.{field} is {found}; expected at least {least}")


@struct.dataclass
class Settings:
    """Numeric settings as data, so that one trace serves every value."""

    window: Array  # int32 [], at most the config's, which is the static size of a query
    frequency: Array  # int32 []


@struct.dataclass
class RankThenActState:
    """What reaches from one rollout into the next."""

    settings: Settings
    history: PyTree  # [M, B, ...] the compact frames before the rollout, newest last
    window_sum: Array  # float32 [B], rho summed over the settled windows of the current episode
    window_count: Array  # int32 [B]


class RankThenAct(FrozenReward):
    """The correlation reward as propose / settle."""

    needs_scorer = True

    def __init__(self, config: RankThenActConfig, *, permutation_equivariant: bool = False):
        """Binds the settings.

        Args:
          config: the settings; `window` is also the static capacity of the state's window.
          permutation_equivariant: shuffling the frames only shuffles this scorer's values, so that
            one call serves all L shuffles and only ties are drawn L times.
        """
        self.config = config
        self.rows_per_window = 1 if permutation_equivariant else config.shuffles
        self.draws_per_row = config.shuffles if permutation_equivariant and config.ties == "random" else 1

    @property
    def slots(self) -> int:
        """K, the static number of frames in a query."""
        return self.config.window if self.config.mode == "window" else self.config.frames

    def history_length(self, max_episode_steps: int) -> int:
        """M, how many frames before a rollout a window can reach back to."""
        reach = self.config.window if self.config.mode == "window" else max_episode_steps + 1
        return max(min(reach, max_episode_steps + 1) - 2, 1)

    def init(self, key: Array, spec: EnvironmentSpec) -> RankThenActState:
        """Makes an empty history for B environments."""
        del key
        length = self.history_length(spec.max_episode_steps)
        history = empty_history(spec, length)
        settings = Settings(jnp.int32(self.config.window), jnp.int32(self.config.frequency))
        return RankThenActState(
            settings, history, jnp.zeros(spec.num_envs, jnp.float32), jnp.zeros(spec.num_envs, jnp.int32)
        )

    def start(self, state: RankThenActState, timestep: TimeStep) -> RankThenActState:
        """Forgets unfinished episodes (their frames are never reached: windows stop at step 0)."""
        del timestep
        return state.replace(
            window_sum=jnp.zeros_like(state.window_sum), window_count=jnp.zeros_like(state.window_count)
        )

    def propose(
        self, state: RankThenActState, rollout: Rollout, key: Array
    ) -> tuple[RankThenActState, Queries]:
        """Finds the windows that are due: t mod N = 0 or the end of the episode, once if both.

        Windows cross rollout boundaries (through `history`) but never episode boundaries.

        Args:
          state: the reward's state.
          rollout: T steps of B environments.
          key: draws the shufflings.

        Returns:
          The state with the newest frames in its history, and queries of K slots.
        """
        done, t = rollout.timestep.done, elapsed_steps(rollout)
        due = done if self.config.mode == "episode" else (t % state.settings.frequency == 0) | done
        history, queries = due_windows(
            state.history, rollout, due, lambda elapsed: self._positions(elapsed, state.settings)
        )
        rows = (queries.index, queries.environment, queries.time, queries.where, queries.step)
        index, environment, position, where, step = (
            jnp.repeat(x, self.rows_per_window, axis=0) for x in rows
        )
        index, position, where = self._shuffle(key, index, position, where)
        queries = queries.replace(
            index=index, environment=environment, time=position, where=where, step=step,
            count=queries.count * self.rows_per_window,
        )  # fmt: skip
        return state.replace(history=history), queries

    def _positions(self, elapsed: Array, settings: Settings) -> tuple[Array, Array]:
        """Chronological positions of a window's frames in their episode: [Q, K] and the mask [Q, K]."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        if self.config.mode == "window":
            size = jnp.minimum(jnp.minimum(settings.window, self.slots), elapsed)  # m = min(N, t)
            position = (elapsed - size)[:, None] + 1 + slot
        else:
            size = jnp.minimum(self.slots, elapsed + 1)
            numerator = 2 * slot * elapsed[:, None] + (size - 1)[:, None]
            position = numerator // (2 * jnp.maximum(size - 1, 1))[:, None]  # round(slot * t / (size - 1))
        where = slot < size[:, None]
        return jnp.where(where, position, elapsed[:, None]), where

    def _shuffle(self, key: Array, index: Array, position: Array, where: Array):
        """Permutes the scored slots of each row at random; the anchor stays first, masked slots last."""
        rows, slots = index.shape
        noise = jax.random.uniform(key, (rows, slots))
        order = jnp.where(where, noise, 2.0).at[:, 0].set(-1.0)
        shown = jnp.argsort(order, axis=-1)
        return tuple(jnp.take_along_axis(x, shown, axis=-1) for x in (index, position, where))

    def settle(
        self,
        state: RankThenActState,
        rollout: Rollout,
        queries: Queries,
        scores: Scores,
        key: Array,
    ) -> tuple[RankThenActState, dict[str, Array], dict[str, Array]]:
        """r_t = mean over L shuffles of spr(progress, time) on query steps, otherwise 0 (section 3.3).

        A window with fewer than two scored frames, or with non-finite values, pays 0; an answer that
        could not be parsed pays -1.

        Args:
          state: the reward's state.
          rollout: the rollout that was proposed.
          queries: what `propose` returned.
          scores: values float32 [Q, K].
          key: draws the ties, if `ties` is 'random'.

        Returns:
          The state, {'reward': float32 [T, B]} and metrics.
        """
        where = queries.where[:, 1:]

        def correlate(tie_key):
            return spearman_with_validity(
                scores.values[:, 1:], queries.time[:, 1:], ties=self.config.ties, where=where, key=tie_key
            )

        if self.config.ties == "random":
            rho, defined = jax.vmap(correlate)(jax.random.split(key, self.draws_per_row))
            rho, defined = rho.mean(0), defined[0]
        else:
            rho, defined = correlate(None)
        rho = jnp.where(scores.valid, rho, PARSE_FAILURE_REWARD)

        asked = jnp.arange(rho.shape[0]) < queries.count
        correlation = scatter_steps(queries, jnp.where(asked, rho, 0.0) / self.rows_per_window)
        is_query = scatter_steps(queries, asked.astype(jnp.float32)) > 0
        state, reward = self._aggregate(state, rollout, correlation, is_query)
        asked_count = jnp.maximum(queries.count, 1)
        metrics = {
            "reward/queries": queries.count,
            "reward/rho": jnp.where(asked, rho, 0.0).sum() / asked_count,
            "reward/undefined_share": (asked & ~defined).sum() / asked_count,
            "reward/parse_failure_share": (asked & ~scores.valid).sum() / asked_count,
        }
        return state, {STREAM: reward}, metrics

    def _aggregate(self, state: RankThenActState, rollout: Rollout, rho: Array, is_query: Array):
        """Sums the windows of an episode, or pays the changes of their running mean."""

        def step(carry, inputs):
            total, count = carry
            value, query, done = inputs
            mean_before = total / jnp.maximum(count, 1)
            total, count = total + value, count + query
            change = total / jnp.maximum(count, 1) - mean_before
            paid = value if self.config.aggregate == "sum" else jnp.where(query, change, 0.0)
            return (jnp.where(done, 0.0, total), jnp.where(done, 0, count)), paid

        carry = (state.window_sum, state.window_count)
        (total, count), reward = jax.lax.scan(step, carry, (rho, is_query, rollout.timestep.done))
        return state.replace(window_sum=total, window_count=count), reward
