"""The registry of linear modules: which types may stand in a ConformalLayers, and how they run.

Affine ones count as linear, with a bias: ``x ← U x + t·b``.

One row a type. A subclass inherits its parent's row unless it overrides ``forward``: then nobody
has vouched for it, and it is refused until it is registered itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConformalError, refusal, shape_text
from ..functional import Scalar
from ..nn import extra_layers as gains
from ..nn import layers
from ..nn.activations import RadialActivation
from ..nn.branches import Composite, Flow, Join, joined_bound
from . import bounds
from .bounds import Shape
from .suggestions import remedy_for

Bound = Callable[[nn.Module, Shape], Scalar]
Scaled = Callable[[nn.Module, Tensor, Scalar], Tensor]
Check = Callable[[nn.Module], str | None]


@dataclass(frozen=True)
class LayerSpec:
    """What the library knows of one linear module type.

    Args:
        bound: (module, input shape) → an upper bound of its operator norm.
        scaled: (module, input, factor) → factor · module(input), cheaper than scaling the output;
            None where the factor had better wait for a later layer.
        parameter: the tensor that the output is proportional to, if there is one.
        check: module → the part of its configuration that is refused, or None.
        rank: the number of axes of a batch, where the module fixes it.
        channels: the attribute that holds the size of axis 1.
        identity_in_eval: it is the identity in evaluation mode.
        affine: its ``bias``, if it has one, is added to the result.
        multiple: in evaluation mode it multiplies the whole sample by one number.
        norm_factor: module → the one number that it multiplies the norm of every sample with, or None
            where there is no such number.
    """

    bound: Bound
    scaled: Scaled | None = None
    check: Check | None = None
    rank: int | None = None
    channels: str | None = None
    parameter: str | None = None
    identity_in_eval: bool = False
    affine: bool = False
    multiple: bool = False
    norm_factor: Callable[[Any], float | None] | None = None


_SPECS: dict[type[nn.Module], LayerSpec] = {}


def register_linear(
    module_type: type[nn.Module],
    bound: Bound,
    *,
    check: Check | None = None,
    rank: int | None = None,
) -> None:
    """Let modules of a type of your own stand in a :class:`ConformalLayers`.

    The module must be linear in its input, without a bias, and treat each sample by itself;
    :func:`conformallayers.testing.assert_linear` checks that.

    Args:
        module_type: the class.
        bound: function of (module, shape of one input sample) that returns an upper bound of the
            operator norm, a float or a 0-dim tensor.
        check: function of the module that returns what is wrong with its configuration, or None.
        rank: number of axes of its input with the batch axis, if it fixes it.

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
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise refusal(
            "register_linear(module_type)",
            "a subclass of nn.Module",
            repr(module_type),
            "Give the class.",
        )
    _SPECS[module_type] = LayerSpec(bound, _scale_output, check, rank)


def find_spec(module: nn.Module) -> LayerSpec | None:
    """Return the row of a module's type, or None where no row vouches for its forward."""
    if "forward" in vars(module):
        return None  # replaced on the object itself
    kind = _SPECS.get(type(module)) or _SPECS.get(_NAMESAKES.get(type(module), nn.Module))
    return kind if kind is not None else _inherited(type(module))


def _inherited(module_type: type[nn.Module]) -> LayerSpec | None:
    if issubclass(module_type, nn.modules.lazy.LazyModuleMixin):
        return None  # it has no weight yet, so no bound
    for ancestor in module_type.__mro__:
        kind = _SPECS.get(ancestor)
        if kind is not None:
            return kind if computes_like(module_type, ancestor) else None
    return None


def computes_like(module_type: type[nn.Module], ancestor: type[nn.Module]) -> bool:
    """Tell whether a class has left what it computes to an ancestor."""
    names = ("forward", "_conv_forward", "__call__")
    return all(getattr(module_type, n, None) is getattr(ancestor, n, None) for n in names)


def spec_of(path: str, module: nn.Module) -> LayerSpec:
    """Return the row of a module's type, or refuse the module."""
    kind = find_spec(module)
    if kind is None:
        raise _unsupported(f"ConformalLayers at position {path}", module)
    problem = kind.check(module) if kind.check else None
    if problem is not None:
        raise ConformalError(f"ConformalLayers at position {path}: {problem}")
    return kind


