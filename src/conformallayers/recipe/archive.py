"""Read and write safetensors files with a checksum: written atomically, validated before use.

Layout: eight bytes with the length of a JSON header, the header, the bytes of all arrays. A second JSON
document in the header's ``__metadata__`` describes the network; see ``docs/deploy.md``. This module
needs only Python, so that the numpy runtime can use it without torch or safetensors. The reader of
safetensors has no limit for the header below 100 MB, accepts duplicate keys, and opens the file by its name
once more; its writer neither replaces a file atomically nor knows the checksum of its own header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from typing import Any

from ..errors import ConformalError, refusal
from ..utils.files import Path, kind_of_file, replace_file
from .operation import expect

FORMAT = 2  # version of the document; raised when older readers could not understand it
# The kinds of files, and the entry of the document that describes each.
KINDS = {"folded": "recipe", "model": "model", "checkpoint": "state"}
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1}
_CHUNK = 2**20  # bytes that are read at a time
_HEADER_LIMIT = 2**24  # bytes: tens of thousands of layers; parsed it takes about twenty times more
_AXES_LIMIT = 16
_SIZE_LIMIT = 2**48
_EMPTY_LIMIT = 2**27  # entries that an empty array would have without its axes of length 0
_SHOWN = 60  # letters of a value in a message
_REASON = 120  # letters of a reason in a message
_KEY, _SUM = "conformallayers", "sha256"


@dataclass(frozen=True)
class Entry:
    """One array of a file: its dtype as safetensors names it, its shape, and its byte range."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Archive:
    """The validated header of an open file.

    The file stays open as long as the archive exists, so that arrays belong to this header even if
    another process replaces the file.
    """

    path: str
    document: dict[str, Any]
    entries: dict[str, Entry]
    header: dict[str, Any]
    offset: int  # of the first array
    file: Any = None  # a FileIO; None before it is written

    def verify(self) -> None:
        """Compare the checksum; read all bytes once and keep none."""
        self.file.seek(self.offset)
        pieces = iter(lambda: self.file.read(_CHUNK), b"")
        if checksum(self.header, pieces) != self.header["__metadata__"][_SUM]:
            raise damaged(self.path, "bytes that differ from its checksum")

    def fill(self, name: str, memory: memoryview) -> None:
        """Read the bytes of an array into a buffer of the same size."""
        self.file.seek(self.offset + self.entries[name].start)
        while len(memory):
            count = self.file.readinto(memory)
            if not count:
                raise damaged(self.path, "an end that was cut off while it was read")
            memory = memory[count:]


def damaged(
    path: str, fault: str, remedy: str = "Write it again, or copy it again."
) -> ConformalError:
    """Return the error of a file that is damaged or of another kind."""
    expected = "a whole file of cl.save or conformallayers train"
    return refusal(f"load({path})", expected, fault, remedy)


def unbuildable(path: str, error: Exception) -> ConformalError:
    """Return the error of a file from which no network can be built, with the reason if that is short."""
    if isinstance(error, ConformalError) and str(error).startswith(f"load({path})"):
        return error
    own = type(error) is ValueError and len(str(error)) <= _REASON
    got = f"a file that makes no network ({error if own else type(error).__name__})"
    remedy = "Save it again with cl.save, or copy it again."
    return refusal(f"load({path})", "a whole file of cl.save", got, remedy)


def checksum(header: Mapping[str, Any], parts: Iterable[Any]) -> str:
    """Return the SHA-256 of a header without its checksum, followed by the arrays."""
    meta = {key: value for key, value in header["__metadata__"].items() if key != _SUM}
    content = {**header, "__metadata__": meta}
    digest = hashlib.sha256(_compact(content, sort_keys=True))
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def open_archive(path: Path) -> Archive:
    """Open a file, validate its header and compare its checksum."""
    name = os.fspath(path)
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(name, flags)
    try:
        archive = _opened(name, handle)
    except BaseException as error:
        os.close(handle)
        if type(error) is ValueError:
            raise damaged(name, str(error)) from error
        raise
    weakref.finalize(archive, os.close, handle)
    archive.verify()
    return archive


