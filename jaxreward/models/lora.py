"""Low-rank adapters (Hu et al., 2022): a trainable x A B beside the frozen x W of linear maps.

    adapter = lora.init(key, model.params, config)
    module.apply({**model.params, **lora.collection(adapter, config)}, ...)      # adapted
    module.apply(model.params, ...)                                              # the reference model
    weights.save(path, model, params=lora.merge(model.params, adapter, config))  # one model again

An adapter is a pytree of its own, so that gradients, optimiser state and checkpoints hold nothing else. Where
layers are scanned, its arrays carry the leading layer axis of their kernels.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxreward.errors import ConfigError, ModelError, StorageError
from jaxreward.models.model_folder import few
from jaxreward.models.tensor_files import TensorEntry, TensorReader, read_header, write_file
from jaxreward.models.weights import Architecture, parameter_shapes
from jaxreward.types import Array, PyTree

DECODER_LAYERS = (r"(decoder/)?layers/[^/]+/kernel",)

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

# Settings of PEFT that change what an adapter computes, with the values that mean "not used".
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Which linear maps are adapted, and how.

    Attributes:
      rank: r, the width between A and B.
      alpha: x A B is scaled by alpha / r.
      targets: regular expressions for whole paths of kernels below 'params', such as
        'decoder/layers/query/kernel'; all linear maps of the text decoder's layers by default. The kernels
        must belong to `jaxreward.models.layers.Linear`, which adds what the adapter holds.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = DECODER_LAYERS

    def __post_init__(self) -> None:
        """Checks the numbers and the expressions."""
        if self.rank < 1:
            raise ConfigError(f"LoRA rank {self.rank} found; expected at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"LoRA alpha {self.alpha} found; expected a finite number above 0")
        for target in self.targets:
            try:
                re.compile(target)
            except re.error as error:
                raise ConfigError(f"LoRA target {target!r} is no regular expression: {error}") from error

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


def target_paths(variables: PyTree, config: LoRAConfig) -> list[str]:
    """Paths of the layers that a config adapts, without their last part 'kernel', in alphabetical order.

    Args:
      variables: {'params': ...}, arrays or shapes.
      config: whose `targets` choose.

    Raises:
      ConfigError: no targets, a target that matches nothing, or one that matches what is no matrix.
    """
    shapes = {path: x.shape for path, x in traverse_util.flatten_dict(variables["params"], sep="/").items()}
    kernels = [path for path in shapes if path.split("/")[-1] == "kernel"]
    matches = {target: [path for path in shapes if re.fullmatch(target, path)] for target in config.targets}
    empty = [target for target, paths in matches.items() if not paths]
    if empty or not matches:
        raise ConfigError(
            f"LoRA targets {empty or config.targets} match no parameter; "
            f"the kernels are {few(sorted(kernels))}"
        )
    found = sorted({path for paths in matches.values() for path in paths})
    wrong = [
        f"{path} {shapes[path]}" for path in found if path not in kernels or len(shapes[path]) not in (2, 3)
    ]
    if wrong:
        raise ConfigError(
            f"LoRA targets match {few(wrong)}; expected kernels [in, out], or [layers, in, out] if scanned"
        )
    return [path.removesuffix("/kernel") for path in found]


def init(key: Array, variables: PyTree, config: LoRAConfig) -> PyTree:
    """Makes an adapter that changes nothing yet: A uniform in +-1 / sqrt(in), B zero, as PEFT does.

    Args:
      key: of A.
      variables: {'params': ...} of the base model, arrays or shapes.
      config: which maps, and the rank.

    Returns:
      float32 {...: {'a': [(L,) in, r], 'b': [(L,) r, out]}}, nested as the parameters are.

    Raises:
      ConfigError: see `target_paths`.
    """
    kernels = traverse_util.flatten_dict(variables["params"], sep="/")
    paths = target_paths(variables, config)
    adapter = {}
    for path, path_key in zip(paths, jax.random.split(key, len(paths)), strict=True):
        *layers, inputs, outputs = kernels[f"{path}/kernel"].shape
        bound = 1 / math.sqrt(inputs)
        shape = (*layers, inputs, config.rank)
        adapter[f"{path}/a"] = jax.random.uniform(path_key, shape, jnp.float32, -bound, bound)
        adapter[f"{path}/b"] = jnp.zeros((*layers, config.rank, outputs), jnp.float32)
    return traverse_util.unflatten_dict(adapter, sep="/")


def collection(adapter: PyTree, config: LoRAConfig) -> dict[str, PyTree]:
    """The variables {'lora': ...} that `layers.Linear` reads, with alpha / r multiplied into B.

    Differentiable in `adapter`; add it to {'params': ...} for `apply`.
    """
    flat = traverse_util.flatten_dict(adapter)
    scaled = {path: x * config.scale if path[-1] == "b" else x for path, x in flat.items()}
    return {"lora": traverse_util.unflatten_dict(scaled)}


def merge(variables: PyTree, adapter: PyTree, config: LoRAConfig) -> dict[str, PyTree]:
    """Adds alpha / r A B to the kernels, in float32, and rounds to their dtype.

    Args:
      variables: {'params': ...} of the base model.
      adapter: from `init`, trained.
      config: of the adapter.

    Returns:
      {'params': ...} of a model without an adapter; what is not adapted is the same array.

    Raises:
      ModelError: for an adapter of another model.
    """
    kernels = traverse_util.flatten_dict(variables["params"], sep="/")
    _check(adapter, {path: x.shape for path, x in kernels.items()})
    for path, (a, b) in _pairs(adapter).items():
        kernel = kernels[f"{path}/kernel"]
        change = config.scale * jnp.matmul(a, b, precision="highest")
        kernels[f"{path}/kernel"] = (kernel.astype(jnp.float32) + change).astype(kernel.dtype)
    return {**variables, "params": traverse_util.unflatten_dict(kernels, sep="/")}


def count(adapter: PyTree) -> int:
    """The number of trainable parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(adapter))


