"""Find the files of a data set below the data root, check and parse them, and fetch them."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import tarfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConformalError, refusal
from ...utils.files import replace_file
from ..checks import require_choice
from .catalogue import CLASSES, LAYOUTS, NAMES, WITHOUT_FILES, Layout

Bytes = npt.NDArray[np.uint8]
VARIABLE = "CONFORMALLAYERS_DATA"
_AGAIN = "Get the file again."
_CHUNK = 1 << 20  # bytes of a download at a time
_TIMEOUT = 60.0  # seconds without a byte
_CIFAR = (3, 32, 32)


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
    def missing(self) -> list[str]:
        """The files that do not exist."""
        return [str(self.path / name) for name in self.layout.checksums if name not in self.found]


def _places(name: str, root: Path) -> Iterator[Place]:
    """Yield where a data set is searched for, in this order."""
    layout = LAYOUTS[name]
    for folder in (root / one for one in layout.folders):
        found = {
            file: folder / spelling
            for file in layout.checksums
            for spelling in reversed(layout.spellings(file))  # the first that exists is kept
            if os.path.isfile(folder / spelling)
        }
        yield Place(layout, folder, found)
        if layout.archive and os.path.isfile(archive := folder / layout.archive):
            yield Place(layout, archive, dict.fromkeys(layout.checksums, archive))


def _locate(name: str, root: Path) -> Place:
    """Return the first complete place, else the one with most files, which may be none."""
    return max(_places(name, root), key=lambda place: len(place.found))


def require(name: str, root: Path) -> Place:
    """Return the place of a data set with all its files, or raise an error that names the missing."""
    remedy = "Run conformallayers data list, or name a folder of pictures."
    require_choice("dataset", name, NAMES, remedy)
    place = _locate(name, root)
    if not place.missing:
        return place
    remedy = (
        f"Run conformallayers data get {name} --source FOLDER_OR_ADDRESS, "
        f"or name the folder by --data-root or {VARIABLE}."
    )
    raise refusal(f"dataset {name}", ", ".join(place.missing), "no such file", remedy)


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
            return
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


def _check_md5(data: bytes, expected: str, where: str) -> None:
    if (digest := md5(data)) != expected:
        remedy = "Get the file again, or allow your own data with --no-check."
        raise refusal(where, f"the md5 {expected}", digest, remedy)


# -- formats ----------------------------------------------------------------------------------------


def read_arrays(layout: Layout, file: str, data: bytes, where: str, verify: bool) -> dict[str, Any]:
    """Return the ``"images"`` (N, C, H, W) and ``"labels"`` (N,) that a file holds, by its name."""
    found: dict[str, Bytes]
    if file.endswith(".bin"):
        record = 1 + math.prod(_CIFAR)
        if not data or len(data) % record:
            expected = f"a multiple of {record} bytes"
            raise refusal(where, expected, f"{len(data)}: it is truncated", _AGAIN)
        rows = np.frombuffer(data, np.uint8).reshape(-1, record)
        found = {"images": rows[:, 1:].reshape(-1, *_CIFAR), "labels": rows[:, 0]}
    elif "images" in file:
        found = {"images": read_idx(data, where, (28, 28))[:, None]}
    else:
        found = {"labels": read_idx(data, where, ())}
    if "labels" in found and int(found["labels"].max()) >= CLASSES:
        got = str(int(found["labels"].max()))
        raise refusal(where, f"labels from 0 to {CLASSES - 1}", got, _AGAIN)
    if verify:  # the format goes first: its errors say more than a checksum does
        _check_md5(data, layout.checksums[file], where)
    return found


def read_idx(data: bytes, where: str, item_shape: tuple[int, ...]) -> Bytes:
    """Return the array of an idx file of unsigned bytes, (N, *item_shape); labels have no item shape.

    Examples:
        >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels", ())
        array([7, 9], dtype=uint8)
    """
    axes = 1 + len(item_shape)
    start = 4 + 4 * axes
    count, *sizes = (int(size) for size in np.frombuffer(data[4:start].ljust(4 * axes), ">u4"))
    whole = start + count * math.prod(item_shape)
    # The third byte is the code of unsigned bytes, the fourth the number of axes.
    if data[:4] != bytes([0, 0, 8, axes]) or tuple(sizes) != item_shape or not count:
        expected = f"an idx file of unsigned bytes, {' × '.join(['N', *map(str, item_shape)])}"
        raise refusal(where, expected, f"the header {data[:start].hex()}", _AGAIN)
    if len(data) != whole:
        state = "truncated" if len(data) < whole else "too long"
        raise refusal(where, f"{whole} bytes", f"{len(data)}: it is {state}", _AGAIN)
    return np.frombuffer(data, np.uint8, offset=start).reshape(count, *item_shape)


# -- fetching ---------------------------------------------------------------------------------------


def fetch(name: str, root: Path, source: str | None) -> list[Path]:
    """Copy or download a data set and return the written files; correct files are kept.

    The source is a folder with the files in a known layout, or the web address of one.
    """
    require_choice("data get", name, NAMES, "Run conformallayers data list.")
    if name in WITHOUT_FILES or (source is None and not _locate(name, root).missing):
        return []
    layout = LAYOUTS[name]
    target = root / layout.folders[0]
    if source is None:
        expected = "--source with a folder or a web address"
        remedy = f"Or put {', '.join(layout.checksums)} in {target}."
        raise refusal(f"data get {name}", expected, "none", remedy)
    folder = Path(source).expanduser()
    if source.startswith(("http://", "https://")):
        base = source.rstrip("/")
        files = (
            [(layout.archive,)] if layout.archive else [(f"{f}.gz", f) for f in layout.checksums]
        )
        choices = [{target / one: f"{base}/{one}" for one in names} for names in files]
    elif folder.is_dir():
        paths = require(name, folder.resolve()).paths
        choices = [{target / path.name: path.as_uri()} for path in paths]
    else:
        expected, got = "a folder, or an address that starts with http", f"{folder}, which is none"
        raise refusal("data get --source", expected, got, "Name the folder that holds the files.")
    written = (_fetch_one(layout, one) for one in choices)
    return [path for path in written if path is not None]


def _fetch_one(layout: Layout, choices: dict[Path, str]) -> Path | None:
    """Write the first alternative that exists at its address; None if a correct file is there already."""

    def verify(path: str | Path, called: str) -> None:
        for file, _, data in read_files(layout, Path(path), called):
            _check_md5(data, layout.checksums[file], called)

    for target in choices:
        try:
            verify(target, target.name)
            return None
        except ConformalError:
            continue
    reasons = []
    for target, address in choices.items():
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT) as stream:
                target.parent.mkdir(parents=True, exist_ok=True)
                chunks = iter(partial(stream.read, _CHUNK), b"")
                replace_file(target, chunks, partial(verify, called=target.name))
        except (OSError, HTTPException) as error:
            reasons.append(f"{address}: {error}")
            continue
        return target
    remedy = "Name the address of the folder that holds the files."
    raise refusal("data get --source", "files at that address", "; ".join(reasons), remedy)
