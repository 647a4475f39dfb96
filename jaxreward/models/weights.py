"""Hugging Face model folders: config.json and safetensors in, parameters out, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from jaxreward.types import PyTree


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
    """

    name: str
    axes: tuple[str | None, ...]
    form: str = "array"
    layers: int = 0
    shape: tuple[int, ...] | None = None
    first: int = 0


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a model file returns for a config.json: the module and where its parameters are stored.

    Attributes:
      module: the Flax module, with the structure that the config gives.
      tensors: for each of our parameters, by its '/'-joined path below 'params', how it is stored.
      initialise: makes the variables from a key; `jax.eval_shape` of it gives every shape without memory.
      aliases: prefixes that other writers use, as {theirs: the one in `tensors`}; the longest match counts.
      ignored: regular expressions of stored names that are no parameters (buffers of old writers).
    """

    module: nn.Module
    tensors: Mapping[str, Stored]
    initialise: Callable[[Any], PyTree]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
