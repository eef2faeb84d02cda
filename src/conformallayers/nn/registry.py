"""The registry of layers and maps: which types may stand in a ConformalLayers, and how they run.

Affine types count as linear: their bias enters as ``x ← U x + t·b``. Each type is one row. A subclass
inherits the row of its nearest ancestor unless it overrides ``forward``; then it must be registered
itself, because nothing guarantees that the override is linear.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..errors import ConformalError, refusal, refusal_at, shape_text
from ..functional import Scalar, norm_pool, window_sums
from .activations import RadialActivation
from .bounds import Shape, pool_axes
from .branches import BatchFlow, Composite, Flow, Join, below, joined_bound
from .supported import BATCH_NORMS, NORM_POOLS, POOLS, REFUSED, SUPPORTED, Bound, LayerSpec

SUPPORTED_KINDS = (
    "a linear layer, an activation such as cl.ReSPro or a homogeneous map such as nn.ReLU"
)
_REGISTER = (
    "cl.register_linear if it is linear, cl.register_homogeneous if f(λx) = λ·f(x) for λ > 0."
)


def register_linear(module_type: type[nn.Module], bound: Bound, *, rank: int | None = None) -> None:
    """Allow modules of your own type in a :class:`ConformalLayers`.

    The module must be linear in its input, without a bias, and treat each sample by itself;
    :func:`conformallayers.testing.assert_linear` checks that.

    Args:
        module_type: the class.
        bound: function of (module, shape of one input sample) that returns an upper bound of the
            operator norm, a float or a 0-dim tensor.
        rank: number of axes of its input including the batch axis, if the module fixes it.

    Examples:
        >>> class Negate(torch.nn.Module):
        ...     def forward(self, input):
        ...         return -input
        >>> register_linear(Negate, bound=lambda module, shape: 1.0)
        >>> import conformallayers as cl
        >>> cl.ConformalLayers(Negate(), cl.ReSPro())
        ConformalLayers(
          (0): Negate()
          (1): ReSPro()
        )
    """
    _check_class("register_linear", module_type)
    _SPECS[module_type] = LayerSpec(bound, rank=rank)


def register_homogeneous(
    module_type: type[nn.Module], bound: Bound, *, rank: int | None = None
) -> None:
    """Allow positively homogeneous maps of your own type in a :class:`ConformalLayers`.

    The map must have ``h(λx) = λ·h(x)`` for λ > 0 and treat each sample by itself;
    :func:`conformallayers.testing.assert_homogeneous` checks that, and the bound.

    Args:
        bound: function of (module, shape of one input sample) that returns an upper bound of
            ``‖h(x)‖/‖x‖``, a float or a 0-dim tensor.
        module_type, rank: as in :func:`register_linear`.

    Examples:
        >>> class Sorted(torch.nn.Module):
        ...     def forward(self, input):
        ...         return input.sort(dim=1).values
        >>> register_homogeneous(Sorted, bound=lambda module, shape: 1.0)
        >>> import conformallayers as cl
        >>> cl.ConformalLayers(cl.Linear(4, 4), Sorted(), cl.ReSPro())(torch.rand(2, 4)).shape
        torch.Size([2, 4])
    """
    _check_class("register_homogeneous", module_type)
    _SPECS[module_type] = LayerSpec(bound, rank=rank, homogeneous=True)


def _check_class(function: str, module_type: Any) -> None:
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        where, expected = f"{function}(module_type)", "a subclass of nn.Module"
        raise refusal(where, expected, repr(module_type), "Pass the class.")


def find_spec(module: nn.Module) -> LayerSpec | None:
    """Return the row of a module's type, or None if no row covers its forward."""
    if "forward" in vars(module):
        return None  # the instance overrides its class
    module_type = type(module)
    if issubclass(module_type, nn.modules.lazy.LazyModuleMixin):
        return None  # no bound before the weight exists
    for ancestor in module_type.__mro__:
        spec = _SPECS.get(ancestor)
        if spec is not None:
            return spec if computes_like(module_type, ancestor) else None
    return None


def computes_like(module_type: type[nn.Module], ancestor: type[nn.Module]) -> bool:
    """Check that a class does not override the computation of its ancestor."""
    names = ("forward", "_conv_forward", "__call__")
    return all(getattr(module_type, n, None) is getattr(ancestor, n, None) for n in names)