def has_hooks(module: nn.Module) -> bool:
    """Tell whether calling the module runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_affine(module: nn.Module) -> bool:
    """Tell whether a supported module adds a bias."""
    if isinstance(module, Composite):
        return any(is_affine(child) for child in module.modules() if child is not module)
    if isinstance(module, _BATCH_NORMS):
        return True
    kind = find_spec(module)
    return kind is not None and kind.affine and isinstance(getattr(module, "bias", None), Tensor)


def has_batch_statistics(module: nn.Module) -> bool:
    """Tell whether a module holds a batch normalisation, which learns from the points it sees."""
    return any(isinstance(child, _BATCH_NORMS) for child in module.modules())


def linear_part(module: nn.Module, kind: LayerSpec, x: Tensor) -> Tensor:
    """Return what a module makes of x for α: without its bias, and as its bound counts it."""
    if kind.identity_in_eval:
        return x
    if isinstance(module, _BATCH_NORMS):
        return x if module.weight is None else x * module.weight.view(-1, *[1] * (x.dim() - 2))
    if isinstance(module, Composite):
        return module.flow("", x, _Linear())
    result: Tensor = module.forward(x)
    return result - module.forward(torch.zeros_like(x)) if is_affine(module) else result


class _Linear(Flow[Tensor]):
    """What branches without activations make of a batch, without their biases."""

    def run(self, path: str, module: nn.Module, value: Tensor) -> Tensor:
        for name, child in modules_in(path, module):
            value = linear_part(child, spec_of(name, child), value)
        return value

    def join(self, path: str, values: list[Tensor], join: Join) -> Tensor:
        return join.merge(values)


def run(module: nn.Module, kind: LayerSpec, x: Tensor, factor: Scalar | None) -> Tensor:
    """Return ``factor · module(x)``, with the factor on the weights where that is possible."""
    if factor is None or kind.scaled is None:
        result: Tensor = module(x)
        return result
    scaled = _scale_output if has_hooks(module) else kind.scaled
    return scaled(module, x, factor)


def flatten_modules(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Walk the children in order, through nested ``nn.Sequential``: (path, module)."""
    for name, child in root._modules.items():
        if child is None:
            continue
        path = f"{prefix}.{name}" if prefix else name
        if type(child) is nn.Sequential:
            yield from flatten_modules(child, path)
        else:
            yield path, child


