"""Episode statistics against a plain Python account."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.training.act import hacking_warning
from jaxreward.training.episodes import empty_tally, tally_episodes
from jaxreward.types import Rollout, TimeStep


def random_steps(seed, steps, num_envs):
    rng = np.random.default_rng(seed)
    done = rng.random((steps, num_envs)) < 0.2
    success = done & (rng.random((steps, num_envs)) < 0.5)
    reward = rng.normal(size=(steps, num_envs)).astype(np.float32)
    env_reward = rng.normal(size=(steps, num_envs)).astype(np.float32)
    elapsed = np.zeros((steps + 1, num_envs), np.int32)
    for t in range(steps):
        elapsed[t + 1] = np.where(done[t], 0, elapsed[t] + 1)
    return done, success, reward, env_reward, elapsed


def cut(data, start, stop):
    done, success, reward, env_reward, elapsed = data
    empty = np.zeros((stop - start, done.shape[1]), np.float32)

    def make(t0, t1, done, success, env_reward):
        return TimeStep(
            empty[: t1 - t0], empty[: t1 - t0], empty[: t1 - t0], empty[: t1 - t0], done, elapsed[t0:t1],
            env_reward, done, np.zeros_like(done), {"success": success},
        )  # fmt: skip

    part = slice(start, stop)
    first = jax.tree.map(lambda x: x[0], make(start, start + 1, done[part], success[part], env_reward[part]))
    after = make(start + 1, stop + 1, done[part], success[part], env_reward[part])
    return jax.tree.map(jnp.asarray, Rollout(first, (), empty, after, {})), jnp.asarray(reward[part])


def test_statistics_equal_a_python_account_across_rollouts():
    data = random_steps(0, 60, 5)
    done, success, reward, env_reward, _ = data
    tally, found = empty_tally(5), []
    for start, stop in ((0, 20), (20, 40), (40, 60)):
        tally, metrics = tally_episodes(tally, *cut(data, start, stop))
        found.append(jax.device_get(metrics))
    starts = np.zeros(5, int)
    episodes = []
    for t in range(60):
        for b in np.flatnonzero(done[t]):
            part = slice(starts[b], t + 1)
            episodes.append(
                (t, success[t, b], reward[part, b].sum(), env_reward[part, b].sum(), t + 1 - starts[b])
            )
            starts[b] = t + 1
    for i, metrics in enumerate(found):
        mine = [e for e in episodes if 20 * i <= e[0] < 20 * (i + 1)]
        won = [e[2] for e in mine if e[1]]
        lost = [e[2] for e in mine if not e[1]]
        assert metrics["episodes"] == len(mine)
        assert metrics["successes"] == len(won)
        np.testing.assert_allclose(metrics["return"], np.mean([e[2] for e in mine]), atol=1e-5)
        np.testing.assert_allclose(metrics["return_on_wins"], np.mean(won), atol=1e-5)
        np.testing.assert_allclose(metrics["return_on_failures"], np.mean(lost), atol=1e-5)
        np.testing.assert_allclose(metrics["env_return"], np.mean([e[3] for e in mine]), atol=1e-5)
        np.testing.assert_allclose(metrics["length"], np.mean([e[4] for e in mine]), atol=1e-5)


def test_no_episode_gives_nan_not_zero():
    data = random_steps(1, 4, 2)
    data[0][:] = False
    _, metrics = tally_episodes(empty_tally(2), *cut(data, 0, 4))
    assert np.isnan(metrics["success"])
    assert metrics["episodes"] == 0


def test_high_reward_without_success_is_called_a_hack():
    hacked = [{"return": 0.95, "success": 0.0}] * 12
    assert "without solving" in hacking_warning(hacked, expert_reward=1.0)
    assert hacking_warning([{"return": 0.95, "success": 0.5}] * 12, 1.0) is None
    assert hacking_warning([{"return": 0.3, "success": 0.0}] * 12, 1.0) is None
    assert hacking_warning([{"return": None, "success": None}], 1.0) is None
