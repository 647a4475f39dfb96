"""Durable checkpoints of a whole training state: saved atomically, restored bit for bit, or refused.

Each step is one Orbax checkpoint of two items: `state`, a flat dictionary from leaf path to array, and
`manifest`, a JSON file with the format's version, the shape, dtype and checksum of every leaf, and the
caller's metadata. The manifest makes a mismatch explainable before any array is read, and a damaged
array (which the array store itself does not notice) an error instead of a wrong number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxreward.errors import ConfigError, ModelError, StorageError
from jaxreward.types import PyTree

FORMAT = "jaxreward checkpoint"
VERSION = 1


class CheckpointStore:
    """The checkpoints of one run: `folder/<step>/`, of which the last `keep` are kept.

    Reading never changes the folder, so a run can be read while another process trains it.
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 3):
        """Names the folder; nothing is read or created until the first call.

        Args:
          folder: where the checkpoints are or will be.
          keep: how many of the newest checkpoints a save leaves, at least 1.

        Raises:
          ConfigError: `keep` is below 1.
        """
        if keep < 1:
            raise ConfigError(
                f"checkpoints to keep: found {keep}, expected at least 1; set keep to 1 or more"
            )
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._writer: ocp.CheckpointManager | None = None

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending; unfinished saves are not among them."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None if there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: PyTree, metadata: dict[str, Any]) -> None:
        """Saves a state and returns when it is on disk; a failure leaves the former checkpoints usable.

        Args:
          step: a number larger than that of any checkpoint in the folder, at least 0.
          state: a pytree of JAX arrays (typed keys included), NumPy arrays and Python numbers.
          metadata: what belongs to the state and is JSON: counters, the config, the environment's name.

        Raises:
          ModelError: a leaf is none of these types.
          StorageError: the folder cannot be written, the disk is full, or `step` is not the newest.
          TypeError: `metadata` is not JSON.
        """
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise StorageError(
                f"checkpoint {step} in {self.folder}: found checkpoint {latest}, expected only earlier ones; "
                "resume from the newest checkpoint, call delete_after, or choose another folder"
            )
        arrays, leaves = _describe_and_flatten(state)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "leaves": leaves,
            "metadata": metadata,
        }
        json.dumps(manifest)
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifest))
        try:
            with _quiet_array_store():
                self._open_writer().save(step, args=items, force=True)
            _flush_to_disk(self.folder / str(step))
        except Exception as error:  # the array store reports a full disk as ValueError, others as OSError
            self._remove_unfinished()
            raise StorageError(
                f"checkpoint {step} in {self.folder} could not be saved: {_first_line(error)}; the former "
                f"checkpoint ({'none' if latest is None else latest}) is untouched; free space or permit "
                "writing there, then resume the run"
            ) from error

    def restore(
        self, abstract_state: PyTree, step: int | None = None, *, within: str = ""
    ) -> tuple[PyTree, dict[str, Any]]:
        """Restores a state, or a part of it, exactly as it was saved.

        Args:
          abstract_state: a pytree of the state's structure, whose leaves are arrays or
            `jax.ShapeDtypeStruct`s (`jax.eval_shape` of the function that makes the state); leaves that
            carry a sharding are restored with it, others on the default device.
          step: which checkpoint; the newest if None.
          within: path of the part that `abstract_state` describes, such as '.agent'; what lies outside may
            have any shape.

        Returns:
          The state, with the structure of `abstract_state` and the values that were saved (NumPy arrays
          and Python numbers come back as such), and the metadata.

        Raises:
          ModelError: there is no such checkpoint, it was made for another structure (the message names
            the first leaf that differs), by a newer format, or it is damaged.
        """
        step, manifest = self._read_manifest(step)
        stored_leaves = manifest["leaves"]
        leaves = {name: leaf for name, leaf in stored_leaves.items() if name.startswith(within)}
        paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract_state)
        expected = {within + _path_name(path): leaf for path, leaf in paths_and_leaves}
        where = f"checkpoint {step} in {self.folder}"
        _check_structure(where, leaves, expected)
        wanted = {
            name: _stored_form(expected[name], leaf)
            if name in expected
            else jax.ShapeDtypeStruct(leaf["stored_shape"], leaf["stored_dtype"])
            for name, leaf in stored_leaves.items()
            if _size(leaf)
        }
        try:
            with _quiet_array_store(), self._open_reader() as reader:
                stored = reader.restore(
                    step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
                ).state
        except Exception as error:  # damage surfaces as whatever the array store met first
            raise _damaged(where, _first_line(error), step) from error
        restored = []
        for name in expected:
            leaf = leaves[name]
            value = stored[name] if name in stored else np.zeros(leaf["stored_shape"], leaf["stored_dtype"])
            if leaf["crc32"] is not None and _checksum(value) != leaf["crc32"]:
                raise _damaged(where, f"{name} is not what was saved (checksums differ)", step)
            restored.append(_original_form(value, leaf))
        return jax.tree.unflatten(treedef, restored), manifest["metadata"]

    def read_metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata of a checkpoint, without its state (the newest if `step` is None).

        Raises:
          ModelError: as `restore`.
        """
        return self._read_manifest(step)[1]["metadata"]

    def delete_after(self, step: int) -> None:
        """Deletes all checkpoints later than `step`, so that a run can go on from there.

        Raises:
          StorageError: the folder cannot be written.
        """
        try:
            for later in self.steps():
                if later > step:
                    shutil.rmtree(self.folder / str(later))
        except OSError as error:
            raise StorageError(
                f"checkpoint {later} in {self.folder} could not be deleted: {error.strerror}; "
                "permit writing there"
            ) from error
        self.close()

    def close(self) -> None:
        """Releases the files; the store can be used again afterwards."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open_writer(self) -> ocp.CheckpointManager:
        if self._writer is None:
            self._remove_unfinished()
            self._writer = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=self.keep, create=True, enable_async_checkpointing=False
                ),
            )
        return self._writer

    def _open_reader(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False),
        )

    def _remove_unfinished(self) -> None:
        """Gives back the space of saves that were killed or failed; their folders are not plain numbers."""
        self.close()
        if jax.process_index() == 0:
            for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)

    def _read_manifest(self, step: int | None) -> tuple[int, dict[str, Any]]:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            raise ModelError(
                f"checkpoint {'' if step is None else str(step) + ' '}in {self.folder}: found "
                f"{'none' if not steps else 'only steps ' + ', '.join(map(str, steps))}, expected "
                f"{'at least one' if step is None else f'step {step}'}; check the folder's name"
            )
        step = steps[-1] if step is None else step
        where = f"checkpoint {step} in {self.folder}"
        path = self.folder / str(step) / "manifest" / "metadata"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelError(
                f"{where}: found no manifest, expected {path.relative_to(self.folder)}; it was not saved by "
                "jaxreward, or is damaged: choose another checkpoint"
            ) from error
        except (OSError, ValueError) as error:
            raise _damaged(where, f"its manifest cannot be read ({_first_line(error)})", step) from error
        found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else None
        if found != (FORMAT, VERSION):
            raise ModelError(
                f"{where}: found format and version {found}, expected {(FORMAT, VERSION)}; use the jaxreward "
                "version that saved it"
            )
        return step, manifest


