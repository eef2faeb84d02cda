"""Load data sets: MNIST, Fashion-MNIST and CIFAR-10 from files, digits from scikit-learn, moving shapes drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConformalError, missing_extra, refusal
from . import files
from .catalogue import CLASSES, DIGITS, LABELS, MOVING_SHAPES, WITHOUT_FILES, Layout
from .formats import Bytes, check_counts, read_arrays
from .moving_shapes import TRAIN_SHAPES, draw_shapes


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels for training and test.

    Args:
        name: of the data set.
        train_images, test_images: (N, C, H, W), unsigned bytes; 0 is black and 255 white.
        train_labels, test_labels: (N,), int64, from 0 to ``classes`` - 1.
        classes: their number, and the number of outputs of a network that is trained on them.
        labels: a name for every class, if they have other names than those of the catalogue.
        spread: the training images are in a random order with the classes spread evenly, and splits take the
            first ones, without copying them.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int = CLASSES
    labels: tuple[str, ...] | None = None
    spread: bool = False

    def __post_init__(self) -> None:
        labels = torch.cat([self.train_labels, self.test_labels])
        wrong = labels[(labels < 0) | (labels >= self.classes)]
        if len(wrong):
            expected, got = f"labels from 0 to {self.classes - 1}", str(wrong[0].item())
            remedy = "Give the number of classes: Dataset(classes=...)."
            raise refusal(f"dataset {self.name}", expected, got, remedy)

    def split(self, validation: float | int, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Set training images aside; return the rest, and a data set that tests on those.

        Args:
            validation: a share below 1, or a number of images.
            seed: of the choice; runs that leave it alone set the same images aside.

        Examples:
            >>> train, held_out = load("digits").split(0.1)
            >>> len(train.train_labels), len(held_out.test_labels)
            (1212, 135)
        """
        total = len(self.train_labels)
        if not 0 <= validation < total or (validation > 1 and validation % 1):
            expected = f"a share below 1 or a whole number below {total}"
            raise refusal("validation", expected, str(validation), "0 sets nothing aside.")
        count = min(round(validation * total) if validation < 1 else int(validation), total - 1)
        held_out, train = self._parts(count, seed)
        if self.spread and count:
            self._check_every_class(validation, held_out.train_labels, train.train_labels)
        images, labels = held_out.train_images, held_out.train_labels
        return train, replace(train, test_images=images, test_labels=labels)

    def _check_every_class(self, validation: float | int, *parts: Tensor) -> None:
        """Refuse a split that leaves a part without images of a class."""
        for labels in parts:
            absent = sorted(set(range(self.classes)) - set(labels.tolist()))
            if absent:
                name = self.labels[absent[0]] if self.labels else absent[0]
                total = int((self.train_labels == absent[0]).sum())
                got = f"{validation:g}, too little or too much of the {total} of {name}"
                expected = "a share with an image of every class, set aside and in the rest"
                raise refusal("validation", expected, got, "Change it, or add images.")

    def subset(self, count: int, seed: int = 0) -> Dataset:
        """Return a data set with ``count`` of the training images, chosen by the seed.

        Examples:
            >>> len(load("digits").subset(100).train_labels)
            100
        """
        total = len(self.train_labels)
        if not 1 <= count <= total:
            expected = f"a whole number from 1 to {total}"
            raise refusal("subset", expected, str(count), "Leave it out to take all images.")
        return self._parts(count, seed)[0]

    def _parts(self, count: int, seed: int) -> tuple[Dataset, Dataset]:
        """Return a data set with ``count`` of the training images, and one with the others."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.train_labels), generator=generator)
        chosen: tuple[Any, Any] = order[:count].sort().values, order[count:].sort().values
        if self.spread:
            chosen = slice(count), slice(count, None)
        first, rest = (
            replace(
                self, train_images=self.train_images[rows], train_labels=self.train_labels[rows]
            )
            for rows in chosen
        )
        return first, rest


def load(name: str, root: str | os.PathLike[str] | None = None, *, verify: bool = True) -> Dataset:
    """Read a data set into memory.

    Args:
        name: ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"``, ``"digits"`` or ``"shapes"``.
        root: the folder of the data; None takes CONFORMALLAYERS_DATA, else ``data``.
        verify: compare checksums; False accepts your own data in the same format.

    Examples:
        >>> load("digits").train_images.shape
        torch.Size([1347, 1, 8, 8])
    """
    if name == DIGITS:
        found = digits()
        train, test = ((255 * x).round().byte() for x in (found.train_images, found.test_images))
        return replace(found, train_images=train, test_images=test)
    if name == MOVING_SHAPES:
        drawn, classes = map(torch.from_numpy, draw_shapes())
        first, rest = slice(TRAIN_SHAPES), slice(TRAIN_SHAPES, None)
        parts = drawn[first], classes[first], drawn[rest], classes[rest]
        return Dataset(name, *parts, classes=len(LABELS[name]))
    place = files.require(name, files.data_root(root))
    read = {}
    for path in place.paths:
        for file, where, data in files.read_files(place.layout, path):
            read[file] = _arrays(place.layout, file, data, str(where), verify)
    tensors: list[Any] = []
    for part, prefixes in (("train", ("train", "data")), ("test", ("t10k", "test"))):
        # In the order of the catalogue, which an archive may not have.
        arrays = [read[file] for file in place.layout.checksums if file.startswith(prefixes)]
        images, labels = (
            np.concatenate([found[kind] for found in arrays if kind in found])
            for kind in ("images", "labels")
        )
        check_counts(len(images), len(labels), f"{part} part of {name} in {place.path}")
        tensors += [torch.from_numpy(images), torch.from_numpy(labels).long()]
    return Dataset(name, *tensors)


def check(name: str, root: Path, *, verify: bool = True) -> Iterator[tuple[str, str | None]]:
    """Yield the path and the fault, if any, of every file of a data set."""
    if name in WITHOUT_FILES:
        yield f"{name}, which {WITHOUT_FILES[name]}", None
        return
    where, correct = name, True
    try:
        place = files.require(name, root)
        for path in place.paths:
            where = str(path)
            for file, inside, data in files.read_files(place.layout, path):
                where, fault = str(inside), None
                try:
                    _arrays(place.layout, file, data, where, verify)
                except ConformalError as error:
                    fault, correct = str(error).removeprefix(f"{where}: "), False
                yield where, fault
        where = str(place.path)
        if correct and not verify:
            load(name, root, verify=False)  # do images and labels fit together?
    except ConformalError as error:  # missing, or a file that cannot be read
        yield where, str(error).removeprefix(f"{where}: ")


def _arrays(layout: Layout, file: str, data: bytes, where: str, verify: bool) -> dict[str, Bytes]:
    # The format goes first: its errors say more than a checksum does.
    arrays = read_arrays(file, data, where)
    if verify:
        files.check_md5(data, layout.checksums[file], where)
    return arrays


def digits() -> Dataset:
    """Load scikit-learn's digits as floats in [0, 1]; the test set is a fixed quarter of each class.

    Examples:
        >>> data = digits()
        >>> tuple(data.train_images.shape), tuple(data.test_images.shape)
        ((1347, 1, 8, 8), (450, 1, 8, 8))
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise missing_extra("scikit-learn", "experiments", f"the dataset {DIGITS}") from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target).long()
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, random_state=0, stratify=bunch.target
    )
    return Dataset(DIGITS, images[train], labels[train], images[test], labels[test])
