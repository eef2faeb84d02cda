"""Attack networks: layers, evaluation and the folds of every strategy against the oracle."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from conformallayers.container import layer_by_layer
from conformallayers.errors import ConformalError
from conformallayers.folding.fold import fold
from conformallayers.folding.strategies import STRATEGIES
from soak.case import Case
from soak.generator import Generator, Shape, samples
from soak.reference import Reference


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
    with torch.no_grad():
        _compare(case, f"fold {name}", folded(x), expected)
        alone = torch.cat([folded(one[None]) for one in x])
        _compare(case, f"fold {name}, one by one", alone, expected)


def _compare(case: Case, path: str, y: Tensor, expected: Reference) -> None:
    case.counts["comparisons"] += 1
    fault = expected.error(y)
    if fault:
        case.find(f"{path}: {fault}")
