"""Arrays of samples in .npy files: opened without reading them, checked before a row is taken."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as npy

from ...errors import shape_text

Array = np.ndarray[Any, Any]
_WHITE = 255


class Unreadable(Exception):
    """Raised for one sample that cannot be read; says why."""


class Stream(Protocol):
    """What bytes are read from."""

    def read(self, size: int = ..., /) -> bytes:
        """Return so many bytes, fewer at the end."""


def count_rows(path: str, shape: tuple[int, ...]) -> int:
    """Return how many samples a file holds, or say why it holds none of this shape."""
    return len(_opened(path, shape))


def read_row(path: str, row: int, shape: tuple[int, ...], white: float) -> Array:
    """Return one sample as the network takes it."""
    return as_sample(_opened(path, shape)[row], shape, white)


def as_sample(values: Array, shape: tuple[int, ...], white: float) -> Array:
    """Return numbers as the network takes them: bytes are pixels, other numbers stay as they are."""
    sample = values.astype(np.float32).reshape(shape)
    return sample / np.float32(_WHITE) * np.float32(white) if values.dtype == np.uint8 else sample


def row_layout(stream: Stream, shape: tuple[int, ...]) -> tuple[int, np.dtype[Any], bool]:
    """Read the header of an array; return its rows, its dtype, and whether rows follow each other."""
    try:
        version = npy.read_magic(stream)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise Unreadable(f"an array file of version {version}")
        found, fortran, dtype = readers[version](stream)
    except ValueError as error:
        raise Unreadable(f"a damaged array ({_first_line(error)})") from error
    count = _count(found, dtype, shape)
    return count, dtype, not fortran or len(found) < 2


@lru_cache(maxsize=4)
def _opened(path: str, shape: tuple[int, ...]) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise Unreadable(error.strerror or _first_line(error)) from error
    except Exception as error:  # a header may hold anything
        raise Unreadable(f"a damaged array ({_first_line(error)})") from error
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


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
