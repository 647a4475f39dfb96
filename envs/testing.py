"""The contract of the Environment protocol as one call, for the tests of every environment."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.envs.base import Environment
from jaxreward.types import Array, Discrete, EnvironmentSpec, PyTree, TimeStep


def check_environment(
    environment: Environment, *, steps: int = 64, seed: int = 0, varied_starts: bool = True
) -> TimeStep:
    """Plays random actions and checks every promise of the Environment protocol.

    Shapes, dtypes and trees are those of the spec, equal for reset and step, and never weak; one trace
    serves all steps; the ends of episodes are counted, flagged and reset within the step; one key and one
    row of actions give one sequence; a saved state goes on as before; frames render to RGB.

    Args:
      environment: what to check; its episodes must be short enough that one ends within `steps`.
      steps: T, how many steps to play.
      seed: of the key for resets and actions.
      varied_starts: episodes begin at random states, so two keys give two beginnings.

    Returns:
      The T steps that were played, NumPy arrays [T, B, ...], for further tests.

    Raises:
      AssertionError: a promise is broken; the message says which.
    """
    assert isinstance(environment, Environment), "it lacks a member of the Environment protocol"
    spec = environment.spec
    reset_key, action_key = jax.random.split(jax.random.key(seed))
    actions = random_actions(spec, action_key, steps)

    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(environment.step, n=1))
    first, played = _play(environment, step, reset_key, actions)
    check_record(spec, first, (spec.num_envs,))
    check_record(spec, played, (steps, spec.num_envs))
    _check_first(first)
    check_episodes(spec, first, played)
    _check_types(environment, reset_key, actions[0])
    _check_render(environment, first, played)

    again_first, again = _play(environment, step, reset_key, actions)
    _assert_equal((first, played), (again_first, again), "the same key and actions gave another sequence")
    if varied_starts:
        other, _ = _play(environment, step, jax.random.key(seed + 1), actions[:1])
        assert not _equal(first.observation, other.observation), "two keys gave the same first observations"
        _check_varied(spec, first, played)
    if environment.can_save:
        _check_saved(environment, step, reset_key, actions, played)
    return played


def random_actions(spec: EnvironmentSpec, key: Array, steps: int) -> Array:
    """Uniformly random actions of a spec's action space: int32 [T, B], or float32 [T, B, ...]."""
    leading = (steps, spec.num_envs)
    if isinstance(spec.action_space, Discrete):
        return jax.random.randint(key, leading, 0, spec.action_space.n)
    box = spec.action_space
    return jax.random.uniform(key, (*leading, *box.shape), jnp.float32, box.low, box.high)


def check_record(spec: EnvironmentSpec, timestep: TimeStep, leading: tuple[int, ...]) -> None:
    """Checks the shapes, dtypes and trees of a TimeStep against the spec.

    Args:
      spec: the environment's.
      timestep: [*leading, ...].
      leading: the axes before each environment's own, the last of them B.

    Raises:
      AssertionError: naming the field.
    """
    flag, count = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.int32)
    expected = {
        "observation": spec.observation,
        "final_observation": spec.observation,
        "frame": spec.frame,
        "final_frame": spec.frame,
        "first": flag,
        "episode_step": count,
        "env_reward": jax.ShapeDtypeStruct((), jnp.float32),
        "terminated": flag,
        "truncated": flag,
    }
    for name, field_spec in expected.items():
        value = getattr(timestep, name)
        assert jax.tree.structure(value) == jax.tree.structure(field_spec), f"{name} is another tree"
        for leaf, leaf_spec in zip(jax.tree.leaves(value), jax.tree.leaves(field_spec), strict=True):
            found, wanted = (leaf.shape, leaf.dtype), (leading + tuple(leaf_spec.shape), leaf_spec.dtype)
            assert found == wanted, f"{name} is {found}, but the spec says {wanted}"
    success = timestep.info["success"]
    assert (success.shape, success.dtype) == (leading, bool), "info['success'] is not a bool for each"
    for leaf in jax.tree.leaves(timestep.info):
        assert leaf.shape[: len(leading)] == leading, "info lacks the leading axes"
    assert np.isfinite(timestep.env_reward).all(), "env_reward is not finite"


