"""The files of a Hugging Face model folder: found, and checked against one another."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxreward.errors import ModelError
from jaxreward.models.tensor_files import TensorEntry, read_header

INDEX = "model.safetensors.index.json"

# What a model folder holds beside config and weights; `save` copies it.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a model folder.

    Raises:
      ModelError: no such folder or file, or no JSON object in it.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder; give the path of a downloaded Hugging Face folder")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: no config.json found in it; a Hugging Face model folder holds config.json and "
            "safetensors files"
        )
    return _read_json(folder / "config.json")


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a folder, by its stored name: from the index, model.safetensors, or all shards found.

    Raises:
      ModelError: no safetensors files, a shard that is missing or outside the folder, a tensor given twice.
    """
    index = folder / INDEX
    listed: dict[str, str] = {}
    if index.is_file():
        listed = _read_index(index)
        files = sorted(set(listed.values()))
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
        reason = f"only {pickled[0]}, a pickle, which can run any code and is never opened" if pickled else ""
        raise ModelError(
            f"{folder}: no safetensors files found ({reason or 'no weights at all'}); convert the weights to "
            "safetensors, in PyTorch: model.save_pretrained(folder, safe_serialization=True)"
        )
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise ModelError(f"{folder}: {INDEX} names {few(absent)}, not found; download the missing shards")
    entries: dict[str, TensorEntry] = {}
    for name in files:
        header = read_header(folder / name)
        twice = sorted(set(header) & set(entries))
        if twice:
            raise ModelError(
                f"{folder}: {few(twice)} stands in {name} and in another file; "
                "keep the files of one model only"
            )
        entries.update(header)
    lost = sorted(
        name for name, file in listed.items() if name not in entries or entries[name].path.name != file
    )
    if lost:
        raise ModelError(f"{index}: {few(lost)} not in the shard that it names; download the folder again")
    return entries


def read_end_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end a text, from generation_config.json, else from config.json; () if neither says.

    Raises:
      ModelError: something else than ids found.
    """
    file = folder / "generation_config.json"
    sources: list[Mapping[str, Any]] = [_read_json(file)] if file.is_file() else []
    sources.append(config)
    if isinstance(config.get("text_config"), Mapping):
        sources.append(config["text_config"])
    for source in sources:
        found = source.get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise ModelError(
                    f"{folder}: eos_token_id {found!r} found; expected a token id or a list of them"
                )
            return tuple(ids)
    return ()


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or ModelError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: no JSON found ({str(error)[:100]}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: a JSON {type(value).__name__} found; expected an object")
    return value


def _read_index(index: Path) -> dict[str, str]:
    """{tensor: file} of an index file; every file is a plain name in the same folder."""
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ModelError(f"{index}: no weight_map of names to files found; download it again")
    outside = sorted(
        {file for file in listed.values() if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file)}
    )
    if outside:
        raise ModelError(
            f"{index}: it names {few(outside)}; expected names of safetensors files in the same folder"
        )
    return listed


def few(names: Sequence[str]) -> str:
    """Up to five of some names, and how many more there are."""
    text = ", ".join(name[:120] for name in names[:5])
    return text if len(names) <= 5 else f"{text} and {len(names) - 5} more"
