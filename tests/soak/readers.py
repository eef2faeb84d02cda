"""Attack readers of data and the report: damaged pictures and archives, and hostile names.

A reader must return what its caller asked for or say in one error why not, in bounded memory.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from conformallayers.errors import ConformalError
from conformallayers.lab.data.files import read_arrays, read_files
from conformallayers.lab.data.pictures import Unreadable, read_image
from conformallayers.lab.report.page import write_page
from conformallayers.utils.text import Table
from datafiles import idx, random_images
from soak.case import Case, limited_memory

MEMORY = 2**31  # bytes that a reader may ask for
DAMAGED = 30  # files of one case
_SHAPE = 3, 8, 8
_FORMATS = "PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"
_HOSTILE = (
    "<script>",
    '"><img src=x onerror=y>',
    "&lt;",
    "</table>",
    "'",
    "\0",
    "\u202e",
    "javascript:",
)


def attack(case: Case) -> None:
    """Read damaged files of every kind, and write a page of hostile names."""
    with TemporaryDirectory() as folder:
        for _ in range(DAMAGED):
            name, read = case.rng.choice(list(READERS.items()))
            case.subject = f"the last file is damaged as {name}"
            case.counts["damaged data files"] += 1
            try:
                with limited_memory(MEMORY):
                    read(case.rng, Path(folder))
            except (ConformalError, Unreadable):
                case.counts["data files refused"] += 1
        _check_page(case, Path(folder) / "page.html")


def _damaged(rng: Random, content: bytes) -> bytes:
    """Change a few bytes, most of them of the header, to small or absurd numbers, or cut the end off."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        end = min(len(found), rng.choice((16, 64, 256, len(found))))
        place, size = rng.randrange(end), rng.choice((1, 2, 4, 8))
        found[place : place + size] = rng.choice((b"\xff", b"\0", b"\x7f", b"9")) * size
    return bytes(found[: rng.randrange(len(found))] if rng.random() < 0.2 else found)


def _picture(rng: Random, folder: Path) -> None:
    stream = io.BytesIO()
    pixels = np.random.default_rng(rng.getrandbits(30)).integers(0, 256, (9, 7, 3), np.uint8)
    image = Image.fromarray(pixels).convert(rng.choice(("RGB", "L")))
    image.save(stream, rng.choice(_FORMATS))
    stream = io.BytesIO(_damaged(rng, stream.getvalue()))
    values = read_image(stream, _SHAPE)
    assert values.shape == _SHAPE
    assert values.min() >= 0
    assert values.max() <= 1


def _archive(rng: Random, folder: Path) -> None:
    """Read a data set of one packed file, damaged, or a bomb of gzip members of zeros."""
    root = folder / f"{rng.getrandbits(60)}"
    (root / "mnist").mkdir(parents=True)
    names = [f"{part}-{kind}" for part in ("train", "t10k") for kind in _KINDS]
    whole = gzip.compress(idx(random_images(2, 28, 28)), mtime=0)
    bomb = gzip.compress(bytes(2**20), mtime=0) * (2048 if rng.random() < 0.05 else 1)
    for name in names:
        content = rng.choice((whole, _damaged(rng, whole), bomb))
        (root / "mnist" / f"{name}.gz").write_bytes(content)
    for file, path, data in read_files("mnist", root):
        read_arrays("mnist", file, data, str(path), verify=False)


def _tar(rng: Random, folder: Path) -> None:
    root, stream = folder / f"{rng.getrandbits(60)}", io.BytesIO()
    root.mkdir()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"):
            entry = tarfile.TarInfo(rng.choice(("", "../", "/")) + name)
            entry.size = 3073
            archive.addfile(entry, io.BytesIO(bytes(3073)))
    content = _damaged(rng, stream.getvalue())
    (root / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(content))
    for file, path, data in read_files("cifar10", root):
        read_arrays("cifar10", file, data, str(path), verify=False)
    assert len(list(root.iterdir())) == 1  # nothing was unpacked into the folder


_KINDS = "images-idx3-ubyte", "labels-idx1-ubyte"
READERS: dict[str, Callable[[Random, Path], None]] = {
    "picture": _picture,
    "idx": _archive,
    "tar": _tar,
}


class _Tags(HTMLParser):
    """Collect the tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text = set[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags |= {tag, *(name for name, _ in attrs)}

    def handle_data(self, data: str) -> None:
        self.text += data


def _check_page(case: Case, path: Path) -> None:
    """Write a page of names with markup: the page must have its own tags alone, and the names as text."""
    names = ["".join(case.rng.choices(_HOSTILE, k=3)) for _ in range(3)]
    plain, hostile = (
        _Tags(write_page(path, words[0], {words[1]: [words[2], Table(words, [words])]}).read_text())
        for words in (["name"] * 3, names)
    )
    if hostile.tags != plain.tags or not all(name in hostile.text for name in names):
        case.find(f"{names} became {hostile.tags - plain.tags}")
