"""Read folders of pictures as data sets: one sub-folder for each class, PNG, JPEG or other image files in it."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

import numpy as np
import torch
from torch import Tensor

from ...errors import refusal
from ...utils.progress import progress
from ...utils.text import printable
from .catalogue import NAMES
from .datasets import Dataset
from .images import SUFFIXES, Unreadable, files_below, need_pillow, read_image

SIZE = "32"  # pixels of both sides, if no size is given
TEST_SHARE = 0.2  # of each class, set aside for testing
_LARGEST = 1024  # pixels of a side
_SHOWN = 5  # names in an error message
_VALIDATION = ("val", "valid", "validation")
# Folders of these names hold parts of a data set; they are hardly classes.
_SPLITS = ("train", "test", *_VALIDATION, "training", "testing", "dev", "eval")
_LAYOUT = "Give a folder with one sub-folder of pictures per class."


def is_pictures(dataset: str) -> bool:
    """Return whether a data set is a folder of pictures, and none of the known sets.

    A word that is neither is taken for a misspelt name of a known set.
    """
    return dataset not in NAMES and (
        os.path.exists(dataset) or os.path.basename(dataset) != dataset
    )


def written_size(size: str | int | Sequence[int] | None) -> str | None:
    """Return a size as the command line takes it, such as ``"48x64"`` for ``(48, 64)``."""
    if isinstance(size, Sequence) and not isinstance(size, str):
        return "x".join(map(str, size))
    return None if size is None else str(size)


def parse_size(text: str | None) -> tuple[int, int]:
    """Return height and width from ``"48"`` or ``"48x64"``; None means 32.

    Examples:
        >>> parse_size("48"), parse_size("48x64"), parse_size(None)
        ((48, 48), (48, 64), (32, 32))
    """
    found = re.fullmatch(r"(\d+)(?:[x×](\d+))?", (SIZE if text is None else text).strip())
    sides = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= min(sides) <= max(sides) <= _LARGEST:
        expected = f"N or HEIGHTxWIDTH, from 1 to {_LARGEST} pixels"
        raise refusal("train --size", expected, repr(text), "Leave it out for 32.")
    return sides


@dataclass(frozen=True)
class Pictures:
    """The files of a folder: which are for training and which for testing, and their classes.

    Args:
        folder: absolute path.
        labels: names of the classes, sorted.
        train, test: (path below the folder, class). Training files are in a fixed random order in which
            the classes are spread evenly.
        has_parts: whether the folder itself says which files are for testing.
    """

    folder: Path
    labels: tuple[str, ...]
    train: tuple[tuple[str, int], ...]
    test: tuple[tuple[str, int], ...]
    has_parts: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names, the sizes and the parts of all files."""
        digest = hashlib.sha256()
        for part, files in (("train", self.train), ("test", self.test)):
            for path in sorted((path for path, _ in files), key=_portable):
                place = self.folder / path
                # A link to nothing is refused when the pictures are read.
                size = place.stat().st_size if os.path.exists(place) else -1
                digest.update(f"{part} {_portable(path).hex()} {size}\n".encode())
        return digest.hexdigest()

    def read(self, size: tuple[int, int], only_test: bool = False, channels: int = 3) -> Dataset:
        """Decode the pictures, (N, channels, H, W); refuse the folder if one cannot be read.

        Args:
            size: height and width that pictures are scaled to.
            only_test: leave the training images out.
            channels: 3, or 1 for grey.
        """
        files = [*([] if only_test else self.train), *self.test]
        images = decode([str(self.folder / path) for path, _ in files], (channels, *size))
        labels = torch.tensor([label for _, label in files])
        count = len(files) - len(self.test)
        known = {image.numpy().tobytes() for image in images[:count]}
        copies = sum(image.numpy().tobytes() in known for image in images[count:])
        if copies:
            told = (
                f"{copies} of {len(self.test)} test pictures are also for training, after scaling"
            )
            place = printable(str(self.folder))
            print(f"conformallayers: {place}: {told}. Remove the copies.", file=sys.stderr)
        parts = (images[:count], labels[:count], images[count:], labels[count:])
        return Dataset(str(self.folder), *parts, len(self.labels), self.labels, spread=True)


def find_pictures(folder: str | os.PathLike[str], where: str = "train") -> Pictures:
    """List the pictures of a folder and set some aside for testing; nothing is decoded.

    A folder with ``train`` and ``test`` in it has its test pictures already; one with ``train`` and ``val``, ``valid``
    or ``validation`` is tested on these, which are not used if there is a ``test``. Otherwise a fifth of each class, at
    least one picture, is for testing: always the same files, as the hash of their names decides.
    """
    need_pillow()
    root = Path(folder).absolute()
    where = f"{where} {printable(str(folder))}"
    names = _sub_folders(root, where)
    parts = _split_folders(root, names, where)
    if parts:
        labels, others = (_sub_folders(root / part, f"{where}/{part}") for part in parts)
        if labels != others:
            odd = ", ".join(sorted(set(labels) ^ set(others)))
            expected = f"the same classes in {parts[0]} and {parts[1]}"
            raise refusal(where, expected, f"{odd} in one", _LAYOUT)
        train, test = (_class_files(root, part, labels, where) for part in parts)
    else:
        labels = names
        train, test = [], []
        for label, files in zip(labels, _class_files(root, "", labels, where), strict=True):
            if len(files) < 2:
                remedy = "Add pictures: one is for training and one for testing at least."
                raise refusal(where, f"2 or more pictures of the class {label}", "1", remedy)
            count = max(1, round(TEST_SHARE * len(files)))
            test.append(files[:count])
            train.append(files[count:])
    if len(labels) < 2:
        got = f"one, {labels[0]}" if labels else "none"
        raise refusal(where, "two classes or more", got, _LAYOUT)
    return Pictures(root, tuple(labels), _spread(train), _spread(test), bool(parts))


