"""Attack files: mutants with a right checksum, and damaged ones.

A mutant must be refused with a ConformalError, or give the same numbers in torch and in numpy. A damaged
file must be refused.
"""

from __future__ import annotations

import copy
import json
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.numpy import load as load_arrays
from torch import Tensor

from conformallayers import numpy as numpy_runtime
from conformallayers.errors import ConformalError
from conformallayers.folding.fold import TOLERANCES, fold
from conformallayers.folding.save import load, save
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.recipe.file import _checksum
from soak.case import Case, limited_memory
from soak.generator import Generator

MUTANTS = 20  # of one file
SECONDS = 30  # of CPU that a mutant may take
MEMORY = 2**31  # bytes that a mutant of a few kilobytes may ask for
_DOCUMENT, _SUM = "conformallayers", "sha256"
_SCALARS = (0, 1, -1, 2, 3, 7, 64, 2**14, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e300)
_OTHERS: tuple[Any, ...] = ("", "x", None, True, False, [], {})
_TYPES = {"F64": "<d", "F32": "<f", "F16": "<e", "I32": "<i"}


def attack(case: Case) -> None:
    """Save the fold of a random network and load mutants of the file."""
    model, shape = Generator(case.rng, portable=True).network()
    model = model.to(case.rng.choice((torch.float32, torch.float64)))
    try:
        folded = fold(model, shape, strategy=case.rng.choice(("auto", *STRATEGIES)))
    except ConformalError:
        folded = fold(model, shape)
    case.subject = f"{shape} {model}"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        save(folded, path)
        content = path.read_bytes()
        for _ in range(MUTANTS):
            if case.rng.random() < 0.15:
                path.write_bytes(_damaged(case.rng, content))
                _check_damaged(case, path)
            else:
                text, mutant = _mutant(case.rng, content)
                path.write_bytes(mutant)
                _check_mutant(case, text, path)


def _check_damaged(case: Case, path: Path) -> None:
    case.counts["damaged files"] += 1
    for read in (load, numpy_runtime.load):
        try:
            read(path)
        except ConformalError:
            continue
        case.find(f"{read.__module__}.load takes a file with a wrong checksum")


def _check_mutant(case: Case, text: str, path: Path) -> None:
    """Load and run a mutant in two ways and compare them; a third result shows its condition."""
    case.counts["mutants"] += 1
    begun = time.process_time()
    try:
        with limited_memory(MEMORY):
            results = _run(path)
    except ConformalError:
        case.counts["mutants refused"] += 1
        return
    except Exception as error:
        case.find(f"{text}: {type(error).__name__}: {str(error)[:300]}")
        return
    finally:
        spent = time.process_time() - begun
        if spent > SECONDS:
            case.find(f"{text}: {spent:.0f} s")
    fault = _differ(*results)
    if fault:
        case.find(f"{text}: {fault}")


def _run(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    network: Any = load(path)
    arrays = numpy_runtime.load(path)
    x = torch.randn(3, *network.input_shape, dtype=torch.float64).to(network.dtype)
    with torch.no_grad():
        return network(x), torch.from_numpy(arrays(x.double().numpy())), network(_shaken(x))


def _shaken(x: Tensor) -> Tensor:
    return x * (1 + 2 * torch.finfo(x.dtype).eps * torch.randn_like(x))


def _differ(a: Tensor, b: Tensor, shaken: Tensor) -> str | None:
    """Say how two results differ, beyond ten tolerances and what rounding of the input changes."""
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    limit = 10 * TOLERANCES[a.dtype if a.dtype in TOLERANCES else torch.float32]
    for one, other, moved in zip(*(y.double().flatten(1) for y in (a, b, shaken)), strict=True):
        if not bool(torch.cat([one, other, moved]).isfinite().all()):
            continue  # constants of a mutant may overflow in one order of operations only
        size, off = float(other.norm()), float((one - other).norm())
        # Beyond these sizes values inside may have left the range of float32.
        if 1e-15 < size < 1e15 and off > limit * size + 100 * float((one - moved).norm()):
            return f"results differ by {off / size:.3g}"
    return None


def _damaged(rng: Random, content: bytes) -> bytes:
    place = rng.randrange(len(content))
    kind = rng.randrange(3)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content + b"\0"
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _mutant(rng: Random, content: bytes) -> tuple[str, bytes]:
    """Return a changed file with a right checksum, and what was changed."""
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    data = bytearray(content[8 + length :])
    document = json.loads(header["__metadata__"][_DOCUMENT])
    kind = rng.random()
    if kind < 0.7:
        texts = [_changed(rng, document) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    elif kind < 0.85:
        kept = header.pop("__metadata__")
        texts = [_changed(rng, header)] if header else []
        header["__metadata__"] = kept
    else:
        texts = [_change_data(rng, header, data)]
    document.pop(_SUM, None)
    header["__metadata__"][_DOCUMENT] = json.dumps(document)
    with suppress(Exception):  # safetensors refuses some headers
        signed = {_SUM: _checksum(document, load_arrays(_joined(header, data))), **document}
        header["__metadata__"][_DOCUMENT] = json.dumps(signed)
    return "; ".join(texts), _joined(header, data)


def _joined(header: dict[str, Any], data: bytearray) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _change_data(rng: Random, header: dict[str, Any], data: bytearray) -> str:
    """Set one number of one array."""
    arrays = [(k, v) for k, v in header.items() if k != "__metadata__" and v["dtype"] in _TYPES]
    arrays = [(k, v) for k, v in arrays if v["data_offsets"][0] < v["data_offsets"][1]]
    if not arrays:
        return "nothing is changed"
    name, entry = rng.choice(arrays)
    kind = _TYPES[entry["dtype"]]
    start, stop = entry["data_offsets"]
    place = rng.randrange(start, stop, struct.calcsize(kind))
    values = (0, -1, 5, 1000) if kind == "<i" else (0.0, -1.0, 3.5, float("nan"), float("inf"))
    value = rng.choice(values)
    struct.pack_into(kind, data, place, value)
    return f"a number of {name} is {value}"


def _changed(rng: Random, tree: Any) -> str:
    """Change one place of a JSON tree; return which and how."""
    place, holder, key = rng.choice(list(_places(tree)))
    old, kind = holder[key], rng.randrange(6)
    if kind == 0:
        del holder[key]
        return f"{place} is deleted"
    if kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
        return f"{place} is there twice"
    if kind == 2 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = rng.choice((old + 1, old - 1, -old, old * 1000, old / 2, float(old)))
    elif kind == 3:  # another value of the same type
        same = [h[k] for _, h, k in _places(tree) if type(h[k]) is type(old)]
        holder[key] = copy.deepcopy(rng.choice(same))
    else:
        holder[key] = copy.deepcopy(rng.choice((*_SCALARS, *_SCALARS, *_OTHERS)))
    return f"{place} is {str(holder[key])[:80]}"


def _places(tree: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, holder, key) of every entry of a JSON tree."""
    keys: Any = range(len(tree)) if isinstance(tree, list) else list(tree)
    for key in keys:
        where = f"{path}[{key}]" if isinstance(tree, list) else f"{path}.{key}"
        yield where, tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key], where)
