"""Environments by name, and from their configs; nothing is imported before it is asked for."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from jaxreward.envs.base import Environment
from jaxreward.envs.names import unknown_name
from jaxreward.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of environment.

    Attributes:
      module: where its config and builder are.
      config: name of the config dataclass.
      builder: name of what makes an Environment of a config.
      field: the config's field that the part after the colon fills.
    """

    module: str
    config: str
    builder: str
    field: str


KINDS = {
    "catrap": Kind("jaxreward.envs.catrap.environment", "CatrapConfig", "Catrap", "level"),
    "cartridge": Kind("jaxreward.envs.pyboy", "CartridgeConfig", "CartridgeEnvironment", "level"),
    "gymnax": Kind("jaxreward.envs.gymnax", "GymnaxConfig", "make", "name"),
    "brax": Kind("jaxreward.envs.brax", "BraxConfig", "make", "name"),
    "gymnasium": Kind("jaxreward.envs.gymnasium", "GymnasiumConfig", "make", "id"),
}


def parse(text: str) -> Any:
    """Reads 'KIND:NAME' into a config with defaults for all else; 'KIND' alone is the kind's default.

    Args:
      text: such as 'gymnax:CartPole-v1', 'gymnasium:Acrobot-v1', 'brax:hopper', 'catrap:3', 'cartridge:3'.

    Returns:
      The kind's config dataclass.

    Raises:
      ConfigError: no such kind, or a colon without a name.
    """
    name, colon, rest = text.partition(":")
    if name not in KINDS:
        raise unknown_name("kind of environment", name, KINDS)
    if colon and not rest:
        raise ConfigError(f"environment '{text}': nothing found behind the colon, expected a name")
    kind = KINDS[name]
    config_class = getattr(importlib.import_module(kind.module), kind.config)
    return config_class(**{kind.field: rest}) if rest else config_class()


def make(config: Any) -> Environment:
    """Builds the environment that a config describes.

    Args:
      config: a config dataclass of one of `KINDS`.

    Returns:
      The environment; one on the host must be closed by its `close`.

    Raises:
      ConfigError: not the config of an environment, or a setting that cannot be used.
      SimulatorError: an environment that cannot be started.
    """
    config_class = type(config)
    for kind in KINDS.values():
        if (config_class.__module__, config_class.__name__) == (kind.module, kind.config):
            return getattr(importlib.import_module(kind.module), kind.builder)(config)
    if isinstance(config, str):
        raise ConfigError(f"'{config}' is a string, not a config: give registry.parse's result to make")
    raise unknown_name("environment config", config_class.__name__, [kind.config for kind in KINDS.values()])
