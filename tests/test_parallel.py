"""Meshes and sharding rules; what needs several devices runs in a process that has eight virtual ones."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxreward import parallel
from jaxreward.errors import ConfigError
from jaxreward.models.decoder import DecoderConfig, empty_cache

TESTS = Path(__file__).parent
VIRTUAL_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def abstract(data=1, fsdp=1, tensor=1):
    return AbstractMesh((data, fsdp, tensor), parallel.MESH_AXES, (AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("mesh", "axes", "shape", "heads", "expected", "notes"),
    [
        # a query kernel of 3 layers, residual width 8, 4 heads of width 6
        ((1, 4, 2), ("layers", "embed", "heads"), (3, 8, 24), 4, (None, "fsdp", "tensor"), 0),
        # 2 key heads on 2 devices, then on 4, although 12 columns could be split in 4
        ((1, 4, 2), ("layers", "embed", "kv_heads"), (3, 8, 12), 2, (None, "fsdp", "tensor"), 0),
        ((1, 2, 4), ("layers", "embed", "kv_heads"), (3, 8, 12), 2, (None, "fsdp", None), 1),
        ((1, 2, 4), ("layers", "embed", "kv_heads"), (3, 8, 12), 0, (None, "fsdp", "tensor"), 0),
        # a width and a vocabulary that do not divide
        ((1, 4, 2), ("vocabulary", "embed"), (7, 10), 0, (None, None), 2),
        # one device: nothing is split
        ((1, 1, 1), ("vocabulary", "embed"), (7, 10), 0, (None, None), 0),
        ((2, 4, 1), ("batch", None), (16, 3), 0, (("data", "fsdp"), None), 0),
        ((2, 1, 4), ("batch", None), (16, 3), 0, ("data", None), 0),
        ((2, 4, 1), ("batch", None), (12, 3), 0, (None, None), 1),
        ((1, 4, 2), (), (), 0, (), 0),
        ((1, 4, 2), ("norm",), (8,), 0, (None,), 0),
    ],
)
def test_how_axes_are_split(mesh, axes, shape, heads, expected, notes):
    spec, found = parallel.partition(abstract(*mesh), axes, shape, heads=heads)
    assert spec == PartitionSpec(*expected)
    assert len(found) == notes


NAMES = st.sampled_from([None, "layers", "embed", "mlp", "vocabulary", "norm", "heads", "kv_heads"])


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    axes=st.lists(st.tuples(NAMES, st.integers(1, 48)), max_size=4),
    heads=st.integers(0, 8),
)
def test_every_split_is_even(sizes, axes, heads):
    names, shape = [a for a, _ in axes], [n for _, n in axes]
    try:
        spec, notes = parallel.partition(abstract(*sizes), names, shape, heads=heads)
    except ConfigError as error:
        assert "only once" in str(error)
        return
    mesh = dict(zip(parallel.MESH_AXES, sizes, strict=True))
    for name, length, part in zip(names, shape, spec, strict=True):
        pieces = mesh[part] if part else 1
        units = heads if heads and name in ("heads", "kv_heads") else length
        assert units % pieces == 0
        wanted = mesh[parallel.DEFAULT_RULES[name]] if parallel.DEFAULT_RULES.get(name) else 1
        assert pieces == wanted or any(note.startswith(f"{name}:") for note in notes)


@pytest.mark.parametrize(
    ("axes", "rules", "message"),
    [
        (("embed",), None, "one for each"),
        (("embed", "width"), None, "'width'"),
        (("embed", "mlp"), {"embed": "fsdp", "mlp": "model"}, "'model'"),
        (("embed", "mlp"), {"embed": "fsdp", "mlp": "fsdp"}, "only once"),
    ],
)
def test_rules_that_cannot_be_used(axes, rules, message):
    with pytest.raises(ConfigError, match=message):
        parallel.partition(abstract(1, 4, 2), axes, (8, 8), rules)


def test_strict_refuses_what_would_be_replicated():
    mesh = abstract(1, 4, 2)
    with pytest.raises(ConfigError, match="embed: 10 in 4 parts"):
        parallel.sharding(mesh, ("embed", "mlp"), (10, 8), strict=True)
    assert parallel.sharding(mesh, ("embed", "mlp"), (12, 8), strict=True).spec == PartitionSpec(
        "fsdp", "tensor"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "data=0"),
        ((1, -2, 1), "fsdp=-2"),
        ((-1, -1, 1), "data=-1 and fsdp=-1"),
        ((1, 2, 3), "needs 6 devices, 4 found"),
        ((-1, 3, 1), "3 does not divide"),
    ],
)
def test_meshes_that_cannot_be(sizes, message):
    with pytest.raises(ConfigError, match=message):
        parallel.make_mesh(*sizes, devices=jax.devices()[:1] * 4)


def test_a_mesh_of_one_device_is_the_default():
    mesh = parallel.make_mesh()
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    batch = parallel.shard_batch(mesh, {"x": jax.numpy.arange(3)})
    assert batch["x"].tolist() == [0, 1, 2]


def test_batches_that_do_not_divide():
    mesh = abstract(2, 3)
    with pytest.raises(ConfigError, match="pad it to 12"):
        parallel.batch_sharding(mesh, 7)
    assert parallel.batch_sharding(mesh, 12, axis=1).spec == PartitionSpec(None, ("data", "fsdp"))


@pytest.mark.parametrize(("tensor", "expected"), [(2, "tensor"), (4, None)])
def test_key_heads_of_the_cache_are_replicated_where_they_do_not_divide(tensor, expected):
    config = DecoderConfig(vocabulary=8, width=8, mlp_width=8, layers=3, heads=4, kv_heads=2, head_width=2)
    cache = jax.eval_shape(lambda: empty_cache(config, batch=4, slots=5))
    found = parallel.cache_shardings(abstract(2, 2, tensor), cache)
    assert found.keys.spec == PartitionSpec(None, ("data", "fsdp"), expected, None, None)
    assert found.values == found.keys
    assert found.where.spec == PartitionSpec(("data", "fsdp"), None)
    assert found.length.spec == PartitionSpec()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    command = [sys.executable, str(TESTS / "eight_devices.py"), str(tmp_path_factory.mktemp("devices"))]
    result = subprocess.run(
        command, env=os.environ | VIRTUAL_DEVICES, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_meshes_of_several_devices(report):
    assert report["devices"] == 8
    assert report["all"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert report["first"] == [0, 1]
    assert report["whole"] is True
    assert report["constrained"] == [2, 3]


def test_parameters_on_a_mesh_are_those_of_one_device(report):
    assert report["same"] is True
    assert report["saved"] is True


def test_every_device_holds_its_part(report):
    assert report["replicated"] == {}
    for name, share in report["shares"].items():
        if name.endswith("kernel") or name == "embedding":
            assert share == 1 / 8, name
        elif name.endswith("bias"):
            assert share == 1 / 2, name
        else:
            assert share == 1, name


def test_key_heads_that_do_not_divide_are_recorded(report):
    expected = {f"layers/{name}/{kind}" for name in ("key", "value") for kind in ("kernel", "bias")}
    assert set(report["narrow"]) == expected
    assert set(report["narrow"].values()) == {"kv_heads: 2 in 4 parts"}


def test_logits_on_a_mesh_are_those_of_one_device(report):
    assert math.isfinite(report["logits"]) and report["logits"] > 0.1
    assert report["error"] < 1e-5
    assert report["key_error"] < 1e-5
    assert report["key_shard"] == [3, 1, 1, 7, 8]


@pytest.mark.slow
def test_the_parity_tests_of_every_model_hold_on_a_mesh():
    files = [
        str(TESTS / "models" / f"test_{family}.py")
        for family in ("clip", "llama", "minilm", "qwen_vl", "siglip", "smolvlm", "xclip")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "pytorch", *files]
    environment = os.environ | VIRTUAL_DEVICES | {"JAXREWARD_TEST_MESH": "1,4,2"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout[-3000:]
