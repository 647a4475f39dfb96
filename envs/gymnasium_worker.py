"""A block of gymnasium environments, and the process that runs one.

This module and all that it imports stay free of JAX: a worker process is a simulator and nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxreward.envs.workers import RESET, array_bytes, lay_out, serve
from jaxreward.errors import ConfigError, SimulatorError


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """What a block of gymnasium environments must know."""

    id: str
    arguments: dict[str, Any]  # keyword arguments of gymnasium.make
    num_envs: int  # of all blocks together
    start: int  # the environments of this block are start .. stop - 1
    stop: int
    max_episode_steps: int
    success: str  # see `GymnasiumConfig`
    render: bool
    observation_shape: tuple[int, ...]
    observation_dtype: str
    action_shape: tuple[int, ...]
    action_dtype: str
    frame_shape: tuple[int, ...]  # (H, W, 3), or () without pictures

    def array_specs(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the arrays that the parent and the blocks share."""
        batch = (self.num_envs,)
        observation = (batch + tuple(self.observation_shape), np.dtype(self.observation_dtype))
        specs = {
            "seed": (batch, np.uint32),
            "action": (batch + tuple(self.action_shape), np.dtype(self.action_dtype)),
            "selected": (batch, np.bool_),
            "observation": observation,
            "final_observation": observation,
            "first": (batch, np.bool_),
            "episode_step": (batch, np.int32),
            "env_reward": (batch, np.float32),
            "terminated": (batch, np.bool_),
            "truncated": (batch, np.bool_),
            "success": (batch, np.bool_),
        }
        if self.render:
            frame = (batch + tuple(self.frame_shape), np.uint8)
            specs |= {"frame": frame, "final_frame": frame}
        return specs


class GymnasiumBlock:
    """The environments start .. stop - 1 with their episodes, over shared arrays.

    An episode that ends is followed by the first observation of the next in the same step; gymnasium's
    vector classes, whose default is to insert a step between the two, are not used.
    """

    def __init__(self, settings: BlockSettings, arrays: dict[str, np.ndarray]):
        """Makes the environments; raises whatever they raise."""
        self._settings, self._arrays = settings, arrays
        self._environments = {
            row: make_single(settings.id, settings.arguments, render=settings.render)
            for row in range(settings.start, settings.stop)
        }

    def run(self, command: bytes) -> None:
        """Resets or steps the selected environments; results are in the shared arrays."""
        for row, environment in self._environments.items():
            if self._arrays["selected"][row]:
                if command == RESET:
                    self._reset(row, environment)
                else:
                    self._step(row, environment)

    def close(self) -> None:
        """Ends the environments."""
        for environment in self._environments.values():
            environment.close()

    def _reset(self, row: int, environment) -> None:
        arrays = self._arrays
        self._begin(row, environment, seed=int(arrays["seed"][row]))
        arrays["env_reward"][row] = 0
        arrays["terminated"][row] = arrays["truncated"][row] = arrays["success"][row] = False
        self._copy_row(row, "observation", "final_observation")
        if self._settings.render:
            self._copy_row(row, "frame", "final_frame")

    def _begin(self, row: int, environment, seed: int | None = None) -> None:
        """Starts an episode; without a seed the environment goes on with its own random numbers."""
        arrays = self._arrays
        observation, _ = environment.reset(seed=seed)
        arrays["observation"][row] = flatten(environment, observation)
        arrays["first"][row] = True
        arrays["episode_step"][row] = 0
        if self._settings.render:
            arrays["frame"][row] = self._picture(environment)

    def _step(self, row: int, environment) -> None:
        arrays, settings = self._arrays, self._settings
        action = arrays["action"][row]
        action = action.item() if not settings.action_shape else action.copy()
        observation, reward, terminated, truncated, info = environment.step(action)
        steps = int(arrays["episode_step"][row]) + 1
        terminated = bool(terminated)
        truncated = not terminated and (bool(truncated) or steps >= settings.max_episode_steps)
        arrays["final_observation"][row] = flatten(environment, observation)
        arrays["env_reward"][row] = reward
        arrays["terminated"][row], arrays["truncated"][row] = terminated, truncated
        arrays["success"][row] = self._succeeded(reward, terminated, info)
        if settings.render:
            arrays["final_frame"][row] = self._picture(environment)
        if terminated or truncated:
            self._begin(row, environment)
            return
        arrays["first"][row] = False
        arrays["episode_step"][row] = steps
        self._copy_row(row, "final_observation", "observation")
        if settings.render:
            self._copy_row(row, "final_frame", "frame")

    def _copy_row(self, row: int, source: str, target: str) -> None:
        self._arrays[target][row] = self._arrays[source][row]

    def _succeeded(self, reward: float, terminated: bool, info: dict) -> bool:
        match self._settings.success:
            case "terminated":
                return terminated
            case "rewarded_end":
                return terminated and reward > 0
            case "never":
                return False
        return bool(info.get("success", info.get("is_success", False)))

    def _picture(self, environment) -> np.ndarray:
        return resize(draw(environment), self._settings.frame_shape[:2])


