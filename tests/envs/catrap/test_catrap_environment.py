"""Catrap's pictures and its batched environment."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.envs.base import Environment
from jaxreward.envs.catrap import art, levels, render, rules, solver
from jaxreward.envs.catrap.environment import Catrap, CatrapConfig
from jaxreward.errors import ConfigError

LOAD, STEP, SPRITES = jax.jit(rules.load), jax.jit(rules.step), jax.jit(render.sprites)
RENDER = jax.jit(render.render, static_argnums=1)
GREY = jax.jit(render.grey, static_argnums=1, static_argnames="crop")


def paint(state):
    """The full picture pixel by pixel from the colours of the art, as the hardware composes it."""
    names = list(art.ART)
    shade = {palette: [palette >> (2 * i) & 3 for i in range(4)] for palette in (0xE4, 0xD0)}
    picture = np.zeros((144, 160), np.uint8)
    for row in range(9):
        for column in range(10):
            code = int(state.now.cells[row + 1, column + 1])
            for y in range(16):
                for x in range(16):
                    letter = art.ART[names[code]][y][x]
                    colour = 0 if letter == "." else int(letter)
                    for cat in range(int(state.num_cats)):
                        if int(state.now.positions[cat]) != (row + 1) * 12 + column + 1:
                            continue
                        climbing = code == art.LADDER
                        mirrored = bool(state.now.facing_left[cat]) and not climbing
                        dot = art.ART["cat_on_ladder" if climbing else "cat"][y][15 - x if mirrored else x]
                        if dot != ".":
                            colour = shade[0xE4 if cat == state.now.active else 0xD0][int(dot)]
                    picture[row * 16 + y, column * 16 + x] = (255, 153, 85, 0)[colour]
    return picture


@pytest.mark.parametrize(("level", "actions"), [("21", (0, 5, 1)), ("01", (0, 0, 3)), ("05", (1,))])
def test_pictures_are_exact_at_every_scale(level, actions):
    state = LOAD(levels.load_level(level).cells)
    for action in actions:
        state = STEP(state, jnp.int32(action))
    full = paint(state)
    frame = SPRITES(state)
    assert frame.shape == (9, 10) and frame.dtype == jnp.int8
    for scale in render.SCALES:
        blocks = full.reshape(144 // scale, scale, 160 // scale, scale).astype(int)
        mean = blocks.sum((1, 3)) // scale**2
        colour = np.asarray(RENDER(frame, scale))
        assert colour.dtype == np.uint8 and colour.shape == (*mean.shape, 3)
        np.testing.assert_array_equal(colour, np.repeat(mean[..., None], 3, -1))
        grey = np.asarray(GREY(jnp.stack([frame, frame])[None], scale))
        np.testing.assert_array_equal(grey[0, 1, ..., 0], mean[12 // scale : 132 // scale])
        np.testing.assert_array_equal(GREY(frame, scale, crop=False)[..., 0], mean)
    assert GREY(frame, 4).shape == (30, 40, 1)
    with pytest.raises(ConfigError, match="scale is 3: expected one of"):
        render.render(frame, 3)


def test_sprites_look_different_at_scale_four():
    tiles = render.grey(jnp.arange(13, dtype=jnp.int8).repeat(90).reshape(13, 9, 10), 4)
    assert len(np.unique(np.asarray(tiles).reshape(13, -1), axis=0)) == 13


def solution_actions(environment, level):
    return [
        jnp.full(environment.spec.num_envs, a, jnp.int32)
        for a in solver.solve(levels.load_level(level).cells)
    ]


@pytest.mark.parametrize("observation", ["pixels", "symbolic"])
def test_a_win_ends_the_episode_and_starts_the_next(observation):
    environment = Catrap(CatrapConfig(level="1", num_envs=3, observation=observation))
    assert isinstance(environment, Environment)
    state, first = environment.reset(jax.random.key(0))
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(environment.step, n=1))
    for t, action in enumerate(solution_actions(environment, 1), start=1):
        state, timestep = step(state, action)
        won = t == 8
        assert (timestep.terminated == won).all() and not timestep.truncated.any()
        assert (timestep.env_reward == float(won)).all() and (timestep.info["success"] == won).all()
        assert (timestep.episode_step == (0 if won else t)).all() and (timestep.first == won).all()
    chex.assert_trees_all_equal(timestep.observation, first.observation)
    chex.assert_trees_all_equal(timestep.frame, first.frame)
    final = np.asarray(timestep.final_frame)
    assert not np.isin(final, (art.WALKER, art.FLYER)).any()
    if observation == "pixels":
        np.testing.assert_array_equal(timestep.final_observation, GREY(final, 4))
    for spec, value in (
        (environment.spec.observation, first.observation),
        (environment.spec.frame, first.frame),
    ):
        assert value.shape[1:] == spec.shape and value.dtype == spec.dtype
    assert environment.render(first.frame).shape == (3, *environment.spec.image_shape)
    restart, _ = environment.reset(jax.random.key(1))
    chex.assert_trees_all_equal(state, restart)


def test_time_limit_truncates_unless_the_last_action_wins():
    for limit, truncated in ((7, True), (8, False)):
        environment = Catrap(CatrapConfig(level="1", num_envs=2, max_episode_steps=limit))
        step = jax.jit(environment.step)
        state, _ = environment.reset(jax.random.key(0))
        for action in solution_actions(environment, 1)[:limit]:
            state, timestep = step(state, action)
        assert timestep.done.all() and (timestep.truncated == truncated).all()
        assert (timestep.terminated != truncated).all() and (state.episode_step == 0).all()


def test_several_levels_keep_their_places_over_resets():
    environment = Catrap(CatrapConfig(level="1,02,3", num_envs=5, max_episode_steps=3))
    state, first = environment.reset(jax.random.key(0))
    step = jax.jit(environment.step)
    for _ in range(3):
        state, timestep = step(state, jnp.zeros(5, jnp.int32))
    assert timestep.truncated.all()
    for name, copies in (("01", (0, 3)), ("02", (1, 4)), ("03", (2,))):
        expected = SPRITES(LOAD(levels.load_level(name).cells))
        for i in copies:
            np.testing.assert_array_equal(timestep.frame[i], expected)
    chex.assert_trees_all_equal(timestep.observation, first.observation)


def test_all_actions_swap_and_rewind():
    environment = Catrap(CatrapConfig(level="21", num_envs=1, actions="all"))
    assert environment.spec.action_space.n == 6
    state, first = environment.reset(jax.random.key(0))
    step = jax.jit(environment.step)
    for action in solution_actions(environment, 21):
        moved, after = step(state, action)
        if action != rules.SWAP and not after.done.all():
            back, timestep = step(moved, jnp.full(1, rules.REWIND, jnp.int32))
            chex.assert_trees_all_equal(back.game.now, state.game.now)
        state, timestep = moved, after
    assert timestep.info["success"].all()
    chex.assert_trees_all_equal(timestep.frame, first.frame)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0: expected 1 or more"),
        ({"max_episode_steps": 0}, "max_episode_steps is 0"),
        ({"observation": "sound"}, "observation is 'sound': expected one of"),
        ({"scale": 3}, "scale is 3"),
        ({"frame_scale": 8}, "frame_scale is 8"),
        ({"actions": "none"}, "actions is 'none'"),
        ({"level": "21"}, "two cats, found actions='dpad': set actions='all'"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(ConfigError, match=message):
        Catrap(CatrapConfig(**change))


def test_pictures_of_an_episode_are_its_frames_at_full_size():
    environment = Catrap(CatrapConfig(level="2", num_envs=1))
    state, timestep = environment.reset(jax.random.key(0))
    frames, actions = [timestep.frame[0]], solution_actions(environment, "2")
    step = jax.jit(environment.step)
    for action in actions:
        state, timestep = step(state, action)
        frames.append(timestep.final_frame[0])
    frames = np.stack(frames)
    pictures = environment.pictures(frames, np.concatenate(actions))
    assert isinstance(pictures, np.ndarray) and pictures.dtype == np.uint8
    assert pictures.shape == (len(actions) + 1, 144, 160, 3)
    blocks = pictures.reshape(-1, 36, 4, 40, 4, 3).astype(int).sum((2, 4)) // 16
    np.testing.assert_array_equal(blocks, environment.render(frames))
