"""Attack networks: layers, evaluation and the folds of every strategy against the oracle."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from conformallayers.errors import ConformalError
from conformallayers.folding.fold import fold
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.nn.container import layer_by_layer
from conformallayers.recipe import point_operations as point
from soak.case import Case
from soak.generator import Generator, Shape, samples
from soak.reference import Reference, noise_of


def attack(case: Case) -> None:
    """Run one random network through every path of torch."""
    model, shape, large = Generator(case.rng).any_network()
    dtype = case.rng.choice((torch.float64, torch.float32))
    model = model.to(dtype)
    x = samples(case.rng, shape, dtype, batch=3 if large else 7)
    case.counts["networks above a million values"] += large
    expected = Reference(model, x, dtype)
    case.counts["samples out of range"] += int((~expected.held).sum())
    case.subject = f"{dtype} {shape} {model}"
    with torch.no_grad():
        with layer_by_layer():
            _compare(case, "layers one by one", copy.deepcopy(model).eval()(x), expected)
        _compare(case, "eval()", copy.deepcopy(model).eval()(x), expected)
    strategies = ("auto", "layers") if large else ("auto", *STRATEGIES)
    for strategy in strategies:
        _fold(case, model, shape, x, strategy, expected)


def _fold(
    case: Case, model: nn.Module, shape: Shape, x: Tensor, strategy: str, expected: Reference
) -> None:
    try:
        folded = fold(model, shape, strategy=strategy, dtype=x.dtype)
    except ConformalError as error:
        if strategy in ("auto", "layers"):
            case.find(f"{strategy} refuses: {error}")
        case.counts["strategies that do not apply"] += 1
        return
    case.counts["folds"] += 1
    name = strategy if strategy != "auto" else f"auto ({folded.strategy})"
    # Energies of points that are sums of parts may be small differences: docs/promises.md.
    forms = any(isinstance(op, point.Grow) for op in folded.recipe.operations)
    with torch.no_grad():
        noise = noise_of(folded, x) if forms else 0.0
        _compare(case, f"fold {name}", folded(x), expected, noise)
        alone = torch.cat([folded(one[None]) for one in x])
        _compare(case, f"fold {name}, one by one", alone, expected, noise)


def _compare(
    case: Case, path: str, y: Tensor, expected: Reference, noise: Tensor | float = 0.0
) -> None:
    case.counts["comparisons"] += 1
    fault = expected.error(y, noise=noise)
    if fault:
        case.find(f"{path}: {fault}")
