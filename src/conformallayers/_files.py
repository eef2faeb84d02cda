"""Files that are whole or not there: written under another name, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from typing import Any

from .errors import refusal

Path = str | os.PathLike[str]


def kind_of_file(mode: int) -> str:
    """Name what is no regular file."""
    return "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"


def replace_file(path: Path, parts: Iterable[Any]) -> None:
    """Write bytes under a temporary name in the same folder, flush them to disk, and rename.

    A file that was there hands its permissions on. A device is not replaced by a file.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    before: int | None = None
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(target).st_mode
    if before is not None and not stat.S_ISREG(before):
        remedy = "Give the path of a file."
        raise refusal(
            f"save({os.fspath(path)})", "a file or a free name", kind_of_file(before), remedy
        )
    temporary = os.path.join(folder, f".{name[:50]}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, 0o666 if before is None else stat.S_IMODE(before))
    try:
        with open(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            os.chmod(temporary, stat.S_IMODE(before))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # not every system lets a folder be flushed
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