def _opened(name: str, handle: int) -> Archive:
    """Validate the header; raise ValueError where it is damaged."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        got, remedy = kind_of_file(status.st_mode), "Give the path of the file."
        raise refusal(f"load({name})", "a file of cl.save", got, remedy)
    size, file = status.st_size, FileIO(handle, "rb", closefd=False)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    other = "" if length < 2**40 else "; no safetensors file begins so"
    fits = size >= 8 and 2 <= length <= min(size - 8, _HEADER_LIMIT)
    if not fits and start.startswith(b"PK\x03\x04"):
        got = "a zip archive, such as torch.save writes"
        remedy = "Of a state_dict: build the model, and model.load_state_dict(torch.load(path))."
        raise damaged(name, got, remedy)
    expect(fits, f"a header of {length} bytes in a file of {size}{other}")
    header = _json(file.read(length))
    meta = header.get("__metadata__")
    if not isinstance(meta, dict) or not isinstance(meta.get(_KEY), str):
        remedy = "Plain weights load with safetensors.torch.load_file; conformallayers fold turns a run into a file of cl.save."
        raise refusal(f"load({name})", "a file of cl.save", "another safetensors file", remedy)
    expect(all(isinstance(value, str) for value in meta.values()), "metadata that is no text")
    document = _json(meta[_KEY])
    _check_document(name, document)
    expect(_SUM in meta, "no checksum")
    arrays = {key: value for key, value in header.items() if key != "__metadata__"}
    entries = {key: _entry(key, value) for key, value in arrays.items()}
    _check_places(entries.values(), size - 8 - length)
    return Archive(name, document, entries, header, 8 + length, file)


def _json(text: str | bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        expect(len(found) == len(pairs), "a name appears twice")
        return found

    def finite(text: str) -> float:
        value = float(text)
        expect(math.isfinite(value), f"{text} is no number of JSON")
        return value

    try:
        plain = text if isinstance(text, str) else text.decode()
        value = json.loads(
            plain, object_pairs_hook=unique, parse_constant=finite, parse_float=finite
        )
    except (ValueError, RecursionError) as error:
        raise ValueError("a header that is no JSON") from error
    expect(isinstance(value, dict), "a header that is no JSON object")
    return value  # type: ignore[no-any-return]


def _check_document(name: str, document: dict[str, Any]) -> None:
    version: Any = document.get("format")
    whole = isinstance(version, int) and not isinstance(version, bool)
    expect(whole and version >= 1, f"format {_shown(version)}")
    if version != FORMAT:
        library = _shown(document.get("library")).strip("'")
        newer = version > FORMAT
        raise refusal(
            f"load({name})",
            f"a file of format {FORMAT}",
            f"format {_shown(version)}, written by conformallayers {library}",
            "Upgrade conformallayers to read it." if newer else "Fold and save the model again.",
        )
    kind, origin = document.get("kind"), document.get("origin")
    described = isinstance(kind, str) and isinstance(document.get(KINDS.get(kind, "")), dict)
    expect(described, "a header without kind or network")
    expect(isinstance(origin, (str, type(None))), f"origin {_shown(origin)}")


def _shown(value: object) -> str:
    """Return a short text of a value for a message."""
    plain = isinstance(value, (str, int, float, type(None)))
    text = repr(value) if plain else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _entry(key: str, value: Any) -> Entry:
    array = f"the array {_shown(key)}"
    described = isinstance(value, dict) and set(value) == {"dtype", "shape", "data_offsets"}
    expect(described, f"no description of {array}")
    dtype, shape, places = value["dtype"], value["shape"], value["data_offsets"]
    known = isinstance(dtype, str) and dtype in ITEM_BYTES
    expect(known, f"{array} of dtype {_shown(dtype)}")
    expect(_are_sizes(shape) and len(shape) <= _AXES_LIMIT, f"{array} without a shape")
    expect(_are_sizes(places) and len(places) == 2, f"{array} without a place")
    count = places[1] - places[0]
    expect(count == prod(shape) * ITEM_BYTES[dtype], f"{array} in {count} bytes")
    long = prod(n for n in shape if n) > _EMPTY_LIMIT
    expect(not (long and 0 in shape), f"{array}, empty and yet long")
    return Entry(dtype, tuple(shape), *places)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _SIZE_LIMIT for n in values
    )


def _check_places(entries: Iterable[Entry], size: int) -> None:
    """Refuse arrays that overlap, leave holes, or do not fill the file."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        expect(entry.start == end, "arrays that overlap or leave holes")
        end = entry.stop
    expect(end == size, f"{size} bytes of arrays where {end} belong")


def write_archive(
    path: Path, document: Mapping[str, Any], arrays: Mapping[str, tuple[str, tuple[int, ...], Any]]
) -> None:
    """Write a file under a temporary name and rename it, so that the old file stays until then.

    Args:
        path: of the file.
        document: the description of the network.
        arrays: safetensors' name of the dtype, shape, and bytes of each array.
    """
    order = sorted(arrays, key=lambda name: (-ITEM_BYTES[arrays[name][0]], name))
    header: dict[str, Any] = {"__metadata__": {_KEY: _compact(document).decode()}}
    start = 0
    for name in order:
        dtype, shape, data = arrays[name]
        stop = start + memoryview(data).nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    parts = [arrays[name][2] for name in order]
    header["__metadata__"][_SUM] = checksum(header, parts)
    text = _compact(header)
    text += b" " * (-len(text) % 8)  # arrays start at a multiple of eight
    if len(text) > _HEADER_LIMIT:
        got, remedy = f"a header of {len(text)} bytes", "Save fewer layers in one file."
        raise refusal(f"save({os.fspath(path)})", f"at most {_HEADER_LIMIT}", got, remedy)
    replace_file(path, [len(text).to_bytes(8, "little"), text, *parts])


def _compact(value: Mapping[str, Any], *, sort_keys: bool = False) -> bytes:
    text = json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    return text.encode()
