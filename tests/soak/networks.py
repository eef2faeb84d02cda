"""Attack networks: layers, evaluation and the folds of every strategy against the oracle."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES
from models import Generator, Shape, odd_samples
from soak.case import Case
from soak.reference import Reference


def attack(case: Case) -> None:
    """Run one random network, conformal or plain, through every path of torch."""
    model, shape = Generator(case.rng).any()
    dtype = case.rng.choice((torch.float64, torch.float32))
    model = model.to(dtype)
    x = odd_samples(case.rng, shape, dtype)
    expected = Reference(model, x, dtype)
    case.counts["samples out of range"] += int((~expected.held).sum())
    case.subject = f"{dtype} {shape} {model}"
    with torch.no_grad(), cl.layer_by_layer():
        expected.check(case, "layers one by one", copy.deepcopy(model).eval()(x))
    with torch.no_grad():
        expected.check(case, "eval()", copy.deepcopy(model).eval()(x))
    for strategy in ("auto", *STRATEGIES):
        _fold(case, model, shape, x, strategy, expected)
    if not any(isinstance(module, cl.ConformalLayers) for module in model.modules()):
        _check_plain(case, model, shape, dtype)


def _fold(
    case: Case, model: nn.Module, shape: Shape, x: Tensor, strategy: str, expected: Reference
) -> None:
    try:
        folded = cl.fold(model, shape, strategy=strategy, dtype=x.dtype)
    except cl.ConformalError as error:
        if strategy in ("auto", "layers"):
            case.find(f"{strategy} refuses: {error}")
        case.counts["strategies that do not apply"] += 1
        return
    case.counts["folds"] += 1
    name = strategy if strategy != "auto" else f"auto ({folded.strategy})"
    with torch.no_grad():
        expected.check(case, f"fold {name}", folded(x))
        expected.check(case, f"{name}, one by one", torch.cat([folded(one[None]) for one in x]))
    for region in folded.explain().regions:
        if strategy == "auto" and region.cost_after.work > region.cost_before.work:
            case.find(f"more multiply-adds than before: {region}")


class Outputs(nn.Module):
    """A network that returns values from its middle, too."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return {"features": y, "more": (self.second(y), x)}


def _check_plain(case: Case, model: Any, shape: Shape, dtype: torch.dtype) -> None:
    """Fold a plain network with several outputs, and run its fold for larger images."""
    cut = case.rng.randrange(1, len(model))
    folded = cl.fold(Outputs(model[:cut], model[cut:]), shape, dtype=dtype)
    x = odd_samples(case.rng, shape, dtype)
    with torch.no_grad():
        found = folded(x)
    Reference(model[:cut], x, dtype).check(case, "an output of the middle", found["features"])
    Reference(model, x, dtype).check(case, "the last of several outputs", found["more"][0])
    x = odd_samples(case.rng, (shape[0], *(n + case.rng.randint(0, 4) for n in shape[1:])), dtype)
    try:
        with torch.no_grad():
            y = cl.fold(model, shape, dtype=dtype)(x)
            model(x)
    except (cl.ConformalError, RuntimeError):  # a size that the fold or the model does not take
        return
    case.counts["images of other sizes"] += 1
    Reference(model, x, dtype).check(case, f"a fold for {shape} on {tuple(x.shape[1:])}", y)
