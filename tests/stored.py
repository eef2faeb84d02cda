"""Files taken apart and put together again with a right checksum, whatever their content is."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.recipe.archive import checksum
from nets import SHAPE, net


class StoredFile:
    """A file taken apart: its header, the document in it, and the bytes of its arrays."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        cl.save(model, path)
        content, self.path = path.read_bytes(), path
        (length,) = struct.unpack("<Q", content[:8])
        self.header: dict[str, Any] = json.loads(content[8 : 8 + length])
        self.document: dict[str, Any] = json.loads(self.header["__metadata__"]["conformallayers"])
        self.data = content[8 + length :]

    @property
    def operations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["recipe"]["operations"]
        return found

    def operation(self, kind: str) -> dict[str, Any]:
        """Return the first operation of a kind."""
        return next(item for item in self.operations if item["operation"] == kind)

    def replace(self, name: str, dtype: str, shape: list[int], data: bytes = b"") -> None:
        """Put another array in the place of one."""
        start, stop = self.header[name]["data_offsets"]
        more = len(data) - (stop - start)
        self.data = self.data[:start] + data + self.data[stop:]
        for key, entry in self.header.items():
            if key not in ("__metadata__", name) and entry["data_offsets"][0] >= stop:
                entry["data_offsets"] = [place + more for place in entry["data_offsets"]]
        places = [start, start + len(data)]
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": places}

    def write(self, change: Callable[[str], str] = str, encoding: str = "utf-8") -> None:
        """Sign and write it; ``change`` may put something into the text that no object makes."""
        document = change(json.dumps(self.document))
        self.header["__metadata__"]["conformallayers"] = document
        self.header["__metadata__"]["sha256"] = checksum(self.header, [self.data])
        text = change(json.dumps(self.header)).encode(encoding)
        self.path.write_bytes(struct.pack("<Q", len(text)) + text + self.data)


def fold(name: str = "unpadded", strategy: str = "dense") -> cl.Folded:
    return cl.fold(net(name), SHAPE, strategy=strategy)


def refused(path: Path, message: str = "expected", *loaders: Callable[[Path], Any]) -> None:
    """Load a file with torch and with numpy: one short sentence each, and no memory is taken."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in loaders or (cl.load, cln.load):
        with pytest.raises(cl.ConformalError, match=message) as caught:
            load(path)
        assert str(caught.value).startswith(f"load({path})")
        assert len(str(caught.value)) < 350 + len(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for _, key in list(found):
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


JUNK: tuple[Any, ...] = (
    *(None, -1, 0, 10**9, 10**18, 10**400, 1e308, "x", "tau", "matmul", [], {}, True, False),
    *([2**40], [[]], {"operation": "call"}),
)
