"""The errors that a user can cause or meet; commands print them in one line and exit with 2."""

import difflib
from collections.abc import Iterable


class JaxrewardError(Exception):
    """Base of every error that names a thing, what was found, what was expected and what to do."""


class ConfigError(JaxrewardError):
    """A config name, field or value that cannot be used."""


class DataError(JaxrewardError):
    """A video, level or other input file that cannot be used."""


class ModelError(JaxrewardError):
    """A model or checkpoint that is missing, damaged or made for something else."""


class SimulatorError(JaxrewardError):
    """A simulator, ROM or environment that cannot be started or has failed."""


class StorageError(JaxrewardError):
    """A run folder or disk that cannot be written."""


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """'; did you mean ...?' with at most so many known names near to one that does not exist, else ''."""
    near = difflib.get_close_matches(name, list(known), most, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
