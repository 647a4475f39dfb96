"""A run's folder: its place, its config, its files, and the lock against two processes at once."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import json
import math
import os
import re
import time
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jaxreward
from jaxreward.errors import ConfigError, StorageError, did_you_mean
from jaxreward.files import write_atomically

CLASS = "class"  # names a dataclass in JSON; a keyword, so no field can have the same name
CONFIG_FILE = "config.json"
LOCK_FILE = ".lock"
SECONDS_FILE = "seconds.json"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of one run; `create` makes a new one, `open_run` finds an existing one.

    Attributes:
      path: the folder.
      config_name: the name of the config that the run was started with.
    """

    path: Path
    config_name: str

    @property
    def config(self) -> Path:
        """The resolved config, as JSON."""
        return self.path / CONFIG_FILE

    @property
    def checkpoints(self) -> Path:
        """The folder of the training state's checkpoints."""
        return self.path / "checkpoints"

    @property
    def demonstrations(self) -> Path:
        """The folder of expert videos that the run made for itself."""
        return self.path / "demonstrations"

    @property
    def report(self) -> Path:
        """The report for a browser."""
        return self.path / "report.html"

    def write_json(self, name: str, value: Any) -> None:
        """Writes a JSON file into the folder, whole or not at all; non-finite numbers become null.

        Raises:
          StorageError: the folder cannot be written or the disk is full.
        """
        self.write_text(name, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file into the folder, whole or not at all.

        Raises:
          StorageError: the folder cannot be written or the disk is full.
        """
        write_atomically(self.path / name, text, make_folder=False)

    def discard_unused(self) -> None:
        """Removes the folder if nothing but its config was ever written there: the run never began."""
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {CONFIG_FILE, LOCK_FILE, SECONDS_FILE}:
                for name in (CONFIG_FILE, LOCK_FILE, SECONDS_FILE):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process; the operating system lets go of it however the process ends.

        Raises:
          StorageError: another process works on this run, or the folder cannot be written.
        """
        path = self.path / LOCK_FILE
        with _storage(f"{path}"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
                raise StorageError(
                    f"run {self.path}: found another process (id {holder}) at work on it, expected none; "
                    "wait for it, stop it, or start a new run"
                ) from error
            with _storage(f"{path}"):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(descriptor)


def create(root: str | os.PathLike, config_name: str, config: Any) -> RunFolder:
    """Makes `root/<config_name>-<time>/` with its config.json; never an existing folder.

    Args:
      root: where runs lie, made if missing.
      config_name: the config's name.
      config: a frozen dataclass, as `to_json` takes it.

    Raises:
      StorageError: the folder cannot be made or written.
    """
    root, stamp = Path(root), time.strftime("%Y%m%d-%H%M%S")
    with _storage(f"run folder in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = root / (f"{config_name}-{stamp}" + (f"-{number}" if number > 1 else ""))
            try:
                path.mkdir()
                break
            except FileExistsError:
                number += 1
    run = RunFolder(path, config_name)
    written = {"name": config_name, "version": jaxreward.__version__, "config": to_json(config)}
    run.write_json(CONFIG_FILE, written)
    return run


def open_run(path: str | os.PathLike, registry: Mapping[str, type]) -> tuple[RunFolder, Any]:
    """Finds an existing run and reads its config.

    Args:
      path: the run's folder.
      registry: as for `from_json`.

    Raises:
      ConfigError: there is no run, or its config cannot be used.
    """
    path = Path(path)
    if not path.is_dir():
        near = did_you_mean(
            path.name, [p.name for p in path.parent.glob("*/")] if path.parent.is_dir() else []
        )
        raise ConfigError(f"run {path}: found no such folder, expected a run's folder{near}")
    name, config = read_config(path / CONFIG_FILE, registry)
    return RunFolder(path, name), config


def read_config(file: str | os.PathLike, registry: Mapping[str, type]) -> tuple[str, Any]:
    """Reads the name and the config from a config.json that a run wrote.

    Args:
      file: the path of a config.json.
      registry: as for `from_json`.

    Raises:
      ConfigError: the file is missing or no such JSON, or the config cannot be used.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        name, config = content["name"], content["config"]
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"{name!r} is no name")
    except OSError as error:
        raise ConfigError(
            f"config {file}: cannot be read ({error.strerror}); expected the config.json of a run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"config {file}: found no JSON with a name and a config ({type(error).__name__}: {error}), "
            "expected the config.json of a run"
        ) from error
    try:
        return name, from_json(config, registry)
    except ConfigError as error:
        raise ConfigError(f"config {file}: {error}") from error


def to_json(config: Any) -> Any:
    """Turns nested dataclasses into what JSON can hold; the inverse of `from_json`.

    A dataclass becomes {"class": its name, field: value, ...}, a tuple a list, an enum member its name,
    a number that is not finite a string ("inf", "-inf", "nan").

    Raises:
      TypeError: a value is none of these, nor a dictionary with text keys, text, number, bool or None.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {CLASS: type(config).__name__, **fields}
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, list | tuple):
        return [to_json(item) for item in config]
    if isinstance(config, dict) and all(isinstance(key, str) and key != CLASS for key in config):
        return {key: to_json(value) for key, value in config.items()}
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    if config is None or isinstance(config, bool | int | float | str):
        return config
    raise TypeError(f"config value {config!r}: found {type(config).__name__}, which JSON cannot hold")


def from_json(value: Any, registry: Mapping[str, type]) -> Any:
    """Builds the dataclass that `to_json` described, checking every field against its annotation.

    Fields that are missing take their defaults, so that older files can be read.

    Args:
      value: {"class": name, field: value, ...}.
      registry: the classes that may stand at the top or where an annotation names no concrete
        dataclass, by name; nested dataclasses and unions of them are known from the annotations.

    Raises:
      ConfigError: an unknown class or field (with the nearest name), a missing field, a wrong type, or
        whatever a dataclass's own checks raise.
    """
    return _dataclass(value, dict(registry), "", registry)


def _convert(value: Any, annotation: Any, where: str, registry: Mapping[str, type]) -> Any:
    """Checks a JSON value against an annotation and converts it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union(value, arguments, where, registry)
    if origin is typing.Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            choices = [str(choice) for choice in arguments]
            near = did_you_mean(str(value), choices)
            raise ConfigError(f"{where}: found {value!r}, expected one of {', '.join(choices)}{near}")
        return value
    if annotation is tuple or origin is tuple:
        return _tuple(value, arguments, where, registry)
    if origin is dict:
        _expect(isinstance(value, dict), value, "a dictionary", where)
        return {k: _convert(v, arguments[1], f"{where}.{k}", registry) for k, v in value.items()}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        names = list(annotation.__members__)
        found = isinstance(value, str) and value in names
        _expect(found, value, f"one of {', '.join(names)}{did_you_mean(str(value), names)}", where)
        return annotation[value]
    if annotation is float:
        if value in ("inf", "-inf", "nan"):
            return float(value)
        _expect(isinstance(value, int | float) and not isinstance(value, bool), value, "float", where)
        return float(value)
    if annotation in (bool, int, str, type(None)):
        right = type(value) is annotation
        _expect(right, value, "null" if annotation is type(None) else annotation.__name__, where)
        return value
    if dataclasses.is_dataclass(annotation):
        return _dataclass(value, {annotation.__name__: annotation}, where, registry)
    if annotation is Any or isinstance(annotation, type):
        allowed = {
            name: known
            for name, known in registry.items()
            if annotation is Any or annotation in known.__mro__
        }
        return _dataclass(value, allowed, where, registry)
    raise TypeError(f"{where}: annotation {annotation} cannot be read from JSON")


def _union(value: Any, members: tuple[Any, ...], where: str, registry: Mapping[str, type]) -> Any:
    """The member that fits: dataclasses by their class's name, others by trying them in turn."""
    if value is None and type(None) in members:
        return None
    if isinstance(value, dict) and CLASS in value:
        classes = {member.__name__: member for member in members if dataclasses.is_dataclass(member)}
        return _dataclass(value, classes, where, registry)
    others = [m for m in members if m is not type(None) and not dataclasses.is_dataclass(m)]
    for member in sorted(others, key=lambda member: member is float):  # 1 stays an int where both are allowed
        with contextlib.suppress(ConfigError):
            return _convert(value, member, where, registry)
    names = " or ".join("null" if m is type(None) else getattr(m, "__name__", str(m)) for m in members)
    raise ConfigError(f"{where}: found {value!r}, expected {names}")


def _tuple(value: Any, arguments: tuple[Any, ...], where: str, registry: Mapping[str, type]) -> tuple:
    _expect(isinstance(value, list), value, "a list", where)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(value) != len(arguments):
        raise ConfigError(f"{where}: found {len(value)} values, expected {len(arguments)}")
    items = enumerate(zip(value, arguments, strict=True))
    return tuple(_convert(item, kind, f"{where}[{i}]", registry) for i, (item, kind) in items)


def _dataclass(value: Any, allowed: Mapping[str, type], where: str, registry: Mapping[str, type]) -> Any:
    """Builds one of the allowed dataclasses; a single one need not be named."""
    label = where or "config"
    _expect(isinstance(value, dict), value, f"the fields of {' or '.join(allowed)}", label)
    name = value.get(CLASS, next(iter(allowed)) if len(allowed) == 1 else None)
    if not isinstance(name, str) or name not in allowed:
        near = did_you_mean(str(name), allowed)
        raise ConfigError(
            f"{label}: found class {name!r}, expected one of {', '.join(sorted(allowed))}{near}"
        )
    cls = allowed[name]
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    prefix = f"{where}." if where else ""
    for given in value:
        if given != CLASS and given not in fields:
            raise ConfigError(
                f"{prefix}{given}: found a field that {name} has not, expected one of "
                f"{', '.join(fields)}{did_you_mean(given, fields)}"
            )
    for needed, field in fields.items():
        optional = not (field.default is field.default_factory is dataclasses.MISSING)
        if needed not in value and not optional:
            raise ConfigError(f"{prefix}{needed}: found nothing, expected a value ({name} has no default)")
    found = {n: _convert(v, hints[n], f"{prefix}{n}", registry) for n, v in value.items() if n != CLASS}
    return cls(**found)


def _expect(right: bool, value: Any, expected: str, where: str) -> None:
    if not right:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        raise ConfigError(f"{where}: found {shown} ({type(value).__name__}), expected {expected}")


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite, which strict JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _storage(what: str) -> Iterator[None]:
    """Turns an OSError into a StorageError that names what could not be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what}: cannot be written ({error.strerror or error}); free space, permit writing there, or "
            "choose another folder"
        ) from error
