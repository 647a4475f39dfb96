"""Hugging Face model folders: config.json and safetensors in, parameters out, and back.

    model = weights.load("Qwen3-VL-4B-Instruct", dtype="bfloat16", mesh=parallel.make_mesh(fsdp=4, tensor=2))
    hidden, _ = model.architecture.module.apply(model.params, ...)
    weights.save("Qwen3-VL-4B-tuned", model, params=tuned)

Loading reads each parameter, and each device's part of it, by ranges of the files and casts it on the way, so
that the host never holds a second copy of the model.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from jaxreward import parallel
from jaxreward.errors import ModelError, StorageError
from jaxreward.models.model_folder import COMPANIONS, INDEX, few, read_config, read_end_tokens, read_headers
from jaxreward.models.tensor_files import TensorEntry, TensorReader, write_file
from jaxreward.types import Array, PyTree

# The file in jaxreward/models that builds a model, by the `model_type` of config.json.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_5_vl": "qwen_vl",
        "qwen3_vl": "qwen_vl",
        "clip": "clip",
        "xclip": "xclip",
        "siglip": "siglip",
        "siglip2": "siglip",
        "smolvlm": "smolvlm",
        "idefics3": "smolvlm",
        "llama": "llama",
        "bert": "minilm",
        "robometer": "robometer",
    }
)

FORMS = ("array", "linear", "convolution")
STORED_FLOATS = ("F32", "F16", "BF16")
# Of a tensor that are read, cast and transposed at once: what fits the processor's cache is three times as
# fast to transpose.
READ_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a checkpoint stores one of our parameters.

    Attributes:
      name: the tensor's name there; '{}' stands for the layer number where layers are scanned.
      axes: logical names of OUR array's axes, which `jaxreward.parallel` maps to the mesh: 'layers',
        'embed', 'heads', 'kv_heads', 'mlp', 'vocabulary', 'norm', or None for an axis never sharded.
      form: 'array': the same array. 'linear': our kernel [in, out] is their weight [out, in]. 'convolution':
        our kernel [in, out] is their weight [out, *in], flattened in C order.
      layers: number of scanned layers, stacked on our axis 0; 0 for a tensor outside the scan.
      shape: the stored shape (of one layer); needed for 'convolution' and wherever theirs has more axes.
      first: number of the first layer in the names.
      heads: how many heads lie side by side on the axis 'heads' or 'kv_heads', which is split between them
        only; 0: anywhere.
    """

    name: str
    axes: tuple[str | None, ...]
    form: str = "array"
    layers: int = 0
    shape: tuple[int, ...] | None = None
    first: int = 0
    heads: int = 0

    def names(self) -> list[str]:
        """Every stored name, in the order of the layers."""
        if not self.layers:
            return [self.name]
        return [self.name.replace("{}", str(self.first + layer)) for layer in range(self.layers)]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a model file returns for a config.json: the module and where its parameters are stored.

    Attributes:
      module: the Flax module, with the structure that the config gives.
      tensors: for each of our parameters, by its '/'-joined path below 'params', how it is stored.
      initialise: makes the variables from a key; `jax.eval_shape` of it gives every shape without memory.
      aliases: prefixes that other writers use, as {theirs: the one in `tensors`}; the longest match counts,
        and a name that is in `tensors` as it stands is left alone.
      ignored: regular expressions (`re.search`) of stored names that are no parameters (buffers of old
        writers, an output layer that is tied).
    """

    module: nn.Module
    tensors: Mapping[str, Stored]
    initialise: Callable[[Any], PyTree]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that has been loaded.

    Attributes:
      architecture: the module and the map of its parameters.
      config: config.json as it stands in the folder.
      params: the variables {'params': ...} for `architecture.module.apply`.
      path: the folder.
      end_tokens: token ids that end a generated text (generation_config.json, else config.json).
      replicated: {path of a parameter: the axis that the mesh could not split evenly}; empty without a mesh.
    """

    architecture: Architecture
    config: Mapping[str, Any]
    params: PyTree
    path: Path
    end_tokens: tuple[int, ...] = ()
    replicated: Mapping[str, str] = dataclasses.field(default_factory=dict)


