"""Files are whole or not there."""

import errno
import os
from pathlib import Path

import pytest

from jaxreward.errors import StorageError
from jaxreward.files import write_atomically


def test_text_and_bytes_replace_what_was_there(tmp_path):
    path = tmp_path / "new folder" / "note.txt"
    write_atomically(path, "first")
    write_atomically(path, "größer")
    assert path.read_bytes() == "größer".encode()
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [p.name for p in path.parent.iterdir()] == ["note.txt"]


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "note.txt"
    path.write_text("old")

    def half(self, content):
        with open(self, "wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(StorageError, match=r"note\.txt.*No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="runs"):
        write_atomically(tmp_path / "runs" / "note.txt", "text")
