"""Arrays of samples in numpy's format, checked before the first row is read."""

from __future__ import annotations

import io
import os
from functools import lru_cache
from math import prod
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from ...errors import first_line, shape_text

Array = np.ndarray[Any, Any]
MAGIC = b"\x93NUMPY"
HEAD = 12  # first bytes to read: they tell arrays from images, and hold the length of a header
_HEADER_LIMIT = 10_000  # bytes, as numpy's own
_WHITE = 255


class Unreadable(Exception):
    """Raised with the reason why a sample cannot be read."""


def require_file(path: str) -> None:
    """Raise Unreadable unless a path is that of a regular file; opening a pipe would block."""
    if not os.path.isfile(path):
        if os.path.exists(path):
            raise Unreadable("no regular file")
        raise Unreadable("a link to nothing" if os.path.islink(path) else "no such file")


@lru_cache(maxsize=4)
def open_rows(path: str, shape: tuple[int, ...]) -> Array:
    """Map the samples of a file into memory, (N, *shape); raise Unreadable if it has others."""
    require_file(path)
    try:
        with open(path, "rb") as file:
            found, fortran, dtype, start = _read_header(file.read(HEAD), file)
            size = os.fstat(file.fileno()).st_size
        count = _count(found, dtype, shape)
        if start + prod(found) * dtype.itemsize > size:
            raise Unreadable("a damaged array (it ends too early)")
        array: Array = np.memmap(path, dtype, "r", start, found, "F" if fortran else "C")
    except OSError as error:
        raise Unreadable(error.strerror or first_line(error)) from error
    return array.reshape(count, *shape)


def piped_rows(head: bytes, stream: BinaryIO, shape: tuple[int, ...]) -> tuple[int, Any]:
    """Read the header of an array behind its first twelve bytes; return the number of rows and their dtype."""
    found, fortran, dtype, _ = _read_header(head, stream)
    count = _count(found, dtype, shape)
    if fortran and len(found) > 1:
        raise Unreadable("an array in Fortran order; save it with np.ascontiguousarray")
    return count, dtype


def _read_header(head: bytes, stream: BinaryIO) -> tuple[tuple[int, ...], bool, Any, int]:
    """Return the shape of an array, whether it is in Fortran order, its dtype, and its first byte.

    numpy would read as many bytes as a header says that it has.
    """
    if not head.startswith(MAGIC):
        raise Unreadable("a damaged array (it does not begin as one)")
    version = tuple(head[len(MAGIC) : 8])
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise Unreadable(f"an array file of version {version}")
    start = 10 if version == (1, 0) else HEAD
    length = int.from_bytes(head[8:start], "little")
    if not 2 <= length <= _HEADER_LIMIT:
        raise Unreadable(f"a damaged array (a header of {length} bytes)")
    header = io.BytesIO(head[8:] + stream.read(start + length - len(head)))
    try:
        found, fortran, dtype = readers[version](header)
    except Exception as error:  # it may raise anything
        raise Unreadable(f"a damaged array ({first_line(error)})") from error
    return tuple(map(int, found)), fortran, dtype, start + length


def scaled(values: Array, white: float) -> Array:
    """Return values as a network takes them: bytes are scaled as pixels, floats are unchanged."""
    sample = values.astype(np.float32)
    return sample / np.float32(_WHITE) * np.float32(white) if values.dtype == np.uint8 else sample


def _count(found: tuple[int, ...], dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the number of samples in an array of the shape ``found``."""
    if dtype.kind != "f" and dtype != np.uint8:
        raise Unreadable(f"an array of {dtype}; floats, or bytes from 0 to 255, are taken")
    if found == shape or (shape[0] == 1 and found == shape[1:]):
        return 1
    grey = shape[0] == 1 and len(found) == len(shape) and found[1:] == shape[1:]
    if not grey and found[1:] != shape:
        raise Unreadable(f"an array of {shape_text(found)} where samples have {shape_text(shape)}")
    if found[0] < 1:
        raise Unreadable("an array without samples")
    return found[0]
