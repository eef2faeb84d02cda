"""Fields of operations: their names in files, and readers that validate their values.

A setting of an operation is a plain number, word or tuple. Its reader takes the JSON value of a file and
returns the Python value, or raises ValueError. The Python value is written to files unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any

Reader = Callable[[Any], Any]
INTEGER_LIMIT = 2**31  # above every whole number in a recipe


def setting(stored: str, reader: Reader, default: Any = MISSING) -> Any:
    """Declare a setting under its stored name; one with a default may be left out of a file."""
    return field(default=default, metadata={"setting": stored, "reader": reader})


def constant(stored: str, *, optional: bool = False, dtype: str | None = None) -> Any:
    """Declare a constant: the field holds the name of an array; ``dtype`` is that of whole numbers."""
    metadata = {"constant": stored, "reader": name, "dtype": dtype}
    return field(default=None if optional else MISSING, metadata=metadata)


def number(value: Any) -> float:
    """Read a finite number."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{value!r:.60} is no finite number")
    return float(value)


def flag(value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.60} is neither true nor false")
    return value


def whole(least: int) -> Reader:
    """Return a reader of a whole number from ``least`` on."""

    def read(value: Any) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not least <= value < INTEGER_LIMIT
        ):
            raise ValueError(f"{value!r:.60} is no whole number >= {least}")
        return value

    return read


def word(*choices: str) -> Reader:
    """Return a reader of one of a few words."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{value!r:.60} is none of {', '.join(choices)}")
        return value

    return read


def name(value: Any) -> str:
    """Read a name."""
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ValueError(f"{value!r:.60} is no name")
    return value


def several(reader: Reader) -> Reader:
    """Return a reader of a tuple of values that ``reader`` reads."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{value!r:.60} is no list")
        return tuple(reader(item) for item in value)

    return read


def optional(reader: Reader) -> Reader:
    """Return a reader that also takes null."""
    return lambda value: None if value is None else reader(value)


positives = several(whole(1))
sizes = several(whole(0))
pairs = several(several(whole(-INTEGER_LIMIT + 1)))
