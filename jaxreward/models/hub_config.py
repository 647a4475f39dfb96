"""Reads fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxreward.errors import ModelError

_REQUIRED: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object; ModelError if it is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} does not exist; a Hugging Face folder with that file was expected"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; a JSON object was expected")
    return content


class Fields:
    """A JSON object of a config, whose fields are read by type.

    A field that is absent or null takes the default; without a default it is an error.

    Args:
      values: the object.
      path: where it stands in the config, for messages; '' for the whole.
      file: the config's name, for messages.

    Raises:
      ModelError: if `values` is no JSON object.
    """

    def __init__(self, values: Any, path: str = "", *, file: str = "config.json") -> None:
        """Checks that there is an object."""
        if not isinstance(values, Mapping):
            raise ModelError(f"{file}: {path or 'the file'} is {values!r}; a JSON object was expected")
        self._values = values
        self._path = path
        self._file = file

    def section(self, name: str, *, optional: bool = False) -> Fields:
        """The object in a field; an empty one where it may be absent."""
        values = self._get(name, {} if optional else _REQUIRED, "a JSON object")
        return Fields(values, self._name(name), file=self._file)

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int = _REQUIRED, *, least: int = 1) -> int:
        """An integer of at least `least`."""
        expected = f"an integer of at least {least}"
        value = self._get(name, default, expected)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(name, value, expected)
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """A finite number, as a float."""
        value = self._get(name, default, "a number")
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._error(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """True or false."""
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def choice(self, name: str, choices: Collection[str], default: str = _REQUIRED) -> str:
        """One of some strings."""
        expected = "one of " + ", ".join(sorted(choices))
        value = self._get(name, default, expected)
        if not isinstance(value, str) or value not in choices:
            raise self._error(name, value, expected)
        return value

    def integers(self, name: str, default: tuple[int, ...] = _REQUIRED) -> tuple[int, ...]:
        """A list of integers of at least 0."""
        expected = "a list of integers of at least 0"
        values = self._get(name, default, expected)
        integral = isinstance(values, list | tuple) and all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
        )
        if not integral:
            raise self._error(name, values, expected)
        return tuple(values)

    def refuse(self, name: str, expected: str) -> ModelError:
        """The error to raise for a field whose value does not fit the others."""
        return self._error(name, self._values.get(name), expected)

    def _get(self, name: str, default: Any, expected: str) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"{self._file}: field {self._name(name)} is missing; {expected} was expected")
        return default

    def _error(self, name: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self._file}: field {self._name(name)} is {value!r}; {expected} was expected")

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name
