"""Damaged idx and CIFAR files are refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import conformallayers as cl
from conformallayers.lab.data.datasets import check, load
from datafiles import NAMES, idx, random_images, random_labels

IMAGES, LABELS = NAMES[0], NAMES[1]
BROKEN: list[tuple[str, str, Callable[[bytes], bytes], str]] = [
    ("empty", IMAGES, lambda data: b"", "magic 00000803, got an empty file"),
    ("magic", IMAGES, lambda data: b"\0\0\x0d\3" + data[4:], "magic 00000803, got 00000d03"),
    ("labels for images", IMAGES, lambda data: idx(random_labels(7)), "00000803, got 00000801"),
    (
        "images for labels",
        LABELS,
        lambda data: idx(random_images(7, 28, 28)),
        "00000801, got 00000803",
    ),
    ("header", IMAGES, lambda data: data[:9], "16 bytes, got 9: it is truncated"),
    ("truncated", IMAGES, lambda data: data[:-5], "5504 bytes, got 5499: it is truncated"),
    ("too long", LABELS, lambda data: data + b"\0", "15 bytes, got 16: it is too long"),
    (
        "sides",
        IMAGES,
        lambda data: idx(random_images(7, 27, 28)),
        "N × 28 × 28 .*, got 7 × 27 × 28",
    ),
    ("none", LABELS, lambda data: idx(random_labels(0)), "N > 0, got 0 in its header"),
    ("label 10", LABELS, lambda data: data[:-2] + b"\x0a\0", "0 to 9, got 10 at position 5"),
    ("count", LABELS, lambda data: idx(random_labels(6)), "as many labels as images, got 7 and 6"),
]


@pytest.mark.parametrize(
    ("file", "change", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_broken_idx_files_are_refused(
    mnist: Path, file: str, change: Callable[[bytes], bytes], message: str
) -> None:
    (mnist / file).write_bytes(change((mnist / file).read_bytes()))
    with pytest.raises(cl.ConformalError, match=message):
        load("mnist", mnist.parent, verify=False)
    faults = [fault for _, fault in check("mnist", mnist.parent, verify=False) if fault]
    assert len(faults) == 1


def test_broken_cifar_files_are_refused(cifar: Path, tmp_path: Path) -> None:
    path = cifar / "data_batch_3.bin"
    good = path.read_bytes()
    for data, message in (
        (b"", "got 0: it is truncated"),
        (good[:-1], "a multiple of 3073 bytes such as 6146, got 6145"),
        (b"\x0a" + good[1:], "labels from 0 to 9, got 10 at position 0"),
    ):
        path.write_bytes(data)
        with pytest.raises(cl.ConformalError, match=message):
            load("cifar10", tmp_path, verify=False)
