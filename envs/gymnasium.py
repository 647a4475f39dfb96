"""Any environment of gymnasium (Towers et al., 2024), in this process or in workers.

The environments step in blocks (`envs/gymnasium_worker.py`) with an auto-reset of our own; neither
gymnasium's vector classes nor its time limits are used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import mmap
import weakref
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxreward.envs.actions import BoxActions
from jaxreward.envs.gymnasium_worker import (
    BlockSettings,
    GymnasiumBlock,
    draw,
    is_array_space,
    make_single,
)
from jaxreward.envs.host import HostEnvironment, HostStep, Unroll
from jaxreward.envs.names import unknown_name
from jaxreward.envs.pictures import ObservationPicture
from jaxreward.envs.workers import (
    RESET,
    STEP,
    InProcess,
    Member,
    Worker,
    array_bytes,
    end_all,
    lay_out,
    shared_file,
)
from jaxreward.errors import ConfigError, SimulatorError
from jaxreward.types import Array, Discrete, EnvironmentSpec, PyTree


@dataclasses.dataclass(frozen=True)
class GymnasiumConfig:
    """Settings of a gymnasium environment.

    Attributes:
      id: a registered id, or 'module:id' to import the module that registers it first.
      num_envs: B.
      workers: processes that run the environments; 0 runs them in this one.
      max_episode_steps: the time limit; 0 is the one that the id was registered with.
      render: whether frames are the environment's own pictures; otherwise the frame is the observation,
        and its picture that of `pictures.ObservationPicture`.
      frame_size: height and width of the pictures, (H, W) pixels; 0 keeps the environment's own.
      task: the task as one sentence; empty for one made of the id.
      success: what `info['success']` means: the environment's own `info['success']` or
        `info['is_success']`, the episode's natural end, a natural end with a reward above zero, or never.
      arguments: keyword arguments of the environment, as (name, value) pairs of plain values.
      unroll: how a driver should step: from inside jit ('scan') or in a plain loop ('loop').
    """

    id: str = "CartPole-v1"
    num_envs: int = 8
    workers: int = 0
    max_episode_steps: int = 0
    render: bool = False
    frame_size: tuple[int, int] = (84, 84)
    task: str = ""
    success: Literal["info", "terminated", "rewarded_end", "never"] = "info"
    arguments: tuple[tuple[str, bool | int | float | str], ...] = ()
    unroll: Unroll = "loop"


class GymnasiumEnvironment(HostEnvironment):
    """B gymnasium environments under the Environment protocol.

    Observation: a Box as it is, uint8 or else float32; any other space flattened to float32 [D] by
    gymnasium's own `spaces.flatten` (a discrete one is one-hot).
    Frame: uint8 [H, W, 3] with `render`, otherwise the observation.
    Action: int32, counted from 0, or float32 [...]; real actions are clipped to their bounds, and come in
    [-1, 1] where the bounds differ between components.
    """

    def __init__(self, config: GymnasiumConfig):
        """Makes the environments; raises as `GymnasiumVectorEnvironment`."""
        host = GymnasiumVectorEnvironment(config)
        super().__init__(host, unroll=config.unroll)
        self.config = config

    def render(self, frame: PyTree) -> Array:
        """Turns frames of any leading axes into uint8 RGB pictures [..., H, W, 3]."""
        return self.host.picture(frame)


class GymnasiumVectorEnvironment:
    """A `HostVectorEnvironment` of gymnasium environments; returns copies, never its shared arrays."""

    def __init__(self, config: GymnasiumConfig):
        """Makes the environments and waits until all of them stand.

        Raises:
          ConfigError: an unknown id, spaces that have no counterpart, or a value that cannot be used.
          SimulatorError: an environment that cannot be made, or a worker that does not start.
        """
        _check(config)
        self.config = config
        self.info_spec = {"success": jax.ShapeDtypeStruct((), jnp.bool_)}
        self._describe(InProcess(functools.partial(_Described, config)))
        count = max(config.workers, 1)
        bounds = [config.num_envs * i // count for i in range(count + 1)]
        blocks = [
            dataclasses.replace(self._settings, start=start, stop=stop)
            for start, stop in itertools.pairwise(bounds)
        ]
        specs = self._settings.array_specs()
        self._owner = np.repeat(np.arange(count), np.diff(bounds))
        self._members: list[Member] = []
        self._finalizer = weakref.finalize(self, end_all, self._members)
        try:
            with shared_file(array_bytes(specs)) as file:
                self._arrays = lay_out(specs, mmap.mmap(file.fileno(), array_bytes(specs)))
                for block in blocks:
                    self._members.append(self._member(block, file.fileno()))
            for member in self._members:
                member.wait()
        except BaseException:
            self.close()
            raise

    def reset(self, handles: np.ndarray, seeds: np.ndarray) -> HostStep:
        """See `HostVectorEnvironment`; each environment is seeded with its own number."""
        self._arrays["seed"][handles] = seeds
        return self._run(RESET, handles)

    def step(self, handles: np.ndarray, action: np.ndarray) -> HostStep:
        """See `HostVectorEnvironment`."""
        if self._box is not None:
            self._arrays["action"][handles] = self._box.to_simulator(action)
        else:
            known = self.spec.action_space.n
            if np.any((action < 0) | (action >= known)):
                raise SimulatorError(
                    f"{self.config.id}: an action is {action.min()} .. {action.max()}; "
                    f"expected 0 .. {known - 1}"
                )
            self._arrays["action"][handles] = action + self._first_action
        return self._run(STEP, handles)

    def close(self) -> None:
        """See `HostVectorEnvironment`."""
        self._finalizer()

    def _run(self, command: bytes, handles: np.ndarray) -> HostStep:
        if not self._finalizer.alive:
            raise SimulatorError(f"the environments {self.config.id} were closed: make new ones")
        selected = self._arrays["selected"]
        selected[...] = False
        selected[handles] = True
        asked = [self._members[i] for i in np.unique(self._owner[handles])]
        try:
            for member in asked:
                member.send(command)
            for member in asked:
                member.wait()
        except BaseException:
            # Answers may still be on their way: there is no telling them from those to the next command.
            self.close()
            raise
        rows = {name: array[handles] for name, array in self._arrays.items()}  # integer indices copy
        return HostStep(
            observation=rows["observation"],
            frame=rows.get("frame", rows["observation"]),
            final_observation=rows["final_observation"],
            final_frame=rows.get("final_frame", rows["final_observation"]),
            first=rows["first"],
            episode_step=rows["episode_step"],
            env_reward=rows["env_reward"],
            terminated=rows["terminated"],
            truncated=rows["truncated"],
            info={"success": rows["success"]},
        )

    def _member(self, block: BlockSettings, descriptor: int) -> Member:
        if not self.config.workers:
            return InProcess(functools.partial(GymnasiumBlock, block, self._arrays))
        name = f"the worker of {block.id} {block.start} .. {block.stop - 1}"
        return Worker("jaxreward.envs.gymnasium_worker", dataclasses.asdict(block), descriptor, name)

    def _describe(self, sample: InProcess) -> None:
        """Reads the spaces, the time limit and a picture's size off one environment, and ends it."""
        config = self.config
        described: _Described = sample.block
        sample.end()
        space, box = described.observation_space, described.action_box
        observation = jax.ShapeDtypeStruct(
            tuple(space.shape), jnp.uint8 if space.dtype == np.uint8 else jnp.float32
        )
        frame = jax.ShapeDtypeStruct(described.frame_shape, jnp.uint8) if config.render else observation
        self.picture = (
            ObservationPicture(frame)
            if config.render
            else ObservationPicture(observation, np.ravel(space.low), np.ravel(space.high))
        )
        self._box, self._first_action = box, described.first_action
        self.spec = EnvironmentSpec(
            num_envs=config.num_envs,
            max_episode_steps=described.max_episode_steps,
            task=config.task or f"do well in the game {config.id.rsplit(':', 1)[-1].rsplit('-v', 1)[0]}",
            observation=observation,
            frame=frame,
            image_shape=self.picture.image_shape,
            action_space=box.space if box is not None else Discrete(described.num_actions),
        )
        self._settings = BlockSettings(
            id=config.id,
            arguments=dict(config.arguments),
            num_envs=config.num_envs,
            start=0,
            stop=config.num_envs,
            max_episode_steps=described.max_episode_steps,
            success=config.success,
            render=config.render,
            observation_shape=observation.shape,
            observation_dtype=np.dtype(observation.dtype).name,
            action_shape=box.space.shape if box is not None else (),
            action_dtype="float32" if box is not None else "int64",
            frame_shape=described.frame_shape,
        )


