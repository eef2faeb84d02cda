"""Data sets of a few random images on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conformallayers.lab.data import catalogue, files
from datafiles import NAMES, idx, random_images, random_labels


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Seven training and three test images in MNIST's files."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    arrays = random_images(7, 28, 28), random_labels(7), random_images(3, 28, 28), random_labels(3)
    for name, array in zip(NAMES, arrays, strict=True):
        (folder / name).write_bytes(idx(array))
    return folder


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Six batches of two images in CIFAR-10's binary files."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in catalogue.LAYOUTS["cifar10"].checksums:
        rows = np.concatenate([random_labels(2)[:, None], random_images(2, 3072)], 1)
        (folder / name).write_bytes(rows.tobytes())
    return folder


@pytest.fixture
def pretended(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take the small files for the real ones: their checksums stand in the catalogue."""
    form = catalogue.LAYOUTS["mnist"]
    sums = {name: files.md5((mnist / name).read_bytes()) for name in NAMES}
    new = catalogue.Layout(sums, form.folders)
    monkeypatch.setitem(catalogue.LAYOUTS, "mnist", new)
    return mnist
