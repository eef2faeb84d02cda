"""The registry of layers and maps: which types may stand in a ConformalLayers, and what is known of each.

Affine types count as linear: their bias enters as ``x ← U x + t·b``. Each type is one row. A subclass
inherits the row of its nearest ancestor unless it overrides ``forward``; then it must be registered
itself, because nothing guarantees that the override is linear.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..errors import ConformalError, refusal, refusal_at, shape_text
from ..functional import Scalar
from . import bounds
from .bounds import Shape
from .layers import Abs, Centre, Channels, ChannelScale, RepeatChannels, Rescale, Scale

Bound = Callable[[nn.Module, Shape], Scalar]
Check = Callable[[nn.Module], str | None]


@dataclass(frozen=True)
class LayerSpec:
    """Describe a linear module type, or a positively homogeneous one.

    Args:
        bound: (module, input shape) → an upper bound of the operator norm; of a homogeneous map, an
            upper bound of ``‖h(x)‖/‖x‖``.
        check: module → why this configuration is refused, or None.
        rank: the number of axes of a batch, if the module fixes it.
        channels: the name of the attribute that holds the size of axis 1.
        identity_in_eval: whether the module is the identity in evaluation mode.
        affine: module → whether it adds a bias.
        multiple: whether it multiplies the whole sample by one number in evaluation mode.
        norm_factor: (module, input shape) → the number by which it multiplies the norm of every
            sample, or None if there is no such number.
        homogeneous: whether it is not linear, but ``h(λx) = λ·h(x)`` for λ > 0.
    """

    bound: Bound
    check: Check | None = None
    rank: int | None = None
    channels: str | None = None
    identity_in_eval: bool = False
    affine: Callable[[Any], bool] = lambda _: False
    multiple: bool = False
    norm_factor: Callable[[Any, Shape], float | None] | None = None
    homogeneous: bool = False

    def takes(self, shape: Shape) -> bool:
        """Check whether samples of a shape have the number of axes that the module fixes."""
        return self.rank is None or len(shape) + 1 == self.rank

    def problem(self, module: nn.Module) -> str | None:
        """Return why the configuration of a module is refused, or None."""
        return None if self.check is None else self.check(module)


def by_axis(*names: str) -> tuple[type[Any], ...]:
    """Return the classes of torch.nn for one to three spatial axes."""
    return tuple(getattr(nn, f"{name}{n}d") for name in names for n in (1, 2, 3))


BATCH_NORMS = by_axis("BatchNorm")
PADS = "ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"
NORM_POOLS = by_axis("LPPool")
POOLS = by_axis("LPPool", "AvgPool")


def _has_bias(module: Any) -> bool:
    return module.bias is not None


def _keeps_statistics(module: Any) -> str | None:
    if module.running_var is not None:
        return None
    return (
        "expected track_running_stats=True, got False. "
        "Without running statistics the samples of a batch depend on each other."
    )


def _requires(attribute: str, value: object, why: str) -> Check:
    """Return a check that refuses modules whose attribute has another value."""

    def check(module: nn.Module) -> str | None:
        got = getattr(module, attribute)
        if got == value:
            return None
        return f"expected {attribute}={value}, got {attribute}={got}. {why}"

    return check


_not_in_place = _requires(
    "inplace", False, "Use inplace=False: the values before it are needed later."
)
_one_output = _requires("return_indices", False, "A layer returns one tensor.")
_euclidean = _requires("norm_type", 2, "Only the Euclidean norm of windows is supported.")


def _pads_linearly(module: Any) -> str | None:
    value = getattr(module, "value", 0)
    if value != 0:
        return f"expected padding with 0, got {value}. Padding must be linear."
    if bounds.pad_mode(module) == "circular" and min(module.padding) < 0:
        return f"expected circular padding without cropping, got {module.padding}. Crop first."
    return None


def _keeps_batch(module: nn.Module) -> str | None:
    dim = getattr(module, "start_dim", getattr(module, "dim", 1))
    if dim == 0:
        return "expected the batch axis to stay, got axis 0. Start at axis 1."
    return None


def _interpolates_linearly(module: Any) -> str | None:
    """Refuse what has no simple bound, or copies other pixels in float32 than in float64."""
    if module.mode in ("linear", "bilinear", "trilinear"):
        return None
    scales = module.scale_factor
    scales = scales if isinstance(scales, tuple) else (scales,)
    nearest = module.mode in ("nearest", "nearest-exact")
    if nearest and all(
        scale is not None and scale >= 1 and scale == int(scale) for scale in scales
    ):
        return None
    got = f"mode={module.mode!r}, scale_factor={module.scale_factor}"
    return f"expected nearest pixels with an integer scale_factor, got {got}. Use mode='bilinear'."


def _one_without_copies(module: Any, shape: Shape) -> float | None:
    """Return the norm factor of padding: 1 if it adds zeros and neither copies nor crops pixels."""
    crops = any(size < 0 for size in module.padding)
    return None if crops or bounds.pad_mode(module) != "zeros" else 1.0


def _spatial_rows(n: int) -> dict[type[nn.Module], LayerSpec]:
    """Return the rows of the layers that torch.nn has for n = 1, 2 and 3 spatial axes."""
    rank = n + 2
    convolves: dict[str, Any] = {"rank": rank, "channels": "in_channels", "affine": _has_bias}
    dropout = LayerSpec(
        bounds.one, check=_not_in_place, rank=rank, identity_in_eval=True, multiple=True
    )
    padding = LayerSpec(
        bounds.pad_bound, check=_pads_linearly, rank=rank, norm_factor=_one_without_copies
    )
    batch_norm = LayerSpec(
        # Without the variances: an α that followed them would change the input scale of the next layers at
        # every training step, and their running statistics would always lag behind.
        bounds.largest("weight"),
        check=_keeps_statistics,
        rank=None if n == 1 else rank,  # BatchNorm1d takes (B, C) as well
        channels="num_features",
        affine=lambda _: True,
    )
    average = LayerSpec(bounds.avg_pool_bound, rank=rank)
    largest = LayerSpec(bounds.max_pool_bound, check=_one_output, rank=rank, homogeneous=True)
    rows = {
        "Conv": LayerSpec(bounds.conv_bound, **convolves),
        "ConvTranspose": LayerSpec(bounds.weight_bound, **convolves),
        **dict.fromkeys(("AvgPool", "AdaptiveAvgPool"), average),
        "Dropout": dropout,
        "BatchNorm": batch_norm,
        **dict.fromkeys(PADS, padding),
        **dict.fromkeys(("MaxPool", "AdaptiveMaxPool"), largest),
        "LPPool": LayerSpec(bounds.norm_pool_bound, check=_euclidean, rank=rank, homogeneous=True),
    }
    return {getattr(nn, f"{name}{n}d"): spec for name, spec in rows.items()}


_MOVES = LayerSpec(bounds.one, rank=4, norm_factor=bounds.one)
_RESHAPES = LayerSpec(bounds.one, check=_keeps_batch, norm_factor=bounds.one)

SPECS: dict[type[nn.Module], LayerSpec] = {
    **_spatial_rows(1),
    **_spatial_rows(2),
    **_spatial_rows(3),
    nn.Linear: LayerSpec(bounds.weight_bound, channels="in_features", affine=_has_bias),
    nn.Flatten: _RESHAPES,
    nn.Unflatten: _RESHAPES,
    nn.Identity: LayerSpec(bounds.one, multiple=True, norm_factor=bounds.one),
    nn.Dropout: LayerSpec(
        bounds.one,
        check=_not_in_place,
        identity_in_eval=True,
        multiple=True,
        norm_factor=bounds.one,
    ),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle), _MOVES),
    nn.Upsample: LayerSpec(
        bounds.upsample_bound, check=_interpolates_linearly, norm_factor=bounds.repeated_pixels
    ),
    RepeatChannels: LayerSpec(bounds.repeat_bound, norm_factor=bounds.repeat_bound),
    ChannelScale: LayerSpec(bounds.largest("factor")),
    Rescale: LayerSpec(bounds.largest("factor"), affine=_has_bias),
    Scale: LayerSpec(bounds.largest("gain"), multiple=True),
    Channels: LayerSpec(bounds.one, channels="channels"),
    nn.ReLU: LayerSpec(bounds.one, check=_not_in_place, homogeneous=True),
    nn.LeakyReLU: LayerSpec(bounds.leaky_bound, check=_not_in_place, homogeneous=True),
    nn.PReLU: LayerSpec(bounds.largest("weight", least=1.0), homogeneous=True),
    Abs: LayerSpec(bounds.one, homogeneous=True),
}

_ACTIVATIONS = (
    *("ReLU6", "RReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Softplus", "Softsign"),
    *("Sigmoid", "Tanh", "LogSigmoid", "Hardswish", "Hardsigmoid", "Hardtanh", "Hardshrink"),
    *("Softshrink", "Tanhshrink", "Softmax", "Softmax2d", "LogSoftmax", "Softmin"),
    *("GLU", "Threshold"),
)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)

# A subclass gets the suggestion of its nearest ancestor.
REFUSED: dict[type, str] = {
    **dict.fromkeys(
        (getattr(nn, name) for name in _ACTIVATIONS),
        "Use nn.ReLU(), nn.LPPool2d(2, ...) or cl.ReSPro(), which fold, or put it into the head.",
    ),
    nn.FractionalMaxPool2d: "Use nn.MaxPool2d or nn.LPPool2d(2, ...): its windows are random.",
    nn.FractionalMaxPool3d: "Use nn.MaxPool3d or nn.LPPool3d(2, ...): its windows are random.",
    **dict.fromkeys(
        _NORMS, "Use nn.BatchNorm, which folds, or leave it out: ReSPro already normalizes."
    ),
    nn.modules.lazy.LazyModuleMixin: "Give the number of input channels: bounds need the weights.",
    nn.Sequential: "Unpack it: cl.ConformalLayers(*inner, ...).",
    Centre: "Put it before the ConformalLayers: it belongs to the input.",
}


# -- looking up rows ------------------------------------------------------------------------------------

SUPPORTED_KINDS = (
    "a linear layer, an activation such as cl.ReSPro or a homogeneous map such as nn.ReLU"
)
_REGISTER = (
    "cl.register_linear if it is linear, cl.register_homogeneous if f(λx) = λ·f(x) for λ > 0."
)


def register_linear(module_type: type[nn.Module], bound: Bound, *, rank: int | None = None) -> None:
    """Allow modules of your own type in a :class:`ConformalLayers`.

    The module must be linear in its input, without a bias, and treat each sample independently;
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
    SPECS[module_type] = LayerSpec(bound, rank=rank)


