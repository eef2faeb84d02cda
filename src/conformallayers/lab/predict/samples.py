"""Find the images and the rows of arrays in files and folders, and read them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...errors import first_line, shape_text
from ..data.images import SUFFIXES, Array, Unreadable, files_below, read_image, require_file

ARRAY = ".npy"


@dataclass(frozen=True)
class Sample:
    """An image, or a row of an array."""

    path: str
    row: int | None = None

    @property
    def name(self) -> str:
        """The path, with the row if there is one."""
        return self.path if self.row is None else f"{self.path}[{self.row}]"

    def read(self, shape: tuple[int, ...], resize: bool) -> Array:
        """Return the values, float32, bytes scaled to [0, 1]; raise Unreadable if there are none of this shape."""
        if os.path.isdir(self.path):
            raise Unreadable("a closed folder")
        if not _is_array(self.path):
            return read_image(self.path, shape, resize)
        rows = open_rows(self.path, shape)
        values: Array = rows[self.row].astype(np.float32)
        return values / np.float32(255) if rows.dtype == np.uint8 else values


def find_samples(paths: Iterable[str], shape: tuple[int, ...]) -> Iterator[Sample]:
    """Yield the samples of files and folders, in order; one for each file or folder that cannot be read.

    A folder is searched recursively for images and arrays, sorted by name. Hidden files and files
    with other suffixes are skipped; links to folders are not followed.
    """
    for path in paths:
        closed: list[OSError] = []
        files: Iterable[str] = [path]
        if os.path.isdir(path):
            files = files_below(path, (*SUFFIXES, ARRAY), closed.append)
        for file in files:
            if not _is_array(file):
                yield Sample(file)
                continue
            try:
                yield from (Sample(file, row) for row in range(len(open_rows(file, shape))))
            except Unreadable:
                yield Sample(file)
        yield from (Sample(str(error.filename)) for error in closed)


def _is_array(path: str) -> bool:
    return path.lower().endswith(ARRAY)


@lru_cache(maxsize=4)
def open_rows(path: str, shape: tuple[int, ...]) -> Array:
    """Map the samples of an .npy file into memory, (N, *shape); raise Unreadable if it has others."""
    require_file(path)
    try:
        array: Array = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise Unreadable(error.strerror or first_line(error)) from error
    except Exception as error:  # a damaged header may raise anything
        raise Unreadable(f"a damaged array ({first_line(error)})") from error
    if array.dtype.kind != "f" and array.dtype != np.uint8:
        raise Unreadable(f"an array of {array.dtype}; floats, or bytes from 0 to 255, are taken")
    # Grey images may come without their channel.
    if array.shape[1:] != shape and (1, *array.shape[1:]) != shape:
        found, wanted = shape_text(array.shape), shape_text(shape)
        raise Unreadable(f"an array of {found} where samples have {wanted}")
    if not array.size:
        raise Unreadable("an array without samples")
    return array.reshape(-1, *shape)
