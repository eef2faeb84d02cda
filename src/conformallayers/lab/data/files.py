"""Find the files of a data set below the data root, and read their bytes."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConformalError, refusal
from ..checks import require_choice
from .catalogue import LAYOUTS, NAMES, WITHOUT_FILES, Layout, identify

VARIABLE = "CONFORMALLAYERS_DATA"
_LIMIT = 1 << 30  # bytes of one file or archive, decompressed; the largest known one has 180 MB
_AGAIN = "Get the file again."


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the data: the argument, else CONFORMALLAYERS_DATA, else ``data``."""
    return Path(root or os.environ.get(VARIABLE) or "data").expanduser()


@dataclass(frozen=True)
class Place:
    """A folder or a tar archive, and the files of a layout that exist there, by their name in the catalogue."""

    layout: Layout
    path: Path
    found: dict[str, Path]

    @property
    def paths(self) -> list[Path]:
        """The existing files, an archive once."""
        return list(dict.fromkeys(self.found.values()))

    @property
    def missing(self) -> list[Path]:
        """The files that do not exist."""
        return [self.path / name for name in self.layout.checksums if name not in self.found]


def layouts_of(name: str) -> tuple[Layout, ...]:
    """Return the layouts of a known data set; digits and shapes have none."""
    remedy = "Run conformallayers data list, or name a folder of pictures."
    require_choice("dataset", name, NAMES, remedy)
    return LAYOUTS.get(name, ())


def places(name: str, root: Path) -> Iterator[Place]:
    """Yield where a data set is searched for, in this order."""
    for layout in layouts_of(name):
        folders = [root / folder for folder in layout.folders]
        for folder in folders:
            found = {
                file: folder / spelling
                for file in layout.checksums
                for spelling in reversed(layout.spellings(file))  # the first that exists is kept
                if os.path.isfile(folder / spelling)
            }
            yield Place(layout, folder, found)
        for archive in [folder / layout.archive for folder in folders[-2:] if layout.archive]:
            there = dict.fromkeys(layout.checksums, archive) if os.path.isfile(archive) else {}
            yield Place(layout, archive, there)


def locate(name: str, root: Path) -> Place:
    """Return the first complete place, else the one with most files, which may be none."""
    # Of equal counts max returns the first; the layouts of a set have equally many files.
    return max(places(name, root), key=lambda place: len(place.found))


def require(name: str, root: Path) -> Place:
    """Return the place of a data set with all its files, or raise an error that names the missing."""
    place = locate(name, root)
    if not place.missing:
        return place
    expected = ", ".join(map(str, place.missing))
    if not place.found:
        folders = ", ".join(str(searched.path) for searched in places(name, root))
        expected = f"{wanted_files(place.layout)} in {folders}"
    remedy = (
        f"Run conformallayers data get {name} --source FOLDER_OR_ADDRESS, "
        f"or name the folder by --data-root or {VARIABLE}."
    )
    raise refusal(f"dataset {name}", expected, "no such file", remedy)


def wanted_files(layout: Layout) -> str:
    """List the files of a layout for an error message."""
    return ", ".join(layout.checksums) + " (or .gz)" * (layout.format == "idx")


def found_where(root: Path) -> dict[str, str]:
    """Return where each known data set is; ``""`` if it was not found."""
    where = {}
    for name in LAYOUTS:
        place = locate(name, root)
        missing = f" ({len(place.missing)} missing)" if place.missing else ""
        where[name] = f"{place.path}{missing}" if place.found else ""
    return where | WITHOUT_FILES


def read_files(
    layout: Layout, path: Path, called: str | None = None
) -> Iterator[tuple[str, Path, bytes]]:
    """Yield the name in the catalogue, the path and the bytes of one file, or of all files of an archive.

    Args:
        layout: of the data set.
        path: of the file or archive.
        called: its name, if the path is that of a temporary file.
    """
    called = called or path.name
    opened = gzip.open if called.endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            stream = Bounded(file, str(path))
            if called == layout.archive:
                yield from _archived_files(layout, path, stream)
            else:
                name = next(name for name in layout.checksums if called in layout.spellings(name))
                yield name, path, stream.read()
    except ConformalError:
        raise
    except Exception as error:  # damaged archives raise anything
        reason = str(error).rstrip(".") or type(error).__name__
        raise refusal(str(path), "a file that can be read", reason, _AGAIN) from error


def _archived_files(layout: Layout, path: Path, stream: Any) -> Iterator[tuple[str, Path, bytes]]:
    wanted = set(layout.checksums)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = Path(member.name).name
            # A link would lead elsewhere, and a sparse file is longer than its bytes.
            if name in wanted and member.isreg() and not member.issparse():
                wanted.remove(name)
                content = archive.extractfile(member)
                yield name, path / member.name, content.read() if content else b""
    if wanted:
        expected = f"an archive with {', '.join(sorted(wanted))}"
        raise refusal(str(path), expected, "one without", _AGAIN)


class Bounded:
    """A stream that is refused after 1 GiB: a few compressed bytes may become any number."""

    def __init__(self, stream: Any, where: str) -> None:
        self._stream, self._where, self._left = stream, where, _LIMIT

    def read(self, size: int = _LIMIT) -> bytes:
        """Return up to ``size`` bytes."""
        data: bytes = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise refusal(self._where, f"at most {_LIMIT} bytes", "more", _AGAIN)
        return data


def md5(*parts: Any) -> str:
    """Return the MD5 of bytes, a guard against accidents and not against attacks."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def check_md5(data: bytes, expected: str, where: str) -> None:
    """Refuse bytes that do not have the expected checksum."""
    digest = md5(data)
    if digest == expected:
        return
    other = identify(digest)
    if other is not None:
        remedy = "The file has the wrong name; move it."
        raise refusal(where, f"{identify(expected)}", other, remedy)
    remedy = "Get the file again, or allow your own data with --no-check."
    raise refusal(where, f"the md5 {expected}", digest, remedy)