def check_episodes(spec: EnvironmentSpec, first: TimeStep, played: TimeStep) -> None:
    """Checks the ends of episodes in a sequence of steps: counting, flags, same-step auto-reset.

    Args:
      spec: the environment's.
      first: NumPy arrays [B, ...], before the first action.
      played: NumPy arrays [T, B, ...].

    Raises:
      AssertionError: saying what is wrong, or that no episode ended.
    """
    done = played.terminated | played.truncated
    assert done.any(), "no episode ended: play more steps or lower max_episode_steps"
    assert not (played.terminated & played.truncated).any(), "terminated and truncated in the same step"
    before = np.concatenate([first.episode_step[None], played.episode_step[:-1]])
    length = before + 1
    np.testing.assert_array_equal(
        played.episode_step, np.where(done, 0, length), "episode_step does not count the actions"
    )
    np.testing.assert_array_equal(played.first, done, "first is not the step that ended an episode")
    assert (length <= spec.max_episode_steps).all(), "an episode went past max_episode_steps"
    np.testing.assert_array_equal(
        played.truncated,
        (length == spec.max_episode_steps) & ~played.terminated,
        "truncated is not the time limit of an episode that did not end by itself",
    )
    going_on = ~done
    for plain, final in ((played.observation, played.final_observation), (played.frame, played.final_frame)):
        _assert_equal(
            jax.tree.map(lambda x: x[going_on], plain),
            jax.tree.map(lambda x: x[going_on], final),
            "the final observation or frame differs from the plain one in the middle of an episode",
        )


def _play(environment: Environment, step, key: Array, actions: Array) -> tuple[TimeStep, TimeStep]:
    state, first = jax.jit(environment.reset)(key)
    timesteps = []
    for action in actions:
        state, timestep = step(state, action)
        timesteps.append(jax.device_get(timestep))
    return jax.device_get(first), jax.tree.map(lambda *leaves: np.stack(leaves), *timesteps)


def _check_first(first: TimeStep) -> None:
    assert first.first.all(), "reset: first is not True"
    assert (first.episode_step == 0).all(), "reset: episode_step is not 0"
    assert (first.env_reward == 0).all(), "reset: env_reward is not 0"
    assert not (first.terminated | first.truncated).any(), "reset: an episode has ended"
    assert not first.info["success"].any(), "reset: success without an action"
    _assert_equal(first.observation, first.final_observation, "reset: final_observation differs")
    _assert_equal(first.frame, first.final_frame, "reset: final_frame differs")


def _check_types(environment: Environment, key: Array, action: Array) -> None:
    """The records of reset and step have one tree and one set of strong types."""
    after_reset = jax.eval_shape(environment.reset, key)
    after_step = jax.eval_shape(environment.step, after_reset[0], action)
    assert jax.tree.structure(after_reset) == jax.tree.structure(after_step), "reset and step differ in tree"
    leaves = zip(jax.tree_util.tree_leaves_with_path(after_reset), jax.tree.leaves(after_step), strict=True)
    for (path, a), b in leaves:
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name}: reset gives {a}, step gives {b}"
        assert not (a.weak_type or b.weak_type), f"{name} is weakly typed"


def _check_render(environment: Environment, first: TimeStep, played: TimeStep) -> None:
    shape = environment.spec.image_shape
    assert len(shape) == 3 and shape[-1] == 3, f"image_shape is {shape}, not (H, W, 3)"
    render = jax.jit(environment.render)
    for frame in (
        jax.tree.map(lambda x: x[0], first.frame),
        first.frame,
        jax.tree.map(lambda x: x[:2], played.final_frame),
    ):
        leading = jax.tree.leaves(frame)[0].shape[
            : jax.tree.leaves(frame)[0].ndim - len(jax.tree.leaves(environment.spec.frame)[0].shape)
        ]
        picture = render(frame)
        found, wanted = (picture.shape, picture.dtype), (leading + tuple(shape), jnp.uint8)
        assert found == wanted, f"render gives {found}, but should give {wanted}"


def _check_varied(spec: EnvironmentSpec, first: TimeStep, played: TimeStep) -> None:
    starts = [
        np.concatenate([a, b[played.first]]).reshape(spec.num_envs + played.first.sum(), -1)
        for a, b in zip(jax.tree.leaves(first.observation), jax.tree.leaves(played.observation), strict=True)
    ]
    distinct = {tuple(row) for row in np.concatenate(starts, axis=-1).tolist()}
    assert len(distinct) > 1, "every episode begins with the same observation"


def _check_saved(environment: Environment, step, key: Array, actions: Array, played: TimeStep) -> None:
    state, _ = jax.jit(environment.reset)(key)
    half = len(actions) // 2
    for action in actions[:half]:
        state, _ = step(state, action)
    state = jax.tree.map(lambda x: x.copy(), state)
    for t in range(half, len(actions)):
        state, timestep = step(state, actions[t])
    _assert_equal(
        jax.device_get(timestep), jax.tree.map(lambda x: x[-1], played), "a saved state went another way"
    )


def _equal(a: PyTree, b: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.floating)) for x, y in pairs)


def _assert_equal(a: PyTree, b: PyTree, message: str) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b) and _equal(a, b), message
