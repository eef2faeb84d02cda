"""Bring the files of a set to the data root, from a folder or a web address the user names."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ...errors import ConformalError, refusal
from ..experiments.writing import write_whole
from . import store as files
from .catalogue import DIGITS, Form

_CHUNK = 1 << 20
_TIMEOUT = 60.0  # seconds without a byte


def get(name: str, root: Path, source: str | None, console: Console | None = None) -> list[Path]:
    """Fetch a set; what is already there and right is left alone.

    Args:
        name: of the set.
        root: the data root.
        source: a folder with the files in a layout that is read, or the address of a folder on the
            web that starts with http:// or https://.
        console: where to show progress; None takes the terminal.

    Returns:
        The files that were written.
    """
    forms = files.known(name)
    if name == DIGITS or _complete(name, root):
        return []
    if source is None:
        where = root / forms[0].folders[0]
        wanted = ", ".join(forms[0].checksums) + " (or .gz)" * (forms[0].format == "idx")
        archives = [f"{form.archive} in {root}" for form in forms if form.archive]
        raise refusal(
            f"data get {name}",
            "--source with a folder or a web address",
            "none",
            f"Or put {' or '.join([f'{wanted} in {where}', *archives])}.",
        )
    if source.startswith(("http://", "https://")):
        written = _download(forms, root, source.rstrip("/"), console or Console())
    else:
        written = _copy(name, root, Path(source).expanduser())
    for path in _wrong(files.located(name, root)):
        got = "another one, which is read before the one that was fetched"
        raise refusal(str(path), "the file of this name", got, "Move it away.")
    return written


def _complete(name: str, root: Path) -> bool:
    place = files.locate(name, root)
    return place is not None and not place.missing() and not _wrong(place)


def _wrong(place: files.Place) -> list[Path]:
    """Return the files of a place that are not what they are called."""
    return [path for path in sorted(set(place.files().values())) if not _right(place.form, path)]


def _copy(name: str, root: Path, source: Path) -> list[Path]:
    if not source.is_dir():
        expected, got = "a folder, or an address that starts with http", f"{source}, which is none"
        raise refusal("data get --source", expected, got, "Name the folder that holds the files.")
    place = files.located(name, source)
    folder = root if place.archived else root / place.form.folders[0]
    written = []
    for path in sorted(set(place.files().values())):
        target = folder / path.name
        if _right(place.form, target):
            continue
        with path.open("rb") as stream:
            _write(place.form, target, iter(lambda: stream.read(_CHUNK), b""))
        written.append(target)
    return written


def _download(forms: tuple[Form, ...], root: Path, base: str, console: Console) -> list[Path]:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    written = []
    with Progress(*columns, console=console) as progress:
        for choices in _choices(forms, root):
            if any(_right(form, target) for form, target in choices):
                continue
            form, target, stream = _first(base, choices)
            with stream:
                length = stream.headers.get("Content-Length")
                task = progress.add_task(target.name, total=int(length) if length else None)
                _write(form, target, _chunks(stream, target.name, partial(progress.advance, task)))
            written.append(target)
    return written


def _choices(forms: tuple[Form, ...], root: Path) -> Iterator[list[tuple[Form, Path]]]:
    """Yield for each file wanted the paths under which it will do, the smallest first."""
    archives = [(form, root / form.archive) for form in forms if form.archive is not None]
    if archives:
        yield archives
        return
    folder = root / forms[0].folders[0]
    for name in forms[0].checksums:
        yield [(forms[0], folder / f"{name}.gz"), (forms[0], folder / name)]


def _first(base: str, choices: list[tuple[Form, Path]]) -> tuple[Form, Path, Any]:
    """Open the first file that the address has."""
    reasons = []
    for form, path in choices:
        address = f"{base}/{path.name}"
        try:
            return form, path, urllib.request.urlopen(address, timeout=_TIMEOUT)
        except (OSError, ValueError, HTTPException) as error:
            reasons.append(f"{address}: {error}")
    remedy = "Name the address of the folder that holds the files."
    raise refusal("data get --source", "files at that address", "; ".join(reasons), remedy)


def _chunks(stream: Any, name: str, advance: Callable[[int], None]) -> Iterator[bytes]:
    try:
        while chunk := stream.read(_CHUNK):
            yield chunk
            advance(len(chunk))
    except (OSError, HTTPException) as error:
        remedy = "Run the command again; finished files are kept."
        raise refusal(f"data get, {name}", "the whole file", str(error), remedy) from error


def _write(form: Form, target: Path, chunks: Iterable[bytes]) -> None:
    """Write a file that takes its name when it is whole and right."""

    def write(path: Path) -> None:
        with path.open("wb") as stream:
            stream.writelines(chunks)
        _verify(form, path, target.name)

    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, write)


def _right(form: Form, path: Path) -> bool:
    try:
        _verify(form, path, path.name)
    except ConformalError:
        return False
    return True


def _verify(form: Form, path: Path, called: str) -> None:
    """Refuse a file, or an archive, that is not the one it is called."""
    if called == form.archive:
        for name, _, read in files.contents(files.Place(form, path, True)):
            files.check_checksum(files.md5(read()), form.checksums[name], f"{name} in {called}")
        return
    name = next(name for name in form.checksums if called in form.spellings(name))
    files.check_checksum(files.md5(files.read(path)), form.checksums[name], called)