def save(
    path: str | os.PathLike[str],
    adapter: PyTree,
    config: LoRAConfig,
    architecture: Architecture,
    *,
    base_model: str = "",
) -> None:
    """Writes an adapter as a folder that PEFT reads: adapter_config.json and adapter_model.safetensors.

    The folder appears whole or not at all. Where an architecture's tensors have two names, those written are
    the longer ones, which are the paths of the modules in transformers 4.52 and later.

    Args:
      path: of the new folder; it must not exist, or be empty.
      adapter: from `init`, trained.
      config: of the adapter.
      architecture: of the base model.
      base_model: name or folder of the base model, for PEFT.

    Raises:
      ModelError: the adapter is not of this architecture, or adapts what PEFT stores in another form.
      StorageError: the folder exists or cannot be written; nothing is left behind.
    """
    folder = Path(path)
    shapes = {name: x.shape for name, x in parameter_shapes(architecture).items()}
    _check(adapter, shapes)
    tensors: dict[str, np.ndarray] = {}
    modules = []
    for layer_path, (a, b) in _pairs(adapter).items():
        stored = architecture.tensors[f"{layer_path}/kernel"]
        if stored.form != "linear":
            raise ModelError(
                f"adapter of {layer_path}, a {stored.form}, found; only linear maps can be written"
            )
        modules.append(re.escape(_full_name(stored.name, architecture)).replace(r"\{\}", r"\d+"))
        for number, name in enumerate(stored.names()):
            module = PREFIX + _full_name(name, architecture)
            for letter, x in (("A", a), ("B", b)):
                one = x[number] if stored.layers else x
                tensors[f"{module}.lora_{letter}.weight"] = np.asarray(one, np.float32).T
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "target_modules": "|".join(modules),
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    _write_folder(folder, settings, tensors)


def load(path: str | os.PathLike[str], architecture: Architecture) -> tuple[PyTree, LoRAConfig]:
    """Reads a folder that PEFT or `save` wrote.

    Args:
      path: the folder.
      architecture: of the base model.

    Returns:
      (float32 adapter of NumPy arrays, its config, whose targets are the layers that it adapts).

    Raises:
      ModelError: files that are missing or damaged, settings that change what an adapter computes in ways
        that are not supported, or tensors that do not fit the architecture.
    """
    folder = Path(path)
    rank, alpha = _read_settings(folder / CONFIG_FILE)
    entries = read_header(folder / TENSOR_FILE)
    shapes = {name: x.shape for name, x in parameter_shapes(architecture).items()}
    found = _match(folder, architecture, entries)
    adapter: dict[str, np.ndarray] = {}
    with TensorReader() as reader:
        for name, (layers, parts) in found.items():
            matrices = [_read_matrix(reader, part) for part in parts]
            if len({x.shape for x in matrices}) > 1:
                raise ModelError(
                    f"{folder}: {name} has matrices of several shapes; expected one for all layers"
                )
            adapter[name] = np.stack(matrices) if layers else matrices[0]
    nested = traverse_util.unflatten_dict(adapter, sep="/")
    _check(nested, shapes, rank)
    if not all(np.isfinite(x).all() for x in adapter.values()):
        raise ModelError(f"{folder}: NaN or infinity in the adapter; it is damaged, or its training failed")
    targets = tuple(re.escape(f"{layer_path}/kernel") for layer_path in _pairs(nested))
    return nested, LoRAConfig(rank, alpha, targets)


