"""Catrap as a batched environment in pure JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreward.envs.catrap import art, levels, render, rules
from jaxreward.errors import ConfigError
from jaxreward.types import Array, Discrete, EnvironmentSpec, TimeStep

TASK = "Kill all monsters by walking the cat into them from the side."


@dataclasses.dataclass(frozen=True)
class CatrapConfig:
    """Settings of Catrap.

    Attributes:
      level: number, name or file of a level; several with commas between, or 'all': environment i of the
        batch plays level i mod n.
      num_envs: B, how many games step together.
      max_episode_steps: the time limit in actions.
      observation: 'pixels' (grey, cropped to the centre 120 x 160) or 'symbolic' (sprites, int8 [9, 10]).
      scale: reduction of the observed pixels, 1, 2 or 4; 4 gives 30 x 40.
      frame_scale: reduction of the pictures that `render` gives, 1, 2 or 4; 4 gives 36 x 40.
      actions: 'dpad' (right, left, up, down) or 'all' (and rewind, swap).
    """

    level: str = "2"
    num_envs: int = 128
    max_episode_steps: int = 64
    observation: Literal["pixels", "symbolic"] = "pixels"
    scale: int = 4
    frame_scale: int = 4
    actions: Literal["dpad", "all"] = "dpad"


@struct.dataclass
class CatrapState:
    """B games and their place in the episode."""

    game: rules.State  # [B, ...]
    level: Array  # int32 [B], which of the environment's levels each game plays
    episode_step: Array  # int32 [B]


class Catrap:
    """B games of Catrap; see `rules` for what the actions do.

    Observation: uint8 [B, 120 / scale, 160 / scale, 1], or int8 [B, 9, 10] if symbolic. Frame: int8
    [B, 9, 10], the sprites of `render.sprites`. Action: int32 [B], right 0, left 1, up 2, down 3 and, if
    all are allowed, rewind 4, swap 5. `env_reward` is 1 on the step that kills the last monster, else 0;
    that step terminates the episode, and `info['success']` says so. Every episode of an environment
    starts in the same way; the key of `reset` changes nothing.
    """

    on_device = True
    can_save = True

    def __init__(self, config: CatrapConfig):
        """Loads the levels.

        Raises:
          ConfigError: a setting out of range, or a two-cat level without the SWAP action.
          DataError: a level that is missing, malformed or unsolvable.
        """
        _check(config)
        self.config = config
        self.levels = levels.choose_levels(config.level)
        if config.actions == "dpad":
            for level in self.levels:
                if (level.cells == art.CAT).sum() > 1:
                    raise ConfigError(
                        f"Catrap level '{level.name}' has two cats, found actions='dpad': "
                        "set actions='all', which can swap them"
                    )
        self._starts = jax.jit(self._load)(np.stack([level.cells for level in self.levels]))
        sprites = jax.ShapeDtypeStruct((art.ROWS, art.COLUMNS), jnp.int8)
        height, width = render.picture_shape(config.scale, crop=True)
        pixels = jax.ShapeDtypeStruct((height, width, 1), jnp.uint8)
        self.spec = EnvironmentSpec(
            num_envs=config.num_envs,
            max_episode_steps=config.max_episode_steps,
            task=TASK,
            observation=pixels if config.observation == "pixels" else sprites,
            frame=sprites,
            image_shape=(*render.picture_shape(config.frame_scale), 3),
            action_space=Discrete(4 if config.actions == "dpad" else 6),
        )

    def reset(self, key: Array) -> tuple[CatrapState, TimeStep]:
        """Starts B games."""
        del key  # every episode starts in the same way
        batch = self.config.num_envs
        level = jnp.arange(batch, dtype=jnp.int32) % len(self.levels)
        game, frame, observation = self._first(level)
        no = jnp.zeros(batch, bool)
        timestep = TimeStep(
            observation=observation,
            frame=frame,
            final_observation=observation,
            final_frame=frame,
            first=jnp.ones(batch, bool),
            episode_step=jnp.zeros(batch, jnp.int32),
            env_reward=jnp.zeros(batch, jnp.float32),
            terminated=no,
            truncated=no,
            info={"success": no},
        )
        return CatrapState(game, level, timestep.episode_step), timestep

    def step(self, state: CatrapState, action: Array) -> tuple[CatrapState, TimeStep]:
        """Plays one action in each game, to its end; ended episodes start anew in the same step.

        Args:
          state: B games.
          action: int32 [B].
        """
        game = jax.vmap(rules.step)(state.game, action)
        final_frame = jax.vmap(render.sprites)(game)
        episode_step = state.episode_step + 1
        success = rules.won(game)
        truncated = ~success & (episode_step >= self.config.max_episode_steps)
        done = success | truncated

        # First games and their pictures are looked up: drawing only what was played halves the cost.
        first_game, first_frame, first_observation = self._first(state.level)
        game = _select(done, first_game, game)
        final_observation = self._observe(final_frame)
        episode_step = jnp.where(done, 0, episode_step)
        timestep = TimeStep(
            observation=_select(done, first_observation, final_observation),
            frame=_select(done, first_frame, final_frame),
            final_observation=final_observation,
            final_frame=final_frame,
            first=done,
            episode_step=episode_step,
            env_reward=success.astype(jnp.float32),
            terminated=success,
            truncated=truncated,
            info={"success": success},
        )
        return CatrapState(game, state.level, episode_step), timestep

    def render(self, frame: Array) -> Array:
        """Draws compact frames int8 [..., 9, 10] as uint8 RGB [..., *spec.image_shape]."""
        return render.render(frame, self.config.frame_scale)

    def pictures(self, frames: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Full-size pictures of one episode, for videos.

        Args:
          frames: int8 [L + 1, 9, 10], the episode's compact frames.
          actions: int32 [L]; not needed, since a compact frame holds all that can be seen.

        Returns:
          uint8 [L + 1, 144, 160, 3], RGB.
        """
        del actions
        return np.asarray(render.render(frames, 1))

    def _load(self, cells: Array) -> tuple[rules.State, Array, Array]:
        """First games, frames and observations of n levels int8 [n, 9, 10]."""
        rewind = self.config.actions == "all"
        game = jax.vmap(lambda level: rules.load(level, rewind=rewind))(cells)
        frame = jax.vmap(render.sprites)(game)
        return game, frame, self._observe(frame)

    def _first(self, level: Array) -> tuple[rules.State, Array, Array]:
        """Games, frames and observations with which episodes of the levels int32 [B] start."""
        if len(self.levels) == 1:  # a look-up by index costs as much as playing the step
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (*level.shape, *x.shape[1:])), self._starts)
        return jax.tree.map(lambda x: jnp.asarray(x)[level], self._starts)

    def _observe(self, frame: Array) -> Array:
        """What the agent sees of compact frames [B, 9, 10]."""
        if self.config.observation == "symbolic":
            return frame
        return render.grey(frame, self.config.scale, crop=True)


def _select(where: Array, yes, no):
    """Chooses between two pytrees of arrays [B, ...] by a bool [B]."""
    return jax.tree.map(lambda a, b: jnp.where(where.reshape(-1, *[1] * (a.ndim - 1)), a, b), yes, no)


def _check(config: CatrapConfig) -> None:
    """Raises ConfigError unless every setting is in range."""
    for field in ("num_envs", "max_episode_steps"):
        value = getattr(config, field)
        if value < 1:
            raise ConfigError(f"Catrap's {field} is {value}: expected 1 or more")
    for field, allowed in (
        ("observation", ("pixels", "symbolic")),
        ("actions", ("dpad", "all")),
        ("scale", render.SCALES),
        ("frame_scale", render.SCALES),
    ):
        value = getattr(config, field)
        if value not in allowed:
            raise ConfigError(f"Catrap's {field} is {value!r}: expected one of {allowed}")
