"""Attack evaluation: change a model in any way; the next evaluation must show the change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from conformallayers.container import layer_by_layer
from conformallayers.nn.activations import RadialActivation
from models import Generator
from soak.case import Case

_FACTOR = 1.5
_THREADS = 3  # that evaluate at once after a change
_LIMIT = 1e-8  # relative, in float64: a stale fold is off by far more


def attack(case: Case) -> None:
    """Evaluate, change, evaluate again; compare with the layers one by one."""
    model, shape = Generator(case.rng).conformal()
    case.subject = f"{shape} {model}"
    x = torch.randn(3, *shape, dtype=torch.float64)
    for name, change in WAYS.items():
        changed = copy.deepcopy(model).eval()
        with torch.no_grad():
            changed(x)
        change(changed, x)
        case.counts["ways to change a weight"] += 1
        with torch.no_grad(), layer_by_layer():
            expected = changed(x)
        with ThreadPoolExecutor(_THREADS) as pool:
            results = list(pool.map(torch.no_grad()(changed), [x] * _THREADS))
        for y in results:
            off, size = float((y - expected).norm()), float(expected.norm())
            if not off <= _LIMIT * size + 1e-280 and expected.isfinite().all():
                case.find(f"{name}: off by {off / size if size else torch.inf:.3g}")


def _each(write: Callable[[Any], Any]) -> Callable[[Any, Tensor], None]:
    """Return a change that writes to every parameter."""

    def change(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)

    return change


def _step(model: nn.Module, x: Tensor) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    model(x).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a learned α is exp(log_factor)
    torch.optim.AdamW(model.parameters(), lr=0.01, fused=True).step()


def _load(model: nn.Module, x: Tensor) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)


def _buffers(model: nn.Module, x: Tensor) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith(("mean", "var", "norm")):
            buffer.data.mul_(_FACTOR)


class _Larger(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * _FACTOR


def _weighted(model: nn.Module) -> list[nn.Module]:
    weights = ((module, module._parameters.get("weight")) for module in model.modules())
    return [module for module, weight in weights if weight is not None and weight.dim() > 1]


def _parametrization(model: nn.Module, x: Tensor) -> None:
    for layer in _weighted(model):
        parametrize.register_parametrization(layer, "weight", _Larger())


def _hooks(model: nn.Module, x: Tensor) -> None:
    for layer in _weighted(model):
        layer.register_forward_hook(lambda layer, inputs, output: output * _FACTOR)


def _alphas(model: nn.Module, x: Tensor) -> None:
    for module in model.modules():
        if isinstance(module, RadialActivation) and isinstance(module.alpha, float):
            module.alpha = module.alpha * _FACTOR


WAYS: dict[str, Callable[[Any, Tensor], None]] = {
    "mul_": _each(lambda p: p.mul_(_FACTOR)),
    "data.mul_": _each(lambda p: p.data.mul_(_FACTOR)),
    "data = ...": _each(lambda p: setattr(p, "data", p.data * _FACTOR)),
    "numpy": _each(lambda p: p.detach().numpy().__imul__(_FACTOR)),
    "dlpack": _each(lambda p: torch.utils.dlpack.from_dlpack(p.detach()).mul_(_FACTOR)),
    "index": _each(lambda p: p.data.view(-1)[:1].fill_(3.0)),
    "fused optimiser": _step,
    "load_state_dict": _load,
    "buffers": _buffers,
    "parametrization": _parametrization,
    "hooks": _hooks,
    "alphas": _alphas,
}
