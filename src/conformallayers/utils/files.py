"""Files that are whole or not there: written under another name, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import refusal

Path = str | os.PathLike[str]


def kind_of_file(mode: int) -> str:
    """Name what is no regular file."""
    return "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"


def replace_file(
    path: Path, parts: Iterable[Any], check: Callable[[str], None] | None = None
) -> None:
    """Write bytes under a temporary name in the same folder, flush them to disk, and rename.

    A file that was there hands its permissions on. A device is not replaced by a file.

    Args:
        path: of the file.
        parts: its bytes.
        check: looks at the temporary file; if it raises, nothing is left behind.
    """
    replace_files({path: parts}, check)


def replace_files(
    files: Mapping[Any, Iterable[Any]], check: Callable[[str], None] | None = None
) -> None:
    """Write several files: all of them, or none.

    Each is on disk under a temporary name before the first is renamed. If a later one cannot be
    renamed, those before it become again what they were.
    """
    targets = [os.path.realpath(path) for path in files]
    modes = [_mode(path) for path in files]
    staged: list[str] = []
    moved: list[tuple[str, str | None]] = []
    try:
        for target, mode, parts in zip(targets, modes, files.values(), strict=True):
            staged.append(_beside(target, "tmp"))
            _write(staged[-1], parts, mode)
            if check is not None:
                check(staged[-1])
        for number, target in enumerate(targets):
            moved.append((target, _kept(target) if number + 1 < len(targets) else None))
            os.replace(staged[number], target)
            staged[number] = ""
    except BaseException:
        for target, old in moved[: len(moved) - 1]:
            with contextlib.suppress(OSError):
                os.unlink(target) if old is None else os.replace(old, target)
        raise
    finally:
        for name in (*staged, *(old for _, old in moved)):
            if name:
                with contextlib.suppress(OSError):
                    os.unlink(name)
    for folder in {os.path.dirname(target) for target in targets}:
        with contextlib.suppress(OSError):  # not every system lets a folder be flushed
            place = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(place)
            finally:
                os.close(place)


def _mode(path: Path) -> int | None:
    """Return the permissions of a file that is to be replaced, None where there is none."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", folder)
    try:
        before = os.stat(os.path.realpath(path)).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(before):
        expected, remedy = "a file or a free name", "Give the path of a file."
        raise refusal(f"save({os.fspath(path)})", expected, kind_of_file(before), remedy)
    return stat.S_IMODE(before)


def _beside(target: str, ending: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name[:50]}.{secrets.token_hex(8)}.{ending}")


def _kept(target: str) -> str | None:
    """Keep a file under a second name; None where there is none, or no second names."""
    second = _beside(target, "old")
    try:
        os.link(target, second)
    except OSError:
        return None
    return second


def _write(temporary: str, parts: Iterable[Any], mode: int | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with open(os.open(temporary, flags, 0o666 if mode is None else mode), "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    if mode is not None:
        os.chmod(temporary, mode)