# --- loading ---------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    rules: parallel.Rules | None = None,
    config: Mapping[str, Any] | None = None,
) -> Model:
    """Loads a Hugging Face folder: config.json and one or many safetensors files.

    Args:
      path: the folder.
      dtype: of the parameters and of the computation, 'float32' or 'bfloat16'. A parameter that the module
        keeps in float32 although `dtype` is bfloat16 is float32, unless it is stored in bfloat16.
      mesh: places every parameter by the logical names of its axes; None: on the default device.
      rules: of `jaxreward.parallel`; its `DEFAULT_RULES` if None.
      config: takes the place of config.json, for folders whose own does not tell all.

    Returns:
      The model; every parameter is as `architecture.initialise` shapes it.

    Raises:
      ModelError: no such folder, an architecture that is not supported, damaged files, or weights that are
        missing, unexpected, misshapen or not finite.
    """
    folder = Path(path)
    config = read_config(folder) if config is None else config
    architecture = build(config, dtype=dtype, source=str(folder / "config.json"))
    entries = _match(folder, architecture, read_headers(folder))
    shapes = parameter_shapes(architecture)
    _check_shapes(folder, architecture, shapes, entries)
    params: dict[str, Array] = {}
    replicated: dict[str, str] = {}
    damaged: list[str] = []
    # Largest first: what one parameter needs for a moment is then small beside what is still to come.
    order = sorted(shapes, key=lambda name: -math.prod(shapes[name].shape))
    with TensorReader() as reader:
        for name in order:
            stored, shape = architecture.tensors[name], shapes[name].shape
            target = _target_dtype(shapes[name].dtype, dtype, entries[name])
            source = _Source(reader, stored, shape, entries[name], target, damaged)
            if mesh is None:
                params[name] = jax.device_put(source(tuple(slice(0, n) for n in shape)))
            else:
                spec, notes = parallel.partition(mesh, stored.axes, shape, rules, heads=stored.heads)
                params[name] = _place(source, shape, jax.NamedSharding(mesh, spec))
                if notes:
                    replicated[name] = "; ".join(notes)
            # Transfers run in the background, and would keep the buffers of many parameters alive at once.
            params[name].block_until_ready()
            if len(damaged) > 5:
                break
    if damaged:
        raise ModelError(
            f"{folder}: NaN or infinity in {few(damaged)}; the weights are damaged, download them again"
        )
    return Model(
        architecture=architecture,
        config=config,
        params={"params": traverse_util.unflatten_dict(params, sep="/")},
        path=folder,
        end_tokens=read_end_tokens(folder, config),
        replicated=replicated,
    )


def build(config: Mapping[str, Any], *, dtype: str = "float32", source: str = "config.json") -> Architecture:
    """The architecture that a config.json describes.

    Args:
      config: contents of config.json.
      dtype: 'float32' or 'bfloat16'.
      source: what error messages call the config.

    Raises:
      ModelError: another dtype, or a `model_type` that is not supported.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"dtype {dtype!r} found; models run in 'float32' or 'bfloat16'")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(
            f"{source}: model_type {family!r} found, which is not supported; expected one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    module = importlib.import_module(f"jaxreward.models.{FAMILIES[family]}")
    return module.architecture(config, dtype=dtype)


def parameter_shapes(architecture: Architecture) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter, by its '/'-joined path; uses no memory.

    Raises:
      ModelError: sizes that fit no model; or `tensors` does not name the module's parameters, or names their
        axes or forms wrongly.
    """
    try:
        variables = jax.eval_shape(architecture.initialise, jax.random.key(0))
    except (ArithmeticError, MemoryError, TypeError, ValueError) as error:
        raise ModelError(
            f"{type(architecture.module).__name__}: the sizes in its config.json do not fit together or are "
            f"too large ({str(error).splitlines()[0][:200]}); compare it with the one the model came with"
        ) from error
    shapes = traverse_util.flatten_dict(variables["params"], sep="/")
    wrong = sorted(set(shapes) ^ set(architecture.tensors)) or [
        name
        for name, stored in architecture.tensors.items()
        if stored.form not in FORMS
        or len(stored.axes) != len(shapes[name].shape)
        or (stored.layers and stored.layers != shapes[name].shape[0])
        or (stored.form != "array" and len(shapes[name].shape) != 2 + bool(stored.layers))
    ]
    if wrong:
        raise ModelError(
            f"{type(architecture.module).__name__}: its parameters and the map of the stored tensors differ "
            f"in {few(wrong)}; this is a fault of jaxreward, please report it"
        )
    return shapes


