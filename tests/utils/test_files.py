"""Atomic writes: a failure leaves the old file, and writers do not disturb each other."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformallayers.errors import ConformalError
from conformallayers.utils.files import is_unfinished, replace_file, staged_files


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def failing() -> Iterator[bytes]:
        yield b"half"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, failing())
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]


def test_writers_of_the_same_file_do_not_meet(tmp_path: Path) -> None:
    def interrupted() -> Iterator[bytes]:
        yield b"fir"
        replace_file(tmp_path / "file", [b"second"])
        yield b"st"

    replace_file(tmp_path / "file", interrupted())
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "first")]


def test_temporary_files_are_known_by_their_name(tmp_path: Path) -> None:
    with staged_files(tmp_path / "a.json") as (staged,):
        assert [is_unfinished(path.name) for path in tmp_path.iterdir()] == [True]
        Path(staged).write_text("done")
    assert [is_unfinished(path.name) for path in tmp_path.iterdir()] == [False]


def test_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    os.chmod(path, 0o400)
    replace_file(path, [b"new"])
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o400


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no new files, not even from root")
def test_an_error_names_the_file_that_was_asked_for() -> None:
    with pytest.raises(OSError, match=r"/proc/net\.safetensors") as caught:
        replace_file("/proc/net.safetensors", [b""])
    assert caught.value.filename == "/proc/net.safetensors"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConformalError, match=r"^write .*: expected the path of a file, got a fol"):
        replace_file(tmp_path, [b"new"])
