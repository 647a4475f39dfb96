"""Random streams of episodes, cut into rollouts, for tests of rewards."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.types import Box, EnvironmentSpec, Rollout, TimeStep

LIMIT = 40  # max_episode_steps


def make_spec(num_envs):
    frame = jax.ShapeDtypeStruct((), jnp.float32)
    return EnvironmentSpec(num_envs, LIMIT, "", frame, frame, (1, 1, 3), Box(-1, 1, (1,)))


def random_stream(seed, steps, num_envs, end_rate=0.1):
    """Frames that are random numbers, and where episodes end (always at the time limit)."""
    rng = np.random.default_rng(seed)
    final = rng.normal(size=(steps, num_envs)).astype(np.float32)
    reset = rng.normal(size=(steps, num_envs)).astype(np.float32)
    first = rng.normal(size=num_envs).astype(np.float32)
    done = np.zeros((steps, num_envs), bool)
    elapsed = np.zeros((steps + 1, num_envs), np.int32)
    for t in range(steps):
        for b in range(num_envs):
            done[t, b] = rng.random() < end_rate or elapsed[t, b] + 1 == LIMIT
            elapsed[t + 1, b] = 0 if done[t, b] else elapsed[t, b] + 1
    return first, final, np.where(done, reset, final), done, elapsed


def cut_rollout(stream, start, stop):
    first, final, frame, done, elapsed = stream
    frames = np.concatenate([first[None], frame])

    def step(t0, t1):
        flags = np.concatenate([np.ones((1, first.size), bool), done])[t0:t1]
        last = np.concatenate([first[None], final])[t0:t1]
        return TimeStep(
            observation=frames[t0:t1],
            frame=frames[t0:t1],
            final_observation=last,
            final_frame=last,
            first=flags,
            episode_step=elapsed[t0:t1],
            env_reward=np.zeros(flags.shape, np.float32),
            terminated=flags,
            truncated=np.zeros_like(flags),
            info={},
        )

    before = jax.tree.map(lambda x: x[0], step(start, start + 1))
    after = step(start + 1, stop + 1)
    return jax.tree.map(jnp.asarray, Rollout(before, (), np.zeros((stop - start, first.size)), after, {}))
