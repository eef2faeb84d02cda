"""Attack files: mutants with a right checksum, and damaged ones.

A mutant must be refused with a ConformalError, or run: with the same numbers in torch and in numpy, and
for a model with the same numbers folded and layer by layer. A damaged file must be refused.
"""

from __future__ import annotations

import copy
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ... import numpy as numpy_runtime
from ...errors import ConformalError
from ...folding.files import load, save
from ...folding.fold import fold
from ...folding.folded import Folded
from ...folding.part import TOLERANCES
from ...folding.strategies import STRATEGIES
from ...nn.container import layer_by_layer
from ...nn.traced import Traced
from ...recipe.archive import checksum
from ...recipe.layer_operations import Elementwise
from ...recipe.recipe import INPUT
from ...recipe.torch.points import RUN
from .case import Case, limited_memory, place_of
from .generator import Generator

MUTANTS = 20  # of one file
SECONDS = 30  # of CPU that a mutant may take
MEMORY = 2**31  # bytes that a mutant of a few kilobytes may ask for
_DOCUMENT, _SUM = "conformallayers", "sha256"
_SCALARS = (0, 1, -1, 2, 3, 7, 64, 2**14, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e300)
_OTHERS: tuple[Any, ...] = ("", "x", None, True, False, [], {})
_TYPES = {"F64": "<d", "F32": "<f", "F16": "<e", "I32": "<i"}


def attack(case: Case) -> None:
    """Save a random network or its fold and load mutants of the file."""
    model, shape = Generator(case.rng, portable=True).network()
    model = model.to(case.rng.choice((torch.float32, torch.float64)))
    saved: nn.Module = model
    traced = any(isinstance(module, Traced) for module in model.modules())  # no file describes it
    if traced or case.rng.random() < 0.8:
        try:
            saved = fold(model, shape, strategy=case.rng.choice(("auto", *STRATEGIES)))
        except ConformalError:
            saved = fold(model, shape)
    case.subject = f"{type(saved).__name__} {shape} {model}"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        save(saved, path)
        content = path.read_bytes()
        for _ in range(MUTANTS):
            if case.rng.random() < 0.15:
                path.write_bytes(_damaged(case.rng, content))
                _check_damaged(case, path)
            else:
                text, mutant = _mutant(case.rng, content)
                path.write_bytes(mutant)
                _check_mutant(case, text, path, shape, isinstance(saved, Folded))


def _check_damaged(case: Case, path: Path) -> None:
    case.counts["damaged files"] += 1
    for read in (load, numpy_runtime.load):
        try:
            read(path)
        except ConformalError:
            continue
        case.find(f"{read.__module__}.load takes a file with a wrong checksum")


def _check_mutant(case: Case, text: str, path: Path, shape: tuple[int, ...], folded: bool) -> None:
    """Load and run a mutant in two ways and compare them; a third result shows its condition."""
    case.counts["mutants"] += 1
    begun = time.process_time()
    try:
        with limited_memory(MEMORY):
            results = _run_fold(path) if folded else _run_model(path, shape)
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


def _run_fold(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    network: Any = load(path)
    arrays = numpy_runtime.load(path)
    x = torch.randn(3, *network.input_shape, dtype=torch.float64).to(network.dtype)
    with torch.no_grad():
        return network(x), torch.from_numpy(arrays(x.double().numpy())), _run_shaken(network, x)


def _run_shaken(network: Folded, x: Tensor) -> Tensor:
    """Run a fold with a shaken input, and with other digits where torch loses them in GELU."""
    values = {INPUT: _shaken(x)}
    for operation in network.recipe.operations:
        RUN.step(operation, network, values)
        if isinstance(operation, Elementwise) and operation.function == "gelu":
            (source,), (name,) = operation.inputs, operation.outputs
            # 1 + erf(x/√2) is rounded, and x/2 times that is the value.
            values[name] = values[name] + torch.finfo(x.dtype).eps * values[source] / 2
    return values[network.recipe.output]


def _run_model(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    model = load(path).eval()
    held = (tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point())
    x = torch.randn(3, *shape, dtype=torch.float64).to(next(held, torch.float32))
    try:
        with torch.no_grad():
            with layer_by_layer():
                expected = model(x)
            return model(x), expected, model(_shaken(x))
    except (RuntimeError, IndexError) as error:
        # Layers around a ConformalLayers that do not fit together are torch's to refuse.
        if place_of(error).startswith("testing/"):
            raise ConformalError(str(error)) from error
        raise


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
    header["__metadata__"][_DOCUMENT] = json.dumps(document)
    header["__metadata__"][_SUM] = checksum(header, [bytes(data)])
    text = json.dumps(header).encode()
    return "; ".join(texts), struct.pack("<Q", len(text)) + text + bytes(data)


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
