"""Find the files of a data set below the data root, read their bytes, and fetch them."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ...errors import ConformalError, refusal
from ...utils.files import replace_file
from ...utils.progress import progress
from ..checks import require_choice
from .catalogue import LAYOUTS, NAMES, WITHOUT_FILES, Layout

VARIABLE = "CONFORMALLAYERS_DATA"
_AGAIN = "Get the file again."
_CHUNK = 1 << 20  # bytes of a download at a time
_TIMEOUT = 60.0  # seconds without a byte


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


def require_known(name: str) -> None:
    """Refuse a name that is not in the catalogue."""
    remedy = "Run conformallayers data list, or name a folder of pictures."
    require_choice("dataset", name, NAMES, remedy)


def _places(name: str, root: Path) -> Iterator[Place]:
    """Yield where a data set is searched for, in this order."""
    layout = LAYOUTS[name]
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


def _locate(name: str, root: Path) -> Place:
    """Return the first complete place, else the one with most files, which may be none."""
    return max(_places(name, root), key=lambda place: len(place.found))


def require(name: str, root: Path) -> Place:
    """Return the place of a data set with all its files, or raise an error that names the missing."""
    require_known(name)
    place = _locate(name, root)
    if not place.missing:
        return place
    expected = ", ".join(map(str, place.missing))
    if not place.found:
        folders = ", ".join(str(searched.path) for searched in _places(name, root))
        expected = f"{_wanted_files(place.layout)} in {folders}"
    remedy = (
        f"Run conformallayers data get {name} --source FOLDER_OR_ADDRESS, "
        f"or name the folder by --data-root or {VARIABLE}."
    )
    raise refusal(f"dataset {name}", expected, "no such file", remedy)


def _wanted_files(layout: Layout) -> str:
    return ", ".join(layout.checksums) + " (or .gz)" * (layout.archive is None)


def found_where(root: Path) -> dict[str, str]:
    """Return where each known data set is; ``""`` if it was not found."""
    where = {}
    for name in LAYOUTS:
        place = _locate(name, root)
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
    try:
        if called == layout.archive:
            yield from _archived_files(layout, path)
        else:
            opened = gzip.open if called.endswith(".gz") else open
            with opened(path, "rb") as file:
                name = next(name for name in layout.checksums if called in layout.spellings(name))
                yield name, path, file.read()
    except ConformalError:
        raise
    except Exception as error:  # damaged archives raise anything
        reason = str(error).rstrip(".") or type(error).__name__
        raise refusal(str(path), "a file that can be read", reason, _AGAIN) from error


def _archived_files(layout: Layout, path: Path) -> Iterator[tuple[str, Path, bytes]]:
    wanted = set(layout.checksums)
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            name = Path(member.name).name
            if name in wanted and member.isreg():  # a link would lead elsewhere
                wanted.remove(name)
                content = archive.extractfile(member)
                yield name, path / member.name, content.read() if content else b""
    if wanted:
        expected = f"an archive with {', '.join(sorted(wanted))}"
        raise refusal(str(path), expected, "one without", _AGAIN)


def md5(*parts: Any) -> str:
    """Return the MD5 of bytes, a guard against accidents and not against attacks."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def check_md5(data: bytes, expected: str, where: str) -> None:
    """Refuse bytes that do not have the expected checksum."""
    if (digest := md5(data)) != expected:
        remedy = "Get the file again, or allow your own data with --no-check."
        raise refusal(where, f"the md5 {expected}", digest, remedy)


# -- fetching ---------------------------------------------------------------------------------------


def fetch(name: str, root: Path, source: str | None) -> list[Path]:
    """Copy or download a data set and return the written files; correct files are kept.

    The source is a folder with the files in a known layout, or the web address of one.
    """
    require_known(name)
    if name in WITHOUT_FILES:
        return []
    layout = LAYOUTS[name]
    with_archive = f" or {layout.archive} in {root}" if layout.archive else ""
    if source is None:
        if not _locate(name, root).missing:
            return []
        expected = "--source with a folder or a web address"
        remedy = f"Or put {_wanted_files(layout)} in {root / layout.folders[0]}{with_archive}."
        raise refusal(f"data get {name}", expected, "none", remedy)
    written = (_fetch_one(layout, choices) for choices in _downloads(name, root, source))
    return [path for path in written if path is not None]


def _downloads(name: str, root: Path, source: str) -> Iterator[list[tuple[Path, str]]]:
    """Yield the alternatives for each wanted file: its place below the root, and its address."""
    layout, base, folder = LAYOUTS[name], source.rstrip("/"), Path(source).expanduser()
    target = root / layout.folders[0]
    if not source.startswith(("http://", "https://")):
        if not folder.is_dir():
            expected = "a folder, or an address that starts with http"
            remedy = "Name the folder that holds the files."
            raise refusal("data get --source", expected, f"{folder}, which is none", remedy)
        for path in require(name, folder.resolve()).paths:
            parent = root if path.name == layout.archive else target
            yield [(parent / path.name, path.as_uri())]
    elif layout.archive is not None:
        yield [(root / layout.archive, f"{base}/{layout.archive}")]
    else:
        for file in layout.checksums:
            yield [(target / one, f"{base}/{one}") for one in (f"{file}.gz", file)]


def _fetch_one(layout: Layout, choices: list[tuple[Path, str]]) -> Path | None:
    """Write the first alternative that exists at its address; None if a correct file is there already."""

    def verify(path: str | Path, called: str) -> None:
        for file, _, data in read_files(layout, Path(path), called):
            where = called if called != layout.archive else f"{file} in {called}"
            check_md5(data, layout.checksums[file], where)

    for target, _ in choices:
        try:
            verify(target, target.name)
            return None
        except ConformalError:
            continue
    reasons = []
    for target, address in choices:
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT) as stream:
                target.parent.mkdir(parents=True, exist_ok=True)
                length = stream.headers.get("Content-Length", "")
                count = -(-int(length) // _CHUNK) if length.isdecimal() else 1
                chunks = iter(partial(stream.read, _CHUNK), b"")
                shown = progress(chunks, max(1, count), target.name)
                replace_file(target, shown, partial(verify, called=target.name))
        except (OSError, HTTPException) as error:
            reasons.append(f"{address}: {error}")
            continue
        return target
    remedy = "Name the address of the folder that holds the files."
    raise refusal("data get --source", "files at that address", "; ".join(reasons), remedy)