def _match(
    folder: Path, architecture: Architecture, entries: Mapping[str, TensorEntry]
) -> dict[str, tuple[int, list[TensorEntry]]]:
    """{path of an A or B: (number of scanned layers, stored matrices)}; ModelError if any is left over."""
    known = {name.removesuffix(".weight") for x in architecture.tensors.values() for name in x.names()}
    unread = {_stored_name(name.removeprefix(PREFIX), architecture, known): name for name in entries}
    found = {}
    for path, stored in architecture.tensors.items():
        for part in "ab":
            modules = [name.removesuffix(".weight") for name in stored.names()]
            wanted = [f"{module}.lora_{part.upper()}.weight" for module in modules]
            missing = [name for name in wanted if name not in unread]
            if stored.form != "linear" or len(missing) == len(wanted):
                continue
            if missing:
                raise ModelError(
                    f"{folder}: missing {few(missing)}; an adapter must hold a linear map of all "
                    "layers or of none"
                )
            found[path.removesuffix("kernel") + part] = (
                stored.layers,
                [entries[unread.pop(name)] for name in wanted],
            )
    if unread or not found:
        raise ModelError(
            f"{folder}: unexpected {few(sorted(unread.values())) or 'emptiness'}; expected a LoRA of linear "
            f"maps of {type(architecture.module).__name__}"
        )
    return found


def _read_matrix(reader: TensorReader, entry: TensorEntry) -> np.ndarray:
    """The transpose of a stored matrix, float32."""
    if len(entry.shape) != 2 or entry.dtype not in ("F32", "F16", "BF16"):
        raise ModelError(
            f"{entry.path}: {entry.name} is {entry.dtype} {list(entry.shape)}; expected a matrix of F32, "
            "F16 or BF16"
        )
    values = reader.read(entry, 0, math.prod(entry.shape)).reshape(entry.shape)
    return values.astype(np.float32).T


def _pairs(adapter: PyTree) -> dict[str, tuple[Array, Array]]:
    """{path of a layer: (A, B)}, in alphabetical order."""
    flat = traverse_util.flatten_dict(adapter, sep="/")
    paths = sorted({path.rpartition("/")[0] for path in flat})
    if set(flat) != {f"{path}/{part}" for path in paths for part in "ab"}:
        raise ModelError(f"adapter with {few(sorted(flat))} found; expected A and B ('a', 'b') of each layer")
    return {path: (flat[f"{path}/a"], flat[f"{path}/b"]) for path in paths}


def _check(adapter: PyTree, shapes: Mapping[str, tuple[int, ...]], rank: int | None = None) -> None:
    """Raises ModelError unless every A and B fits its kernel, and the rank, if given."""
    for path, (a, b) in _pairs(adapter).items():
        kernel = shapes.get(f"{path}/kernel")
        if kernel is None:
            raise ModelError(f"adapter of {path} found; the model has no such linear map")
        *layers, inputs, outputs = kernel
        width = a.shape[-1] if rank is None else rank
        if (a.shape, b.shape) != ((*layers, inputs, width), (*layers, width, outputs)):
            raise ModelError(
                f"adapter of {path} with A {a.shape} and B {b.shape} found; expected rank {width} for a "
                f"kernel {kernel}: the adapter is of another model"
            )


def _full_name(name: str, architecture: Architecture) -> str:
    """A module's longest name, from the stored name of its weight."""
    name = name.removesuffix(".weight")
    spellings = [
        other + name.removeprefix(ours)
        for other, ours in architecture.aliases.items()
        if name.startswith(ours)
    ]
    return max([name, *spellings], key=len)


def _stored_name(name: str, architecture: Architecture, known: set[str]) -> str:
    """The name as `Architecture.tensors` spells it; that of a module which it knows is left alone."""
    if re.sub(r"\.lora_[AB]\.weight$", "", name) in known:
        return name
    for prefix in sorted(architecture.aliases, key=len, reverse=True):
        if name.startswith(prefix):
            return architecture.aliases[prefix] + name[len(prefix) :]
    return name


def _read_settings(file: Path) -> tuple[int, float]:
    """Rank and alpha of an adapter_config.json; ModelError for settings that are not supported."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{file}: it cannot be read ({error}); expected PEFT's adapter_config.json"
        ) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type LORA expected; other kinds of adapters are not supported")
    for name, plain in PLAIN.items():
        if settings.get(name) not in plain:
            raise ModelError(
                f"{file}: {name} {str(settings[name])[:80]} found; only {plain[-1]} is supported"
            )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ModelError(
            f"{file}: r {rank!r} and lora_alpha {alpha!r} found; expected an integer and a number"
        )
    # Rank-stabilised LoRA scales by alpha / sqrt(r).
    return rank, float(alpha) * (math.sqrt(rank) if settings.get("use_rslora") else 1.0)


def _write_folder(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes both files beside the folder's place, then renames."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StorageError(f"{folder}: it exists and is not empty; choose a new folder for the adapter")
        temporary.mkdir(parents=True)
        text = json.dumps(settings, indent=2) + "\n"
        (temporary / CONFIG_FILE).write_text(text, encoding="utf-8")
        described = {name: (x.dtype, x.shape) for name, x in tensors.items()}
        write_file(temporary / TENSOR_FILE, described, lambda name: [tensors[name]])
        os.replace(temporary, folder)
    except OSError as error:
        raise StorageError(
            f"{folder}: it cannot be written ({error.strerror}); choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
