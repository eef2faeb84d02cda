"""Bring the files of a set to the data root, from a folder or a web address the user names."""

from __future__ import annotations

import os
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import ConformalError, refusal
from . import files
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
        return _download(forms, root, source.rstrip("/"), console or Console())
    return _copy(name, root, Path(source).expanduser())


def _complete(name: str, root: Path) -> bool:
    place = files.locate(name, root)
    if place is None or place.missing():
        return False
    return all(_right(place.form, path) for path in set(place.files().values()))


def _copy(name: str, root: Path, source: Path) -> list[Path]:
    place = files.located(name, source)
    folder = root if place.archived else root / place.form.folders[0]
    written = []
    for path in sorted(set(place.files().values())):
        target = folder / path.name
        if _right(place.form, target):
            continue
        with path.open("rb") as stream, _checked(place.form, target) as file:
            shutil.copyfileobj(stream, file, _CHUNK)
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
            with stream, _checked(form, target) as file:
                length = stream.headers.get("Content-Length")
                task = progress.add_task(target.name, total=int(length) if length else None)
                for chunk in _chunks(stream, target.name):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
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


def _chunks(stream: Any, name: str) -> Iterator[bytes]:
    try:
        while chunk := stream.read(_CHUNK):
            yield chunk
    except (OSError, HTTPException) as error:
        remedy = "Run the command again; finished files are kept."
        raise refusal(f"data get, {name}", "the whole file", str(error), remedy) from error


@contextmanager
def _checked(form: Form, target: Path) -> Iterator[IO[bytes]]:
    """Give a file beside the target; it takes its name when it is whole and right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".part-{target.name}")
    try:
        with partial.open("wb") as stream:
            yield stream
        _verify(form, partial, target.name)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


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
            files.check_checksum(read(), form.checksums[name], f"{name} in {called}")
        return
    name = next(name for name in form.checksums if called in form.spellings(name))
    files.check_checksum(files.read(path), form.checksums[name], called)
