"""What all commands share: typed overrides by dotted path, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from jaxreward.errors import ConfigError, JaxrewardError, did_you_mean
from jaxreward.training.act import Interrupted

BAD_INPUT = 2
INTERRUPTED = 130


def run_command(command: Callable[[], None]) -> int:
    """Runs a command and turns what ends it into an exit code: 0, 2 (bad input) or 130 (interrupted)."""
    try:
        command()
    except JaxrewardError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except Interrupted as note:
        print(f"interrupted: {note}" if str(note) else "interrupted", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`); Python would complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def field_paths(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every field of nested dataclasses by its dotted path, with its value.

    Args:
      config: a dataclass instance.
      prefix: what the paths begin with.
    """
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= field_paths(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


def override(config: Any, arguments: Sequence[str], program: str) -> Any:
    """Replaces fields of a config as the command line says.

    Args:
      config: a frozen dataclass instance; the classes of its nested parts stay what they are.
      arguments: such as ['--act.updates', '30', '--env.level=4'].
      program: how the command is called, for its help text.

    Returns:
      The new config.

    Raises:
      ConfigError: an unknown field (with the nearest names) or a value of the wrong type.
    """
    known = field_paths(config)
    for argument in arguments:
        name = argument.split("=", 1)[0].removeprefix("--").replace("-", "_")
        name = re.sub(r"(^|\.)no_", r"\1", name) if name not in known else name
        if argument.startswith("--") and name not in known and name not in ("help", "h"):
            raise ConfigError(f"there is no field '{argument.split('=', 1)[0]}'{nearest(name, known)}")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            narrowed = _without_unions(type(config), config)
            parsed = tyro.cli(narrowed, default=_copy(config, narrowed), args=list(arguments), prog=program)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_flatten(printed.getvalue())) from None
    return _merge(config, parsed)


def parse(config_type: type, arguments: Sequence[str], program: str, description: str) -> Any:
    """Reads a whole command line into a dataclass.

    Raises:
      ConfigError: an unknown option or a value that cannot be used.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(config_type, args=list(arguments), prog=program, description=description)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_flatten(printed.getvalue())) from None


def nearest(name: str, known, otherwise: str = "--help lists the fields") -> str:
    """'; did you mean ...?' with the nearest known names, or what to do where none is near."""
    known = list(known)
    if near := did_you_mean(name, known, 3):
        return near
    last = name.rsplit(".", 1)[-1]
    same = [k for k in known if k.rsplit(".", 1)[-1] == last][:3]
    return f"; did you mean {' or '.join(same)}?" if same else f"; {otherwise}"


def _without_unions(config_type: type, config: Any) -> type:
    """The config's type with each union of dataclasses narrowed to what the default holds.

    Tyro turns unions into subcommands, which would hide the dotted paths.
    """
    fields = []
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        value, annotation = getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            annotation = _without_unions(type(value), value)
        # A default of the wrong (unnarrowed) type would be refused, so the instance carries the values.
        fields.append((field.name, annotation, dataclasses.field()))
    narrowed = dataclasses.make_dataclass(config_type.__name__, fields, frozen=True)
    narrowed.__doc__ = config_type.__doc__
    narrowed.__module__ = config_type.__module__
    return narrowed


def _copy(config: Any, narrowed: type) -> Any:
    """The config's values as an instance of its narrowed type."""
    hints = typing.get_type_hints(narrowed)
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values[field.name] = _copy(value, hints[field.name]) if dataclasses.is_dataclass(value) else value
    return narrowed(**values)


def _merge(config: Any, parsed: Any) -> Any:
    """The parsed values in the config's own types, whose own checks run."""
    values = {}
    for field in dataclasses.fields(config):
        value, former = getattr(parsed, field.name), getattr(config, field.name)
        values[field.name] = _merge(former, value) if dataclasses.is_dataclass(former) else value
    return dataclasses.replace(config, **values)


def _flatten(message: str) -> str:
    """The words of a boxed error message in one line."""
    # Where the terminal cannot draw boxes, they are made of dashes.
    words = re.sub(r"[\u2500-\u257f]+|-{4,}", " ", message)
    words = re.sub(r"\x1b\[[0-9;]*m", "", words)
    return " ".join(words.split()).removeprefix("Parsing error ")


def dataclass_types(root: type) -> dict[str, type]:
    """All dataclasses that a config of type `root` can hold, by class name: what `from_json` may build."""
    found: dict[str, type] = {}

    def visit(annotation: Any) -> None:
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            if annotation.__name__ not in found:
                found[annotation.__name__] = annotation
                for hint in typing.get_type_hints(annotation).values():
                    visit(hint)
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
            for member in typing.get_args(annotation):
                visit(member)

    visit(root)
    return found