class _Described:
    """What one environment says of itself."""

    def __init__(self, config: GymnasiumConfig):
        registered = _registered(config.id)
        environment = make_single(config.id, dict(config.arguments), render=config.render)
        try:
            self.max_episode_steps = config.max_episode_steps or _time_limit(
                config.id, registered.max_episode_steps
            )
            self.observation_space = _observation_box(config.id, environment.observation_space)
            self.num_actions, self.first_action, self.action_box = _actions(config.id, environment)
            self.frame_shape = ()
            if config.render:
                environment.reset()
                height, width, _ = draw(environment).shape
                self.frame_shape = (config.frame_size[0] or height, config.frame_size[1] or width, 3)
        finally:
            environment.close()

    def run(self, command: bytes) -> None:
        """Nothing: it only describes."""

    def close(self) -> None:
        """Nothing: the environment is closed already."""


def make(config: GymnasiumConfig) -> GymnasiumEnvironment:
    """Builds B gymnasium environments; see `GymnasiumVectorEnvironment` for what it raises."""
    return GymnasiumEnvironment(config)


def _check(config: GymnasiumConfig) -> None:
    """Raises ConfigError for the first setting that cannot be used."""
    if config.num_envs < 1:
        raise ConfigError(f"num_envs is {config.num_envs}, but must be at least 1")
    if not 0 <= config.workers <= config.num_envs:
        raise ConfigError(f"workers is {config.workers}, but must be 0 .. num_envs = {config.num_envs}")
    if config.max_episode_steps < 0:
        raise ConfigError(f"max_episode_steps is {config.max_episode_steps}, but must be 0 (the own) or more")
    if len(config.frame_size) != 2 or min(config.frame_size) < 0:
        raise ConfigError(f"frame_size is {config.frame_size}, but must be (height, width), 0 for the own")