def modules_in(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module with its path, or what an ``nn.Sequential`` holds."""
    if type(module) is nn.Sequential:
        yield from flatten_modules(module, path)
    else:
        yield path, module


def check_module(path: str, module: nn.Module) -> list[nn.Module]:
    """Refuse a module that cannot stand in a ConformalLayers, by name, position and remedy.

    Returns the activations that a point passes in it, in order.
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
    kind, base = type(module), RadialActivation
    if kind.growth is base.growth and kind.rule is base.rule:
        where, expected = f"ConformalLayers at position {path}", "an activation with a growth"
        remedy = "Derive from it and define growth(q), or use cl.ReSPro."
        raise refusal(where, expected, f"{kind.__name__}, which has none", remedy)
    if kind.rule is base.rule:
        problem = module.fault()
        if problem is not None:
            where, expected = (
                f"ConformalLayers at position {path}",
                "a growth(q) that is a positive",
            )
            expected += " function of each q by itself, 1 at q = 0, and a slope > 0"
            remedy = "See cl.RadialActivation."
            raise refusal(where, expected, f"{kind.__name__} with {problem}", remedy)


class _Checking(Flow[None]):
    """Refuse what a composite must not hold; there are no values."""

    def __init__(self) -> None:
        self.passed: list[nn.Module] = []

    def run(self, path: str, module: nn.Module, value: None) -> None:
        for name, child in modules_in(path, module):
            self.passed += check_module(name, child)

    def join(self, path: str, values: list[None], join: Join) -> None:
        pass


def check_input(
    path: str, module: nn.Module, kind: LayerSpec, shape: tuple[int, ...], *, traced: bool = False
) -> None:
    """Refuse a batch whose number of axes or channels the module does not take.

    ``traced`` tells that the user gave the shape of one sample, and no batch.
    """
    name = type(module).__name__
    came = f"samples of shape {shape_text(shape[1:])}" if traced else f"an input of shape {shape}"
    if kind.rank is not None and len(shape) != kind.rank:
        unbatched = not traced and len(shape) == kind.rank - 1
        remedy = "Add the batch axis with x.unsqueeze(0)." if unbatched else "Reshape the input."
        if traced and len(shape) == kind.rank + 1:
            remedy = "Leave the batch axis out of the input shape."
        raise refusal(
            f"{name} at position {path}",
            f"a batch with {kind.rank} axes",
            f"an unbatched input of shape {shape}" if unbatched else came,
            remedy,
        )
    wanted = getattr(module, kind.channels) if kind.channels else None
    axis = -1 if isinstance(module, nn.Linear) else 1
    if wanted is not None and shape[axis] != wanted:
        raise refusal(
            f"{name} at position {path}",
            f"{kind.channels}={wanted} on axis {axis}",
            came,
            "Change the layer or the input.",
        )


def check_batch_axis(path: str, module: nn.Module, shape: tuple[int, ...], batch: int) -> None:
    """Refuse an output that has lost the batch axis."""
    if len(shape) < 2 or shape[0] != batch:
        raise refusal(
            f"{type(module).__name__} at position {path}",
            "the batch axis to stay first",
            f"an output of shape {tuple(shape)} for a batch of {batch}",
            "Keep axis 0 out of the layer.",
        )


_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


def _unsupported(where: str, module: nn.Module) -> ConformalError:
    derived = any(ancestor in _SPECS for ancestor in type(module).__mro__)
    remedy = remedy_for(module, derived)
    return refusal(where, "a linear layer or cl.ReSPro", type(module).__name__, remedy)


def _scale_output(module: Any, x: Tensor, factor: Scalar) -> Tensor:
    result: Tensor = module(x)
    return result * factor


def _scaled_conv(module: Any, x: Tensor, factor: Scalar) -> Tensor:
    result: Tensor = module._conv_forward(x, module.weight * factor, None)
    return result


def _scaled_transposed(module: Any, x: Tensor, factor: Scalar) -> Tensor:
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.dim() - 3]
    return function(
        x,
        module.weight * factor,
        None,
        module.stride,
        module.padding,
        module.output_padding,
        module.groups,
        module.dilation,
    )


def _scaled_linear(module: Any, x: Tensor, factor: Scalar) -> Tensor:
    return F.linear(x, module.weight * factor)


def _scaled_gain(module: Any, x: Tensor, factor: Scalar) -> Tensor:
    result: Tensor = x * (module.gain * factor)
    return result


def _keeps_statistics(module: Any) -> str | None:
    if module.running_var is not None:
        return None
    return (
        "expected track_running_stats=True, got False. "
        "Without running statistics the samples of a batch depend on each other."
    )


def _pads_zeros(module: Any) -> float | None:
    crops = any(size < 0 for size in module.padding)
    copies = any(isinstance(module, kind) for kind, _ in bounds.COPYING_PADS)
    return None if crops or copies else 1.0


def _not_in_place(module: nn.Module) -> str | None:
    if not getattr(module, "inplace", False):
        return None
    return "expected inplace=False, got inplace=True. Values before an activation are needed later."


def _zero_value(module: nn.Module) -> str | None:
    value = getattr(module, "value", 0)
    return None if value == 0 else f"expected padding with 0, got {value}. Padding must be linear."


def _keeps_batch(module: nn.Module) -> str | None:
    dim = getattr(module, "start_dim", getattr(module, "dim", 1))
    if dim == 0:
        return "expected the batch axis to stay, got axis 0. Start at axis 1."
    return None


def _by_one(module: nn.Module) -> float:
    return 1.0


class _Bounding(Flow[tuple[Shape, Scalar]]):
    """Follow the shape and the bound of what a composite of linear layers gives."""

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
        return shape, joined_bound([bound for _, bound in values], join)


