"""Attack whole numbers: quantised folds give the same bits in torch, numpy, ONNX Runtime and C."""

from __future__ import annotations

import torch

from conformallayers.errors import ConformalError
from conformallayers.folding.fold import fold
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.quantization.quantize import quantize
from conformallayers.recipe import integer_operations
from conformallayers.recipe.integer_operations import keeps_integers
from conformallayers.recipe.layer_operations import AddConstant
from conformallayers.recipe.operation import Operation
from soak.case import Case
from soak.generator import Generator, samples
from soak.runtimes import outputs

_LIMIT = 1e-5  # of functions of floats, of the largest output


def attack(case: Case) -> None:
    """Quantise the fold of a random network by samples, and run it on others in every runtime."""
    model, shape = Generator(case.rng, portable=True).network()
    strategy = case.rng.choice(("auto", *STRATEGIES))
    seen, x = (samples(case.rng, shape, torch.float32) for _ in range(2))
    case.subject = f"{strategy} {shape} {model}"
    try:
        folded = quantize(fold(model.float(), shape, strategy=strategy), seen)
    except ConformalError:
        case.counts["folds that int8 lacks"] += 1
        return
    case.counts["quantised folds"] += 1
    with torch.no_grad():
        expected = folded(x)
    # Functions of floats behind the whole numbers, such as tanh, round by the runtime.
    limit = 0.0 if all(map(_rounds_alike, folded.recipe.operations)) else _LIMIT
    limit *= float(expected.nan_to_num().abs().max())
    for runtime, y in outputs(case, folded, x):
        same = (y == expected) | (y.isnan() & expected.isnan()) | ((y - expected).abs() <= limit)
        if not same.all():
            count, worst = int((~same).sum()), (y - expected).abs().max()
            case.find(
                f"{folded.strategy} in {runtime}: {count} outputs differ by up to {worst:.3g}"
            )


def _rounds_alike(operation: Operation) -> bool:
    """Tell whether all runtimes round an operation in the same way."""
    whole = type(operation).__module__ == integer_operations.__name__
    return whole or keeps_integers(operation) or isinstance(operation, AddConstant)
