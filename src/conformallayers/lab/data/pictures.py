"""List and decode folders of pictures: one sub-folder for each class, PNG, JPEG or other image files in it."""

from __future__ import annotations

import hashlib
import os
import re
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
from .images import SUFFIXES, Unreadable, files_below, need_pillow, read_image

TEST_SHARE = 0.2  # of each class, held out for testing
_LARGEST = 1024  # pixels of a side
_SHOWN = 5  # names in an error message
_HELD_OUT = ("test", "val", "valid", "validation")
# Folders of these names hold parts of a data set; with folders in them they are no classes.
_SPLITS = ("train", *_HELD_OUT, "training", "testing", "dev", "eval")
_LAYOUT = "Give a folder with one sub-folder of pictures per class."
File = tuple[str, int]  # the path below the folder, and the class


def is_pictures(dataset: str) -> bool:
    """Return whether a data set is a folder of pictures, and none of the known sets.

    A word that is neither is taken for a misspelt name of a known set.
    """
    return dataset not in NAMES and (
        os.path.exists(dataset) or os.path.basename(dataset) != dataset
    )


def parse_size(size: str | int | None) -> tuple[int, int]:
    """Return height and width from ``48`` or ``"48x64"``; None means 32.

    Examples:
        >>> parse_size(48), parse_size("48x64"), parse_size(None)
        ((48, 48), (48, 64), (32, 32))
    """
    found = re.fullmatch(r"(\d+)(?:[x×](\d+))?", str(32 if size is None else size).strip())
    sides = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= min(sides) <= max(sides) <= _LARGEST:
        expected = f"N or HEIGHTxWIDTH, from 1 to {_LARGEST} pixels"
        raise refusal("train --size", expected, repr(size), "Leave it out for 32.")
    return sides


@dataclass(frozen=True)
class Pictures:
    """The files of a folder: which are for training and which for testing, and their classes.

    Args:
        folder: absolute path.
        labels: names of the classes, sorted.
        train, test: the files.
        has_parts: whether the folder itself says which files are for testing.
    """

    folder: Path
    labels: tuple[str, ...]
    train: tuple[File, ...]
    test: tuple[File, ...]
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

    def read(self, size: tuple[int, int], channels: int = 3) -> tuple[Tensor, ...]:
        """Decode the pictures: images (N, channels, H, W), unsigned bytes, and labels (N,), for training and for test.

        They are scaled to the size and put upright, transparent pixels over white; a folder with a broken picture is
        refused.
        """
        shape, broken = (channels, *size), []
        files = (*self.train, *self.test)
        images = np.empty((len(files), *shape), np.uint8)
        for index, (path, _) in enumerate(progress(files, len(files), "pictures")):
            try:
                values = read_image(str(self.folder / path), shape, 255.0, resize=True, opaque=True)
                images[index] = values.round().astype(np.uint8)
            except Unreadable as fault:
                broken.append(f"{printable(path)} ({printable(str(fault))})")
        if broken:
            more = f" and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
            got = f"{len(broken)} that cannot: {'; '.join(broken[:_SHOWN])}{more}"
            where = f"pictures in {printable(str(self.folder))}"
            raise refusal(where, "files that can be read", got, "Replace or remove them.")
        pixels, labels = torch.from_numpy(images), torch.tensor([label for _, label in files])
        count = len(self.train)
        return pixels[:count], labels[:count], pixels[count:], labels[count:]


def find_pictures(folder: str | os.PathLike[str], where: str = "train") -> Pictures:
    """List the pictures of a folder and hold some out for testing; nothing is decoded.

    A folder with ``train`` and ``test`` in it has its test pictures already, or those of ``val``, ``valid`` or
    ``validation`` if there is no ``test``. Otherwise a fifth of each class, at least one picture, is for testing:
    always the same files, as the hash of their names decides.
    """
    need_pillow()
    root = Path(folder).absolute()
    where = f"{where} {printable(str(folder))}"
    names = _sub_folders(root, where)
    parts = {name.lower(): name for name in names}
    held_out = [parts[name] for name in _HELD_OUT if name in parts]
    has_parts = bool(held_out) and set(parts) <= {"train", *_HELD_OUT} and "train" in parts
    if has_parts:
        labels = _sub_folders(root / parts["train"], where)
        others = _sub_folders(root / held_out[0], where)
        if labels != others:
            other = ", ".join(sorted(set(labels) ^ set(others)))
            expected = f"the same classes in {parts['train']} and {held_out[0]}"
            raise refusal(where, expected, f"{other} in one", _LAYOUT)
        train, test = (
            [_class_files(root, os.path.join(part, label), where) for label in labels]
            for part in (parts["train"], held_out[0])
        )
    else:
        odd = [n for n in names if n.lower() in _SPLITS and any((root / n).glob("[!.]*/"))]
        if odd:
            expected = "train and test, train and val, or folders of classes"
            remedy = f"Move other folders away, or rename {odd[0]} if it is a class."
            raise refusal(where, expected, ", ".join(names), remedy)
        labels, train, test = names, [], []
        for label in labels:
            files = _class_files(root, label, where)
            if len(files) < 2:
                remedy = "Add pictures: one is for training and one for testing at least."
                raise refusal(where, f"2 or more pictures of the class {label}", "1", remedy)
            count = max(1, round(TEST_SHARE * len(files)))
            test.append(files[:count])
            train.append(files[count:])
    if len(labels) < 2:
        got = f"one, {labels[0]}" if labels else "none"
        raise refusal(where, "two classes or more", got, _LAYOUT)
    return Pictures(root, tuple(labels), _numbered(train), _numbered(test), has_parts)


def _numbered(classes: Sequence[Sequence[str]]) -> tuple[File, ...]:
    return tuple((path, label) for label, files in enumerate(classes) for path in files)


def _sub_folders(folder: Path, where: str) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones and files do not count."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise refusal(where, "a folder with one sub-folder per class", got, _LAYOUT)
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in entries:
        if path.name.lower().endswith(SUFFIXES) and not path.is_dir():
            got = f"the picture {printable(path.name)} beside them"
            raise refusal(where, "pictures in the folders of their classes", got, "Move it.")
    names = [path.name for path in entries if path.is_dir()]
    for name in names:
        if printable(name) != name or name != name.strip():
            got = printable(name)
            raise refusal(where, "folder names that can be printed", got, "Rename the folder.")
    return names


def _class_files(root: Path, below: str, where: str) -> list[str]:
    """Return the files of a class as paths below the root, sorted by the hash of their names.

    A file that is added leaves the order of the others.
    """

    def fail(error: OSError) -> None:
        reason = f"{printable(str(error.filename))}: {error.strerror}"
        raise refusal(where, "folders that can be read", reason, "Check their permissions.")

    pictures = files_below(str(root / below), SUFFIXES, fail)
    files = [os.path.relpath(path, root) for path in pictures]
    if not files:
        remedy = "Add pictures, or remove the folder."
        raise refusal(where, f"pictures of the class {below}", "an empty folder", remedy)
    return sorted(files, key=lambda path: hashlib.sha256(_portable(path)).digest())


def _portable(path: str) -> bytes:
    """Return a path as bytes that are the same on every system: with slashes, letters composed."""
    text = unicodedata.normalize("NFC", PurePath(path).as_posix())
    return text.encode("utf-8", "surrogateescape")
