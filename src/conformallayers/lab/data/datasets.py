"""Image sets in memory: MNIST, Fashion-MNIST and CIFAR-10 from files, digits from scikit-learn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import ConformalError, missing_extra, refusal
from . import store as files
from .catalogue import CLASSES, DIGITS, Form
from .formats import check_counts, checked_labels, read_cifar_binary, read_cifar_pickle, read_idx
from .pickles import Bytes

_SIDE = 28  # of the images in idx files


@dataclass(frozen=True, eq=False)
class Dataset:
    """A set of images and their labels.

    Args:
        name: of the set.
        train_images, test_images: (N, C, H, W), unsigned bytes; 0 is black and 255 white.
        train_labels, test_labels: (N,), int64.
        classes: how many there are.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int = CLASSES

    def split(self, validation: float | int, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Return the set with some training images set aside, and one that tests on those.

        Args:
            validation: a share below 1, or a number of images.
            seed: of the choice; it is the same for every run that leaves it alone.

        Examples:
            >>> train, held = load("digits").split(0.1)
            >>> len(train.train_labels), len(held.test_labels)
            (1212, 135)
        """
        total = len(self.train_labels)
        if not 0 <= validation < total or (validation > 1 and validation % 1):
            expected = f"a share below 1 or a whole number below {total}"
            raise refusal("validation", expected, str(validation), "0 sets nothing aside.")
        count = min(round(validation * total) if validation < 1 else int(validation), total - 1)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        kept, held = order[count:].sort().values, order[:count].sort().values
        images, labels = self.train_images, self.train_labels
        train = replace(self, train_images=images[kept], train_labels=labels[kept])
        return train, replace(train, test_images=images[held], test_labels=labels[held])

    def subset(self, count: int, seed: int = 0) -> Dataset:
        """Return the set with so many training images: the first of an order that the seed decides.

        Examples:
            >>> len(load("digits").subset(100).train_labels)
            100
        """
        total = len(self.train_labels)
        if not 1 <= count <= total:
            expected = f"a whole number from 1 to {total}"
            raise refusal("subset", expected, str(count), "Leave it out to take all images.")
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        rows = order[:count].sort().values
        return replace(
            self, train_images=self.train_images[rows], train_labels=self.train_labels[rows]
        )


class Verdict(NamedTuple):
    """What a check found: a file, and its fault or None."""

    path: str
    fault: str | None


def load(name: str, root: str | os.PathLike[str] | None = None, *, verify: bool = True) -> Dataset:
    """Read a set into memory.

    Args:
        name: ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"`` or ``"digits"``.
        root: the folder of the data; None takes CONFORMALLAYERS_DATA, else ``data``.
        verify: compare checksums; False takes your own data in the same format.

    Examples:
        >>> load("digits").train_images.shape
        torch.Size([1347, 1, 8, 8])
    """
    if name == DIGITS:
        return _digits()
    place = files.located(name, files.data_root(root))
    found = {
        file: _parse(place.form, file, path, read(), verify)
        for file, path, read in files.contents(place)
    }
    arrays: dict[str, list[Bytes]] = {}
    for file in place.form.checksums:  # an archive may have another order
        for key, array in found.pop(file).items():
            arrays.setdefault(key, []).append(array)
    train, test = (_joined(arrays, part, f"{name} in {place.path}") for part in ("train", "test"))
    return Dataset(name, *train, *test)


def check(name: str, root: Path, *, verify: bool = True) -> Iterator[Verdict]:
    """Yield a verdict on every file of a set, then one on the set if its parts do not fit."""
    if name == DIGITS:
        yield Verdict("scikit-learn's digits", None)
        return
    where, sound = name, True
    try:
        place = files.located(name, root)
        where = str(place.path)
        for file, path, read in files.contents(place):
            fault = None
            try:
                _parse(place.form, file, path, read(), verify)
            except ConformalError as error:
                fault = str(error).removeprefix(f"{path}: ")
            sound = sound and fault is None
            yield Verdict(str(path), fault)
        if sound and not verify:  # the known files do fit
            load(name, root, verify=False)
    except ConformalError as error:
        yield Verdict(where, str(error).removeprefix(f"{where}: "))


def _parse(form: Form, file: str, path: Path, data: bytes, verify: bool) -> dict[str, Bytes]:
    """Return the arrays of one file under the names of Dataset's fields."""
    part = "train" if file.startswith(("train", "data")) else "test"
    where, digest = str(path), files.md5(data) if verify else ""
    if verify:
        files.check_identity(digest, form.checksums[file], where)
    if form.format == "idx" and "images" in file:
        found = {f"{part}_images": read_idx(data, where, (_SIDE, _SIDE))[:, None]}
    elif form.format == "idx":
        found = {f"{part}_labels": checked_labels(read_idx(data, where, ()), where)}
    else:
        reader = read_cifar_binary if form.format == "binary" else read_cifar_pickle
        images, labels = reader(data, where)
        found = {f"{part}_images": images, f"{part}_labels": labels}
    if verify:
        files.check_checksum(digest, form.checksums[file], where)
    return found


def _joined(arrays: dict[str, list[Bytes]], part: str, where: str) -> tuple[Tensor, Tensor]:
    images, labels = (np.concatenate(arrays[f"{part}_{kind}"]) for kind in ("images", "labels"))
    check_counts(len(images), len(labels), f"{part} part of {where}")
    return torch.from_numpy(images), torch.from_numpy(labels).long()


def _digits() -> Dataset:
    try:
        from .digits import digits
    except ImportError as error:
        raise missing_extra("scikit-learn", "experiments", f"the dataset {DIGITS}") from error
    found = digits()
    train, test = ((255 * x).round().byte() for x in (found.train_images, found.test_images))
    return Dataset(DIGITS, train, found.train_labels, test, found.test_labels)
