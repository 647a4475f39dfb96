import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxreward.checkpoints.store import CheckpointStore
from jaxreward.errors import ConfigError, ModelError, StorageError


@flax.struct.dataclass
class TrainingState:
    params: dict
    optimizer: optax.OptState
    key: jax.Array
    keys: jax.Array
    step: jax.Array
    frame: jax.Array
    handles: np.ndarray
    memory: tuple
    empty: jax.Array
    seen: dict
    rate: float
    name: str = flax.struct.field(pytree_node=False, default="static")


def make_state(seed: int = 0) -> TrainingState:
    key = jax.random.key(seed)
    params = {
        "kernel": jax.random.normal(key, (7, 5)),
        "half": jax.random.normal(key, (3,), jnp.bfloat16),
        "awkward": jnp.array([jnp.nan, jnp.inf, -0.0, 1e-45], jnp.float32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainingState(
        params=params,
        optimizer=optimizer.init(params),
        key=jax.random.key(seed + 3),
        keys=jax.random.split(jax.random.key(seed, impl="rbg"), 4),
        step=jnp.int32(2**31 - 1),
        frame=jnp.arange(12, dtype=jnp.uint8).reshape(3, 4),
        handles=np.arange(3, dtype=np.int64) + 2**40,
        memory=(),
        empty=jnp.zeros((4, 0)),
        seen={1: jnp.array([True, False]), 2: jnp.array([False])},
        rate=0.1,
    )


def bits(leaf) -> bytes:
    if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        assert np.shape(one) == np.shape(other)
        assert bits(one) == bits(other)


@pytest.mark.parametrize("abstract", ["concrete", "eval_shape"])
def test_a_state_comes_back_bit_for_bit_with_its_types(tmp_path, abstract):
    state = make_state()
    CheckpointStore(tmp_path).save(40, state, {"env_steps": 2**40, "config": {"lr": 1e-3, "tags": ["a"]}})
    if abstract == "concrete":
        like = jax.tree.map(lambda leaf: leaf, make_state(seed=9))
    else:
        like = jax.eval_shape(make_state).replace(
            handles=jax.ShapeDtypeStruct((3,), np.int64), rate=state.rate
        )
    restored, metadata = CheckpointStore(tmp_path).restore(like)
    assert_identical(restored, state)
    assert metadata == {"env_steps": 2**40, "config": {"lr": 1e-3, "tags": ["a"]}}
    # the restored keys go on with the same random numbers
    np.testing.assert_array_equal(jax.random.normal(restored.key), jax.random.normal(state.key))
    assert jax.random.key_impl(restored.keys) == jax.random.key_impl(state.keys)


def test_the_last_three_are_kept_and_each_is_its_own(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    assert store.latest_step() is None
    assert store.steps() == []
    assert not (tmp_path / "checkpoints").exists()
    for step in (0, 10, 200, 3000, 40000):
        store.save(step, {"x": jnp.full((2,), step)}, {"step": step})
    assert store.steps() == [200, 3000, 40000]
    assert store.latest_step() == 40000
    for step in (200, 3000, 40000):
        state, metadata = store.restore({"x": jnp.zeros((2,), jnp.int32)}, step)
        assert state["x"].tolist() == [step, step]
        assert metadata == store.read_metadata(step) == {"step": step}


def test_other_folders_beside_the_steps_are_left_alone(tmp_path):
    stage_1 = CheckpointStore(tmp_path / "rank", keep=1)
    stage_1.save(200, {"x": jnp.int32(5)}, {})
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        store.save(step, {"x": jnp.int32(step)}, {})
    assert store.steps() == [2]
    assert stage_1.restore({"x": jnp.int32(0)})[0]["x"] == 5


def test_a_step_is_never_overwritten_and_rewinding_is_explicit(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"x": jnp.int32(step)}, {})
    for step in (2, 3):
        with pytest.raises(StorageError, match=f"checkpoint {step} .*found checkpoint 3"):
            store.save(step, {"x": jnp.int32(0)}, {})
    store.delete_after(1)
    store.save(2, {"x": jnp.int32(20)}, {})
    assert store.steps() == [1, 2]
    assert store.restore({"x": jnp.int32(0)})[0]["x"] == 20


def test_reading_leaves_a_save_in_progress_alone(tmp_path):
    CheckpointStore(tmp_path).save(1, {"x": jnp.int32(1)}, {})
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    reader = CheckpointStore(tmp_path)
    assert reader.latest_step() == 1
    reader.restore({"x": jnp.int32(0)})
    assert unfinished.exists()
    CheckpointStore(tmp_path).save(2, {"x": jnp.int32(2)}, {})
    assert not unfinished.exists()


def test_a_sharded_state_keeps_its_sharding(tmp_path):
    script = """
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        import sys, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from jaxreward.checkpoints.store import CheckpointStore
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        rows = NamedSharding(mesh, P("data"))
        keys = jax.device_put(jax.random.split(jax.random.key(1), 8), rows)
        state = {"rows": jax.device_put(np.arange(8.0, dtype=np.float32), rows), "keys": keys,
                 "all": jax.device_put(np.float32(3), NamedSharding(mesh, P()))}
        CheckpointStore(sys.argv[1]).save(1, state, {})
        restored, _ = CheckpointStore(sys.argv[1]).restore(state)
        for name, leaf in state.items():
            assert restored[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
        np.testing.assert_array_equal(restored["rows"], state["rows"])
        assert (jax.random.bits(restored["keys"][5]) == jax.random.bits(keys[5])).all()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=120)


def test_foreign_states_are_refused_by_the_first_leaf_that_differs(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(7, {"params": {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, "n": jnp.int32(0)}, {})
    good = {"params": {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, "n": jnp.int32(0)}
    cases = [
        (
            {**good, "params": {**good["params"], "a": jnp.zeros((2, 4))}},
            r"\['params'\]\['a'\]: found float32\[2, 3\], expected float32\[2, 4\]",
        ),
        ({**good, "n": jnp.float32(0)}, r"\['n'\]: found int32\[\], expected float32\[\]"),
        ({**good, "n": jax.random.key(0)}, r"\['n'\]: found int32\[\], expected key<fry>\[\]"),
        ({**good, "z": jnp.zeros(1)}, r"found no leaf \['z'\] among its 3, expected float32\[1\]"),
        ({"params": good["params"]}, r"found leaf \['n'\] int32\[\], which is not expected"),
    ]
    for like, message in cases:
        with pytest.raises(ModelError, match=message) as caught:
            store.restore(like)
        assert str(tmp_path) in str(caught.value)


def test_missing_checkpoints_name_what_is_there(tmp_path):
    with pytest.raises(ModelError, match="found none, expected at least one"):
        CheckpointStore(tmp_path / "nowhere").restore({})
    store = CheckpointStore(tmp_path)
    store.save(3, {"x": jnp.int32(0)}, {})
    with pytest.raises(ModelError, match="found only steps 3, expected step 4"):
        store.restore({"x": jnp.int32(0)}, 4)
    with pytest.raises(ConfigError, match="found 0, expected at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_leaves_that_are_no_arrays_are_refused_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(ModelError, match=r"leaf \['name'\]: found str"):
        store.save(1, {"name": "x"}, {})
    with pytest.raises(TypeError):
        store.save(1, {"x": jnp.int32(0)}, {"path": Path("x")})
    assert store.latest_step() is None


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGES = {
    "flipped bit": lambda folder: flip(largest_file(folder)),
    "short array": lambda folder: os.truncate(largest_file(folder), 100),
    "short manifest": lambda folder: os.truncate(folder / "manifest" / "metadata", 30),
    "lost manifest": lambda folder: shutil.rmtree(folder / "manifest"),
    "lost arrays": lambda folder: shutil.rmtree(folder / "state"),
    "other version": lambda folder: rewrite(folder, '"version": 1', '"version": 99'),
}


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def rewrite(folder: Path, old: str, new: str):
    path = folder / "manifest" / "metadata"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_and_the_earlier_checkpoint_still_serves(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    state = {"x": jax.random.normal(jax.random.key(0), (20000,))}
    store.save(1, state, {})
    store.save(2, jax.tree.map(lambda x: x + 1, state), {})
    DAMAGES[damage](tmp_path / "2")
    with pytest.raises(ModelError, match=re.escape(f"checkpoint 2 in {tmp_path}")):
        CheckpointStore(tmp_path).restore(state)
    assert_identical(CheckpointStore(tmp_path).restore(state, 1)[0], state)


def test_a_full_disk_is_reported_and_the_former_checkpoint_kept(tmp_path, capfd):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        store = CheckpointStore(disk / "checkpoints", keep=1)
        state = {"x": jax.random.normal(jax.random.key(0), (60000,))}  # 240 kB of noise
        store.save(1, state, {})
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(b"x" * (free - 100_000))
        for _ in range(2):
            with pytest.raises(StorageError, match=r"checkpoint 2 in .*disk/checkpoints") as caught:
                store.save(2, state, {})
            assert "the former checkpoint (1) is untouched" in str(caught.value)
            assert "No space left on device" in str(caught.value)
        assert "Traceback" not in capfd.readouterr().err
        assert store.steps() == [1]
        assert_identical(store.restore(state)[0], state)
        (disk / "other").unlink()  # room again: the same store goes on
        store.save(2, state, {})
        assert store.steps() == [2]
        store.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_an_operating_system_error_names_folder_and_cause(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, {"x": jnp.int32(1)}, {})

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left on device") as caught:
        store.save(2, {"x": jnp.int32(2)}, {})
    assert str(tmp_path) in str(caught.value)
    monkeypatch.undo()
    assert CheckpointStore(tmp_path).restore({"x": jnp.int32(0)}, 1)[0]["x"] == 1


KILLED = """
import sys, jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from jaxreward.checkpoints.store import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
state = {"x": jax.random.normal(jax.random.key(0), (500_000,))}
for step in range(1, 1000):
    print(step, flush=True)
    store.save(step, {"x": state["x"] + step}, {"step": step})
"""


def test_kill_in_mid_save_leaves_the_former_checkpoint(tmp_path):
    delays = (0.001, 0.01, 0.02, 0.04)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / str(delay))], stdout=subprocess.PIPE, text=True
        )
        for delay in delays
    ]
    base = jax.random.normal(jax.random.key(0), (500_000,))
    for delay, process in zip(delays, processes, strict=True):
        while (begun := int(process.stdout.readline())) < 3:
            pass
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for line in process.stdout:
            begun = int(line)
        process.stdout.close()
        store = CheckpointStore(tmp_path / str(delay))
        latest = store.latest_step()
        assert latest in (begun - 1, begun)
        state, metadata = store.restore({"x": base})
        assert metadata == {"step": latest}
        np.testing.assert_array_equal(state["x"], base + latest)
        store.save(begun + 1, {"x": base}, {})  # the run goes on
        assert not list((tmp_path / str(delay)).glob("*tmp*"))