def register_homogeneous(
    module_type: type[nn.Module], bound: Bound, *, rank: int | None = None
) -> None:
    """Allow positively homogeneous maps of your own type in a :class:`ConformalLayers`.

    The map must have ``h(λx) = λ·h(x)`` for λ > 0 and treat each sample independently;
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
    SPECS[module_type] = LayerSpec(bound, rank=rank, homogeneous=True)


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
        spec = SPECS.get(ancestor)
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


def suggestion(module_type: type[nn.Module]) -> str:
    """Return what to use instead of a refused type, from its nearest ancestor with a suggestion."""
    rows = [kind for kind in module_type.__mro__ if kind in REFUSED]
    if rows:
        return REFUSED[rows[0]]
    derived = any(ancestor in SPECS for ancestor in module_type.__mro__)
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
    spec = find_spec(module)
    return spec is not None and spec.affine(module)


def has_batch_statistics(module: nn.Module) -> bool:
    """Check whether a module contains a batch norm, which updates its statistics in training."""
    return any(isinstance(child, BATCH_NORMS) for child in module.modules())


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
            yield from modules_in(f"{prefix}.{name}" if prefix else name, child)


def modules_in(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module with its path, or the modules of an ``nn.Sequential``."""
    if type(module) is nn.Sequential:
        yield from flatten_modules(module, path)
    else:
        yield path, module


def shape_after(module: nn.Module, shape: Shape) -> torch.Size:
    """Return the output shape of a batch of two, from a copy of the module without data, on the meta device.

    Two, so that a module that merges the batch axis shows it.
    """
    tensors = list(held_tensors(module))
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    x = torch.empty(2, *shape, dtype=floats[0] if floats else None, device="meta")
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


def on_meta(module: nn.Module) -> nn.Module:
    """Copy a module without its values, to run for shapes alone."""
    return copy.deepcopy(module, {id(value): value.to("meta") for value in held_tensors(module)})