def _match(
    folder: Path, architecture: Architecture, entries: Mapping[str, TensorEntry]
) -> dict[str, list[TensorEntry]]:
    """The stored tensors of each of our parameters, layer by layer."""
    deepest = max(stored.layers for stored in architecture.tensors.values())
    if deepest > len(entries):
        raise ModelError(
            f"{folder}: {len(entries)} tensors found for a model of {deepest} layers; config.json and "
            "weights must be of the same model"
        )
    wanted = {name for stored in architecture.tensors.values() for name in stored.names()}
    ignored = [re.compile(pattern) for pattern in architecture.ignored]
    prefixes = sorted(architecture.aliases, key=len, reverse=True)

    def rename(name: str) -> str:
        if name in wanted:
            return name
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return name if prefix is None else architecture.aliases[prefix] + name[len(prefix) :]

    found: dict[str, TensorEntry] = {}
    unexpected = []
    for name, entry in entries.items():
        renamed = rename(name)
        if renamed in wanted and renamed not in found:
            found[renamed] = entry
        elif not any(pattern.search(name) or pattern.search(renamed) for pattern in ignored):
            unexpected.append(name)
    missing = sorted(wanted - set(found))
    if missing or unexpected:
        parts = [f"missing {few(missing)}"] if missing else []
        parts += [f"unexpected {few(sorted(unexpected))}"] if unexpected else []
        raise ModelError(
            f"{folder}: the weights do not fit {type(architecture.module).__name__}: {'; '.join(parts)}; "
            "config.json and weights must be of the same model"
        )
    return {path: [found[name] for name in stored.names()] for path, stored in architecture.tensors.items()}