def decode(paths: Sequence[str], shape: tuple[int, int, int]) -> Tensor:
    """Return pictures as (N, C, H, W), unsigned bytes: scaled, upright, transparent pixels over white."""
    images = np.empty((len(paths), *shape), np.uint8)
    broken = []
    for index, path in enumerate(progress(paths, len(paths), "pictures")):
        try:
            values = read_image(path, shape, 255.0, resize=True, opaque=True)
        except Unreadable as fault:
            broken.append(f"{printable(path)} ({printable(str(fault))})")
            continue
        images[index] = values.round().astype(np.uint8)
    if broken:
        more = f" and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        got = f"{len(broken)} that cannot: {'; '.join(broken[:_SHOWN])}{more}"
        remedy = "Replace or remove them."
        raise refusal("pictures", "files that can be read", got, remedy)
    return torch.from_numpy(images)


def _sub_folders(folder: Path, where: str) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones and files do not count."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise refusal(where, "a folder with one sub-folder per class", got, _LAYOUT)
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    names = [path.name for path in entries if path.is_dir()]
    for path in entries:
        if path.name.lower().endswith(SUFFIXES) and not path.is_dir():
            got = f"the picture {printable(path.name)} beside them"
            raise refusal(where, "pictures in the folders of their classes", got, "Move it.")
    for name in names:
        if printable(name) != name or name != name.strip():
            got = printable(name)
            raise refusal(where, "folder names that can be printed", got, "Rename the folder.")
    return names


def _split_folders(root: Path, names: Sequence[str], where: str) -> tuple[str, str] | None:
    """Return the folders for training and for testing; None if the folders are classes."""
    known = {name.lower(): name for name in names}
    held_out = [name for name in ("test", *_VALIDATION) if name in known]
    is_clear = len(held_out) == 1 or "test" in held_out
    if len(known) == len(names) and is_clear and set(known) == {"train", *held_out}:
        train, test, *unused = (known[name] for name in ("train", *held_out))
        if unused or test.lower() != "test":
            more = f"; {', '.join(unused)} is not used" if unused else ""
            note = f"trained on {train}, tested on {test}{more}"
            print(f"conformallayers: {where}: {note}", file=sys.stderr)
        return train, test
    for name in names:
        if name.lower() in _SPLITS and any((root / name).glob("[!.]*/")):
            expected = "train and test, train and val, or folders of classes"
            remedy = f"Move other folders away, or rename {name} if it is a class."
            raise refusal(where, expected, ", ".join(names), remedy)
    return None


def _class_files(root: Path, part: str, labels: Sequence[str], where: str) -> list[list[str]]:
    """Return the files of each class as paths below the root.

    They are in the order of the hash of their names: a file that is added leaves the order of the others.
    """

    def fail(error: OSError) -> None:
        reason = f"{printable(str(error.filename))}: {error.strerror}"
        raise refusal(where, "folders that can be read", reason, "Check their permissions.")

    found = []
    for label in labels:
        below = os.path.join(part, label)
        if root.resolve().is_relative_to((root / below).resolve()):
            got = f"{label}, a link to the folder itself or to one above it"
            raise refusal(where, "folders of classes", got, "Remove the link.")
        pictures = files_below(str(root / below), SUFFIXES, fail)
        files = [os.path.relpath(path, root) for path in pictures]
        if not files:
            remedy = "Add pictures, or remove the folder."
            raise refusal(where, f"pictures of the class {below}", "an empty folder", remedy)
        found.append(sorted(files, key=lambda path: hashlib.sha256(_portable(path)).digest()))
    return found


def _portable(path: str) -> bytes:
    """Return a path as bytes that are the same on every system: with slashes, letters composed."""
    text = unicodedata.normalize("NFC", PurePath(path).as_posix())
    return text.encode("utf-8", "surrogateescape")


def _spread(classes: Sequence[Sequence[str]]) -> tuple[tuple[str, int], ...]:
    """Interleave the files of the classes: any first N of them have each class in its share.

    Examples:
        >>> _spread([["a1", "a2", "a3", "a4"], ["b1", "b2"]])
        (('a1', 0), ('b1', 1), ('a2', 0), ('a3', 0), ('b2', 1), ('a4', 0))
    """
    # File i of n lies at (i + 1/2)/n of its class; sorting by this place interleaves the classes.
    places = [
        ((index + 0.5) / len(files), label, path)
        for label, files in enumerate(classes)
        for index, path in enumerate(files)
    ]
    return tuple((path, label) for _, label, path in sorted(places))
