"""Find the files of an image set below a data root, and read their bytes."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import refusal
from .catalogue import DIGITS, FORMS, NAMES, Form, identify

VARIABLE = "CONFORMALLAYERS_DATA"
_LIMIT = 1 << 30  # bytes of one file after decompression; the largest known one has 47 MB
_AGAIN = "Get the file again."


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the data: the argument, else CONFORMALLAYERS_DATA, else ``data``."""
    return Path(root or os.environ.get(VARIABLE) or "data").expanduser()


@dataclass(frozen=True)
class Place:
    """Where a set may lie in one form: a folder of files, or an archive."""

    form: Form
    path: Path
    archived: bool = False

    def files(self) -> dict[str, Path]:
        """Return the files that are there, by their name in the catalogue."""
        if self.archived:
            return dict.fromkeys(self.form.checksums, self.path) if self.path.is_file() else {}
        found = {}
        for name in self.form.checksums:
            for spelling in self.form.spellings(name):
                if (self.path / spelling).is_file():
                    found[name] = self.path / spelling
                    break
        return found

    def missing(self) -> list[Path]:
        """Return the paths of the files that are not there."""
        found = self.files()
        return [self.path / name for name in self.form.checksums if name not in found]


def known(name: str) -> tuple[Form, ...]:
    """Return the forms of a set, or refuse a name that is none; digits has no files."""
    if name not in NAMES:
        raise refusal(
            "dataset", f"one of {', '.join(NAMES)}", repr(name), "Names are in lower case."
        )
    return FORMS.get(name, ())


def places(name: str, root: Path) -> list[Place]:
    """Return where a set is looked for, in this order."""
    found = []
    for form in known(name):
        folders = [root / folder for folder in form.folders]
        found += [Place(form, folder) for folder in folders]
        if form.archive is not None:
            found += [Place(form, folder / form.archive, True) for folder in folders[-2:]]
    return found


def locate(name: str, root: Path) -> Place | None:
    """Return the first complete place, else the one with most of the files, else None."""
    best: tuple[int, Place | None] = (0, None)
    for place in places(name, root):
        count = len(place.files())
        if count == len(place.form.checksums):
            return place
        if count > best[0]:
            best = count, place
    return best[1]


def how_to_get(name: str) -> str:
    """Return the sentence that ends a refusal of missing files."""
    return (
        f"Run conformallayers data get {name} --source FOLDER_OR_ADDRESS, "
        f"or name the folder by --data-root or {VARIABLE}."
    )


def located(name: str, root: Path) -> Place:
    """Return the place of a set with all its files, or refuse and name what is missing."""
    place = locate(name, root)
    if place is None:
        candidates = places(name, root)
        form = candidates[0].form
        files = ", ".join(form.checksums) + " (or .gz)" * (form.format == "idx")
        folders = ", ".join(str(place.path) for place in candidates)
        raise refusal(f"dataset {name}", f"{files} in {folders}", "no such file", how_to_get(name))
    missing = place.missing()
    if missing:
        paths = ", ".join(map(str, missing))
        raise refusal(f"dataset {name}", paths, "no such file", how_to_get(name))
    return place


def contents(place: Place) -> Iterator[tuple[str, Path, Callable[[], bytes]]]:
    """Yield name and path of every file of a place, and a function that reads it.

    The files of an archive come in its own order, and each can be read only in its turn.
    """
    if not place.archived:
        for name, path in place.files().items():
            yield name, path, partial(read, path)
        return
    wanted = set(place.form.checksums)
    with _readable(place.path), tarfile.open(place.path, "r|*") as archive:
        for member in archive:
            name = Path(member.name).name
            if name in wanted and member.isfile():
                wanted.remove(name)
                yield name, place.path / member.name, partial(_member, place, archive, member)
    if wanted:
        expected = f"an archive with {', '.join(sorted(wanted))}"
        raise refusal(str(place.path), expected, "one without", _AGAIN)


def read(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if its name ends in ``.gz``."""
    with _readable(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        data = stream.read(_LIMIT + 1)
    return _limited(data, path)


def _member(place: Place, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Read one file of an archive; nothing is extracted to disk."""
    with _readable(place.path):
        stream = archive.extractfile(member)
        data = b"" if stream is None else stream.read(_LIMIT + 1)
    return _limited(data, place.path / member.name)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what a broken file leads to into a refusal that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise refusal(str(path), "a file that can be read", reason, _AGAIN) from error


def _limited(data: bytes, path: Path) -> bytes:
    if len(data) > _LIMIT:
        raise refusal(str(path), f"at most {_LIMIT} bytes", "more", _AGAIN)
    return data


def md5(data: bytes) -> str:
    """Return the checksum of the catalogue; it guards against accidents, not against malice."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def check_identity(digest: str, expected: str, where: str) -> None:
    """Refuse the checksum of another known file."""
    other = identify(digest)
    if other is not None and digest != expected:
        wanted = identify(expected)
        raise refusal(where, f"{wanted}", other, "The file lies under a wrong name; move it.")


def check_checksum(digest: str, expected: str, where: str) -> None:
    """Refuse a checksum that is not that of the catalogue."""
    if digest != expected:
        remedy = "Get the file again, or allow your own data with --no-check."
        raise refusal(where, f"the md5 {expected}", digest, remedy)


def found_where(root: Path) -> dict[str, str]:
    """Say for each known set where it is; ``""`` if it is nowhere."""
    found = {}
    for name in FORMS:
        place = locate(name, root)
        note = "" if place is None or not place.missing() else f" ({len(place.missing())} missing)"
        found[name] = "" if place is None else f"{place.path}{note}"
    return {**found, DIGITS: "comes with scikit-learn"}