def stored_shape(stored: Stored, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a stored tensor (of one layer) for our parameter of a shape."""
    own = shape[1:] if stored.layers else shape
    if stored.shape is not None:
        return stored.shape
    return own if stored.form == "array" else own[::-1]


def _check_shapes(
    folder: Path,
    architecture: Architecture,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    entries: Mapping[str, list[TensorEntry]],
) -> None:
    """Raises where a stored tensor has another shape, or a dtype that cannot be read."""
    wrong, unreadable = [], []
    for path, stored in architecture.tensors.items():
        expected = stored_shape(stored, shapes[path].shape)
        for entry in entries[path]:
            if entry.shape != expected:
                wrong.append(f"{entry.name} is {list(entry.shape)} instead of {list(expected)}")
            if entry.dtype not in STORED_FLOATS:
                unreadable.append(f"{entry.name} in {entry.dtype}")
    if wrong:
        raise ModelError(
            f"{folder}: misshapen {few(wrong)}; config.json and weights must be of the same model"
        )
    if unreadable:
        raise ModelError(
            f"{folder}: {few(unreadable)}; weights must be stored in {', '.join(STORED_FLOATS)} (get the "
            "model's unquantised version)"
        )


def _target_dtype(declared: Any, dtype: str, entries: list[TensorEntry]) -> np.dtype:
    """The dtype of a loaded parameter: see `load`."""
    if dtype == "bfloat16" and all(entry.dtype == "BF16" for entry in entries):
        return np.dtype(jnp.bfloat16)
    return np.dtype(declared)


class _Source:
    """Reads any block of one of our parameters from the stored tensors.

    Attributes:
      damaged: gets the name of each stored tensor in which something is not finite.
    """

    def __init__(
        self,
        reader: TensorReader,
        stored: Stored,
        shape: tuple[int, ...],
        entries: list[TensorEntry],
        dtype: np.dtype,
        damaged: list[str],
    ) -> None:
        self.reader, self.stored, self.entries = reader, stored, entries
        self.dtype, self.damaged = dtype, damaged
        self.own = shape[1:] if stored.layers else shape
        self.turned = stored.form != "array"

    def __call__(self, block: tuple[slice, ...]) -> np.ndarray:
        """Our block, given by slices with a start and a stop, as a new array."""
        out = _aligned_empty(tuple(part.stop - part.start for part in block), self.dtype)
        if not self.stored.layers:
            self._fill(out, self.entries[0], block)
            return out
        layers, *inner = block
        for row, layer in enumerate(range(layers.start, layers.stop)):
            self._fill(out[row, ...], self.entries[layer], tuple(inner))
        return out

    def _fill(self, out: np.ndarray, entry: TensorEntry, block: tuple[slice, ...]) -> None:
        """Writes a block of one layer, reading whole rows of the stored tensor, a few at a time."""
        if self.turned:
            # Their rows are our columns: read [out, in] and write into the transposed view.
            view, block, out = self.own[::-1], block[::-1], out.T
        else:
            view = self.own
        if not view:
            view, block, out = (1,), (slice(0, 1),), out.reshape(1)
        rows, inner = block[0], block[1:]
        width = math.prod(view[1:])
        step = max(1, READ_BYTES // max(1, width * 4))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            read = self.reader.read(entry, start * width, (stop - start) * width)
            read = read.reshape(stop - start, *view[1:])[(slice(None), *inner)].astype(self.dtype, copy=False)
            if not _finite(read) and entry.name not in self.damaged:
                self.damaged.append(entry.name)
            out[start - rows.start : stop - rows.start] = read


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at an address that the CPU backend can take over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    shift = -raw.ctypes.data % 64
    return raw[shift : shift + size].view(dtype).reshape(shape)


def _finite(x: np.ndarray) -> bool:
    """Whether a float32 or bfloat16 array has no NaN and no infinity: no exponent of ones only."""
    bits, exponent = (np.uint32, 0x7F800000) if x.dtype.itemsize == 4 else (np.uint16, 0x7F80)
    return not np.any((x.view(bits) & bits(exponent)) == bits(exponent))


def _place(source: _Source, shape: tuple[int, ...], sharding: jax.NamedSharding) -> Array:
    """Reads each device's block of a parameter; a block that several devices hold is read once."""
    placed: dict[tuple[tuple[int, int], ...], Array] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        block = tuple(slice(*part.indices(n)[:2]) for part, n in zip(index, shape, strict=True))
        key = tuple((part.start, part.stop) for part in block)
        if key not in placed:
            placed[key] = jax.device_put(source(block), device)
        arrays.append(jax.device_put(placed[key], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


# --- saving ----------------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    model: Model,
    *,
    params: PyTree | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that PyTorch transformers and `load` read: config.json, safetensors, tokenizer files.

    The folder appears whole or not at all: it is written beside its place, under another name, and renamed.
    Tensors are fetched from the devices one layer at a time.

    Args:
      path: of the new folder; it must not exist, or be empty.
      model: its architecture and config, and the tokenizer and processor files of its folder.
      params: the variables {'params': ...} to write; those of the model if None.
      dtype: to store, 'float32', 'bfloat16' or 'float16'; each parameter's own if None.
      max_shard_bytes: a file grows no larger, unless a single tensor is.

    Raises:
      ModelError: parameters that are not those of the architecture.
      StorageError: the folder exists, or cannot be written (a full disk); nothing is left behind.
    """
    folder = Path(path).absolute()  # '.' has no name that another could be made from
    variables = model.params if params is None else params
    values = traverse_util.flatten_dict(dict(variables["params"]), sep="/")
    plan = _plan(model.architecture, values, dtype)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StorageError(f"{folder}: it exists and is not empty; choose a new folder for the model")
        temporary.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"{folder}: it cannot be made ({error.strerror}); choose another place") from error
    try:
        _write_shards(temporary, plan, max_shard_bytes)
        _write_companions(temporary, model, {str(tensor.dtype) for tensor in plan.values()})
        os.replace(temporary, folder)
    except OSError as error:
        raise StorageError(
            f"{folder}: it cannot be written ({error.strerror}); choose a folder with room"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A tensor that is to be written: its dtype, its stored shape, and its value in our form."""

    dtype: np.dtype
    shape: tuple[int, ...]
    value: Array
    layer: int | None
    turned: bool

    def fetch(self) -> np.ndarray:
        """The tensor as it is stored."""
        value = np.asarray(self.value if self.layer is None else self.value[self.layer]).astype(self.dtype)
        return (value.T if self.turned else value).reshape(self.shape)


def _plan(architecture: Architecture, values: Mapping[str, Array], dtype: str | None) -> dict[str, _Planned]:
    """Every tensor to write, by its stored name."""
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ModelError(f"dtype {dtype!r} found; weights are stored in 'float32', 'bfloat16' or 'float16'")
    shapes = parameter_shapes(architecture)
    wrong = sorted(set(shapes) ^ set(values)) or [
        f"{name} {tuple(values[name].shape)}" for name in shapes if values[name].shape != shapes[name].shape
    ]
    if wrong:
        raise ModelError(
            f"{type(architecture.module).__name__}: the parameters to save differ from the architecture's in "
            f"{few(wrong)}"
        )
    plan = {}
    for path, stored in architecture.tensors.items():
        value = values[path]
        if not getattr(value, "is_fully_addressable", True):
            raise ModelError(
                f"{path}: a part of it lies on another process's devices; gather the parameters "
                "before saving (jax.experimental.multihost_utils.process_allgather)"
            )
        target = np.dtype(value.dtype if dtype is None else jnp.dtype(dtype))
        shape = stored_shape(stored, value.shape)
        for layer, name in enumerate(stored.names()):
            plan[name] = _Planned(
                target, shape, value, layer if stored.layers else None, stored.form != "array"
            )
    return plan


def _write_shards(folder: Path, plan: Mapping[str, _Planned], max_shard_bytes: int) -> None:
    """Writes model.safetensors, or several shards and their index."""
    shards: list[list[str]] = [[]]
    total = filled = 0
    for name, tensor in plan.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size

    def parts(name: str) -> Iterator[np.ndarray]:
        yield plan[name].fetch()

    listed = {}
    for number, names in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = several if len(shards) > 1 else "model.safetensors"
        write_file(folder / file, {name: (plan[name].dtype, plan[name].shape) for name in names}, parts)
        listed.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": listed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_companions(folder: Path, model: Model, dtypes: set[str]) -> None:
    """Writes config.json, with the dtype that is stored, and copies the tokenizer and processor files."""
    config = dict(model.config)
    if len(dtypes) == 1:
        # `torch_dtype` is what transformers before version 5 call it
        for key in {"dtype", "torch_dtype"} & set(config) or {"dtype"}:
            config[key] = next(iter(dtypes))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COMPANIONS:
        if (model.path / name).is_file():
            shutil.copyfile(model.path / name, folder / name)
