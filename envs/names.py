"""Errors about names, with the nearest known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from jaxreward.errors import ConfigError


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """An error that says which known names are nearest to one that does not exist.

    Args:
      kind: what is named, as in 'gymnax environment'.
      name: the name that was asked for.
      known: all names there are.

    Returns:
      A ConfigError to raise.
    """
    originals = {candidate.lower(): candidate for candidate in known}
    near = [originals[match] for match in difflib.get_close_matches(name.lower(), originals, n=3, cutoff=0.5)]
    if near:
        return ConfigError(f"there is no {kind} '{name}'; the nearest names are {', '.join(near)}")
    listed = sorted(originals.values())
    shown = ", ".join(listed[:20]) + (f", ... ({len(listed)} in all)" if len(listed) > 20 else "")
    return ConfigError(f"there is no {kind} '{name}'; there are {shown}")
