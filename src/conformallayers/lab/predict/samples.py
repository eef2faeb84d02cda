"""Find the samples of files, folders and standard input lazily, without a list of all of them."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

import numpy as np

from .arrays import HEAD, MAGIC, Array, Unreadable, open_rows, piped_rows, scaled
from .images import SUFFIXES, is_image, read_image

ARRAY = ".npy"
STANDARD_INPUT = "-"
_NAMES = 100_000  # names of one folder to sort at a time
_LINE = 2**16  # most bytes of a path
_PIPED_IMAGE = 2**28  # most bytes of an image on standard input


@dataclass(frozen=True)
class Sample:
    """An image, or a row of an array.

    Args:
        name: to display.
        source: the path of a file; the bytes of an image, or a row, from standard input.
        row: index into the array of a file.
    """

    name: str
    source: str | bytes | Array
    row: int | None = None

    def read(
        self, shape: tuple[int, ...], white: float, resize: bool, opaque: bool = False
    ) -> Array:
        """Return the values, float32; raise Unreadable if there are none of this shape."""
        if isinstance(self.source, np.ndarray):
            return scaled(self.source, white)
        if self.row is not None:
            return scaled(open_rows(str(self.source), shape)[self.row], white)
        return read_image(self.source, shape, white, resize, opaque)


@dataclass(frozen=True)
class Broken:
    """A sample, file or folder that cannot be read, and the reason."""

    name: str
    reason: str


def find_samples(
    paths: Iterable[str], shape: tuple[int, ...], stream: BinaryIO | None = None
) -> Iterator[Sample | Broken]:
    """Yield the samples of files, folders and standard input, in order.

    A folder is searched recursively for images and arrays, sorted by name. Hidden files and files
    with other suffixes are skipped; links to folders are not followed. ``-`` stands for the stream.
    """
    for path in paths:
        if path != STANDARD_INPUT or stream is None:
            yield from _in_path(path, shape)
            continue
        try:
            yield from _standard_input(stream, shape)
        except Unreadable as fault:
            yield Broken(path, str(fault))


def _in_path(path: str, shape: tuple[int, ...]) -> Iterator[Sample | Broken]:
    return _in_folder(path, shape) if os.path.isdir(path) else _in_file(path, shape)


def _in_file(path: str, shape: tuple[int, ...]) -> Iterator[Sample | Broken]:
    if not path.lower().endswith(ARRAY):
        yield Sample(path, path)
        return
    try:
        count = len(open_rows(path, shape))
    except Unreadable as fault:
        yield Broken(path, str(fault))
        return
    for row in range(count):
        yield Sample(f"{path}[{row}]", path, row)


def _in_folder(path: str, shape: tuple[int, ...]) -> Iterator[Sample | Broken]:
    # No recursion: paths may have more levels than Python allows.
    stack = [(path, sorted_entries(path))]
    while stack:
        folder, entries = stack[-1]
        try:
            name, is_folder = next(entries)
        except StopIteration:
            stack.pop()
            continue
        except OSError as error:
            stack.pop()
            yield Broken(folder, error.strerror or type(error).__name__)
            continue
        below = os.path.join(folder, name)
        if is_folder:
            stack.append((below, sorted_entries(below)))
        else:
            yield from _in_file(below, shape)


def sorted_entries(folder: str, most: int = _NAMES) -> Iterator[tuple[str, bool]]:
    """Yield (name, is a folder), sorted, with at most ``most`` names in memory.

    A larger folder is scanned several times, each time for the next names.
    """
    last = ""
    while True:
        with os.scandir(folder) as found:
            wanted = (entry for entry in found if entry.name > last and _is_wanted(entry))
            names = heapq.nsmallest(most, ((entry.name, _is_folder(entry)) for entry in wanted))
        yield from names
        if len(names) < most:
            return
        last = names[-1][0]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _is_wanted(entry: os.DirEntry[str]) -> bool:
    name = entry.name.lower()
    return not name.startswith(".") and (name.endswith((*SUFFIXES, ARRAY)) or _is_folder(entry))


def _standard_input(stream: BinaryIO, shape: tuple[int, ...]) -> Iterator[Sample | Broken]:
    """Yield the samples of an array, an image or a list of paths, by the first bytes."""
    head = stream.read(HEAD)
    if head.startswith(MAGIC):
        yield from _piped_rows(head, stream, shape)
    elif is_image(head):
        data = head + stream.read(_PIPED_IMAGE)
        if len(data) > _PIPED_IMAGE:
            raise Unreadable(f"more than {_PIPED_IMAGE} bytes")
        yield Sample(STANDARD_INPUT, data)
    else:
        yield from _listed_paths(head, stream, shape)


def _listed_paths(
    head: bytes, stream: BinaryIO, shape: tuple[int, ...]
) -> Iterator[Sample | Broken]:
    first = (head + stream.readline(_LINE)).splitlines(keepends=True)
    for line in chain(first, iter(lambda: stream.readline(_LINE), b"")):
        if len(line) >= _LINE or b"\0" in line:
            raise Unreadable("neither an array, an image, nor a list of paths")
        path = os.fsdecode(line.rstrip(b"\r\n"))
        if path:
            yield from _in_path(path, shape)


def _piped_rows(head: bytes, stream: BinaryIO, shape: tuple[int, ...]) -> Iterator[Sample | Broken]:
    count, dtype = piped_rows(head, stream, shape)
    size = int(np.prod(shape)) * dtype.itemsize
    for row in range(count):
        data = stream.read(size)
        name = f"{STANDARD_INPUT}[{row}]"
        if len(data) < size:
            yield Broken(name, f"the end of the array, {count - row} rows too early")
            return
        yield Sample(name, np.frombuffer(data, dtype).reshape(shape))