def shape_after(module: nn.Module, shape: Shape, batch: int = 2) -> torch.Size:
    """Return the shape that a module gives to a batch of samples; values are not computed."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    x = torch.empty(batch, *shape, dtype=floats[0] if floats else None, device="meta")
    try:
        meta = {name: torch.empty_like(t, device="meta") for name, t in tensors.items()}
        result: Tensor = torch.func.functional_call(module, meta, (x,))
    except RuntimeError:  # a module with tensors of its own needs its own device
        unseen = copy.deepcopy(module).eval()  # batch statistics are not to see this
        result = unseen(torch.zeros_like(x, device=device))
    return result.shape


def _composite_problem(module: Any) -> str | None:
    try:
        check_module("", module)
    except ConformalError as error:
        return str(error).removeprefix("ConformalLayers at position ")
    return None


def _composite_bound(module: Any, shape: Shape) -> Scalar:
    bound: Scalar = module.flow("", (shape, 1.0), _Bounding())[1]
    return bound


def _register_torch() -> None:
    for n in (1, 2, 3):
        rank = n + 2

        def kind(name: str, n: int = n) -> type[nn.Module]:
            found: type[nn.Module] = getattr(nn, f"{name}{n}d")
            return found

        _SPECS[kind("Conv")] = LayerSpec(
            bounds.conv_bound, _scaled_conv, None, rank, "in_channels", "weight", affine=True
        )
        _SPECS[kind("ConvTranspose")] = LayerSpec(
            bounds.transposed_bound,
            _scaled_transposed,
            None,
            rank,
            "in_channels",
            "weight",
            affine=True,
        )
        _SPECS[kind("AvgPool")] = LayerSpec(bounds.avg_pool_bound, rank=rank)
        _SPECS[kind("AdaptiveAvgPool")] = LayerSpec(bounds.adaptive_pool_bound, rank=rank)
        _SPECS[kind("Dropout")] = LayerSpec(
            bounds.one, check=_not_in_place, rank=rank, identity_in_eval=True, multiple=True
        )
        for pad in ("ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"):
            _SPECS[kind(pad)] = LayerSpec(
                bounds.pad_bound, check=_zero_value, rank=rank, norm_factor=_pads_zeros
            )
        _SPECS[kind("BatchNorm")] = LayerSpec(
            bounds.channel_bound,
            check=_keeps_statistics,
            rank=rank if n > 1 else None,
            channels="num_features",
        )
    _SPECS[nn.Linear] = LayerSpec(
        bounds.linear_bound, _scaled_linear, None, None, "in_features", "weight", affine=True
    )
    _SPECS[nn.Flatten] = LayerSpec(bounds.one, check=_keeps_batch, norm_factor=_by_one)
    _SPECS[nn.Unflatten] = LayerSpec(bounds.one, check=_keeps_batch, norm_factor=_by_one)
    _SPECS[nn.Identity] = LayerSpec(bounds.one, multiple=True, norm_factor=_by_one)
    _SPECS[nn.Dropout] = LayerSpec(
        bounds.one, check=_not_in_place, identity_in_eval=True, multiple=True, norm_factor=_by_one
    )
    for shuffle in (nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle):
        _SPECS[shuffle] = LayerSpec(bounds.one, rank=4, norm_factor=_by_one)
    _SPECS[nn.Upsample] = LayerSpec(bounds.upsample_bound, norm_factor=bounds.repeated_pixels)
    _SPECS[gains.RepeatChannels] = LayerSpec(
        bounds.repeat_bound, norm_factor=lambda module: float(module.times**0.5)
    )
    _SPECS[gains.ChannelScale] = LayerSpec(bounds.scale_bound)
    _SPECS[Composite] = LayerSpec(_composite_bound, check=_composite_problem)
    _SPECS[gains.Scale] = LayerSpec(
        bounds.gain_bound, _scaled_gain, parameter="gain", multiple=True
    )


_register_torch()
# This package's own classes, so that their look-up ends at the first step.
_NAMESAKES: dict[type[nn.Module], type[nn.Module]] = {
    ours: ours.__mro__[1]
    for ours in vars(layers).values()
    if isinstance(ours, type) and ours.__module__ == layers.__name__ and ours not in _SPECS
}
