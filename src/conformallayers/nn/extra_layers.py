"""Linear modules that torch.nn lacks: gains, repeated channels, and a mean that is subtracted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import check_count, checked_shape, is_real, refusal, shape_text

_Device = torch.device | str | int | None


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
            raise refusal("Scale(gain=...)", "a finite number", repr(gain), "1.0 changes nothing.")
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
    """Reorder the axes behind the batch, as ``x.permute(0, 2, 3, 1)`` and ``x.transpose(1, 2)`` do.

    Args:
        order: axis i of a sample of the result is axis ``order[i]`` of that of the input.
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
        """Set the mean to that of samples (N, ...)."""
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
