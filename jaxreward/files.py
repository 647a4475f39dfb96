"""Files that are seen whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jaxreward.errors import StorageError


def write_atomically(path: str | os.PathLike, content: bytes | str, *, make_folder: bool = True) -> None:
    """Writes a file under a temporary name beside it and renames it.

    Args:
      path: the file; its folder is made if it is missing and `make_folder` is True.
      content: bytes, or text that is written as UTF-8.
      make_folder: make the folder if it is missing.

    Raises:
      StorageError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}); free space, permit writing there, or "
            "choose another folder"
        ) from error
    finally:
        # After the rename there is nothing under this name.
        with contextlib.suppress(OSError):
            temporary.unlink()