def spec_of(path: str, module: nn.Module) -> LayerSpec:
    """Return the row of a module's type, or refuse the module."""
    spec = find_spec(module)
    if spec is None:
        name, remedy = type(module).__name__, suggestion(type(module))
        where = f"ConformalLayers at position {path}"
        raise refusal(where, SUPPORTED_KINDS, name, remedy)
    problem = spec.problem(module)
    if problem is not None:
        raise ConformalError(f"ConformalLayers at position {path}: {problem}")
    return spec


def is_homogeneous(module: nn.Module) -> bool:
    """Check whether a module is a positively homogeneous map, which acts on x and leaves t alone."""
    spec = find_spec(module)
    return spec is not None and spec.homogeneous


def branches(module: nn.Module) -> bool:
    """Check whether a module has branches with activations or maps, so that it is not one linear layer."""
    return isinstance(module, Composite) and any(
        isinstance(child, RadialActivation) or is_homogeneous(child) for child in module.modules()
    )


def suggestion(module_type: type[nn.Module]) -> str:
    """Return what to use instead of a refused type, from its nearest ancestor with a suggestion."""
    rows = [kind for kind in module_type.__mro__ if kind in REFUSED]
    if rows:
        return REFUSED[rows[0]]
    derived = any(ancestor in _SPECS for ancestor in module_type.__mro__)
    start = "It overrides forward: register" if derived else "Register"
    return f"{start} it with {_REGISTER}"


def has_hooks(module: nn.Module) -> bool:
    """Check whether calling the module runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Check whether torch has hooks that run at every call of any module."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def is_affine(module: nn.Module) -> bool:
    """Check whether a supported module adds a bias."""
    if isinstance(module, Composite):
        return any(is_affine(child) for child in module.modules() if child is not module)
    if isinstance(module, BATCH_NORMS):
        return True
    spec = find_spec(module)
    return spec is not None and spec.affine and isinstance(getattr(module, "bias", None), Tensor)


def has_batch_statistics(module: nn.Module) -> bool:
    """Check whether a module contains a batch norm, which updates its statistics in training."""
    return any(isinstance(child, BATCH_NORMS) for child in module.modules())


def linear_part(module: nn.Module, spec: LayerSpec, x: Tensor) -> Tensor:
    """Return U x for α: the module without its bias, with the normalisations its bound ignores."""
    if spec.identity_in_eval:
        return x
    if isinstance(module, BATCH_NORMS):
        return x if module.weight is None else x * module.weight.view(-1, *[1] * (x.dim() - 2))
    if isinstance(module, Composite):
        return module.flow("", x, _Linear())
    result: Tensor = module.forward(x)
    return result - module.forward(torch.zeros_like(x)) if is_affine(module) else result


class _Linear(BatchFlow):
    """Apply the linear part of branches without activations."""

    def run(self, path: str, module: nn.Module, value: Tensor) -> Tensor:
        for name, child in modules_in(path, module):
            value = linear_part(child, spec_of(name, child), value)
        return value


def run(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x); pooling takes less time, and has gradients where the norm of a window is 0."""
    if isinstance(module, nn.Upsample):
        x = x.contiguous()  # torch copies other entries of a channels-last map
    if isinstance(module, POOLS) and not (has_hooks(module) or has_global_hooks()):
        sizes, ceil_mode = pool_axes(module, x.dim() - 2), bool(module.ceil_mode)
        if isinstance(module, NORM_POOLS):
            return norm_pool(x, sizes["kernel"], sizes["stride"], ceil_mode)
        if not any(sizes["padding"]) and not ceil_mode:
            divisor = getattr(module, "divisor_override", None) or math.prod(sizes["kernel"])
            return window_sums(x, sizes["kernel"], sizes["stride"]) / divisor
    result: Tensor = module(x)
    return result


def check_input(
    path: str, module: nn.Module, spec: LayerSpec, shape: tuple[int, ...], *, traced: bool = False
) -> None:
    """Refuse a batch whose number of axes or channels does not fit the module.

    With ``traced`` the user gave the shape of one sample instead of a batch.
    """
    got = f"samples of shape {shape_text(shape[1:])}" if traced else f"an input of shape {shape}"
    if spec.rank is not None and len(shape) != spec.rank:
        remedy = "Reshape the input."
        if len(shape) == spec.rank + (1 if traced else -1):
            remedy = (
                "Leave the batch axis out of the input shape."
                if traced
                else "Add the batch axis with x.unsqueeze(0)."
            )
        raise refusal_at(path, module, f"a batch with {spec.rank} axes", got, remedy)
    expected = getattr(module, spec.channels) if spec.channels else None
    axis = -1 if isinstance(module, nn.Linear) else 1
    if expected is not None and shape[axis] != expected:
        needed, remedy = (
            f"{spec.channels}={expected} on axis {axis}",
            "Change the layer or the input.",
        )
        if len(shape) > 3 and shape[-1] == expected:
            order = ", ".join(map(str, (0, len(shape) - 1, *range(1, len(shape) - 1))))
            remedy = f"Are the channels last? Move them first with x.permute({order})."
        raise refusal_at(path, module, needed, got, remedy)


