"""Files with another content and a right checksum, and values that do not belong into a document."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import save

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.recipe.file import _checksum

Change = Callable[[Any, dict[str, Any]], Any]


def forge(path: Path, change: Change) -> Any:
    """Let ``change`` edit the document and the arrays of a file, and sign it again; return its result."""
    with safe_open(path, "np") as file:
        document = json.loads(file.metadata()["conformallayers"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del document["sha256"]
    result = change(document, arrays)
    text = json.dumps({"sha256": _checksum(document, arrays), **document})
    path.write_bytes(save(arrays, {"conformallayers": text}))
    return result


def refused(path: Path, message: str, *loaders: Callable[[Path], Any]) -> None:
    """Load a file with torch and with numpy: one short sentence each, and no memory is taken."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in loaders or (cl.load, cln.load):
        with pytest.raises(cl.ConformalError, match=message) as caught:
            load(path)
        assert str(caught.value).startswith(f"load({path})")
        assert len(str(caught.value)) < 350 + len(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])
