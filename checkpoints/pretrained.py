"""Small scorers as files: parameters in safetensors, structure and provenance in JSON beside them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax.errors import FlaxError

from jaxreward.errors import ConfigError, ModelError, StorageError
from jaxreward.files import write_atomically
from jaxreward.models.frame_ranker import FrameRanker, FrameRankerConfig
from jaxreward.types import PyTree

PRETRAINED = pathlib.Path(__file__).parent / "pretrained"
_MODEL = "FrameRanker"
_FORMAT = 1


def save_scorer(
    folder: str | os.PathLike,
    config: FrameRankerConfig,
    params: PyTree,
    metadata: dict[str, Any],
    *,
    name: str = "scorer",
) -> pathlib.Path:
    """Writes `name`.safetensors and `name`.json, each atomically, the JSON last.

    Args:
      folder: made if it does not exist.
      config: the network's structure; `frame_shape` must be set.
      params: the network's parameters, float32.
      metadata: anything JSON can hold: how the scorer was made and what it scored.
      name: stem of both files.

    Returns:
      The path of the JSON file, which `load_scorer` takes.

    Raises:
      ModelError: if the parameters are not those of `config`, or `frame_shape` is None.
      StorageError: if the folder cannot be written.
    """
    folder = pathlib.Path(folder)
    tensors = {path: np.asarray(leaf) for path, leaf in _flatten(params).items()}
    _check_tensors(tensors, config, f"scorer {name!r}, to be saved")
    payload = safetensors.numpy.save(tensors)
    card = {
        "format": _FORMAT,
        "model": _MODEL,
        "config": dataclasses.asdict(config),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "parameters": sum(tensor.size for tensor in tensors.values()),
        "metadata": metadata,
    }
    card_path = folder / f"{name}.json"
    text = json.dumps(card, indent=2, allow_nan=False) + "\n"
    try:
        write_atomically(folder / f"{name}.safetensors", payload)
        write_atomically(card_path, text)
    except StorageError as error:
        raise StorageError(f"scorer {name!r} is not saved: {error}") from error
    return card_path


def load_scorer(path: str | os.PathLike) -> tuple[FrameRankerConfig, PyTree, dict[str, Any]]:
    """Reads what `save_scorer` wrote, and checks it.

    Args:
      path: the JSON file, the safetensors file, or a folder that holds 'scorer.json'.

    Returns:
      (config, params, card): the network's structure, its parameters as float32 JAX arrays, and the whole
      JSON record; `card["metadata"]` is what was passed to `save_scorer`.

    Raises:
      ModelError: if a file is missing or damaged, belongs to another model, or holds missing, unexpected
        or misshapen parameters.
    """
    path = pathlib.Path(path)
    card_path = path / "scorer.json" if path.is_dir() else path.with_suffix(".json")
    card, config = _read_card(card_path)
    weights_path = card_path.with_suffix(".safetensors")
    payload = _read(weights_path)
    found = hashlib.sha256(payload).hexdigest()
    if found != card["sha256"]:
        raise ModelError(
            f"{weights_path}: sha256 {found} found, {card['sha256']} expected from {card_path.name}; the "
            "file is damaged or belongs to another scorer. Copy both files again."
        )
    try:
        tensors = safetensors.numpy.load(payload)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{weights_path}: not a readable safetensors file ({error})") from error
    _check_tensors(tensors, config, str(weights_path))
    return config, _unflatten(tensors), card


def load_pretrained(name: str = "general_ranker") -> tuple[FrameRankerConfig, PyTree, dict[str, Any]]:
    """Loads a scorer that ships with the package; returns and raises what `load_scorer` does."""
    available = sorted(path.stem for path in PRETRAINED.glob("*.json"))
    if name not in available:
        raise ModelError(
            f"no shipped scorer {name!r}; available: {', '.join(available) or 'none'}. "
            "Use load_scorer for a path."
        )
    return load_scorer(PRETRAINED / f"{name}.json")


def pretrained_model(name: str) -> pathlib.Path:
    """The folder of a vision-language model: a path, or the name of one that ships with the package.

    Args:
      name: 'catrap_reader', or the path of a Hugging Face folder.

    Raises:
      ModelError: there is neither.
    """
    shipped = PRETRAINED / name
    for folder in (pathlib.Path(name), shipped):
        if (folder / "config.json").is_file():
            return folder
    available = sorted(path.parent.name for path in PRETRAINED.glob("*/config.json"))
    raise ModelError(
        f"{name}: no Hugging Face folder (with a config.json) found there, nor a shipped model of that name; "
        f"shipped: {', '.join(available) or 'none'}"
    )


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); a scorer is a pair of files") from error


def _read_card(path: pathlib.Path) -> tuple[dict[str, Any], FrameRankerConfig]:
    """The JSON record of a scorer and the config in it, checked."""
    try:
        card = json.loads(_read(path))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    fields = {"format", "model", "config", "sha256", "parameters", "metadata"}
    if not isinstance(card, dict) or not fields <= card.keys():
        found = sorted(card) if isinstance(card, dict) else type(card).__name__
        raise ModelError(f"{path}: {found} found, a record with {sorted(fields)} expected")
    if (card["format"], card["model"]) != (_FORMAT, _MODEL):
        raise ModelError(
            f"{path}: model {card['model']!r} in format {card['format']!r} found, {_MODEL!r} in format "
            f"{_FORMAT} expected"
        )
    known = {field.name for field in dataclasses.fields(FrameRankerConfig)}
    if not isinstance(card["config"], dict) or card["config"].keys() != known:
        raise ModelError(f"{path}: config {card['config']} found, the fields {sorted(known)} expected")
    try:
        config = FrameRankerConfig(**{name: _as_tuple(value) for name, value in card["config"].items()})
    except (ConfigError, TypeError) as error:
        raise ModelError(f"{path}: config {card['config']} found, which cannot be built ({error})") from error
    return card, config


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _flatten(params: PyTree) -> dict[str, Any]:
    """{'params/block_0/attention/key/kernel': leaf, ...}."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(str(entry.key) for entry in path): leaf for path, leaf in leaves}


def _unflatten(tensors: dict[str, np.ndarray]) -> PyTree:
    params: dict[str, Any] = {}
    for path, tensor in tensors.items():
        *parents, leaf = path.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = jnp.asarray(tensor)
    return params


def _check_tensors(tensors: dict[str, np.ndarray], config: FrameRankerConfig, thing: str) -> None:
    """Compares names, shapes and dtypes with those that `config` makes; raises ModelError."""
    if config.frame_shape is None:
        raise ModelError(f"{thing}: config.frame_shape is None; (height, width) in pixels expected")
    try:
        frames = jax.ShapeDtypeStruct((1, 2, *config.frame_shape, config.channels), jnp.uint8)
        where = jax.ShapeDtypeStruct((1, 2), jnp.bool_)
        expected = _flatten(jax.eval_shape(FrameRanker(config).init, jax.random.key(0), frames, where))
    except (TypeError, ValueError, FlaxError) as error:
        raise ModelError(f"{thing}: the config {config} cannot be built ({error})") from error
    problems = [f"missing {path}" for path in expected if path not in tensors]
    problems += [f"unexpected {path}" for path in tensors if path not in expected]
    for path in expected.keys() & tensors.keys():
        found, wanted = tensors[path], expected[path]
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            problems.append(
                f"{path} is {found.dtype}{list(found.shape)}, {wanted.dtype}{list(wanted.shape)} expected"
            )
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(f"{thing}: parameters do not fit the config {config}: {shown}{more}")
