"""Parse the file formats of data sets: idx (MNIST) and CIFAR-10's binary files."""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt

from ...errors import ConformalError, refusal
from .catalogue import CLASSES

Bytes = npt.NDArray[np.uint8]
_UBYTE = 8  # the code of unsigned bytes in the third byte of an idx file
_AGAIN = "Get the file again: it is damaged, or another one under this name."
CIFAR_SHAPE = (3, 32, 32)
_PIXELS = math.prod(CIFAR_SHAPE)


def read_idx(data: bytes, where: str, item_shape: tuple[int, ...]) -> Bytes:
    """Return the array of an idx file of unsigned bytes, (N, *item_shape); labels have no item shape.

    Examples:
        >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels", ())
        array([7, 9], dtype=uint8)
    """
    axes = 1 + len(item_shape)
    magic = bytes([0, 0, _UBYTE, axes])
    if data[:4] != magic:
        got = data[:4].hex() or "an empty file"
        raise refusal(where, f"the idx magic {magic.hex()}", got, _AGAIN)
    start = 4 + 4 * axes
    if len(data) < start:
        raise _wrong_size(where, start, len(data))
    count, *sizes = struct.unpack(f">{axes}I", data[4:start])
    if tuple(sizes) != item_shape or not count:
        expected = " × ".join(["N", *map(str, item_shape)])
        got = " × ".join(map(str, [count, *sizes]))
        raise refusal(where, f"{expected} bytes with N > 0", f"{got} in its header", _AGAIN)
    if len(data) != start + count * math.prod(item_shape):
        raise _wrong_size(where, start + count * math.prod(item_shape), len(data))
    return np.frombuffer(data, np.uint8, offset=start).reshape(count, *item_shape)


def read_cifar_binary(data: bytes, where: str) -> dict[str, Bytes]:
    """Return images (N, 3, 32, 32) and labels (N,) of a ``data_batch_*.bin``."""
    record = 1 + _PIXELS
    if not data or len(data) % record:
        whole = max(1, -(-len(data) // record)) * record
        raise _wrong_size(where, whole, len(data), f"a multiple of {record} bytes such as {whole}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    labels = _checked_labels(rows[:, 0], where)
    return {"images": rows[:, 1:].reshape(-1, *CIFAR_SHAPE), "labels": labels}


def read_arrays(file: str, data: bytes, where: str) -> dict[str, Bytes]:
    """Return the ``"images"`` (N, C, H, W) and ``"labels"`` (N,) that a file holds, by its name."""
    if file.endswith(".bin"):
        return read_cifar_binary(data, where)
    if "images" in file:
        return {"images": read_idx(data, where, (28, 28))[:, None]}
    return {"labels": _checked_labels(read_idx(data, where, ()), where)}


def _checked_labels(labels: Bytes, where: str) -> Bytes:
    """Return the labels, or refuse one that is out of range."""
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        place = int(wrong[0])
        got = f"{int(labels[place])} at position {place}"
        raise refusal(where, f"labels from 0 to {CLASSES - 1}", got, _AGAIN)
    return labels


def check_counts(images: int, labels: int, where: str) -> None:
    """Refuse images and labels that differ in number, and empty sets."""
    if images != labels or not images:
        remedy = "Both must come from the same set; get them again."
        raise refusal(where, "as many labels as images", f"{images} and {labels}", remedy)


def _wrong_size(where: str, expected: int, got: int, text: str | None = None) -> ConformalError:
    state = "truncated" if got < expected else "too long"
    return refusal(where, text or f"{expected} bytes", f"{got}: it is {state}", _AGAIN)
