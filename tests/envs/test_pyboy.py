"""Emulators in worker processes: against the JAX environment, and against what can go wrong."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.envs import workers
from jaxreward.envs.base import Environment
from jaxreward.envs.catrap import art, levels, rules, solver
from jaxreward.envs.catrap.cartridge import ROM, build
from jaxreward.envs.catrap.environment import Catrap, CatrapConfig
from jaxreward.envs.host import HostVectorEnvironment
from jaxreward.envs.pyboy import CartridgeConfig, CartridgeEnvironment, EmulatorVectorEnvironment, measure_raw
from jaxreward.envs.pyboy_worker import Emulator, OriginalCatrapLayout, block_mean, read_rom
from jaxreward.errors import ConfigError, SimulatorError

needs_sdcc = pytest.mark.skipif(shutil.which("sdcc") is None, reason="SDCC is not installed: cannot build")

B, STEPS = 6, 45
SETTINGS = {"level": "1,2,21", "num_envs": B, "max_episode_steps": 20, "actions": "all"}


def _actions():
    """Random actions int32 [STEPS, B]; environment 0 plays the solution of its level over and over."""
    actions = np.random.default_rng(3).integers(0, 6, (STEPS, B)).astype(np.int32)
    solution = solver.solve(levels.load_level("1").cells)
    actions[:, 0] = (solution * STEPS)[:STEPS]
    return actions


@pytest.fixture(scope="module")
def environment():
    environment = CartridgeEnvironment(CartridgeConfig(**SETTINGS, workers=2))
    yield environment
    environment.close()


@pytest.mark.parametrize("unroll", ["loop", "scan"])
def test_equals_the_jax_environment(environment, unroll):
    actions = _actions()
    clone = Catrap(CatrapConfig(**SETTINGS))
    state, clone_first = clone.reset(jax.random.key(0))
    _, clone_steps = jax.jit(lambda state, actions: jax.lax.scan(clone.step, state, actions))(state, actions)

    if unroll == "loop":
        first = environment.host_reset(jax.random.key(0))
        steps = [environment.host_step(action) for action in actions]
        steps = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
    else:
        state, first = environment.reset(jax.random.key(0))
        state, steps = jax.jit(lambda s, a: jax.lax.scan(environment.step, s, a))(state, actions)
        environment.raise_if_failed(state)

    for ours, theirs in ((first, clone_first), (steps, clone_steps)):
        for name in ("frame", "final_frame"):
            pictures = environment.render(getattr(ours, name))
            np.testing.assert_array_equal(pictures, clone.render(getattr(theirs, name)))
        same = {"frame": 0, "final_frame": 0}
        jax.tree.map(np.testing.assert_array_equal, ours.replace(**same), theirs.replace(**same))
    wins = STEPS // len(solver.solve(levels.load_level("1").cells))
    assert np.asarray(steps.terminated)[:, 0].sum() == wins >= 2, "environment 0 plays the solution"
    assert np.asarray(steps.truncated).sum() >= 2 * (B - 1)


def test_describes_itself(environment):
    assert isinstance(environment, Environment)
    assert isinstance(environment.host, HostVectorEnvironment)
    spec, expected = environment.spec, Catrap(CatrapConfig(**SETTINGS)).spec
    for name in ("num_envs", "max_episode_steps", "task", "observation", "image_shape", "action_space"):
        assert getattr(spec, name) == getattr(expected, name), name
    assert spec.frame.shape == (36, 40, 1) and spec.frame.dtype == jnp.uint8


@pytest.mark.parametrize("number", [0, 2])
def test_pictures_of_an_episode_are_its_frames_at_full_size(environment, number):
    actions = _actions()[:8]
    frames = [environment.host_reset(jax.random.key(0)).frame[number]]
    for action in actions:
        frames.append(environment.host_step(action).final_frame[number])
    frames = np.stack(frames)
    pictures = environment.pictures(frames, actions[:, number])
    assert pictures.shape == (9, 144, 160, 3) and pictures.dtype == np.uint8
    blocks = pictures.reshape(9, 36, 4, 40, 4, 3).astype(int).sum((2, 4)) // 16
    np.testing.assert_array_equal(blocks, environment.render(frames))
    assert not np.array_equal(frames[0], frames[-1])


def test_frames_that_begin_like_no_level_are_returned_in_rgb(environment):
    frames = np.random.default_rng(0).integers(0, 256, (3, 36, 40, 1)).astype(np.uint8)
    np.testing.assert_array_equal(
        environment.pictures(frames, np.zeros(2, np.int32)), environment.render(frames)
    )


def test_some_environments_can_be_stepped_alone(environment):
    host = environment.host
    everyone = np.arange(B, dtype=np.int32)
    before = host.reset(everyone, np.zeros(B, np.uint32))
    some = np.array([4, 1], np.int32)
    step = host.step(some, np.array([rules.LEFT, rules.RIGHT], np.int32))
    np.testing.assert_array_equal(step.episode_step, [1, 1])
    np.testing.assert_array_equal(host.step(everyone, np.zeros(B, np.int32)).episode_step, [1, 2, 1, 1, 2, 1])
    assert len(host.rom_sha256) == 64
    assert before.first.all(), "results are copies: later steps do not change them"


def test_two_scales_and_no_workers():
    config = CartridgeConfig(level="3", num_envs=2, workers=0, scale=2, frame_scale=1, max_episode_steps=9)
    host = EmulatorVectorEnvironment(config)
    try:
        handles = np.arange(2, dtype=np.int32)
        step = host.reset(handles, np.zeros(2, np.uint32))
        assert step.observation.shape == (2, 60, 80, 1) and step.frame.shape == (2, 144, 160, 1)
        blocks = step.frame[:, 12:132].astype(np.int64).reshape(2, 60, 2, 80, 2).sum((2, 4)) // 4
        np.testing.assert_array_equal(step.observation[..., 0], blocks)
    finally:
        host.close()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_block_mean_is_the_floor_of_the_mean(size):
    picture = np.random.default_rng(size).integers(0, 256, (144, 160)).astype(np.uint8)
    picture[:32] = 255
    exact = picture.astype(np.int64).reshape(144 // size, size, 160 // size, size).sum((1, 3)) // size**2
    np.testing.assert_array_equal(block_mean(picture, size), exact)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 3}, "scale is 3"),
        ({"frame_scale": 5}, "frame_scale is 5"),
        ({"actions": "some"}, "actions is 'some'"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"workers": 9}, "workers is 9, more than num_envs, 8"),
        ({"level": "21"}, "two cats"),
        ({"save_state": "a.state"}, "without rom"),
        ({"unroll": "vmap"}, "unroll is 'vmap'"),
    ],
)
def test_unusable_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        CartridgeEnvironment(CartridgeConfig(**{"num_envs": 8, **settings}))


def test_an_unknown_action_is_an_error_before_anything_moves(environment):
    environment.host_reset(jax.random.key(0))
    with pytest.raises(SimulatorError, match=r"expected 0 \.\. 5"):
        environment.host_step(np.full(B, 6, np.int32))
    environment.host_reset(jax.random.key(0))


# ---- Workers that die, and parents that do ----


def test_a_killed_worker_is_reported_and_the_others_end():
    host = EmulatorVectorEnvironment(CartridgeConfig(num_envs=4, workers=2))
    processes = [member._process for member in host._members]
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    handles = np.arange(4, dtype=np.int32)
    with pytest.raises(SimulatorError, match=r"worker of environments 2 .. 3 was killed by signal 9"):
        host.reset(handles, np.zeros(4, np.uint32))
    assert processes[0].wait(10) == 0
    with pytest.raises(SimulatorError, match="were closed"):
        host.reset(handles, np.zeros(4, np.uint32))
    host.close()


def test_an_exception_in_a_worker_surfaces_with_its_cause(tmp_path):
    state = tmp_path / "level.state"
    state.write_bytes(b"not a save state")
    config = CartridgeConfig(num_envs=2, workers=1, rom=str(ROM), save_state=str(state))
    with pytest.raises(SimulatorError, match=r"environments 0 .. 1: the save state does not fit .*catrap.gb"):
        EmulatorVectorEnvironment(config)


def test_blocks_end_one_after_another_whatever_happens():
    ended = []

    class Stubborn:
        def end(self):
            ended.append(self)
            raise SimulatorError("it does not end")

    members = [Stubborn(), Stubborn()]
    with pytest.raises(SimulatorError):
        workers.end_all(members)
    assert ended == members


def test_a_pool_that_nobody_closed_says_nothing_at_exit():
    script = (
        "from jaxreward.envs.pyboy import CartridgeConfig, EmulatorVectorEnvironment\n"
        "kept = EmulatorVectorEnvironment(CartridgeConfig(num_envs=1, workers=0))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


SCRIPT = """
import sys, time
import numpy as np
from jaxreward.envs.pyboy import CartridgeConfig, EmulatorVectorEnvironment
host = EmulatorVectorEnvironment(CartridgeConfig(num_envs=2, workers=2))
handles = np.arange(2, dtype=np.int32)
host.reset(handles, np.zeros(2, np.uint32))
print(*[member._process.pid for member in host._members], flush=True)
while True:
    host.step(handles, np.array([0, 1], np.int32))
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(sent):
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    if sent == signal.SIGINT:
        for pid in workers:  # a terminal would send it to the whole group
            os.kill(pid, sent)
    parent.send_signal(sent)
    try:
        _, errors = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert parent.returncode != 0
    if sent == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt") and "jaxreward.errors" not in errors
    deadline = time.monotonic() + 20
    while any(map(_alive, workers)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def _alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_workers_import_no_jax():
    script = "import sys, jaxreward.envs.pyboy_worker; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# ---- ROMs ----


def test_files_that_are_no_rom_are_named(tmp_path):
    short = tmp_path / "short.gb"
    short.write_bytes(bytes(1000))
    damaged = tmp_path / "damaged.gb"
    image = bytearray(ROM.read_bytes())
    image[0x134] ^= 1
    damaged.write_bytes(image)
    for path, message in (
        (
            short,
            r"short.gb is not a Game Boy ROM: it has 1000 bytes, not a multiple of 32768 \(SHA-256 [0-9a-f]",
        ),
        (damaged, r"damaged.gb .*header checksum .*SHA-256 [0-9a-f]{64}"),
        (tmp_path / "missing.gb", "missing.gb cannot be read: No such file"),
    ):
        with pytest.raises(SimulatorError, match=message):
            EmulatorVectorEnvironment(CartridgeConfig(num_envs=1, workers=1, rom=str(path)))
    assert read_rom(ROM) == ROM.read_bytes()


def test_a_users_rom_needs_a_save_state():
    with pytest.raises(SimulatorError, match="needs a save state"):
        EmulatorVectorEnvironment(CartridgeConfig(num_envs=1, workers=1, rom=str(ROM)))


def test_the_cartridges_header_is_valid_and_holds_no_logo():
    image = ROM.read_bytes()
    assert len(image) == 32768 and not any(image[0x104:0x134])
    checksum = 0
    for byte in image[0x134:0x14D]:
        checksum = (checksum - byte - 1) & 0xFF
    assert image[0x14D] == checksum
    rest = sum(image) - image[0x14E] - image[0x14F]
    assert int.from_bytes(image[0x14E:0x150], "big") == rest & 0xFFFF


@needs_sdcc
def test_the_packaged_cartridge_equals_a_rebuild():
    if build.installed_sdcc() != build.SDCC_VERSION:
        pytest.skip(f"SDCC is {build.installed_sdcc()}, not {build.SDCC_VERSION}: it builds other bytes")
    assert "equals a rebuild" in build.check()


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Our game with its state where the original keeps it: (ROM, save state at the start of a level)."""
    folder = tmp_path_factory.mktemp("original")
    rom = folder / "original.gb"
    image, addresses = build.build("original")
    rom.write_bytes(image)
    with warnings.catch_warnings(action="ignore"):
        from pyboy import PyBoy

    player = PyBoy(str(rom), window="null", sound_emulated=False, no_input=True, log_level="ERROR")
    player.set_emulation_speed(0)
    player.tick(120, False)
    player.memory[addresses["level_request"]] = 20  # '21', with two cats
    player.button("start", 2)
    player.tick(60, False)
    with open(folder / "level.state", "wb") as file:
        player.save_state(file)
    player.stop(save=False)
    return rom, folder / "level.state"


@needs_sdcc
def test_the_original_layout_is_read_through_a_stand_in(stand_in):
    rom, state = stand_in
    level = levels.load_level("21")
    solution = solver.solve(level.cells)
    emulator, ours = Emulator(rom=str(rom), save_state=str(state)), Emulator(level=20)
    try:
        for game in (emulator, ours):
            game.reset()
        assert isinstance(emulator.layout, OriginalCatrapLayout)
        seen = set()
        for action in [None, *solution]:
            if action is not None:
                emulator.step(action)
                ours.step(action)
            found, expected = emulator.read(), ours.read()
            np.testing.assert_array_equal(found.cells[:, :10], expected.cells)
            assert sorted(found.cats) == sorted(expected.cats)
            assert found.cats[found.active] == expected.cats[expected.active]
            assert found.monsters == expected.monsters
            np.testing.assert_array_equal(emulator.picture(), ours.picture())
            seen.add(expected.active)
        assert found.monsters == 0 and seen == {0, 1}
        with pytest.raises(SimulatorError, match="no other can be chosen"):
            emulator.choose(3)
    finally:
        emulator.close()
        ours.close()


@needs_sdcc
def test_a_users_rom_runs_as_a_vector_environment(stand_in):
    rom, state = stand_in
    solution = solver.solve(levels.load_level("21").cells)
    config = CartridgeConfig(
        num_envs=2, workers=1, actions="all", max_episode_steps=99, rom=str(rom), save_state=str(state)
    )
    environment = CartridgeEnvironment(config)
    try:
        first = environment.host_reset(jax.random.key(0))
        for action in solution:
            timestep = environment.host_step(np.array([action, rules.LEFT], np.int32))
        np.testing.assert_array_equal(timestep.terminated, [True, False])
        np.testing.assert_array_equal(timestep.info["success"], [True, False])
        np.testing.assert_array_equal(timestep.observation[0], first.observation[0])
        assert int(timestep.episode_step[1]) == len(solution)
        frames = np.asarray(first.frame)
        np.testing.assert_array_equal(environment.pictures(frames, [0]), environment.render(frames))
    finally:
        environment.close()


# ---- One emulator, for recordings ----


def test_recordings_hold_every_frame_or_the_ones_at_rest():
    level = np.full((art.ROWS, art.COLUMNS), art.WALL, np.int8)
    level[1:6, 1:4] = art.EMPTY
    level[2, 1], level[3, 1], level[5, 3] = art.CAT, art.SAND, art.FLYER
    emulator = Emulator(level=level, animated=True)
    try:
        emulator.reset()
        frames = []
        emulator.step(rules.RIGHT, frames)  # off the sand and down three cells
        assert emulator.read().cats == ((5, 2),)
        assert all(frame.shape == (144, 160, 3) and frame.dtype == np.uint8 for frame in frames)
        np.testing.assert_array_equal(frames[-1], emulator.picture())
        moving = len({frame.tobytes() for frame in frames})
        assert 16 <= moving <= 22, "8 frames of walking, 4 frames a cell of falling"
        np.testing.assert_array_equal(frames[-1][..., 0], emulator.screen)
    finally:
        emulator.close()


def test_raw_speed_is_measured():
    figures = measure_raw(CartridgeConfig(num_envs=4, workers=2), steps=3)
    assert figures["steps_per_second"] > 0 and figures["start_seconds"] > 0 and figures["reset_seconds"] > 0
