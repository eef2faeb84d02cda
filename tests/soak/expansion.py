"""Attack expand and collapse: the outputs of the model, its keys, and those of the trained one after it."""

from __future__ import annotations

import torch
from torch import nn

import conformallayers as cl
from conformallayers.nn.expanded import Expanded
from models import Generator
from soak.case import Case
from soak.reference import Reference


def attack(case: Case) -> None:
    """Expand a random network, train it for a few steps, collapse and fold it."""
    rng, (model, shape) = case.rng, Generator(case.rng).any()
    x = torch.randn(5, *shape, dtype=torch.float64)
    kinds = "chain", "branches", "chain+branches"
    found = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, *_CONVOLUTIONS))}
    wide = any(max(getattr(layer, "kernel_size", (1,))) > 1 for layer in found.values())
    if not found:
        return
    only = rng.sample([*found], rng.randint(1, len(found)))
    if wide and rng.random() < 0.6:
        only = None
    options = {"kind": rng.choice(kinds), "width": rng.uniform(1, 4), "only": only}
    options["norm"] = rng.random() < 0.3
    case.subject = f"{options} {shape} {model}"
    bigger = cl.expand(model, **options)
    expected = Reference(model, x, torch.float64)
    with torch.no_grad():
        expected.check(case, "expanded", bigger.eval()(x))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _train(bigger, x)
    plain = cl.collapse(bigger)
    if list(plain.state_dict()) != list(before) or str(plain) != str(model):
        case.find(f"collapsed to {plain}")
    if any(not torch.equal(value, before[key]) for key, value in model.state_dict().items()):
        case.find("the model itself has changed")
    trained = Reference(plain, x, torch.float64)
    with torch.no_grad(), cl.layer_by_layer():
        trained.check(case, "trained, layer by layer", bigger.eval()(x))
    with torch.no_grad():
        trained.check(case, "trained and evaluated", bigger(x))
        trained.check(case, "trained and folded", cl.fold(bigger, shape, dtype=x.dtype)(x))
        trained.check(case, "collapsed and folded", cl.fold(plain, shape, dtype=x.dtype)(x))
    case.counts["normalized layers"] += sum(
        "Normalized" in type(m).__name__ for m in bigger.modules()
    )
    case.counts["expanded layers"] += sum(isinstance(m, Expanded) for m in bigger.modules())


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _train(model: nn.Module, x: torch.Tensor) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        optimiser.zero_grad()
        model.train()(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a learned α is exp(log_factor)
        optimiser.step()
