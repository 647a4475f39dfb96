"""Plays a policy and says how often it succeeds."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.metrics.statistics import pass_at_k, wilson_interval
from jaxreward.training.unroll import make_host_unroll, unroll
from jaxreward.types import Array, Discrete, EnvironmentSpec, PyTree, Rollout, TimeStep


class UniformRandom:
    """An agent that takes uniformly random actions."""

    def __init__(self, spec: EnvironmentSpec):
        """Binds the action space."""
        self.spec = spec

    def memory(self, batch_size: int) -> PyTree:
        """No memory."""
        return ()

    def act(self, state: PyTree, memory: PyTree, timestep: TimeStep, key: Array, *, greedy: bool = False):
        """A uniform action for each environment, whatever it sees."""
        space, batch = self.spec.action_space, timestep.first.shape[0]
        if isinstance(space, Discrete):
            return memory, jax.random.randint(key, (batch,), 0, space.n), {}
        action = jax.random.uniform(key, (batch, *space.shape), minval=space.low, maxval=space.high)
        return memory, action, {}


@dataclasses.dataclass(frozen=True)
class Episode:
    """One finished episode of an evaluation.

    Attributes:
      success: the goal was reached.
      length: number of actions.
      env_return: sum of the environment's own reward.
      actions: [length, ...] what was done.
      frames: pytree of [length + 1, ...] compact frames, the first and the final one included.
      env_rewards: float32 [length], the environment's own reward of each step.
      reached: bool [length], whether the step reached the goal.
    """

    success: bool
    length: int
    env_return: float
    actions: np.ndarray
    frames: PyTree
    env_rewards: np.ndarray
    reached: np.ndarray


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Finished episodes of one policy.

    Attributes:
      episodes: the episodes, in the order environment by environment.
      greedy: the most likely action was taken instead of a sampled one.
    """

    episodes: list[Episode]
    greedy: bool

    @property
    def successes(self) -> int:
        """How many episodes reached the goal."""
        return sum(e.success for e in self.episodes)

    @property
    def success_rate(self) -> float:
        """Share of episodes that reached the goal, in [0, 1]."""
        return self.successes / len(self.episodes)

    def summary(self) -> dict[str, object]:
        """The numbers that a run reports: rate, 95 % Wilson interval, pass@5, length and return.

        A greedy policy that plays the same actions in every episode has been tried once: it has neither an
        interval nor a pass@5 (None).
        """
        count = len(self.episodes)
        once = self.greedy and len({e.actions.tobytes() for e in self.episodes}) == 1
        interval = [float(x) for x in wilson_interval(self.successes, count)]
        return {
            "episodes": count,
            "success_rate": self.success_rate,
            "success_interval": None if once else interval,
            "pass_at_5": None if once or count < 5 else pass_at_k(count, self.successes, 5),
            "length": float(np.mean([e.length for e in self.episodes])),
            "env_return": float(np.mean([e.env_return for e in self.episodes])),
        }


def make_unroll(environment, agent, *, length: int, greedy: bool):
    """The jitted `unroll`, or the plain loop around a host environment that prefers one."""
    if environment.on_device or environment.unroll == "scan":
        return jax.jit(functools.partial(unroll, environment, agent, length=length, greedy=greedy))
    return make_host_unroll(environment, agent, length=length, greedy=greedy)


def evaluate(
    environment, agent, agent_state: PyTree, key: Array, *, episodes: int, greedy: bool = False
) -> Evaluation:
    """Plays at least `episodes` whole episodes.

    Every environment contributes the same number of its first episodes: counting whichever episodes
    end first would favour short ones, and here a short episode is a success.

    Args:
      environment: B environments.
      agent: the agent.
      agent_state: its state.
      key: a typed key.
      episodes: how many episodes, rounded up to a multiple of B.
      greedy: take the most likely action.
    """
    spec = environment.spec
    per_environment = -(-episodes // spec.num_envs)
    play = make_unroll(environment, agent, length=spec.max_episode_steps, greedy=greedy)
    reset_key, key = jax.random.split(key)
    state, timestep = environment.reset(reset_key)
    memory = agent.memory(spec.num_envs)
    rollouts = []
    for i in range(per_environment):  # one rollout of the longest episode ends at least one everywhere
        state, timestep, memory, rollout = play(
            agent_state, state, timestep, memory, jax.random.fold_in(key, i)
        )
        if not environment.on_device:
            environment.raise_if_failed(state)
        rollouts.append(jax.tree.map(np.asarray, rollout))
    found = split_episodes(rollouts)
    return Evaluation([e for column in found for e in column[:per_environment]], greedy)


def split_episodes(rollouts: list[Rollout]) -> list[list[Episode]]:
    """Cuts consecutive NumPy rollouts into their finished episodes, a list for each environment."""
    join = lambda *x: np.concatenate(x)  # noqa: E731
    steps = jax.tree.map(join, *[r.timestep for r in rollouts])
    actions = np.concatenate([r.action for r in rollouts])
    first = rollouts[0].first_timestep.frame
    before = jax.tree.map(lambda a, b: np.concatenate([a[None], b[:-1]]), first, steps.frame)
    done = np.asarray(steps.terminated | steps.truncated)
    columns = []
    for b in range(done.shape[1]):
        ends = np.flatnonzero(done[:, b])
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(int)
        columns.append([_cut(steps, actions, before, b, s, e) for s, e in zip(starts, ends, strict=True)])
    return columns


def _cut(steps, actions, before, b: int, start: int, end: int) -> Episode:
    frames = jax.tree.map(
        lambda head, last: np.concatenate([head[start : end + 1, b], last[end : end + 1, b]]),
        before,
        steps.final_frame,
    )
    return Episode(
        success=bool(steps.info["success"][start : end + 1, b].any()),
        length=int(end + 1 - start),
        env_return=float(steps.env_reward[start : end + 1, b].sum()),
        actions=actions[start : end + 1, b],
        frames=frames,
        env_rewards=steps.env_reward[start : end + 1, b],
        reached=steps.info["success"][start : end + 1, b],
    )


def pad_frames(episodes: list[Episode], max_episode_steps: int) -> tuple[PyTree, jnp.ndarray]:
    """Stacks the frames of episodes, repeating the last: ([V, max_episode_steps + 1, ...], lengths [V])."""
    size = max_episode_steps + 1
    index = [np.minimum(np.arange(size), e.length) for e in episodes]
    frames = jax.tree.map(
        lambda *x: np.stack([a[i] for a, i in zip(x, index, strict=True)]), *[e.frames for e in episodes]
    )
    return frames, np.array([e.length + 1 for e in episodes], np.int32)
