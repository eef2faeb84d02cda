"""Files that are whole or not there: written under another name and then renamed.

A process that is killed leaves the old file or the new one, never half of one.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PARTIAL = ".part-"  # how the name of an unfinished file begins


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, which takes its place when it is on disk."""
    # The number keeps apart processes that write the same file, such as those of one search.
    partial = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
    try:
        write(partial)
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one piece."""
    text = json.dumps(value, indent=2) + "\n"
    write_whole(path, lambda partial: partial.write_text(text, "utf-8"))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows in one piece; the header has every key of any of them."""
    header = list(dict.fromkeys(key for row in rows for key in row))

    def write(partial: Path) -> None:
        with partial.open("w", newline="", encoding="utf-8") as stream:
            table = csv.DictWriter(stream, header)
            table.writeheader()
            table.writerows(rows)

    write_whole(path, write)