def make_single(id: str, arguments: dict[str, Any], *, render: bool):
    """Makes one gymnasium environment without gymnasium's time limit, which the block keeps itself.

    Args:
      id: a registered id, or 'module:id'.
      arguments: keyword arguments of gymnasium.make.
      render: whether `render()` must give pictures.

    Raises:
      ConfigError: the environment cannot draw pictures.
      SimulatorError: the environment cannot be made.
    """
    import gymnasium

    try:
        environment = gymnasium.make(
            id,
            max_episode_steps=-1,
            disable_env_checker=True,
            **({"render_mode": "rgb_array"} if render else {}),
            **arguments,
        )
    except Exception as error:
        advice = "; if it cannot draw pictures, set render=False" if render else ""
        raise SimulatorError(
            f"gymnasium could not make '{id}': {type(error).__name__}: {error}{advice}"
        ) from error
    if render and "rgb_array" not in environment.metadata.get("render_modes", []):
        environment.close()
        raise ConfigError(
            f"{id} cannot draw pictures (no 'rgb_array' among its render modes): set render=False"
        )
    return environment


def is_array_space(space) -> bool:
    """Whether observations of a gymnasium space are used as they are, not flattened to a vector."""
    from gymnasium import spaces

    return isinstance(space, spaces.Box) and len(space.shape) > 0


def flatten(environment, observation) -> np.ndarray:
    """An observation as one array: a Box's as it is, all others by gymnasium's own flattening."""
    from gymnasium import spaces

    space = environment.observation_space
    return observation if is_array_space(space) else spaces.flatten(space, observation)


def draw(environment) -> np.ndarray:
    """The environment's present picture, uint8 [H, W, 3]; raises SimulatorError if it gives none."""
    try:
        picture = environment.render()
    except Exception as error:
        raise SimulatorError(f"{environment} cannot draw: {type(error).__name__}: {error}") from error
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[-1] != 3:
        found = f"{picture.dtype}{list(picture.shape)}" if isinstance(picture, np.ndarray) else type(picture)
        raise SimulatorError(f"{environment} rendered {found}; expected uint8 [H, W, 3]")
    return picture.astype(np.uint8, copy=False)


def resize(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes uint8 [H, W, 3] to (H, W) by averaging (box filter); a picture of that size is kept."""
    if picture.shape[:2] == tuple(size):
        return picture
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling.BOX))


def main() -> None:
    """The life of a worker process."""
    serve(
        lambda settings, memory: GymnasiumBlock(
            BlockSettings(**settings), lay_out(BlockSettings(**settings).array_specs(), memory)
        ),
        lambda settings: array_bytes(BlockSettings(**settings).array_specs()),
    )


if __name__ == "__main__":
    main()
