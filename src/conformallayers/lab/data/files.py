"""Find the files of a data set below the data root, check and parse them, and fetch them."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Collection, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import numpy.typing as npt

from ...errors import first_line, refusal
from ...utils.files import replace_file
from ...utils.text import size
from ..checks import require_choice
from .catalogue import DIGITS, LAYOUTS, NAMES

Bytes = npt.NDArray[np.uint8]
VARIABLE = "CONFORMALLAYERS_DATA"
_AGAIN = "Get the file again."
_TIMEOUT = 60.0  # seconds without a byte
_CIFAR = (3, 32, 32)
_LARGEST = 2**29  # bytes of a file or archive, unpacked: three times the archive of CIFAR-10


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the data: the argument, else CONFORMALLAYERS_DATA, else ``data``."""
    return Path(root or os.environ.get(VARIABLE) or "data").expanduser()


def find_files(name: str, root: Path) -> tuple[Path, dict[str, Path]]:
    """Return the folder with most files of a data set, and where each of them is stored there."""
    layout = LAYOUTS[name]
    best: tuple[Path, dict[str, Path]] = root / layout.folders[0], {}
    for folder in (root / one for one in layout.folders):
        found = {
            file: folder / stored
            for file in layout.checksums
            for stored in reversed(layout.stored_names(file))  # the file itself goes first
            if (folder / stored).is_file()
        }
        best = max(best, (folder, found), key=lambda place: len(place[1]))
    return best


def found_where(root: Path) -> dict[str, str]:
    """Return where each known data set is; ``""`` if it was not found."""
    where = {}
    for name, layout in LAYOUTS.items():
        folder, found = find_files(name, root)
        missing = len(layout.checksums) - len(found)
        where[name] = f"{folder}{f' ({missing} missing)' if missing else ''}" if found else ""
    return {**where, DIGITS: "comes with scikit-learn"}


def read_files(name: str, root: Path) -> Iterator[tuple[str, Path, bytes]]:
    """Yield name, path and bytes of each file of a data set; refuse a missing or unreadable one."""
    require_choice("dataset", name, NAMES, "Or name a folder of pictures.")
    folder, found = find_files(name, root)
    missing = [str(folder / file) for file in LAYOUTS[name].checksums if file not in found]
    if missing:
        remedy = (
            f"Run conformallayers data get {name} --source FOLDER_OR_ADDRESS, "
            f"or name the folder by --data-root or {VARIABLE}."
        )
        raise refusal(f"dataset {name}", ", ".join(missing), "no such file", remedy)
    for path in dict.fromkeys(found.values()):
        wanted = [file for file, stored in found.items() if stored == path]
        for file, data in _unpack(path.read_bytes(), str(path), wanted).items():
            yield file, path if len(wanted) == 1 else path / file, data


def _unpack(data: bytes, path: str, wanted: Collection[str]) -> dict[str, bytes]:
    """Return the bytes of the wanted files from a tar archive, a gzipped file, or the file itself."""
    try:
        if path.endswith(".gz"):
            with gzip.open(io.BytesIO(data)) as stream:
                data = _read(stream, path)
        if not path.endswith(".tar.gz"):
            return dict.fromkeys(wanted, data)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            members = {
                Path(one.name).name: one for one in archive if one.isreg() and not one.issparse()
            }
            return {name: archive.extractfile(members[name]).read() for name in wanted}  # type: ignore[union-attr]
    except KeyError as error:
        raise refusal(path, f"an archive with {error.args[0]}", "one without", _AGAIN) from error
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise refusal(path, "a file that can be read", first_line(error), _AGAIN) from error


def _read(stream: Any, path: str) -> bytes:
    """Read a stream of limited size: a few compressed kilobytes may hold gigabytes."""
    data: bytes = stream.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise refusal(path, f"at most {size(_LARGEST)}", "more", _AGAIN)
    return data