def _path_name(path: tuple) -> str:
    return jax.tree_util.keystr(path) or "(root)"


def _size(leaf: dict[str, Any]) -> int:
    return int(np.prod(leaf["stored_shape"]))


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _signature(leaf: Any) -> tuple[list[int], str]:
    """Shape and dtype as the manifest writes them; Python numbers are scalars of their type's name."""
    if isinstance(leaf, bool | int | float):
        return [], f"python {type(leaf).__name__}"
    return list(leaf.shape), str(leaf.dtype)


def _describe_and_flatten(state: PyTree) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Splits a state into what the array store holds (no empty arrays, no typed keys) and the rest."""
    arrays, leaves = {}, {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = _path_name(path)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise ModelError(
                f"state to save, leaf {name}: found {type(leaf).__name__}, expected an array or a number; "
                "put it into the metadata or make it a static field"
            )
        shape, dtype = _signature(leaf)
        entry = {"shape": shape, "dtype": dtype, "kind": "jax" if isinstance(leaf, jax.Array) else "numpy"}
        if isinstance(leaf, bool | int | float):
            entry["kind"] = "python"
        value = leaf if entry["kind"] == "jax" else np.asarray(leaf)
        if _is_key(leaf):
            entry["key_implementation"] = str(jax.random.key_impl(leaf))
            value = jax.random.key_data(leaf)
        entry.update(stored_shape=list(value.shape), stored_dtype=str(value.dtype), crc32=_checksum(value))
        leaves[name] = entry
        if value.size:
            arrays[name] = value
    return arrays, leaves


def _checksum(value: Any) -> int | None:
    """CRC-32 of an array's bytes; None where no single process holds all of them."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _stored_form(abstract: Any, leaf: dict[str, Any]) -> Any:
    """What to ask of the array store for a leaf."""
    shape, dtype = tuple(leaf["stored_shape"]), jax.numpy.dtype(leaf["stored_dtype"])
    if leaf["kind"] != "jax":
        return np.empty(shape, dtype)
    sharding = getattr(abstract, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _original_form(value: Any, leaf: dict[str, Any]) -> Any:
    if leaf["kind"] == "python":
        return value.item()
    if leaf["kind"] == "numpy":
        return np.asarray(value)
    if "key_implementation" in leaf:
        return jax.random.wrap_key_data(value, impl=leaf["key_implementation"])
    return jax.numpy.asarray(value)


def _check_structure(where: str, leaves: dict[str, dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compares the saved leaves with the wanted ones and names the first that differs."""
    advice = "resume with the config that the run was started with"
    for name, leaf in expected.items():
        shape, dtype = _signature(leaf)
        if name not in leaves:
            raise ModelError(
                f"{where}: found no leaf {name} among its {len(leaves)}, expected {dtype}{shape}; {advice}"
            )
        found = leaves[name]
        if (found["shape"], found["dtype"]) != (shape, dtype):
            raise ModelError(
                f"{where}: leaf {name}: found {found['dtype']}{found['shape']}, expected {dtype}{shape}; "
                + advice
            )
    for name, leaf in leaves.items():
        if name not in expected:
            raise ModelError(
                f"{where}: found leaf {name} {leaf['dtype']}{leaf['shape']}, which is not expected; {advice}"
            )


def _damaged(where: str, what: str, step: int) -> ModelError:
    return ModelError(
        f"{where} is damaged: {what}; expected a complete checkpoint: restore an earlier step or delete "
        f"the folder {step} to go on from the one before"
    )


def _first_line(error: Exception) -> str:
    """The error in one short line; the array store puts the cause at the end of a very long one."""
    lines = str(error).strip().splitlines() or ["no message"]
    line = lines[0] if len(lines[0]) <= 300 else f"{lines[0][:120]} ... {lines[0][-120:]}"
    return f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def _quiet_array_store() -> Iterator[None]:
    """Keeps the array store from printing a traceback for each of its threads; the error is raised anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _flush_to_disk(folder: Path) -> None:
    """Waits until a folder's files and names would survive a power cut."""
    for root, _, files in os.walk(folder):
        for path in [os.path.join(root, name) for name in files] + [root]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
