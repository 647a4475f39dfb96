"""Host environments: the callback path, the plain loop, and what happens when a simulator misbehaves."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxreward.envs.base import Environment
from jaxreward.envs.host import HostEnvironment, HostStep, HostVectorEnvironment
from jaxreward.errors import SimulatorError
from jaxreward.types import Discrete, EnvironmentSpec

B, LIMIT = 4, 5
PICTURE = (36, 40, 1)


class Adder:
    """Each environment sums its actions; its picture is filled with the sum. Reuses all its buffers."""

    def __init__(self, num_envs=B, fail_at=None, error=None):
        picture = jax.ShapeDtypeStruct(PICTURE, jnp.uint8)
        self.spec = EnvironmentSpec(
            num_envs=num_envs,
            max_episode_steps=LIMIT,
            task="add",
            observation=picture,
            frame=picture,
            image_shape=(36, 40, 3),
            action_space=Discrete(3),
        )
        self.info_spec = {"success": jax.ShapeDtypeStruct((), jnp.bool_)}
        self.total, self.steps = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int32)
        self.picture = _aligned(num_envs, *PICTURE)
        self.final_picture = _aligned(num_envs, *PICTURE)
        self.seeds = None
        self.calls, self.fail_at, self.error = 0, fail_at, error

    def reset(self, handles, seeds):
        self.seeds = seeds
        self.total[handles] = self.steps[handles] = 0
        self.picture[handles] = self.final_picture[handles] = 0
        return self._result(handles, np.zeros(len(handles), bool), np.ones(len(handles), bool))

    def step(self, handles, action):
        self.calls += 1
        if self.calls == self.fail_at:
            raise self.error
        self.total[handles] += action
        self.steps[handles] += 1
        self.final_picture[handles] = self.total[handles, None, None, None]
        truncated = self.steps[handles] == LIMIT
        self.total[handles[truncated]] = self.steps[handles[truncated]] = 0
        self.picture[handles] = self.total[handles, None, None, None]
        return self._result(handles, truncated, truncated)

    def _result(self, handles, truncated, first):
        everything = np.array_equal(handles, np.arange(len(self.total)))
        rows = slice(None) if everything else handles  # a view of the buffers wherever possible
        return HostStep(
            observation=self.picture[rows],
            frame=self.picture[rows],
            final_observation=self.final_picture[rows],
            final_frame=self.final_picture[rows],
            first=first,
            episode_step=self.steps[rows],
            env_reward=np.zeros(len(handles), np.float32),
            terminated=np.zeros(len(handles), bool),
            truncated=truncated,
            info={"success": np.zeros(len(handles), bool)},
        )

    def close(self):
        self.closed = True


def _aligned(*shape):
    """A uint8 array at a multiple of 64 bytes: JAX may take such memory over without a copy."""
    size = int(np.prod(shape))
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)


def _actions(steps, num_envs=B, seed=0):
    return np.random.default_rng(seed).integers(0, 3, (steps, num_envs)).astype(np.int32)


def _scan(environment):
    @jax.jit
    def run(state, actions):
        return jax.lax.scan(environment.step, state, actions)

    return run


def _expected_pictures(actions):
    """Sums by hand, [T, B]: (as shown next, as shown last)."""
    shown, final = np.zeros(actions.shape, int), np.zeros(actions.shape, int)
    for t in range(len(actions)):
        start = t // LIMIT * LIMIT
        final[t] = actions[start : t + 1].sum(0)
        shown[t] = 0 if (t + 1) % LIMIT == 0 else final[t]
    return shown, final


def test_follows_both_protocols():
    environment = HostEnvironment(Adder())
    assert isinstance(environment, Environment)
    assert isinstance(environment.host, HostVectorEnvironment)
    assert not environment.on_device and not environment.can_save


def test_scan_loop_and_hand_count_agree():
    actions = _actions(12)
    shown, final = _expected_pictures(actions)

    scanned = HostEnvironment(Adder())
    state, first = jax.jit(scanned.reset)(jax.random.key(0))
    state, steps = _scan(scanned)(state, actions)
    scanned.raise_if_failed(state)

    looped = HostEnvironment(Adder())
    loop_first = looped.host_reset(jax.random.key(0))
    loop_steps = [looped.host_step(action) for action in actions]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *loop_steps)

    jax.tree.map(np.testing.assert_array_equal, first, loop_first)
    jax.tree.map(np.testing.assert_array_equal, steps, stacked)
    np.testing.assert_array_equal(steps.observation[:, :, 3, 3, 0], shown)
    np.testing.assert_array_equal(steps.final_frame[:, :, 35, 39, 0], final)
    np.testing.assert_array_equal(
        np.asarray(steps.truncated).sum(1), [B if t % 5 == 4 else 0 for t in range(12)]
    )
    np.testing.assert_array_equal(scanned.host.seeds, looped.host.seeds)
    assert len(set(np.asarray(scanned.host.seeds).tolist())) == B


def test_the_two_paths_can_be_mixed():
    actions = _actions(6)
    environment = HostEnvironment(Adder())
    environment.host_reset(jax.random.key(0))
    for action in actions[:2]:
        environment.host_step(action)
    state, _ = _scan(environment)(environment.host_state(), actions[2:4])
    environment.raise_if_failed(state)
    timestep = environment.host_step(actions[4])
    np.testing.assert_array_equal(timestep.final_frame[:, 0, 0, 0], actions[:5].sum(0))


@pytest.mark.parametrize("path", ["callback", "loop"])
def test_reused_buffers_never_reach_earlier_results(path):
    environment = HostEnvironment(Adder())
    step = jax.jit(environment.step)
    state, _ = environment.reset(jax.random.key(0))
    kept, total = [], np.zeros(B, int)
    for t, action in enumerate(_actions(100, seed=1)):
        if path == "callback":
            state, timestep = step(state, action)
        else:
            timestep = environment.host_step(action)
        total += action
        kept.append((timestep, total.copy()))
        total = total * ((t + 1) % LIMIT != 0)
    for timestep, expected in kept:
        pictures = np.asarray(timestep.final_frame)
        assert (pictures == expected[:, None, None, None]).all()


def test_a_failure_surfaces_with_its_message_and_reset_recovers():
    environment = HostEnvironment(Adder(fail_at=3, error=SimulatorError("emulator 2 died: bad ROM")))
    state, _ = environment.reset(jax.random.key(0))
    state, steps = _scan(environment)(state, _actions(6))
    assert np.asarray(steps.final_frame[2:]).sum() == 0
    assert environment.host.calls == 3, "no call may follow a failure"
    for _ in range(2):
        with pytest.raises(SimulatorError, match="emulator 2 died: bad ROM"):
            environment.raise_if_failed(state)
    with pytest.raises(SimulatorError, match="bad ROM"):
        environment.host_step(_actions(1)[0])
    state, _ = environment.reset(jax.random.key(1))
    state, steps = _scan(environment)(state, _actions(4))
    environment.raise_if_failed(state)
    np.testing.assert_array_equal(steps.final_frame[:, :, 0, 0, 0], np.cumsum(_actions(4), 0))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ZeroDivisionError("x"), SimulatorError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_any_exception_is_caught_in_the_callback(raised, expected):
    environment = HostEnvironment(Adder(fail_at=1, error=raised))
    state, _ = environment.reset(jax.random.key(0))
    state, _ = _scan(environment)(state, _actions(2))
    with pytest.raises(expected) as caught:
        environment.raise_if_failed(state)
    if expected is SimulatorError:
        assert "ZeroDivisionError" in str(caught.value)


def test_a_replayed_call_is_detected():
    environment = HostEnvironment(Adder())
    step = jax.jit(environment.step)
    old, _ = environment.reset(jax.random.key(0))
    step(old, _actions(1)[0])
    replayed, _ = step(old, _actions(1)[0])
    with pytest.raises(SimulatorError, match="call 1 but the simulator at call 2: a call was lost"):
        environment.raise_if_failed(replayed)


def test_a_state_from_before_a_reset_is_detected():
    environment = HostEnvironment(Adder())
    old, _ = environment.reset(jax.random.key(0))
    environment.reset(jax.random.key(0))
    state, _ = environment.step(old, jnp.zeros(B, jnp.int32))
    with pytest.raises(SimulatorError, match="lost or replayed"):
        environment.raise_if_failed(state)


def test_a_wrong_shape_from_the_simulator_is_named():
    host = Adder()
    host.picture = _aligned(B, 36, 41, 1)
    environment = HostEnvironment(host)
    with pytest.raises(SimulatorError, match=r"timestep.observation is uint8\[4, 36, 41, 1\]; .*36, 40, 1"):
        environment.host_reset(jax.random.key(0))


def _mesh():
    devices = jax.devices("cpu")
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def _sharded_scan(environment, mesh):
    """A scan in which the shards also wait for one another in every step, as in training."""

    def run(state, actions):
        def body(state, action):
            state, timestep = environment.step(state, action)
            return state, (timestep, jax.lax.psum(timestep.episode_step.sum(), "data"))

        return jax.lax.scan(body, state, actions)

    steps = P(None, "data")
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(P("data"), steps), out_specs=(P("data"), (steps, P())))
    )


def test_shards_call_with_their_own_handles():
    mesh = _mesh()
    environment = HostEnvironment(Adder(num_envs=4 * mesh.size))
    actions = _actions(12, 4 * mesh.size)
    state, _ = environment.reset(jax.random.key(0))
    state, (steps, step_sum) = _sharded_scan(environment, mesh)(state, actions)
    environment.raise_if_failed(state)
    shown, _ = _expected_pictures(actions)
    np.testing.assert_array_equal(steps.frame[:, :, 0, 0, 0], shown)
    np.testing.assert_array_equal(step_sum, [(t + 1) % LIMIT * 4 * mesh.size for t in range(12)])
    assert environment.host.calls == 12 * mesh.size

    restarted = jax.shard_map(environment.reset, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    state, first = jax.jit(restarted)(jax.random.key(1), state.handle)
    environment.raise_if_failed(state)
    assert np.asarray(first.first).all() and np.asarray(first.frame).sum() == 0


def test_shards_survive_a_failure_of_one_of_them():
    mesh = _mesh()
    environment = HostEnvironment(Adder(num_envs=4 * mesh.size, fail_at=4, error=RuntimeError("no power")))
    state, _ = environment.reset(jax.random.key(0))
    state, _ = _sharded_scan(environment, mesh)(state, _actions(12, 4 * mesh.size))
    with pytest.raises(SimulatorError, match="RuntimeError: no power"):
        environment.raise_if_failed(state)


def test_shards_on_two_devices():
    """Runs the two tests above in a process with two CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "shards and not two",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_grey_frames_render_as_rgb():
    environment = HostEnvironment(Adder())
    frame = np.arange(2 * 36 * 40, dtype=np.uint8).reshape(2, 36, 40, 1)
    rendered = environment.render(frame)
    assert rendered.shape == (2, 36, 40, 3) and rendered.dtype == jnp.uint8
    for channel in range(3):
        np.testing.assert_array_equal(rendered[..., channel], frame[..., 0])
