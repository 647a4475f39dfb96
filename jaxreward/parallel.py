"""A mesh of (data, fsdp, tensor), and the rules that place arrays on it by the logical names of their axes.

Everything is a `NamedSharding`; the compiler adds the communication, so that one program runs on one device,
on eight virtual CPU devices and on a slice of accelerators. A sharding never changes a result, only where it
is computed: an axis that cannot be split evenly is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxreward.errors import ConfigError
from jaxreward.types import Array, PyTree

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

Rules = Mapping[str, str | tuple[str, ...] | None]

# Which mesh axes split a logical axis. Parameters: `fsdp` splits the residual width (ZeRO-3, Rajbhandari et
# al., 2020), `tensor` splits heads and the inner width of MLPs (Megatron-LM, Shoeybi et al., 2019).
DEFAULT_RULES: Rules = MappingProxyType(
    {
        "batch": BATCH_AXES,
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "vocabulary": "tensor",
        "layers": None,
        "norm": None,
    }
)

# Logical axes of the fields of `jaxreward.models.decoder.Cache`.
CACHE_AXES: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    {
        "keys": ("layers", "batch", "kv_heads", None, None),
        "values": ("layers", "batch", "kv_heads", None, None),
        "where": ("batch", None),
        "length": (),
    }
)


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes 'data', 'fsdp' and 'tensor'.

    Args:
      data: copies of the model, each with its part of the batch; -1 for as many as the devices allow.
      fsdp: parts that the parameters are split into over the batch's devices; -1 for as many as possible.
      tensor: parts that heads and MLPs are split into; -1 for as many as possible. Neighbouring devices.
      devices: all devices of all processes if None. A mesh smaller than that takes the first ones.

    Raises:
      ConfigError: a size that is no positive number (or -1, once), or that needs more devices than there are.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1 and size != -1]
    if wrong or len(free) > 1:
        raise ConfigError(
            f"mesh: {', '.join(wrong) or ' and '.join(f'{name}=-1' for name in free)} found; "
            "every size must be 1 or more, and at most one may be -1 (what the devices allow)"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if len(devices) % fixed:
            raise ConfigError(
                f"mesh: {len(devices)} devices found, which {fixed} does not divide, so that {free[0]}=-1 "
                "cannot be filled in; give sizes whose product divides the number of devices"
            )
        sizes[free[0]] = len(devices) // fixed
    count = math.prod(sizes.values())
    if count > len(devices):
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"mesh: {text} needs {count} devices, {len(devices)} found; choose smaller sizes (on the CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes virtual devices)"
        )
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), devices=devices[:count]
    )


def partition(
    mesh: Mesh,
    axes: Sequence[str | None],
    shape: Sequence[int],
    rules: Rules | None = None,
    *,
    heads: int = 0,
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """How an array is split, and which of its axes should have been but cannot.

    Args:
      mesh: from `make_mesh`.
      axes: logical name of each axis of the array; None for one that is never split.
      shape: of the array.
      rules: {logical name: mesh axis, several of them, or None}; `DEFAULT_RULES` if None.
      heads: how many heads lie side by side on an axis called 'heads' or 'kv_heads', which is split between
        heads and never within one; 0: the axis counts the heads themselves.

    Returns:
      (spec, notes): a note for each axis that is replicated because its length does not divide.

    Raises:
      ConfigError: an axis without a rule, a rule for a mesh axis that does not exist, a mesh axis used twice,
        or not one name for each axis.
    """
    rules = DEFAULT_RULES if rules is None else rules
    if len(axes) != len(shape):
        raise ConfigError(f"sharding: axes {tuple(axes)} found for shape {tuple(shape)}; give one for each")
    parts: list[tuple[str, ...]] = []
    notes = []
    for name, length in zip(axes, shape, strict=True):
        wanted = _mesh_axes(mesh, name, rules)
        pieces = math.prod(mesh.shape[axis] for axis in wanted)
        units = heads if heads and name in ("heads", "kv_heads") else length
        if units % pieces:
            notes.append(f"{name}: {units} in {pieces} parts")
            wanted = ()
        parts.append(wanted)
    used = [axis for part in parts for axis in part]
    if len(set(used)) < len(used):
        raise ConfigError(
            f"sharding: axes {tuple(axes)} are split as {parts}; the rules must use each mesh axis only once"
        )
    spec = [part[0] if len(part) == 1 else part or None for part in parts]
    return PartitionSpec(*spec), tuple(notes)


def _mesh_axes(mesh: Mesh, name: str | None, rules: Rules) -> tuple[str, ...]:
    """The mesh axes of more than one device that a logical axis is split over."""
    if name is None:
        return ()
    if name not in rules:
        raise ConfigError(
            f"sharding: no rule for the axis {name!r} found; the rules know {', '.join(sorted(rules))}"
        )
    rule = rules[name]
    wanted = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
    unknown = [axis for axis in wanted if axis not in mesh.shape]
    if unknown:
        raise ConfigError(
            f"sharding: the rule for {name!r} names the mesh axis {unknown[0]!r}; the mesh has "
            f"{', '.join(mesh.axis_names)}"
        )
    return tuple(axis for axis in wanted if mesh.shape[axis] > 1)


def sharding(
    mesh: Mesh,
    axes: Sequence[str | None],
    shape: Sequence[int],
    rules: Rules | None = None,
    *,
    heads: int = 0,
    strict: bool = False,
) -> NamedSharding:
    """The sharding of one array; see `partition` for the arguments.

    Args:
      mesh, axes, shape, rules, heads: as for `partition`.
      strict: raise where an axis cannot be split evenly, instead of replicating it.

    Raises:
      ConfigError: as `partition`; with `strict` also an axis that does not divide.
    """
    spec, notes = partition(mesh, axes, shape, rules, heads=heads)
    if strict and notes:
        raise ConfigError(
            f"sharding: axes {tuple(axes)} of shape {tuple(shape)} cannot be split evenly "
            f"({'; '.join(notes)}); choose a mesh whose sizes divide them"
        )
    return NamedSharding(mesh, spec)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, size: int, axis: int = 0) -> NamedSharding:
    """The sharding of an array whose axis `axis`, of length `size`, is the batch: over 'data' and 'fsdp'.

    Raises:
      ConfigError: `size` cannot be split evenly.
    """
    pieces = math.prod(mesh.shape[name] for name in BATCH_AXES)
    if size % pieces:
        raise ConfigError(
            f"batch: {size} found, for a mesh that splits it in {pieces} (data x fsdp); pad it to "
            f"{-(-size // pieces) * pieces} or choose another mesh"
        )
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH_AXES))


def shard_batch(mesh: Mesh, batch: PyTree, axes: PyTree = 0) -> PyTree:
    """Places a batch on the mesh, split over 'data' and 'fsdp'.

    Args:
      mesh: from `make_mesh`.
      batch: pytree of arrays.
      axes: which axis is the batch's: an int for all arrays, or a pytree prefix of ints and Nones as
        `jax.vmap` takes it (None: every device holds the array whole).

    Returns:
      The same pytree of committed arrays.

    Raises:
      ConfigError: an array whose batch axis cannot be split evenly.
    """

    def place(axis: int | None, part: PyTree) -> PyTree:
        if axis is None:
            return jax.device_put(part, replicated(mesh))
        return jax.tree.map(lambda x: jax.device_put(x, batch_sharding(mesh, x.shape[axis], axis)), part)

    return jax.tree.map(place, axes, batch, is_leaf=lambda x: x is None)


def cache_shardings(mesh: Mesh, cache: Any, rules: Rules | None = None) -> Any:
    """The shardings of a KV cache: batch over 'data' and 'fsdp', key heads over 'tensor' where they divide.

    Args:
      mesh: from `make_mesh`.
      cache: a `jaxreward.models.decoder.Cache` of arrays or of `jax.ShapeDtypeStruct`s.
      rules: `DEFAULT_RULES` if None.

    Returns:
      A cache of `NamedSharding`s, for `jax.device_put` or for `jax.jit`'s `in_shardings`.
    """
    return cache.replace(
        **{name: sharding(mesh, axes, getattr(cache, name).shape, rules) for name, axes in CACHE_AXES.items()}
    )


def shard_cache(mesh: Mesh, cache: Any, rules: Rules | None = None) -> Any:
    """Places a KV cache on the mesh; see `cache_shardings`."""
    return jax.device_put(cache, cache_shardings(mesh, cache, rules))


def constrain(x: Array, mesh: Mesh, axes: Sequence[str | None], rules: Rules | None = None) -> Array:
    """Asks the compiler, inside a jitted function, for the sharding of an intermediate result."""
    return jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape, rules))