def _registered(id: str):
    """gymnasium's record of an id or 'module:id'; raises ConfigError for one that is not known."""
    import gymnasium

    module, _, name = id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        raise ConfigError(f"the module of '{id}' cannot be imported: {error}") from error
    except gymnasium.error.Error as error:
        raise unknown_name("gymnasium environment", name, gymnasium.registry) from error


def _time_limit(id: str, registered: int | None) -> int:
    if registered is None:
        raise ConfigError(f"{id} has no time limit of its own: set max_episode_steps")
    return registered


def _observation_box(id: str, space) -> Any:
    """The Box of what the blocks hand out."""
    from gymnasium import spaces

    if is_array_space(space):
        return space
    try:
        flat = spaces.flatten_space(space)
    except NotImplementedError:
        flat = None
    if not isinstance(flat, spaces.Box):
        raise ConfigError(
            f"{id} has the observations {space}, which have no fixed size as numbers: wrap the environment "
            f"so that its observations are a Box"
        )
    # One-hot vectors flatten to whole numbers; agents see them as float32 all the same.
    return spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)


def _actions(id: str, environment) -> tuple[int, int, BoxActions | None]:
    """(number of actions, first action, None) of a discrete space, (0, 0, BoxActions) of a Box."""
    from gymnasium import spaces

    space = environment.action_space
    if isinstance(space, spaces.Discrete):
        return int(space.n), int(space.start), None
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return 0, 0, BoxActions.of(id, space.low, space.high, space.shape)
    raise ConfigError(
        f"{id} has the actions {space}, but only Discrete and real-valued Box can be used: wrap the "
        f"environment so that its actions are one of them"
    )
