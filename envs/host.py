"""Host simulators as environments: NumPy on the host, an ordered callback inside jit.

The state that JAX carries is small: a handle for each environment, which says whose turn it is, and a
counter, which says whose call it is. Sharding the handles routes the calls to the right simulators;
the counter shows a call that was lost or replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import io_callback

from jaxreward.errors import SimulatorError
from jaxreward.types import Array, Box, EnvironmentSpec, PyTree, TimeStep, zeros_from_spec

HostStep = TimeStep
"""A `TimeStep` whose leaves are NumPy arrays [b, ...]: what a host environment returns."""

Unroll = Literal["loop", "scan"]
"""How a driver steps a host environment: a plain loop around the jitted agent, or a scan inside jit."""

_COUNTER_MASK = 0x7FFFFFFF  # the counter wraps within the non-negative int32 numbers


@runtime_checkable
class HostVectorEnvironment(Protocol):
    """B simulators that step together, in NumPy, with same-step auto-reset (see `TimeStep`).

    A call names the b <= B environments that it is for; row i of all arrays belongs to `handles[i]`.
    An implementation may hand out views of its own buffers: whoever calls copies. It raises
    `SimulatorError` when a simulator fails, and need not be safe against concurrent calls.

    Attributes:
      spec: what the environment is; see `EnvironmentSpec`.
      info_spec: the shapes and dtypes of one environment's `info`; 'success' (bool) is always there.
    """

    spec: EnvironmentSpec
    info_spec: dict[str, PyTree]

    def reset(self, handles: np.ndarray, seeds: np.ndarray) -> HostStep:
        """Starts new episodes.

        Args:
          handles: int32 [b], distinct numbers below B.
          seeds: uint32 [b], for simulators that draw random numbers.
        """
        ...

    def step(self, handles: np.ndarray, action: np.ndarray) -> HostStep:
        """Takes one action, int32 [b] or float32 [b, ...], in each of the named environments."""
        ...

    def close(self) -> None:
        """Ends the simulators and frees what they hold; a second call does nothing."""
        ...


@struct.dataclass
class HostState:
    """What JAX knows of a host environment; every leaf has the axis B, so all shard alike."""

    handle: Array  # int32 [B], which environment a row belongs to
    counter: Array  # int32 [B], calls that this environment has had
    failed: Array  # bool [B], a call has failed: all that followed are zeros


class HostEnvironment:
    """A `HostVectorEnvironment` under the Environment protocol.

    `reset` and `step` can be called inside jit, scan and `shard_map` (not vmap or grad): they reach the
    simulators by an ordered callback. A callback must not raise, since in a program over several
    devices an exception aborts the process. So the first failure is kept, the arrays that follow are
    zeros, `HostState.failed` is True, and the driver calls `raise_if_failed(state)` after each program.
    `host_reset` and `host_step` are the same thing for a plain Python loop, and raise at once.

    Every array that JAX receives is a fresh copy: JAX may keep the memory of a NumPy array without
    copying it, and a simulator that reuses its buffers would change results after the fact.
    """

    on_device = False
    can_save = False

    def __init__(self, host: HostVectorEnvironment, *, unroll: Unroll = "loop"):
        """Wraps `host`, which is closed by `close`; `unroll` tells drivers which path to take."""
        self.host = host
        self.unroll = unroll
        self.spec = host.spec
        self._step_spec = timestep_spec(host.spec, host.info_spec)
        self._counter = np.zeros(host.spec.num_envs, np.int32)
        self._failure: BaseException | None = None
        # Shards of one program call from several threads.
        self._lock = threading.Lock()

    def reset(self, key: Array, handles: Array | None = None) -> tuple[HostState, TimeStep]:
        """Starts new episodes and forgets an earlier failure.

        Args:
          key: a typed key; simulators that draw random numbers are seeded from it.
          handles: int32 [b], the environments to reset; all B by default. Give a shard's own handles
            inside `shard_map`.

        Returns:
          The state and the first `TimeStep`, rows in the order of `handles`.
        """
        handles = jnp.arange(self.spec.num_envs, dtype=jnp.int32) if handles is None else handles
        seeds = jax.random.bits(key, handles.shape, jnp.uint32)
        return self._call(self._reset_callback, handles, seeds, jnp.zeros(handles.shape, bool))

    def step(self, state: HostState, action: Array) -> tuple[HostState, TimeStep]:
        """Takes one action in each environment of `state`; ended episodes start anew in the same step."""
        dtype = jnp.float32 if isinstance(self.spec.action_space, Box) else jnp.int32
        arguments = (state.counter, state.failed, action.astype(dtype))
        return self._call(self._step_callback, state.handle, arguments, state.failed)

    def render(self, frame: Array) -> Array:
        """Turns uint8 [..., H, W, 1] (grey) or [..., H, W, 3] into RGB [..., H, W, 3]."""
        return jnp.broadcast_to(frame, (*frame.shape[:-1], 3))

    def host_reset(self, key: Array) -> TimeStep:
        """Resets all environments outside jit; raises SimulatorError. See `reset`."""
        seeds = jax.random.bits(key, (self.spec.num_envs,), jnp.uint32)
        with self._lock:
            self._failure = None
            return jax.device_put(self._advance(self.host.reset, self._all_handles(), np.array(seeds)))

    def host_step(self, action: np.ndarray) -> TimeStep:
        """Steps all environments outside jit; raises SimulatorError. See `step`."""
        with self._lock:
            if self._failure is not None:
                raise _as_simulator_error(self._failure)
            return jax.device_put(self._advance(self.host.step, self._all_handles(), np.array(action)))

    def host_state(self) -> HostState:
        """The state with which `step` goes on from where `host_reset` and `host_step` are."""
        with self._lock:
            failed = np.full(self.spec.num_envs, self._failure is not None)
            return HostState(
                handle=jnp.array(self._all_handles()),
                counter=jnp.array(self._counter.copy()),
                failed=jnp.array(failed),
            )

    def raise_if_failed(self, state: HostState) -> None:
        """Waits for `state` and raises the failure that a callback met, if any.

        Raises:
          SimulatorError: with the simulator's own message.
          KeyboardInterrupt: if that is what ended the callback.
        """
        failed = [bool(np.any(shard.data)) for shard in state.failed.addressable_shards]
        if not any(failed):
            return
        with self._lock:
            failure = self._failure
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        raise _as_simulator_error(failure or SimulatorError("the simulator failed in an earlier program"))

    def close(self) -> None:
        """Ends the simulators; a second call does nothing."""
        with self._lock:
            self.host.close()

    def _all_handles(self) -> np.ndarray:
        return np.arange(self.spec.num_envs, dtype=np.int32)

    def _call(
        self, callback: Callable, handles: Array, arguments: PyTree, failed: Array
    ) -> tuple[HostState, TimeStep]:
        """Makes the ordered callback for b environments and gives its results the type of `handles`."""
        batch = handles.shape[0]
        flags = (jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.bool_))
        result_spec = (_batched(self._step_spec, batch), *flags)
        result = io_callback(callback, result_spec, handles, arguments, ordered=True)
        # Inside shard_map a callback's result counts as equal on all devices; the handles do not.
        here = handles[0] >= 0
        timestep, counter, failed_now = jax.tree.map(lambda x: jnp.where(here, x, x), result)
        return HostState(handle=handles, counter=counter, failed=failed | failed_now), timestep

    def _reset_callback(self, handles: PyTree, seeds: PyTree) -> PyTree:
        with self._lock:
            handles = np.array(handles)
            self._failure = None
            return self._guarded(handles, lambda: self._advance(self.host.reset, handles, np.array(seeds)))

    def _step_callback(self, handles: PyTree, arguments: PyTree) -> PyTree:
        with self._lock:
            handles = np.array(handles)
            counter, failed, action = (np.array(argument) for argument in arguments)

            def run() -> HostStep:
                if self._failure is not None or failed.any():
                    raise self._failure or SimulatorError("the simulator failed in an earlier program")
                self._check_counter(handles, counter)
                return self._advance(self.host.step, handles, action)

            return self._guarded(handles, run)

    def _guarded(self, handles: np.ndarray, run: Callable[[], HostStep]) -> PyTree:
        """Runs a call; whatever it raises is kept, and zeros take the place of its result."""
        try:
            return run(), self._counter[handles], np.zeros(handles.shape, bool)
        except BaseException as error:  # an exception that left the callback could abort the process
            self._failure = self._failure or error
            step = zeros_from_spec(self._step_spec, handles.shape)
            return step, np.zeros(handles.shape, np.int32), np.ones(handles.shape, bool)

    def _check_counter(self, handles: np.ndarray, counter: np.ndarray) -> None:
        expected = self._counter[handles]
        if (expected != counter).any():
            row = int(np.argmax(expected != counter))
            raise SimulatorError(
                f"environment {int(handles[row])}: the program is at call {int(counter[row])} but the "
                f"simulator at call {int(expected[row])}: a call was lost or replayed. A host environment "
                "cannot go back to an earlier state: use each state once, or call reset"
            )

    def _advance(self, call: Callable, handles: np.ndarray, argument: np.ndarray) -> HostStep:
        """Makes the call, counts it, and returns a checked copy of its result."""
        result = call(handles, argument)
        self._counter[handles] = (self._counter[handles] + 1) & _COUNTER_MASK
        return _checked_copy(result, _batched(self._step_spec, handles.shape[0]))


def timestep_spec(spec: EnvironmentSpec, info_spec: dict[str, PyTree]) -> TimeStep:
    """The shapes and dtypes of one environment's `TimeStep`, as a `TimeStep` of ShapeDtypeStruct."""
    flag, count = jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((), jnp.int32)
    return TimeStep(
        observation=spec.observation,
        frame=spec.frame,
        final_observation=spec.observation,
        final_frame=spec.frame,
        first=flag,
        episode_step=count,
        env_reward=jax.ShapeDtypeStruct((), jnp.float32),
        terminated=flag,
        truncated=flag,
        info=dict(info_spec),
    )


def _batched(spec: PyTree, batch: int) -> PyTree:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((batch, *s.shape), s.dtype), spec)


def _checked_copy(step: HostStep, spec: PyTree) -> HostStep:
    """Copies every leaf; raises SimulatorError naming the first one of another shape or dtype."""

    def copy(path, expected, found):
        found = np.asarray(found)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise SimulatorError(
                f"the simulator's timestep{jax.tree_util.keystr(path)} is {found.dtype}{list(found.shape)}; "
                f"its spec says {expected.dtype}{list(expected.shape)}"
            )
        return np.array(found)

    try:
        return jax.tree_util.tree_map_with_path(copy, spec, step)
    except ValueError as error:
        raise SimulatorError(f"the simulator's timestep has other fields than its spec: {error}") from error


def _as_simulator_error(failure: BaseException) -> SimulatorError:
    """A SimulatorError to raise anew: the kept one may have been raised before, with its own traceback."""
    message = str(failure) if isinstance(failure, SimulatorError) else f"{type(failure).__name__}: {failure}"
    error = SimulatorError(message)
    error.__cause__ = failure
    return error
