"""The linear layers: subclasses of their torch.nn namesakes, with ``bias=False`` by default.

Arguments, their order, ``state_dict`` keys and repr are those of torch.nn. A bias b is added to the
point, ``x ← U x + t·b``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch  # noqa: F401 (for the examples)
from torch import nn

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
T = TypeVar("T", bound=nn.Module)

_CONV = """
    Arguments that are not listed are those of torch.nn.

    Args:
        bias: add a bias to the point. A bias between two activations costs a folded network
            further dot products.
        device, dtype: of the weight and the bias.

    Shape:
        (B, C_in, AXES) → (B, C_out, AXES')

    Examples:
        >>> NAME(3, 8, 1)(torch.rand(2, 3, SIZES)).shape
        torch.Size([2, 8, SIZES])
    """
_POOL = """
    Shape:
        (B, C, AXES) → (B, C, AXES')

    Examples:
        >>> NAME(1)(torch.ones(1, 2, SIZES)).shape[:2]
        torch.Size([1, 2])
    """


def _documented(text: str) -> Callable[[type[T]], type[T]]:
    """Append the sections of a spatial layer to its docstring, written for its number of axes."""

    def decorate(module_type: type[T]) -> type[T]:
        n = int(module_type.__name__[-2])
        axes = ("L", "H, W", "D, H, W")[n - 1]
        filled = text.replace("AXES'", axes.replace(",", "',") + "'").replace("AXES", axes)
        filled = filled.replace("NAME", module_type.__name__).replace("SIZES", ", ".join("5" * n))
        module_type.__doc__ = f"{module_type.__doc__}\n{filled}"
        return module_type

    return decorate


def _without_bias(module_type: type[T]) -> type[T]:
    """Give ``bias`` the default False; everything else of torch's ``__init__`` stays."""
    torch_init: Callable[..., None] = module_type.__init__
    signature = inspect.signature(torch_init)
    position = list(signature.parameters).index("bias") - 1  # self is not in args

    @functools.wraps(torch_init)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) <= position:
            kwargs.setdefault("bias", False)
        torch_init(self, *args, **kwargs)

    parameters = [
        parameter.replace(default=False) if parameter.name == "bias" else parameter
        for parameter in signature.parameters.values()
    ]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{module_type.__qualname__}.__init__"
    module_type.__init__ = __init__  # type: ignore[method-assign]
    return module_type


@_documented(_CONV)
@_without_bias
class Conv1d(nn.Conv1d):
    """Apply a convolution, as :class:`torch.nn.Conv1d` does."""


@_documented(_CONV)
@_without_bias
class Conv2d(nn.Conv2d):
    """Apply a convolution, as :class:`torch.nn.Conv2d` does."""


@_documented(_CONV)
@_without_bias
class Conv3d(nn.Conv3d):
    """Apply a convolution, as :class:`torch.nn.Conv3d` does."""


@_documented(_CONV)
@_without_bias
class ConvTranspose1d(nn.ConvTranspose1d):
    """Apply a transposed convolution, as :class:`torch.nn.ConvTranspose1d` does."""


@_documented(_CONV)
@_without_bias
class ConvTranspose2d(nn.ConvTranspose2d):
    """Apply a transposed convolution, as :class:`torch.nn.ConvTranspose2d` does."""


@_documented(_CONV)
@_without_bias
class ConvTranspose3d(nn.ConvTranspose3d):
    """Apply a transposed convolution, as :class:`torch.nn.ConvTranspose3d` does."""


@_without_bias
class Linear(nn.Linear):
    """Multiply by a matrix, as :class:`torch.nn.Linear` does.

    Args:
        in_features, out_features, device, dtype: as in torch.nn.
        bias: add a bias to the point, see :class:`Conv2d`.

    Shape:
        (B, ..., in_features) → (B, ..., out_features)

    Examples:
        >>> Linear(4, 2)(torch.rand(3, 4)).shape
        torch.Size([3, 2])
    """


@_documented(_POOL)
class AvgPool1d(nn.AvgPool1d):
    """Average over windows, as :class:`torch.nn.AvgPool1d` does."""


@_documented(_POOL)
class AvgPool2d(nn.AvgPool2d):
    """Average over windows, as :class:`torch.nn.AvgPool2d` does."""


@_documented(_POOL)
class AvgPool3d(nn.AvgPool3d):
    """Average over windows, as :class:`torch.nn.AvgPool3d` does."""


@_documented(_POOL)
class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """Average to a fixed size, as :class:`torch.nn.AdaptiveAvgPool1d` does."""


@_documented(_POOL)
class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """Average to a fixed size, as :class:`torch.nn.AdaptiveAvgPool2d` does."""


@_documented(_POOL)
class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """Average to a fixed size, as :class:`torch.nn.AdaptiveAvgPool3d` does."""


class Dropout(nn.Dropout):
    """Zero coefficients at random in training, as :class:`torch.nn.Dropout` does; t is kept.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Dropout(0.5).eval()(torch.ones(1, 2))
        tensor([[1., 1.]])
    """


class Flatten(nn.Flatten):
    """Flatten axes, as :class:`torch.nn.Flatten` does.

    Shape:
        (B, C, H, W) → (B, C·H·W) with the default arguments

    Examples:
        >>> Flatten()(torch.ones(1, 2, 3)).shape
        torch.Size([1, 6])
    """


class Identity(nn.Identity):
    """Return the input, as :class:`torch.nn.Identity` does.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Identity()(torch.ones(1, 2))
        tensor([[1., 1.]])
    """
