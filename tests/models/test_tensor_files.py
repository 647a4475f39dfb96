"""The reader and writer of safetensors files, against the safetensors library."""

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.errors import ModelError, StorageError
from jaxreward.models.tensor_files import DTYPES, MAX_HEADER_BYTES, TensorReader, read_header, write_file

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(1.5, np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "c.weight": np.arange(8, dtype=np.int64).reshape(2, 2, 2),
    "d": np.arange(5).astype(ml_dtypes.bfloat16),
    "e": np.array([True, False, True]),
}


def file_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    assert set(header) == set(TENSORS)
    with TensorReader() as reader:
        for name, value in TENSORS.items():
            assert header[name].shape == value.shape
            assert DTYPES[header[name].dtype] == value.dtype
            np.testing.assert_array_equal(reader.read(header[name], 0, value.size), value.reshape(-1))
        np.testing.assert_array_equal(reader.read(header["c.weight"], 3, 4), [3, 4, 5, 6])


def test_the_library_reads_what_is_written(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, {n: (x.dtype, x.shape) for n, x in TENSORS.items()}, lambda name: [TENSORS[name]])
    found = safetensors.numpy.load_file(path)
    assert set(found) == set(TENSORS)
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


GOOD = json.dumps({"a": entry(), "b": entry("I8", (3,), (8, 11))}).encode()
HOSTILE = {
    "no length": b"\x01\x02",
    "a length of 2^60": struct.pack("<Q", 2**60) + b"{}",
    "a length of 2^64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a length one byte too long": struct.pack("<Q", len(GOOD) + 12) + GOOD + bytes(11),
    "a length over the limit": struct.pack("<Q", MAX_HEADER_BYTES + 1) + GOOD,
    "no JSON": file_bytes(b"{'a': 1}"),
    "no UTF-8": file_bytes(b"\xff\xfe{}"),
    "a list": file_bytes(b"[]"),
    "deep nesting": file_bytes(b"[" * 200_000),
    "a number of a million digits": file_bytes(b'{"a": ' + b"9" * 1_000_000 + b"}"),
    "a name twice": file_bytes(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "overlapping tensors": file_bytes({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": file_bytes({"a": entry(), "b": entry()}, bytes(8)),
    "a hole": file_bytes({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "bytes after the last tensor": file_bytes({"a": entry()}, bytes(9)),
    "truncated data": file_bytes({"a": entry()}, bytes(7)),
    "negative offsets": file_bytes({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "offsets in reverse": file_bytes({"a": entry(offsets=(8, 0))}, bytes(8)),
    "offsets past 2^63": file_bytes({"a": entry(offsets=(2**64, 2**64 + 8))}, bytes(8)),
    "a fraction as an offset": file_bytes({"a": entry(offsets=(0.0, 8))}, bytes(8)),
    "true as an offset": file_bytes({"a": entry("I8", (1,), (0, True))}, bytes(1)),
    "three offsets": file_bytes({"a": entry(offsets=(0, 8, 8))}, bytes(8)),
    "a negative size": file_bytes({"a": entry(shape=(-2,))}, bytes(8)),
    "a shape that needs 2^80 bytes": file_bytes({"a": entry(shape=(2**40, 2**40))}, bytes(8)),
    "a shape with more bytes": file_bytes({"a": entry(shape=(3,))}, bytes(8)),
    "a thousand axes": file_bytes({"a": entry(shape=[1] * 1000 + [2])}, bytes(8)),
    "a shape that is text": file_bytes({"a": entry() | {"shape": "2"}}, bytes(8)),
    "an unknown dtype": file_bytes({"a": entry("F31")}, bytes(8)),
    "a dtype that is a list": file_bytes({"a": entry() | {"dtype": ["F32"]}}, bytes(8)),
    "no shape": file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "a tensor that is a number": file_bytes({"a": 8}, bytes(8)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_end_in_one_line(tmp_path, case):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[case])
    tracemalloc.start()
    with pytest.raises(ModelError) as error:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400 + len(str(path))
    assert peak < 200 * len(HOSTILE[case]) + 1_000_000


def test_a_missing_file_ends_in_one_line(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path)


def test_a_file_cut_after_the_header_was_read(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(8, np.float32)}, path)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-4])
    with TensorReader() as reader, pytest.raises(ModelError, match="ends early"):
        reader.read(header["a"], 0, 8)


def library_says(path):
    """{name: shape} by the safetensors library, None where it refuses the file."""
    try:
        with safetensors.safe_open(path, "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError):
        return None


def same_as_library(path, content):
    path.write_bytes(content)
    try:
        found = {name: tensor.shape for name, tensor in read_header(path).items()}
    except ModelError:
        return None
    assert found == library_says(path), content
    return found


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=64))
def test_random_bytes(scratch, content):
    same_as_library(scratch, content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
SIZES = st.integers(-1, 9)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F8_E4M3", "F4", "X"]) | JSON,
        "shape": st.lists(SIZES, max_size=3) | JSON,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=300, deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ENTRY | JSON, max_size=3),
    data=st.binary(max_size=16),
)
def test_random_headers(scratch, header, data):
    same_as_library(scratch, file_bytes(header, data))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_good_file_with_one_byte_changed(scratch, data):
    good = file_bytes(GOOD, bytes(range(11)))
    assert same_as_library(scratch, good) == {"a": (2,), "b": (3,)}
    at = data.draw(st.integers(0, len(good) - 1))
    same_as_library(scratch, good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :])


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=5).filter(lambda x: x != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=4,
    )
)
def test_every_good_file_is_accepted(scratch, tensors):
    arrays = {name: np.zeros(shape, DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    write_file(scratch, {n: (x.dtype, x.shape) for n, x in arrays.items()}, lambda name: [arrays[name]])
    expected = {name: array.shape for name, array in arrays.items()}
    assert same_as_library(scratch, scratch.read_bytes()) == library_says(scratch) == expected


def test_a_file_that_cannot_be_made(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        write_file(tmp_path / "no" / "x.safetensors", {}, lambda name: [])
