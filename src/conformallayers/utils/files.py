"""Atomic file writes: a killed process leaves the old file or the new one, never half of one."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import refusal

Path = str | os.PathLike[str]
_UNFINISHED = ".tmp"


def kind_of_file(mode: int) -> str:
    """Describe the type of a path that is not a regular file, from its ``st_mode``."""
    return "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"


def replace_file(
    path: Path, parts: Iterable[Any], check: Callable[[str], None] | None = None
) -> None:
    """Write bytes under a temporary name in the same folder, flush them to disk, and rename.

    A missing folder is created. If ``check``, which looks at the temporary file, raises, nothing is left behind.
    """
    replace_files({path: parts}, check)


def replace_files(
    files: Mapping[Any, Iterable[Any]], check: Callable[[str], None] | None = None
) -> None:
    """Write several files as :func:`replace_file` does; none is renamed before all are written."""
    with staged_files(*files) as staged:
        for temporary, parts in zip(staged, files.values(), strict=True):
            with open(temporary, "wb") as file:
                file.writelines(parts)
            if check is not None:
                check(temporary)


@contextlib.contextmanager
def staged_files(*paths: Path) -> Iterator[list[str]]:
    """Yield a temporary file for each path, and rename them when the block ends without an error.

    All are flushed to disk before the first is renamed. A new file gets the permissions of the file it
    replaces. Devices are not replaced.
    """
    targets = [os.path.realpath(path) for path in paths]
    modes = [_mode(path) for path in paths]
    staged: list[str] = []
    try:
        for target, mode in zip(targets, modes, strict=True):
            folder, name = os.path.split(target)
            hidden = f".{name[:50]}.{secrets.token_hex(8)}{_UNFINISHED}"
            staged.append(os.path.join(folder, hidden))
            # Never more open to others than the file it replaces, and writable until it does.
            access = 0o666 if mode is None else mode | stat.S_IRUSR | stat.S_IWUSR
            os.close(os.open(staged[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, access))
        yield list(staged)
        for temporary, mode in zip(staged, modes, strict=True):
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            if mode is not None:
                os.chmod(temporary, mode)
        for temporary, target in zip(staged, targets, strict=True):
            os.replace(temporary, target)
    except OSError as error:
        if error.filename in staged:
            error.filename = targets[staged.index(error.filename)]  # the caller's name
        raise
    finally:
        for temporary in staged:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def is_unfinished(name: str) -> bool:
    """Check whether a file name is a temporary one, which a killed process may leave behind."""
    return name.startswith(".") and name.endswith(_UNFINISHED)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON."""
    replace_file(path, [f"{json.dumps(value, indent=2)}\n".encode()])


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a file by a CSV table; its header has every key of any row."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    table.writeheader()
    table.writerows(rows)
    replace_file(path, [text.getvalue().encode()])


def _mode(path: Path) -> int | None:
    """Return the permissions of a file that is to be replaced; if there is none, create its folder and return None."""
    try:
        before = os.stat(os.path.realpath(path)).st_mode
    except FileNotFoundError:
        os.makedirs(os.path.dirname(os.path.realpath(path)), exist_ok=True)
        return None
    if not stat.S_ISREG(before):
        expected, remedy = "the path of a file", "Add the name of the file."
        raise refusal(f"write {os.fspath(path)}", expected, kind_of_file(before), remedy)
    return stat.S_IMODE(before)
