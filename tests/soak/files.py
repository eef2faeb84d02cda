"""Attack files: mutants with a right checksum, and damaged ones.

A mutant must be refused with a ConformalError, or give the same numbers in torch and in numpy. A damaged
file must be refused.
"""

from __future__ import annotations

import copy
import math
import struct
import time
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from conformallayers import numpy as numpy_runtime
from conformallayers.errors import ConformalError
from conformallayers.folding.fold import TOLERANCES, fold
from conformallayers.folding.save import load, save
from conformallayers.folding.strategies import STRATEGIES
from models import Generator
from soak.case import Case, limited_memory
from stored import forge, places

MUTANTS = 20  # of one file
SECONDS = 30  # of CPU that a mutant may take
MEMORY = 2**31  # bytes that a mutant of a few kilobytes may ask for
_SCALARS = (0, 1, -1, 2, 3, 7, 64, 2**14, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e300)
_OTHERS: tuple[Any, ...] = (
    *("", "x", "tau", "matmul", None, True, False, math.inf),
    *([], {}, [2**40], [[]], {"operation": "call"}),
)


def attack(case: Case) -> None:
    """Save the fold of a random network and load mutants of the file."""
    model, shape = Generator(case.rng).any()
    model = model.to(case.rng.choice((torch.float32, torch.float64)))
    case.subject = f"{shape} {model}"
    try:
        folded = fold(model, shape, strategy=case.rng.choice(("auto", *STRATEGIES)))
    except ConformalError:
        folded = fold(model, shape)
    if any(operation.kind == "call" for operation in folded.recipe.operations):
        return  # of torch alone: no file holds it
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        save(folded, path)
        content = path.read_bytes()
        for _ in range(MUTANTS):
            if case.rng.random() < 0.15:
                path.write_bytes(_damaged(case.rng, content))
                _check_damaged(case, path)
            else:
                path.write_bytes(content)
                _check_mutant(case, forge(path, partial(_mutate, case.rng)), path)


def _check_damaged(case: Case, path: Path) -> None:
    case.counts["damaged files"] += 1
    for read in (load, numpy_runtime.load):
        try:
            read(path)
        except ConformalError as error:
            _check_message(case, str(error), path)
            continue
        case.find(f"{read.__module__}.load takes a file with a wrong checksum")


def _check_message(case: Case, text: str, path: Path) -> None:
    """Expect one short sentence that names the file."""
    if not text.startswith(f"load({path})") or len(text) > 350 + len(str(path)):
        case.find(f"a refusal that is no short sentence: {text[:600]}")


def _check_mutant(case: Case, text: str, path: Path) -> None:
    """Load and run a mutant in two ways and compare them; a third result shows its condition."""
    case.counts["mutants"] += 1
    begun = time.process_time()
    try:
        with limited_memory(MEMORY):
            results = _run(path)
    except ConformalError as error:
        _check_message(case, str(error), path)
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
    kind = rng.randrange(4)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content + b"\0"
    if kind == 2:  # the length of the header
        return struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1))) + content[8:]
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _mutate(rng: Random, document: Any, arrays: dict[str, Any]) -> str:
    """Change a document or its arrays; return what was changed."""
    if not arrays or rng.random() < 0.75:
        return "; ".join(_changed(rng, document) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    name, other = rng.choice(sorted(arrays)), rng.choice(sorted(arrays))
    array = arrays[name]
    if array.size and rng.random() < 0.5:
        value = rng.choice((0, -1, 5, 1000, math.nan, math.inf))
        whole = array.dtype.kind == "i"
        arrays[name] = array = array.copy()
        array.reshape(-1)[rng.randrange(array.size)] = (
            5 if whole and not abs(value) < 100 else value
        )
        return f"a number of {name} is {value}"
    row = array.reshape(-1)
    arrays[name] = rng.choice((row, row[:-1], array[..., None], array.astype("f8"), arrays[other]))
    return f"{name} is {arrays[name].dtype} {arrays[name].shape}"


def _changed(rng: Random, tree: Any) -> str:
    """Change one place of a JSON tree; return which and how."""
    holder, key = rng.choice(list(places(tree)))
    old, kind = holder[key], rng.randrange(6)
    if kind == 0:
        del holder[key]
        return f"{key!r} is deleted"
    if kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
        return f"{str(old)[:80]} is there twice"
    if kind == 2 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = rng.choice((old + 1, old - 1, -old, old * 1000, old / 2, float(old)))
    elif kind == 3:  # another value of the same type
        same = [h[k] for h, k in places(tree) if type(h[k]) is type(old)]
        holder[key] = copy.deepcopy(rng.choice(same))
    else:
        holder[key] = copy.deepcopy(rng.choice((*_SCALARS, *_SCALARS, *_OTHERS)))
    return f"{key!r} is {str(holder[key])[:80]} instead of {str(old)[:80]}"
