"""Reads fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxreward.errors import ModelError

_REQUIRED: Any = object()


class Fields:
    """A JSON object of a config, whose fields are read by type.

    A field that is absent or null takes the default; without a default it is an error.

    Args:
      values: the object.
      path: where it stands in the config, for messages; '' for the whole.

    Raises:
      ModelError: if `values` is no JSON object.
    """

    def __init__(self, values: Any, path: str = "") -> None:
        """Checks that there is an object."""
        if not isinstance(values, Mapping):
            raise ModelError(f"config.json: {path or 'the file'} is {values!r}; a JSON object was expected")
        self._values = values
        self._path = path

    def section(self, name: str, *, optional: bool = False) -> Fields:
        """The object in a field; an empty one where it may be absent."""
        return Fields(self._get(name, {} if optional else _REQUIRED, "a JSON object"), self._name(name))

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
        """A number, as a float."""
        value = self._get(name, default, "a number")
        if not isinstance(value, int | float) or isinstance(value, bool):
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

    def refuse(self, name: str, expected: str) -> ModelError:
        """The error to raise for a field whose value does not fit the others."""
        return self._error(name, self._values.get(name), expected)

    def _get(self, name: str, default: Any, expected: str) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"config.json: field {self._name(name)} is missing; {expected} was expected")
        return default

    def _error(self, name: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"config.json: field {self._name(name)} is {value!r}; {expected} was expected")

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name
