"""Fetch the files of a data set from a folder or a web address that the user names."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ...errors import ConformalError, refusal
from ...utils.files import replace_file
from . import files
from .catalogue import Layout
from .datasets import check

_CHUNK = 1 << 20
_TIMEOUT = 60.0  # seconds without a byte
# A file to fetch: its layout, its place below the data root, and its address.
_Download = tuple[Layout, Path, str]


def get(name: str, root: Path, source: str | None) -> list[Path]:
    """Fetch a data set and return the written files; files that exist and are correct are kept.

    The source is a folder with the files in a known layout, or the web address of one.
    """
    layouts = files.layouts_of(name)
    if all(fault is None for _, fault in check(name, root)):
        return []
    if source is None:
        wanted = f"{files.wanted_files(layouts[0])} in {root / layouts[0].folders[0]}"
        archives = [f"{layout.archive} in {root}" for layout in layouts if layout.archive]
        expected = "--source with a folder or a web address"
        remedy = f"Or put {' or '.join([wanted, *archives])}."
        raise refusal(f"data get {name}", expected, "none", remedy)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        fetched = [_fetch(choices, progress) for choices in _downloads(name, root, source)]
    for path, fault in check(name, root):
        if fault is not None:
            got = "another one, which is read before the one that was fetched"
            raise refusal(path, "the file of this name", got, "Move it away.")
    return [path for path in fetched if path is not None]


def _downloads(name: str, root: Path, source: str) -> Iterator[list[_Download]]:
    """Yield the alternatives for each wanted file, the smallest first."""
    layouts, base, folder = files.layouts_of(name), source.rstrip("/"), Path(source).expanduser()
    first = layouts[0]
    if not source.startswith(("http://", "https://")):
        if not folder.is_dir():
            expected = "a folder, or an address that starts with http"
            remedy = "Name the folder that holds the files."
            raise refusal("data get --source", expected, f"{folder}, which is none", remedy)
        place = files.require(name, folder.resolve())
        archived = place.path.name == place.layout.archive
        target = root if archived else root / place.layout.folders[0]
        for path in place.paths:
            yield [(place.layout, target / path.name, path.as_uri())]
    elif first.archive is not None:
        yield [(one, root / f"{one.archive}", f"{base}/{one.archive}") for one in layouts]
    else:
        for file in first.checksums:
            names, target = (f"{file}.gz", file), root / first.folders[0]
            yield [(first, target / name, f"{base}/{name}") for name in names]


def _fetch(choices: list[_Download], progress: Progress) -> Path | None:
    """Write the first alternative that exists at its address; None if a correct file is there already."""
    for layout, target, _ in choices:
        with suppress(ConformalError):
            _verify(layout, target, target.name)
            return None
    reasons = []
    for layout, target, address in choices:
        try:
            stream = urllib.request.urlopen(address, timeout=_TIMEOUT)
        except (OSError, ValueError, HTTPException) as error:
            reasons.append(f"{address}: {error}")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with stream:
            verify = partial(_verify, layout, called=target.name)
            replace_file(target, _chunks(stream, target.name, progress), verify)
        return target
    remedy = "Name the address of the folder that holds the files."
    raise refusal("data get --source", "files at that address", "; ".join(reasons), remedy)


def _chunks(stream: Any, name: str, progress: Progress) -> Iterator[bytes]:
    length = stream.headers.get("Content-Length", "")
    task = progress.add_task(name, total=int(length) if length.isdecimal() else None)
    bounded = files.Bounded(stream, f"data get, {name}")
    try:
        while chunk := bounded.read(_CHUNK):
            yield chunk
            progress.advance(task, len(chunk))
    except (OSError, HTTPException) as error:
        remedy = "Run the command again; finished files are kept."
        raise refusal(f"data get, {name}", "the whole file", str(error), remedy) from error


def _verify(layout: Layout, path: str | Path, called: str) -> None:
    """Compare the checksums of a file, or of all files in an archive."""
    for name, _, data in files.read_files(layout, Path(path), called):
        where = called if called != layout.archive else f"{name} in {called}"
        files.check_md5(data, layout.checksums[name], where)
