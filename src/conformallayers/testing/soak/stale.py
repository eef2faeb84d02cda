"""Attack evaluation caches: change a model in every way there is; the next evaluation must show it.

Ways that leave no version behind (fused optimisers, .data, numpy, storages) change every entry: of a
large tensor the library compares some, see docs/promises.md.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)

from ...nn.activations import RadialActivation, ReSPro
from ...nn.container import ConformalLayers, layer_by_layer
from ...nn.layers import Linear
from .case import Case
from .generator import Generator

Change = Callable[[Any, Tensor], Any]
WAYS_PER_CASE = 12
_FACTOR = 1.5
_LIMIT = 1e-8  # relative, in float64: a stale fold is off by far more


def attack(case: Case) -> None:
    """Evaluate, change, evaluate again; compare with the layers one by one."""
    model, shape = Generator(case.rng).network()
    features = ConformalLayers(Linear(4, 4), ReSPro(0.5), nn.Sequential(Linear(4, 4), ReSPro(2.0)))
    if not any(p.dim() for p in model.parameters()) or case.rng.random() < 0.2:
        batch_norm = nn.BatchNorm1d(4)
        model, shape = features.append(batch_norm).double(), (4,)
    case.subject = f"{shape} {model}"
    x = torch.randn(3, *shape, dtype=torch.float64)
    for name in case.rng.sample(sorted(WAYS), WAYS_PER_CASE):
        changed = copy.deepcopy(model).eval()
        with torch.no_grad():
            changed(x)
        case.counts["ways to change a weight"] += 1
        with _undone():
            result = WAYS[name](changed, x)
            current = result if isinstance(result, nn.Module) else changed
            if not all(bool(p.isfinite().all()) for p in current.parameters()):
                continue  # an optimiser may diverge
            with torch.no_grad():
                y = current(x)
                with layer_by_layer():
                    expected = current(x)
        off, size = float((y - expected).norm()), float(expected.norm())
        if not off <= _LIMIT * size + 1e-280 and expected.isfinite().all():
            case.find(f"{name}: off by {off / size if size else torch.inf:.3g}")


@contextmanager
def _undone() -> Iterator[None]:
    """Remove the hooks that a way has set for all modules."""
    hooks = nn.modules.module._global_forward_hooks
    before = dict(hooks)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


WAYS: dict[str, Change] = {}


def _way(change: Change) -> Change:
    WAYS[change.__name__.strip("_")] = change
    return change


def _optimiser(name: str, **options: Any) -> None:
    def change(model: nn.Module, x: Tensor) -> None:
        model(x).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a learned α is exp(log_factor)
        with torch.no_grad():
            model(x)
        getattr(torch.optim, name)(model.parameters(), lr=0.3, **options).step()

    WAYS[f"{name} {options}"] = change


for _name in ("SGD", "Adam", "AdamW", "Adagrad"):
    for _options in ({"fused": True}, {"foreach": True}, {}):
        _optimiser(_name, **_options)
for _name in ("RMSprop", "NAdam", "Adamax", "Rprop", "RAdam"):
    _optimiser(_name)


def _each(
    name: str,
    write: Callable[[Any], Any],
    select: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters,
) -> None:
    """Add a way that writes to every parameter, or to everything that is selected."""

    def change(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            for selected in list(select(model)):
                write(selected)

    WAYS[name] = change


def _weighted(model: nn.Module) -> list[nn.Module]:
    """Return the layers with a weight of at least two axes."""
    weights = ((module, module._parameters.get("weight")) for module in model.modules())
    return [module for module, weight in weights if weight is not None and weight.dim() > 1]


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def _statistics(model: nn.Module) -> list[Tensor]:
    """Return the buffers of batch norms and of spectral activations."""
    names = "mean", "var", "norm"
    return [buffer for name, buffer in model.named_buffers() if name.endswith(names)]


def _enlarge_input(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * _FACTOR,)


def _enlarge_output(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * _FACTOR


def _update_statistics(norm: Any) -> None:
    batch = torch.randn(8, norm.num_features, dtype=torch.float64)
    F.batch_norm(batch, norm.running_mean, norm.running_var, training=True)


_each("mul_", lambda p: p.mul_(_FACTOR))
_each("copy_", lambda p: p.copy_(p * _FACTOR))
_each("data.mul_", lambda p: p.data.mul_(_FACTOR))
_each("data = ...", lambda p: setattr(p, "data", p.data * _FACTOR))
_each("detach().mul_", lambda p: p.detach().mul_(_FACTOR))
_each("numpy", lambda p: p.detach().numpy().__imul__(_FACTOR))
_each("dlpack", lambda p: torch.utils.dlpack.from_dlpack(p.detach()).mul_(_FACTOR))
_each("storage", lambda p: p.untyped_storage().copy_((p * _FACTOR).untyped_storage()))
_each("set_", lambda p: p.set_((p * _FACTOR).untyped_storage(), 0, p.shape, p.stride()))
_each("swap_tensors", lambda p: torch.utils.swap_tensors(p, nn.Parameter(p * _FACTOR)))
_each("lerp_", lambda p: p.lerp_(torch.ones_like(p), 0.5))
_each("nn.init", nn.init.ones_)
_each("index", lambda p: p.view(-1)[:1].fill_(3.0))
_each("pruning", lambda layer: prune.l1_unstructured(layer, "weight", 0.5), _weighted)
_each("forward_hooks", lambda layer: layer.register_forward_hook(_enlarge_output), _weighted)
_each("forward_pre_hooks", lambda layer: layer.register_forward_pre_hook(_enlarge_input), _weighted)
_each("buffers", lambda buffer: buffer.data.mul_(_FACTOR), _statistics)
_each("batch_norm_functional", _update_statistics, _batch_norms)
_each("batch_norm_eps", lambda norm: setattr(norm, "eps", 1.0), _batch_norms)


@_way
def _foreach(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), _FACTOR)


@_way
def _load_state_dict(model: nn.Module, x: Tensor) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})


@_way
def _load_state_dict_assign(model: nn.Module, x: Tensor) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)


@_way
def _vector_to_parameters(model: nn.Module, x: Tensor) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * _FACTOR, model.parameters())


@_way
def _new_parameters(model: nn.Module, x: Tensor) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() * _FACTOR))


@_way
def _new_parameters_in_the_table(model: nn.Module, x: Tensor) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach() * _FACTOR)


@_way
def _thread(model: nn.Module, x: Tensor) -> None:
    worker = threading.Thread(target=WAYS["data.mul_"], args=(model, x))
    worker.start()
    worker.join()


@_way
def _inference_tensors(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.clone(), requires_grad=False))
        model(x)
        for parameter in model.parameters():
            parameter.mul_(_FACTOR)


class _Larger(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * _FACTOR


@_way
def _parametrisation(model: nn.Module, x: Tensor) -> None:
    for layer in _weighted(model):
        parametrize.register_parametrization(layer, "weight", _Larger())
    with torch.no_grad():
        model(x)
    WAYS["mul_"](model, x)


@_way
def _weight_norm(model: nn.Module, x: Tensor) -> None:
    for layer in _weighted(model):
        weight: Any = layer.weight
        if weight.flatten(1).norm(dim=1).min() > 0:  # torch divides by the norms of the rows
            parametrizations.weight_norm(layer)
    with torch.no_grad():
        model(x)
    WAYS["data.mul_"](model, x)


@_way
def _global_hook(model: nn.Module, x: Tensor) -> None:
    nn.modules.module.register_module_forward_hook(
        lambda module, _, output: (
            output * _FACTOR if isinstance(module, (nn.Linear, nn.Conv2d)) else None
        )
    )


@_way
def _moved_children(model: nn.Module, x: Tensor) -> None:
    for module in model.modules():
        if type(module) is nn.Sequential and all(map(_keeps_shape, module)):
            first = next(iter(module._modules), None)
            if first is not None:
                module._modules[first] = module._modules.pop(first)


def _keeps_shape(module: Any) -> bool:
    square = isinstance(module, nn.Linear) and module.in_features == module.out_features
    return square or isinstance(module, (nn.Identity, RadialActivation))


@_way
def _activations(model: nn.Module, x: Tensor) -> None:
    for module in model.modules():
        if isinstance(module, RadialActivation) and isinstance(module.alpha, float):
            module.alpha = module.alpha * _FACTOR
        if isinstance(module, ReSPro):
            module.projective = not module.projective


@_way
def _deep_copy(model: nn.Module, x: Tensor) -> nn.Module:
    twin = copy.deepcopy(model)
    WAYS["numpy"](twin, x)
    return twin


@_way
def _training(model: nn.Module, x: Tensor) -> None:
    model.train()(x)
    model.eval()
