"""Frozen copies of modules: evaluation semantics, no parameters, no hooks, no tie to the model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

from ..errors import refusal
from ..functional import wide_dtype
from ..nn.expanded import collapsed
from ..nn.registry import held_tensors

# Hooks that compute the weight before each forward; their work is done once, at freezing.
_WEIGHT_HOOKS = ("WeightNorm", "SpectralNorm")


def freeze(module: nn.Module) -> nn.Module:
    """Copy a module for evaluation, without parameters, parametrisations or hooks.

    Hooks that compute a weight (weight norm, spectral norm, pruning) have done their work in the
    copy; other hooks are left behind, see :func:`refuse_hooks`.
    """
    # Computed tensors, of functional_call or as attributes, cannot be copied.
    computed = (value for value in held_tensors(module) if not value.is_leaf)
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in computed}
    with torch.no_grad():
        frozen = collapsed(copy.deepcopy(module, memo)).eval()  # weights may differ in training
        for child in list(frozen.modules()):
            _store_weights(child)
        for child in frozen.modules():
            for name, parameter in list(child._parameters.items()):
                if parameter is not None:
                    del child._parameters[name]
                    child.register_buffer(name, parameter.detach())
    return frozen


def frozen_wide(module: nn.Module) -> nn.Module:
    """Freeze a module in float64, on a device that has it."""
    frozen = freeze(module)
    if wide_dtype(device_of([frozen])) is not torch.float64:
        frozen = frozen.to("cpu")
    return frozen.to(torch.float64)


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the first tensor of frozen modules; without any the CPU."""
    buffers = (buffer for module in modules for buffer in module.buffers())
    return next((buffer.device for buffer in buffers), torch.device("cpu"))


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Refuse a module whose hooks may change its output: a folded copy would lose them."""
    lost = lost_hooks(module)
    if lost:
        raise refusal(
            f"{type(module).__name__} at position {path}" if path else type(module).__name__,
            "a module without forward hooks",
            f"{lost} of them, which a folded copy would lose",
            "Remove them first: handle.remove().",
        )


def lost_hooks(module: nn.Module) -> int:
    """Count the forward hooks of a module that a frozen copy does not have."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return sum(not _computes_weight(hook) for hook in hooks)


def _computes_weight(hook: Any) -> bool:
    return isinstance(hook, BasePruningMethod) or type(hook).__name__ in _WEIGHT_HOOKS


def _store_weights(module: nn.Module) -> None:
    """Replace parametrised and hooked weights by buffers, and drop all hooks."""
    if parametrize.is_parametrized(module):
        # Not remove_parametrizations: it deletes properties of the class, which the copy shares
        # with the model itself.
        names: Any = module.parametrizations
        values = {name: getattr(module, name).detach().clone() for name in names}
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
        for name, value in values.items():
            module.register_buffer(name, value)
    for hook in list(module._forward_pre_hooks.values()):
        if _computes_weight(hook):
            _run_weight_hook(module, hook)
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()


def _run_weight_hook(module: nn.Module, hook: Any) -> None:
    hook(module, ())
    name: str = getattr(hook, "_tensor_name", None) or hook.name
    weight = module.__dict__.pop(name).detach()
    for table in (module._parameters, module._buffers):
        for part in [part for part in table if part.startswith(name + "_")]:
            del table[part]
    module.register_buffer(name, weight)
