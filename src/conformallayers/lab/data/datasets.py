"""Load data sets: known ones from files, digits from scikit-learn, and folders of pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import missing_extra, refusal, shape_text
from ...networks import IMAGE_SHAPE
from ...utils.text import printable
from ..options import DataOptions
from . import files
from .catalogue import CLASSES, DIGITS, LABELS, NAMES, SHAPES
from .pictures import Pictures, find_pictures, is_pictures, parse_size


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels for training and test."""

    name: str
    train_images: Tensor  # (N, C, H, W), unsigned bytes; 0 is black
    train_labels: Tensor  # (N,), int64, from 0 to classes - 1
    test_images: Tensor
    test_labels: Tensor
    classes: int = CLASSES  # outputs of a network that is trained on it
    labels: tuple[str, ...] | None = None  # names other than those of the catalogue
    pictures: str | None = None  # digest of a folder of pictures

    def __post_init__(self) -> None:
        labels = torch.cat([self.train_labels, self.test_labels])
        wrong = labels[(labels < 0) | (labels >= self.classes)]
        if len(wrong):
            expected, got = f"labels from 0 to {self.classes - 1}", str(wrong[0].item())
            remedy = "Give the number of classes: Dataset(classes=...)."
            raise refusal(f"dataset {self.name}", expected, got, remedy)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a training run that follow from the data set."""
        shape = tuple(self.train_images.shape[1:])
        keeps_shape = self.pictures is not None or max(shape[1:]) > IMAGE_SHAPE[1]
        return {
            "classes": self.classes,
            "labels": list(self.labels) if self.labels else None,
            "in_shape": list(shape) if keeps_shape else None,
            "pictures": self.pictures,
        }

    def split(self, validation: float | int) -> tuple[Dataset, Dataset]:
        """Hold out training images, a share below 1 or a count; return the rest, and a data set that tests on them.

        All runs hold out the same images.
        """
        total = len(self.train_labels)
        if not 0 <= validation < total or (validation > 1 and validation % 1):
            expected = f"a share below 1 or an integer below {total}"
            raise refusal("validation", expected, f"{validation:g}", "0 holds out nothing.")
        count = min(round(validation * total) if validation < 1 else int(validation), total - 1)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
        held_out, kept = order[:count].sort().values, order[count:].sort().values
        images, labels = self.train_images, self.train_labels
        train = replace(self, train_images=images[kept], train_labels=labels[kept])
        return train, replace(train, test_images=images[held_out], test_labels=labels[held_out])


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    size: str | int | None = None,
    verify: bool = True,
    where: str = "train",
) -> Dataset:
    """Read a data set into memory.

    Args:
        name: ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"``, ``"digits"``, or a folder of pictures.
        root: the folder of the known sets; None takes CONFORMALLAYERS_DATA, else ``data``.
        size: of pictures, such as ``48`` or ``"48x64"``; None means 32.
        verify: compare checksums; False accepts your own data in the same format.
        where: the command, for error messages.
    """
    if is_pictures(name):
        return _read_pictures(find_pictures(name, where), (3, *parse_size(size)))
    if size is not None and name in NAMES:
        remedy = "Leave it out: the images of a known set have one size."
        raise refusal(f"{where} --size", "a folder of pictures", name, remedy)
    if name == DIGITS:
        return _digits()
    return _read_known(name, files.data_root(root), verify)


def _read_known(name: str, root: Path, verify: bool) -> Dataset:
    read = {
        file: files.read_arrays(name, file, data, str(path), verify)
        for file, path, data in files.read_files(name, root)
    }
    tensors: list[Any] = []
    for prefixes in (("train", "data"), ("t10k", "test")):
        arrays = [found for file, found in read.items() if file.startswith(prefixes)]
        images, labels = (
            np.concatenate([found[kind] for found in arrays if kind in found])
            for kind in ("images", "labels")
        )
        if len(images) != len(labels):
            got, remedy = f"{len(labels)} for {len(images)}", "Get both from the same set."
            raise refusal(f"dataset {name}", "as many labels as images", got, remedy)
        tensors += [torch.from_numpy(images), torch.from_numpy(labels).long()]
    return Dataset(name, *tensors)


def _digits() -> Dataset:
    """Load scikit-learn's digits, integers up to 16; the test set is a fixed quarter of each class."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise missing_extra("scikit-learn", "experiments", f"the dataset {DIGITS}") from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images * 255 / 16).round().byte().unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, random_state=0, stratify=bunch.target
    )
    return Dataset(DIGITS, images[train], labels[train], images[test], labels[test])


# -- folders of pictures, and data sets to test on ----------------------------------------------------


def _read_pictures(pictures: Pictures, shape: tuple[int, ...]) -> Dataset:
    about: Any = {"labels": pictures.labels, "pictures": pictures.digest}
    parts = pictures.read(shape)
    return Dataset(str(pictures.folder), *parts, classes=len(pictures.labels), **about)


def load_test(
    name: str | None,
    network: Any,
    shape: tuple[int, ...],
    options: DataOptions,
    where: str,
    *,
    only_test: bool = True,
) -> Dataset:
    """Read a data set to test a fold or a run on, by default that of its training, as its notes ``about`` name it.

    Of the folder of the training, the held-out pictures are read; of another folder all pictures, or those
    below ``test``. Classes get the numbers that the network has for their names, ``labels``.
    """
    about, labels = network.about or {}, network.labels
    trained, digest = about.get("dataset"), about.get("pictures")
    name = name or (trained if trained in SHAPES or digest else None)
    if name is None:
        expected = "the set of the test images" if only_test else "images to calibrate with"
        raise refusal(where, expected, "none", "Name a data set, such as mnist.")
    if is_pictures(name):
        pictures, where = find_pictures(name, where), f"{where} {printable(name)}"
        if pictures.digest != digest:
            if digest and os.path.exists(str(trained)) and pictures.folder.samefile(str(trained)):
                remedy = "Restore it, or name a folder of other pictures by --dataset."
                got = "a changed one: its test pictures may have been training pictures"
                raise refusal(where, "the folder as it was for the training", got, remedy)
            if only_test and not pictures.has_parts:
                pictures = replace(pictures, test=(*pictures.train, *pictures.test))
        data = _read_pictures(replace(pictures, train=()) if only_test else pictures, shape)
    else:
        data = load(name, options.data_root, verify=options.verify)
    found = tuple(data.test_images.shape[1:])
    if shape not in (IMAGE_SHAPE, found):
        remedy = "Name a set of such images or a folder of pictures, or fold for these."
        raise refusal(where, f"images of {shape_text(shape)}", shape_text(found), remedy)
    return data if labels is None else _renumbered(data, labels, where)


def _renumbered(data: Dataset, labels: Sequence[str], where: str) -> Dataset:
    """Return a data set with the class numbers of a network; refuse classes that it does not have."""
    own = data.labels or LABELS[data.name]
    odd = [label for label in own if label not in labels]
    if odd:
        remedy = "Name a data set with classes of the network; folders are named after their class."
        raise refusal(where, f"classes among {', '.join(labels)}", ", ".join(odd), remedy)
    places = torch.tensor([labels.index(label) for label in own])
    train, test = places[data.train_labels], places[data.test_labels]
    names: Any = {"classes": len(labels), "labels": tuple(labels)}
    return replace(data, train_labels=train, test_labels=test, **names)
