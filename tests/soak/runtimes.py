"""Attack runtimes: one fold, in floats and in int8, in torch, numpy, ONNX Runtime, JavaScript and C under sanitizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.recipe import integer_operations
from conformallayers.recipe.layer_operations import AddConstant
from conformallayers.recipe.onnx.export import LIMITS
from conformallayers.recipe.recipe import Operation
from models import Generator, odd_samples
from runtimes import RUNTIMES, run, takes
from soak.case import Case
from soak.reference import Reference

_LIMIT = 1e-5  # of C in float32, see docs/deploy.md; of functions of floats in an int8 network


def attack(case: Case) -> None:
    """Fold a random network, save it, and run the file in every runtime; then the same in int8."""
    model, shape = Generator(case.rng).any()
    dtype = case.rng.choice((torch.float32, torch.float32, torch.float64))
    strategy = case.rng.choice(("auto", *STRATEGIES))
    model = model.to(dtype)
    x = odd_samples(case.rng, shape, dtype)
    case.subject = f"{strategy} {dtype} {shape} {model}"
    try:
        folded = cl.fold(model, shape, strategy=strategy, dtype=dtype)
    except cl.ConformalError:
        folded = cl.fold(model, shape, strategy="layers", dtype=dtype)
    if any(operation.kind == "call" for operation in folded.recipe.operations):
        case.counts["folds that only torch runs"] += 1
        return
    expected = Reference(model, x, dtype)
    for runtime, y in _outputs(case, folded, x):
        extra = {"ONNX Runtime": LIMITS[dtype]}.get(runtime, _LIMIT if "C" in runtime else 0.0)
        expected.check(case, f"{folded.strategy} in {runtime}", y, extra)
    if dtype == torch.float32:
        _attack_integers(case, folded, x)


def _attack_integers(case: Case, folded: cl.Folded, x: Tensor) -> None:
    """Quantise a fold by other samples, and expect the same bits everywhere."""
    try:
        folded = cl.quantize(folded, odd_samples(case.rng, folded.input_shape, torch.float32))
    except cl.ConformalError:
        case.counts["folds that int8 lacks"] += 1
        return
    with torch.no_grad():
        expected = folded(x)
    # Functions of floats behind the integers, such as tanh, round by the runtime.
    limit = 0.0 if all(map(_rounds_alike, folded.recipe.operations)) else _LIMIT
    limit *= float(expected.nan_to_num().abs().max())
    for runtime, y in _outputs(case, folded, x):
        same = (y == expected) | (y.isnan() & expected.isnan()) | ((y - expected).abs() <= limit)
        if not same.all():
            count, worst = int((~same).sum()), (y - expected).abs().max()
            case.find(f"int8 in {runtime}: {count} outputs differ by up to {worst:.3g}")


def _rounds_alike(operation: Operation) -> bool:
    """Tell whether all runtimes round an operation in the same way."""
    whole = type(operation).__module__ == integer_operations.__name__
    return whole or operation.keeps_integers or isinstance(operation, AddConstant)


def _outputs(case: Case, folded: cl.Folded, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each runtime that takes a fold, with its outputs."""
    for name in RUNTIMES:
        if not takes(name, folded):
            continue
        with TemporaryDirectory() as folder, torch.no_grad():
            try:
                y = run(name, folded, Path(folder), x)
            except cl.ConformalError as error:
                if name in ("torch", "numpy"):
                    case.find(f"{name} refuses: {error}")
                case.counts[f"{name}: refused by name"] += 1
                continue
        case.counts[f"{name}: runs"] += 1
        yield name, y


def missing() -> list[str]:
    """Return the runtimes that this machine lacks."""
    return [name for name in ("ONNX Runtime", "JavaScript", "C for speed") if name not in RUNTIMES]