def flatten_modules(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of the children in order, descending into nested ``nn.Sequential``."""
    for name, child in root._modules.items():
        if child is not None:
            yield from modules_in(below(prefix, name), child)


def modules_in(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module with its path, or the modules of an ``nn.Sequential``."""
    if type(module) is nn.Sequential:
        yield from flatten_modules(module, path)
    else:
        yield path, module


def check_module(path: str, module: nn.Module) -> list[nn.Module]:
    """Refuse a module that cannot stand in a ConformalLayers.

    Returns the activations of the module in the order a point passes them.
    """
    if isinstance(module, RadialActivation):
        _check_activation(path, module)
        return [module]
    if not isinstance(module, Composite):
        spec_of(path, module)
        return []
    checking = _Checking()
    module.flow(path, None, checking)
    return checking.passed


def _check_activation(path: str, module: RadialActivation) -> None:
    where = f"ConformalLayers at position {path}"
    module_type, base = type(module), RadialActivation
    if module_type.growth is base.growth:
        remedy = "Derive from it and define growth(q), or use cl.ReSPro."
        got = f"{module_type.__name__}, which has none"
        raise refusal(where, "an activation with a growth", got, remedy)
    problem = module.fault()
    if problem is not None:
        raise refusal(
            where,
            "a positive growth(q) of + - * / sqrt exp log tanh, 1 at q = 0, and a slope > 0",
            f"{module_type.__name__} with {problem}",
            "See cl.RadialActivation.",
        )


class _Checking(Flow[None]):
    """Check the modules of a composite; no values flow."""

    def __init__(self) -> None:
        self.passed: list[nn.Module] = []

    def run(self, path: str, module: nn.Module, value: None) -> None:
        for name, child in modules_in(path, module):
            self.passed += check_module(name, child)

    def join(self, path: str, values: list[None], join: Join) -> None:
        pass


class _Bounding(Flow[tuple[Shape, Scalar]]):
    """Compute the output shape and the bound of a composite of linear layers."""

    def run(
        self, path: str, module: nn.Module, value: tuple[Shape, Scalar]
    ) -> tuple[Shape, Scalar]:
        shape, bound = value
        for name, child in modules_in(path, module):
            bound = spec_of(name, child).bound(child, shape) * bound
            shape = tuple(shape_after(child, shape)[1:])
        return shape, bound

    def join(
        self, path: str, values: list[tuple[Shape, Scalar]], join: Join
    ) -> tuple[Shape, Scalar]:
        shape = join.shape([shape for shape, _ in values])
        return shape, joined_bound([bound for _, bound in values], join, one_coordinate=True)


def shape_after(module: nn.Module, shape: Shape, batch: int = 2) -> torch.Size:
    """Return the output shape of a batch, from a copy of the module without data, on the meta device."""
    tensors = list(held_tensors(module))
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    x = torch.empty(batch, *shape, dtype=floats[0] if floats else None, device="meta")
    memo: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in tensors}
    try:
        result: Tensor = _bare_copy(module, memo)(x)
    except RuntimeError:  # a tensor that is made in forward is on another device
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        result = _bare_copy(module, {})(torch.zeros_like(x, device=device))
    return result.shape


def held_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a module and its children: parameters, buffers and attributes."""
    for child in module.modules():
        for held in (child._parameters, child._buffers, vars(child)):
            yield from (value for value in held.values() if isinstance(value, Tensor))


def _bare_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module for evaluation, without the hooks of its user."""
    copied = copy.deepcopy(module, memo).eval()
    for part in copied.modules():
        part._forward_hooks.clear()
    return copied


def _composite_problem(module: Any) -> str | None:
    try:
        check_module("", module)
    except ConformalError as error:
        return str(error).removeprefix("ConformalLayers at position ")
    return None


def _composite_bound(module: Any, shape: Shape) -> Scalar:
    bound: Scalar = module.flow("", (shape, 1.0), _Bounding())[1]
    return bound


_SPECS: dict[type[nn.Module], LayerSpec] = {
    **SUPPORTED,
    Composite: LayerSpec(_composite_bound, check=_composite_problem),
}