def md5(data: bytes) -> str:
    """Return the MD5 of bytes, a guard against accidents and not against attacks."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _check_md5(data: bytes, expected: str, where: str) -> None:
    if (digest := md5(data)) != expected:
        remedy = "Get the file again, or allow your own data with --no-check."
        raise refusal(where, f"the md5 {expected}", digest, remedy)


# -- formats ----------------------------------------------------------------------------------------


def read_arrays(name: str, file: str, data: bytes, where: str, verify: bool) -> dict[str, Any]:
    """Return the ``"images"`` (N, C, H, W) and ``"labels"`` (N,) that a file of a data set holds."""
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
    if verify:  # the format goes first: its errors say more than a checksum does
        _check_md5(data, LAYOUTS[name].checksums[file], where)
    return found


def read_idx(data: bytes, where: str, item_shape: tuple[int, ...]) -> Bytes:
    """Return the array of an idx file of unsigned bytes, (N, *item_shape); labels have no item shape."""
    axes = 1 + len(item_shape)
    start, size = 4 + 4 * axes, math.prod(item_shape)
    # The code of unsigned bytes, the number of axes, and the sizes, of which the first is the count.
    count = (len(data) - start) // size
    header = bytes([0, 0, 8, axes]) + np.array([max(count, 0), *item_shape], ">u4").tobytes()
    if data[:start] != header or len(data) != start + count * size or not count:
        expected = f"a whole idx file of unsigned bytes, {' × '.join(['N', *map(str, item_shape)])}"
        raise refusal(where, expected, f"{len(data)} bytes, {data[:start].hex()}…", _AGAIN)
    return np.frombuffer(data, np.uint8, offset=start).reshape(count, *item_shape)


# -- fetching ---------------------------------------------------------------------------------------


def fetch(name: str, root: Path, source: str | None) -> list[Path]:
    """Copy or download a data set from a folder or web address, and return the written files.

    Files are checked and stored uncompressed; correct ones are kept.
    """
    require_choice("data get", name, NAMES, "Run conformallayers data list.")
    if name == DIGITS:
        return []
    layout = LAYOUTS[name]
    target = root / layout.folders[0]
    if source is None:
        if len(find_files(name, root)[1]) == len(layout.checksums):
            return []
        expected = "--source with a folder or a web address"
        remedy = f"Or put {', '.join(layout.checksums)} in {target}."
        raise refusal(f"data get {name}", expected, "none", remedy)
    is_web = source.startswith(("http://", "https://"))
    base = source.rstrip("/") if is_web else Path(source).expanduser().resolve().as_uri()
    written: list[Path] = []
    for file, digest in layout.checksums.items():
        path = target / file
        if path.is_file() and md5(path.read_bytes()) == digest:
            continue
        wanted = layout.checksums if layout.archive else [file]
        for one, data in _download(base, layout.stored_names(file), wanted).items():
            _check_md5(data, layout.checksums[one], f"{base}/{one}")
            replace_file(target / one, [data])
            written.append(target / one)
    return written


def _download(base: str, names: tuple[str, str], wanted: Collection[str]) -> dict[str, bytes]:
    """Return a file, or all files of an archive, under the first of the names that exists."""
    reasons = []
    for name in names:
        try:
            with urllib.request.urlopen(f"{base}/{name}", timeout=_TIMEOUT) as stream:
                return _unpack(
                    _read(stream, name), name, wanted if name == names[1] else [names[0]]
                )
        except (OSError, HTTPException) as error:
            reasons.append(f"{base}/{name}: {_reason(error)}")
    remedy = "Name the folder that holds the files, or its address."
    raise refusal("data get --source", "the files of the data set", "; ".join(reasons), remedy)


def _reason(error: Exception) -> str:
    """Return the message of an error without the number and the file of the system."""
    cause = error.reason if type(error) is URLError else error
    return str(getattr(cause, "strerror", None) or cause)
