"""Find data sets for training and for tests: a known set, a folder of pictures, or a data set in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import refusal, shape_text
from ...networks import IMAGE_SHAPE
from ...utils.text import printable
from .catalogue import CLASSES, LABELS, SHAPES
from .datasets import Dataset, load
from .pictures import find_pictures, is_pictures, parse_size, written_size


@dataclass(frozen=True)
class UnreadDataset:
    """A data set that is not read yet.

    Args:
        name: a known name, or the absolute path of a folder.
        options: of a run, as the data set determines them: classes; of a folder also labels, in_shape, size and pictures.
        read: reads the images.
    """

    name: str
    options: dict[str, Any]
    read: Callable[[], Dataset]


def find_source(
    dataset: str | Dataset,
    size: str | int | Sequence[int] | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    verify: bool = True,
    where: str = "train",
) -> UnreadDataset:
    """Look up a data set; a folder of pictures is listed, and nothing is decoded yet.

    Args:
        dataset: a name, a folder of pictures, or a data set.
        size: of pictures, ``48``, ``(48, 64)``, ``"48"`` or ``"48x64"``; None means 32.
        root, verify: as in :func:`conformallayers.lab.data.datasets.load`.
        where: the command, for error messages.
    """
    if isinstance(dataset, str) and is_pictures(dataset):
        written = written_size(size)
        pictures, sides = find_pictures(dataset, where), parse_size(written)
        return UnreadDataset(
            str(pictures.folder),
            {
                "classes": len(pictures.labels),
                "labels": list(pictures.labels),
                "in_shape": [3, *sides],
                "size": written,
                "pictures": pictures.digest,
            },
            lambda: pictures.read(sides),
        )
    if size is not None:
        name = dataset if isinstance(dataset, str) else dataset.name
        remedy = "Leave it out: its images have a size."
        if os.path.isdir(name):
            remedy = f"For the pictures in that folder write ./{name}; {name} is a known data set."
        raise refusal(f"{where} --size", "it for a folder of pictures", name, remedy)
    if isinstance(dataset, str):
        classes = len(LABELS.get(dataset, range(CLASSES)))
        return UnreadDataset(
            dataset, {"classes": classes}, lambda: load(dataset, root, verify=verify)
        )
    options: dict[str, Any] = {"classes": dataset.classes}
    if dataset.labels is not None:
        options["labels"] = list(dataset.labels)
    shape = tuple(dataset.train_images.shape[1:])
    if len(shape) == 3 and max(shape[1:]) > IMAGE_SHAPE[1]:
        options["in_shape"] = list(shape)
    return UnreadDataset(dataset.name, options, lambda: dataset)


def load_test(
    name: str | None,
    about: Mapping[str, Any],
    labels: tuple[str, ...] | None,
    shape: tuple[int, ...],
    root: str | os.PathLike[str] | None,
    *,
    verify: bool,
    where: str,
    option: str = "--dataset",
    only_test: bool = True,
) -> Dataset:
    """Read a data set to test a network on, by default that of its training.

    Of the folder of the training, the pictures that were set aside are read; of another folder all pictures, or those
    below ``test``. Classes get the numbers that the network has for their names, also those of a known set if the
    network was trained on a folder.

    Args:
        name: of a known set, or a folder of pictures.
        about: notes of the network: the ``dataset`` of its training, and the digest of a folder of ``pictures``.
        labels: names of the network's classes.
        shape: of the network's input.
        root, verify: as in :func:`conformallayers.lab.data.datasets.load`.
        where, option: the command and the option that names the set, for error messages.
        only_test: leave pictures for training out.
    """
    trained, digest = about.get("dataset"), about.get("pictures")
    name = name or (trained if trained in SHAPES or digest else None)
    if name is None:
        expected = "the set of the test images" if only_test else "images to calibrate with"
        raise refusal(f"{where} {option}", expected, "none", f"Name them: {option} mnist.")
    if not is_pictures(name):
        data = load(name, root, verify=verify)
        if digest is None or labels is None:
            return data
        _check_classes(LABELS[name], labels, f"{where} {name}")
        return _with_labels(data, labels)
    pictures, where = find_pictures(name, where), f"{where} {printable(name)}"
    if pictures.digest != digest:
        if digest and os.path.exists(str(trained)) and pictures.folder.samefile(str(trained)):
            remedy = "Restore it, or name a folder of other pictures by --dataset."
            got = "one with other files: those to test could be among those of the training"
            raise refusal(where, "the folder as it was for the training", got, remedy)
        if only_test and not pictures.has_parts:
            pictures = replace(pictures, train=(), test=(*pictures.train, *pictures.test))
    if labels is not None:
        _check_classes(pictures.labels, labels, where)
    if len(shape) != 3 or shape[0] not in (1, 3):
        remedy = "In Python, evaluate takes any images as a Dataset."
        raise refusal(where, "a network for pictures, (1 or 3, H, W)", shape_text(shape), remedy)
    channels, *sides = shape
    data = pictures.read((sides[0], sides[1]), only_test=only_test, channels=channels)
    return data if labels is None else _with_labels(data, labels)


def _check_classes(own: Sequence[str], labels: tuple[str, ...], where: str) -> None:
    """Refuse classes that a network does not have."""
    odd = [label for label in own if label not in labels]
    if odd:
        remedy = "Name a data set with classes of the network; folders are named after their class."
        raise refusal(where, f"classes among {', '.join(labels)}", ", ".join(odd), remedy)


def _with_labels(data: Dataset, labels: tuple[str, ...]) -> Dataset:
    """Return a data set with the class numbers of a network, by the names of the classes."""
    places = torch.tensor([labels.index(label) for label in data.labels or LABELS[data.name]])
    train, test = places[data.train_labels], places[data.test_labels]
    return replace(data, train_labels=train, test_labels=test, classes=len(labels), labels=labels)
