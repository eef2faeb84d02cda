"""Read pictures with Pillow, and folders of them with one sub-folder for each class."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import first_line, ignored_warnings, refusal, shape_text
from ...utils.progress import progress
from ...utils.text import printable
from .catalogue import NAMES

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Array = np.ndarray[Any, Any]
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"),
)
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # nothing that runs a program
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of 8 bits or less
TEST_SHARE = 0.2  # of each class, held out for testing
_LARGEST = 1024  # pixels of a side
_SHOWN = 5  # names in an error message
_HELD_OUT = ("test", "val", "valid", "validation")
# With folders in them, folders of these names are parts of a data set and not classes.
_PARTS = ("train", *_HELD_OUT, "training", "testing", "dev", "eval")
_LAYOUT = "Give a folder with one sub-folder of pictures per class."
File = tuple[str, int]  # the path below the folder, and the class


class Unreadable(Exception):
    """Raised with the reason why a file cannot be read."""


def files_below(folder: str, onerror: Callable[[OSError], object]) -> Iterator[str]:
    """Yield the images below a folder, sorted; hidden files and links to folders are skipped."""
    for place, folders, files in os.walk(folder, onerror=onerror):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield os.path.join(place, name)


def find_images(paths: Iterable[str]) -> Iterator[str]:
    """Yield the images of files and folders, in order, and the folders that cannot be read."""
    for path in paths:
        closed: list[OSError] = []
        yield from files_below(path, closed.append) if os.path.isdir(path) else [path]
        yield from (str(error.filename) for error in closed)


def read_image(source: str | IO[bytes], shape: tuple[int, ...]) -> Array:
    """Return an image as (C, H, W), float32, with values in [0, 1], scaled to the shape; transparent pixels are put over white.

    Raises:
        Unreadable: not an image, damaged, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    if len(shape) != 3 or shape[0] not in (1, 3):
        raise Unreadable(f"an image where the model takes {shape_text(shape)}")
    with ignored_warnings(Image.DecompressionBombWarning):  # ignored are such as odd metadata
        try:
            if isinstance(source, str) and os.path.exists(source) and not os.path.isfile(source):
                raise Unreadable("not a regular file")  # opening a pipe would block
            with Image.open(source, formats=_FORMATS) as image:
                return _pixels(image, shape)
        except Unreadable:
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise Unreadable("too many pixels") from error
        except UnidentifiedImageError as error:
            raise Unreadable(f"not an image of {', '.join(_FORMATS)}") from error
        except Exception as error:  # decoders raise anything for damaged files
            reason = error.strerror if isinstance(error, OSError) else None
            raise Unreadable(reason or f"a damaged image ({first_line(error)})") from error


def _pixels(image: Picture, shape: tuple[int, ...]) -> Array:
    """Return the pixels, (C, H, W), in [0, 1]."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    # Photographs of phones hold a second picture, which MPO calls a frame.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise Unreadable("several images in one file")
    if image.mode not in _MODES:
        raise Unreadable(f"pixels of mode {image.mode}, whose white is not known")
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    plain = upright if upright.mode in ("1", "L") else upright.convert("RGB")
    plain = plain.convert("L" if channels == 1 else "RGB")
    if plain.size != (width, height):
        plain = plain.resize((width, height), Image.Resampling.BILINEAR)
    values = np.asarray(plain, np.float32).reshape(height, width, channels)
    return np.ascontiguousarray(values.transpose(2, 0, 1)) / np.float32(255)


# -- folders of pictures --


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
    """The files of a folder: which are for training and which for testing, and their classes."""

    folder: Path  # absolute
    labels: tuple[str, ...]  # names of the classes, sorted
    train: tuple[File, ...]
    test: tuple[File, ...]
    has_parts: bool = False  # the folder itself says which files are for testing

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names, the sizes and the parts of all files."""
        digest = hashlib.sha256()
        for part, files in (("train", self.train), ("test", self.test)):
            for path in sorted(path for path, _ in files):
                place = self.folder / path
                # A link to nothing is refused when the pictures are read.
                size = place.stat().st_size if place.exists() else -1
                digest.update(f"{part} {_name_hash(path).hex()} {size}\n".encode())
        return digest.hexdigest()

    def read(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decode the pictures: images (N, *shape), unsigned bytes, and labels (N,), for training and for test.

        They are scaled to the shape and put upright; a folder with a broken picture is refused.
        """
        files, broken = (*self.train, *self.test), []
        images = np.empty((len(files), *shape), np.uint8)
        for index, (path, _) in enumerate(progress(files, len(files), "pictures")):
            try:
                values = 255 * read_image(str(self.folder / path), shape)
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
    root = Path(folder).absolute()
    where = f"{where} {printable(str(folder))}"
    labels = _sub_folders(root, where)
    held_out = next((name for name in _HELD_OUT if name in labels), None)
    has_parts = any(n.lower() in _PARTS and any((root / n).glob("[!.]*/")) for n in labels)
    if has_parts:
        if held_out is None or not {"train"} <= set(labels) <= {"train", *_HELD_OUT}:
            expected = "train and test, train and val, or folders of classes"
            raise refusal(where, expected, ", ".join(labels), "Move other folders away.")
        labels, others = (_sub_folders(root / part, where) for part in ("train", held_out))
        if labels != others:
            other = ", ".join(sorted(set(labels) ^ set(others)))
            expected = f"the same classes in train and {held_out}"
            raise refusal(where, expected, f"{other} in one", _LAYOUT)
        train, test = (
            [_class_files(root, f"{part}/{label}", where) for label in labels]
            for part in ("train", held_out)
        )
    else:
        classes = [_class_files(root, label, where, at_least=2) for label in labels]
        counts = [max(1, round(TEST_SHARE * len(files))) for files in classes]
        test = [files[:count] for files, count in zip(classes, counts, strict=True)]
        train = [files[count:] for files, count in zip(classes, counts, strict=True)]
    if len(labels) < 2:
        raise refusal(where, "two classes or more", ", ".join(labels) or "none", _LAYOUT)
    return Pictures(root, tuple(labels), _numbered(train), _numbered(test), has_parts)


def _numbered(classes: Sequence[Sequence[str]]) -> tuple[File, ...]:
    return tuple((path, label) for label, files in enumerate(classes) for path in files)


def _sub_folders(folder: Path, where: str) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones and files do not count."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise refusal(where, "a folder with one sub-folder per class", got, _LAYOUT)
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    loose = [path.name for path in entries if path.name.lower().endswith(SUFFIXES)]
    if loose:
        got = f"the picture {printable(loose[0])} beside them"
        raise refusal(where, "pictures in the folders of their classes", got, "Move it.")
    return [path.name for path in entries if path.is_dir()]


def _class_files(root: Path, below: str, where: str, at_least: int = 1) -> list[str]:
    """Return the files of a class as paths below the root, sorted by the hash of their names.

    A file that is added leaves the order of the others.
    """

    def fail(error: OSError) -> None:
        raise error

    pictures = files_below(str(root / below), fail)
    files = [os.path.relpath(path, root) for path in pictures]
    if len(files) < at_least:
        expected = f"{at_least} or more pictures of the class {below}"
        raise refusal(where, expected, str(len(files)), "Add pictures, or remove the folder.")
    return sorted(files, key=_name_hash)


def _name_hash(path: str) -> bytes:
    return hashlib.sha256(PurePath(path).as_posix().encode("utf-8", "surrogateescape")).digest()
