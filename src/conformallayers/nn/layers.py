"""Layers like those of torch.nn without a bias by default, and layers that torch.nn lacks.

Arguments, their order, ``state_dict`` keys and repr are those of torch.nn. A bias b is added to the
point, ``x ← U x + t·b``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from torch.nn import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from torch.nn import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from torch.nn import AvgPool1d as AvgPool1d
from torch.nn import AvgPool2d as AvgPool2d
from torch.nn import AvgPool3d as AvgPool3d
from torch.nn import Dropout as Dropout
from torch.nn import Flatten as Flatten
from torch.nn import Identity as Identity

from ..errors import check_count, checked_shape, is_real, refusal, shape_text

T = TypeVar("T", bound=nn.Module)
_Device = torch.device | str | int | None


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


@_without_bias
class Conv1d(nn.Conv1d):
    """Apply a convolution to (B, C, L), as :class:`torch.nn.Conv1d` does, with a bias only if ``bias=True``."""


@_without_bias
class Conv2d(nn.Conv2d):
    """Apply a convolution to (B, C, H, W), as :class:`torch.nn.Conv2d` does.

    Arguments that are not listed are those of torch.nn.

    Args:
        bias: add a bias to the point. A bias after an activation ends the stage of a folded network.

    Examples:
        >>> Conv2d(3, 8, 1)(torch.rand(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """


@_without_bias
class Conv3d(nn.Conv3d):
    """Apply a convolution to (B, C, D, H, W), as :class:`torch.nn.Conv3d` does, with a bias only if ``bias=True``."""


@_without_bias
class ConvTranspose1d(nn.ConvTranspose1d):
    """Apply a transposed convolution, as :class:`torch.nn.ConvTranspose1d` does, with a bias only if ``bias=True``."""


@_without_bias
class ConvTranspose2d(nn.ConvTranspose2d):
    """Apply a transposed convolution, as :class:`torch.nn.ConvTranspose2d` does, with a bias only if ``bias=True``."""


@_without_bias
class ConvTranspose3d(nn.ConvTranspose3d):
    """Apply a transposed convolution, as :class:`torch.nn.ConvTranspose3d` does, with a bias only if ``bias=True``."""


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


class Abs(nn.Module):
    """Take the absolute value of every coefficient.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Abs()(torch.tensor([[-2.0, 3.0]]))
        tensor([[2., 3.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``|input|``."""
        return input.abs()


class Channels(nn.Module):
    """Keep the channels from ``start`` to before ``stop``: the first step of a group of :class:`Split`.

    Args:
        start, stop: the range of channels.
        channels: how many channels the input has.

    Shape:
        (B, C, ...) → (B, stop − start, ...)
    """

    def __init__(self, start: int, stop: int, channels: int) -> None:
        super().__init__()
        if start >= stop:
            raise ValueError("no channels are left")
        self.start, self.stop, self.channels = start, stop, channels

    def forward(self, input: Tensor) -> Tensor:
        """Return some of the channels."""
        return input[:, self.start : self.stop]

    def extra_repr(self) -> str:
        """Return the range and the number of channels."""
        return f"{self.start}, {self.stop}, channels={self.channels}"


class Scale(nn.Module):
    """Multiply by one learned number.

    Args:
        gain: the initial value.
        device, dtype: of the gain.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Scale(2.0)(torch.ones(1, 2)).tolist()
        [[2.0, 2.0]]
    """

    def __init__(
        self, gain: float = 1.0, *, device: _Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not is_real(gain) or not math.isfinite(gain):
            raise refusal("Scale(gain=...)", "a finite number", repr(gain), "The default is 1.")
        self.initial = float(gain)
        self.gain = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the gain to its initial value."""
        nn.init.constant_(self.gain, self.initial)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``gain · input``."""
        return input * self.gain

    def extra_repr(self) -> str:
        """Return the initial value if it is not 1."""
        return "" if self.initial == 1.0 else f"gain={self.initial:g}"


class RepeatChannels(nn.Module):
    """Repeat the channels of every sample, for example a grey image as three equal channels.

    Args:
        times: the number of repetitions.

    Shape:
        (B, C, ...) → (B, times·C, ...)

    Examples:
        >>> RepeatChannels(3)(torch.rand(2, 1, 4, 4)).shape
        torch.Size([2, 3, 4, 4])
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        remedy = "3 turns a grey image into a colour image."
        check_count("RepeatChannels(times=...)", times, remedy)
        self.times = times

    def forward(self, input: Tensor) -> Tensor:
        """Return the channels one after the other, ``times`` times."""
        repeats = [1] * input.dim()
        repeats[1] = self.times
        return input.repeat(repeats)

    def extra_repr(self) -> str:
        """Return the number of repetitions."""
        return f"times={self.times}"


class ChannelScale(nn.Module):
    """Multiply each channel by a number: the linear part of a batch norm.

    Args:
        factor: one number per channel, shape (C,).

    Shape:
        (B, C, ...) → (B, C, ...)
    """

    factor: Tensor

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled channels."""
        return input * self.factor.view(-1, *[1] * (input.dim() - 2))


class Rescale(nn.Module):
    """Multiply by a constant and add another, as ``x * 2`` and ``x - mean`` in the forward of a model.

    Args:
        factor, bias: buffers that broadcast to a sample; None leaves the step out.

    Shape:
        (B, ...) → (B, ...)
    """

    factor: Tensor | None
    bias: Tensor | None

    def __init__(self, factor: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.register_buffer("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``factor · input + bias``."""
        output = input if self.factor is None else input * self.factor.to(input.dtype)
        return output if self.bias is None else output + self.bias.to(input.dtype)


class Product(nn.Module):
    """Multiply two values entry by entry, as ``x * torch.sigmoid(y)`` in the forward of a model.

    Shape:
        (B, ...), (B, ...) → (B, ...), axes of length 1 repeated
    """

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return ``input · other``."""
        return input * other


class Permute(nn.Module):
    """Reorder the axes after the batch, as ``x.permute(0, 2, 3, 1)`` and ``x.transpose(1, 2)`` do.

    Args:
        order: axis i of an output sample is axis ``order[i]`` of the input sample.
    """

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = tuple(order)

    def forward(self, input: Tensor) -> Tensor:
        """Return a view with other strides."""
        return input.permute(0, *(axis + 1 for axis in self.order))

    def extra_repr(self) -> str:
        """Return the order."""
        return f"{self.order}"


class Centre(nn.Module):
    """Subtract a mean sample, kept in a buffer. Use it before a ConformalLayers, not inside.

    Args:
        shape: the shape of one sample.
        device, dtype: of the mean.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> centre = Centre((2,))
        >>> centre.fit(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
        >>> centre(torch.ones(1, 2)).tolist()
        [[-1.0, -1.0]]
    """

    mean: Tensor

    def __init__(
        self, shape: Sequence[int], *, device: _Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.shape = checked_shape(shape, "Centre(shape=...)")
        self.register_buffer("mean", torch.zeros(self.shape, device=device, dtype=dtype))

    def fit(self, samples: Tensor) -> None:
        """Set the mean to the mean of samples (N, ...)."""
        if tuple(samples.shape[1:]) != self.shape or not samples.shape[0]:
            expected = f"samples (N, {shape_text(self.shape)[1:]}, N > 0"
            remedy = "Pass them with the batch axis."
            raise refusal("Centre.fit", expected, f"{tuple(samples.shape)}", remedy)
        self.mean.copy_(samples.mean(0, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input − mean``."""
        return input - self.mean

    def extra_repr(self) -> str:
        """Return the shape."""
        return shape_text(self.shape)
