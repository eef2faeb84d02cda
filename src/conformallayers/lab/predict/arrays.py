"""Arrays of samples in .npy files, memory-mapped, and checked before the first row is read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ...errors import shape_text

Array = np.ndarray[Any, Any]
_WHITE = 255


class Unreadable(Exception):
    """Raised with the reason why a sample cannot be read."""


def count_rows(path: str, shape: tuple[int, ...]) -> int:
    """Return the number of samples in a file; raise Unreadable if they have another shape."""
    return len(_open(path, shape))


def read_row(path: str, row: int, shape: tuple[int, ...], white: float) -> Array:
    """Return one sample of a file as a network takes it."""
    return as_sample(_open(path, shape)[row], shape, white)


def as_sample(values: Array, shape: tuple[int, ...], white: float) -> Array:
    """Return values as a network takes them: bytes are scaled as pixels, floats are unchanged."""
    sample = values.astype(np.float32).reshape(shape)
    return sample / np.float32(_WHITE) * np.float32(white) if values.dtype == np.uint8 else sample


def row_layout(stream: Any, shape: tuple[int, ...]) -> tuple[int, np.dtype[Any], bool]:
    """Read the header of an array; return its row count, its dtype, and whether rows are contiguous."""
    try:
        version = npy.read_magic(stream)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise Unreadable(f"an array file of version {version}")
        found, fortran, dtype = readers[version](stream)
    except ValueError as error:
        raise Unreadable(f"a damaged array ({first_line(error)})") from error
    count = _count(found, dtype, shape)
    return count, dtype, not fortran or len(found) < 2


@lru_cache(maxsize=4)
def _open(path: str, shape: tuple[int, ...]) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise Unreadable(error.strerror or first_line(error)) from error
    except Exception as error:  # a damaged header may raise anything
        raise Unreadable(f"a damaged array ({first_line(error)})") from error
    count = _count(array.shape, array.dtype, shape)
    return array.reshape(count, *shape)


def _count(found: tuple[int, ...], dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    if dtype.kind != "f" and dtype != np.uint8:
        raise Unreadable(f"an array of {dtype}; floats, or bytes from 0 to 255, are taken")
    if found == shape or (shape[0] == 1 and found == shape[1:]):
        return 1
    grey = shape[0] == 1 and len(found) == len(shape) and found[1:] == shape[1:]
    if not grey and found[1:] != shape:
        raise Unreadable(f"an array of {shape_text(found)} where samples have {shape_text(shape)}")
    if found[0] == 0:
        raise Unreadable("an array without samples")
    return found[0]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
