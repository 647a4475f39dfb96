"""Reading and writing safetensors files by ranges, with nothing mapped into memory and nothing trusted.

A file is: the header's length as 8 bytes (little-endian), the header as JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, and the tensors' bytes, in C order, without gaps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxreward.errors import ModelError, StorageError

MAX_HEADER_BYTES = 100_000_000  # as the safetensors library

MAX_AXES = 64  # as NumPy

# numpy dtypes of the names in the header; what is not here is no weight that these models read
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# sizes in bits of the dtypes that may stand in a file beside the ones that are read
OTHER_BITS = {
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
      path: of the file.
      name: of the tensor.
      dtype: its name in the header, such as 'BF16'.
      shape: of the tensor.
      start: byte in the file at which it begins.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Reads which tensors a file holds, and checks that every one lies inside it.

    Args:
      path: of a safetensors file.

    Returns:
      {tensor's name: where it lies}.

    Raises:
      ModelError: the file is missing, truncated or no safetensors file, or its header contradicts itself.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"a header of {length:,} bytes announced in a file of {size:,}")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: it cannot be read ({error.strerror}); check the model folder") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"a header that is not JSON ({str(error)[:100]})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "a header that is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _damaged(path, "metadata that is no map of texts")
    begin = 8 + length
    spans = {name: _span(path, name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, first, last) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise _damaged(path, f"tensor {name[:80]!r} at byte {first:,} where {end:,} was due")
        end = last
    if begin + end != size:
        raise _damaged(path, f"{begin + end:,} bytes announced in a file of {size:,}")
    return {
        name: TensorEntry(path, name, dtype, shape, begin + first)
        for name, (dtype, shape, first, _) in spans.items()
    }


def _damaged(path: Path, found: str) -> ModelError:
    return ModelError(f"{path}: {found}; the file is truncated or damaged, download or copy it again")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _span(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Checks one entry of the header: (dtype, shape, begin, end)."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value[:MAX_AXES])

    label = repr(name[:80])
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"tensor {label} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not (dtype in DTYPES or dtype in OTHER_BITS):
        raise ModelError(f"{path}: tensor {label} has the dtype {str(dtype)[:20]!r}, which is not known here")
    if not sizes(shape) or not sizes(offsets) or len(shape) > MAX_AXES or len(offsets) != 2:
        raise _damaged(path, f"tensor {label} has an impossible shape or impossible offsets")
    bits = 8 * DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_BITS[dtype]
    begin, end = offsets
    if 8 * (end - begin) != math.prod(shape) * bits:
        raise _damaged(path, f"tensor {label} of shape {shape} and dtype {dtype} has {end - begin:,} bytes")
    return dtype, tuple(shape), begin, end


class TensorReader:
    """Reads ranges of tensors; files are opened once and read without buffers or memory maps.

    A memory map would leave every page that was touched in the process's resident memory, so that a model
    would count twice while it loads.
    """

    def __init__(self) -> None:
        """Opens nothing yet."""
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> TensorReader:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, entry: TensorEntry, first: int, count: int) -> np.ndarray:
        """Reads elements [first, first + count) of a tensor in C order, as a new flat array.

        Raises:
          ModelError: the file ends before them or cannot be read.
        """
        dtype = DTYPES[entry.dtype]
        out = np.empty(count * dtype.itemsize, np.uint8)
        view, done = memoryview(out), 0
        try:
            if entry.path not in self._files:
                self._files[entry.path] = open(entry.path, "rb", buffering=0)  # noqa: SIM115
            file = self._files[entry.path]
            file.seek(entry.start + first * dtype.itemsize)
            while done < len(out):
                got = file.readinto(view[done:])
                if not got:
                    raise _damaged(entry.path, f"tensor {entry.name!r} ends early")
                done += got
        except OSError as error:
            raise ModelError(f"{entry.path}: it cannot be read ({error.strerror})") from error
        return out.view(dtype)


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    parts: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Writes a safetensors file, one part of one tensor at a time, and waits until the disk has it.

    Args:
      path: of the new file.
      tensors: {name: (dtype, shape)}, in the order in which they are written.
      parts: gives the arrays that, one after another in C order, make up a tensor.

    Raises:
      StorageError: the disk is full or the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in tensors:
                for part in parts(name):
                    file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"{path}: it cannot be written ({error.strerror}); choose a folder with room"
        ) from error
