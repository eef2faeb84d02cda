"""Small data sets in the file formats of the known ones."""

from __future__ import annotations

import struct

import numpy as np

from conformallayers.lab.data import catalogue

NAMES = tuple(catalogue.LAYOUTS["mnist"][0].checksums)


RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def random_images(count: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (count, *shape), np.uint8)


def random_labels(count: int) -> np.ndarray:
    return RANDOM.integers(0, 10, count, np.uint8)


def short_string(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def python2_pickle(images: np.ndarray, classes: list[int]) -> bytes:
    """Write a batch as Python 2 did: protocol 2, its strings, numpy's old module names."""
    shape = b"".join(b"M" + struct.pack("<H", size) for size in images.shape)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85q\x04U\x01b\x87Rq\x05"
        b"(K\x01" + shape + b"\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<I", images.size) + images.tobytes() + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([n]) for n in classes) + b"e"
    return (
        b"\x80\x02}q\x01("
        + short_string(b"data")
        + array
        + short_string(b"labels")
        + listed
        + b"u."
    )
