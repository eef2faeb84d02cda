"""The linear modules: torch.nn's layers under their own names.

Each layer is its torch.nn namesake, with the same arguments, order, state_dict keys and repr; only
``bias`` is off by default: ``x ← U x + t·b`` needs the coordinate t.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_Device = torch.device | str | int | None


class Conv1d(nn.Conv1d):
    """Convolve, as :class:`torch.nn.Conv1d` does.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode:
            as in torch.nn; ``padding`` also takes ``"same"`` and ``"valid"``.
        bias: add one to the point; off by default, because one between two activations costs a
            folded network further dot products.
        device, dtype: where and how the weight is kept.

    Shape:
        (B, C_in, L) → (B, C_out, L')

    Examples:
        >>> Conv1d(3, 8, 3, padding=1)(torch.rand(2, 3, 5)).shape
        torch.Size([2, 8, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: str | int | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: PaddingMode = "zeros",
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )


class Conv2d(nn.Conv2d):
    """Convolve, as :class:`torch.nn.Conv2d` does.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode:
            as in torch.nn; ``padding`` also takes ``"same"`` and ``"valid"``.
        bias: add one to the point; off by default, because one between two activations costs a
            folded network further dot products.
        device, dtype: where and how the weight is kept.

    Shape:
        (B, C_in, H, W) → (B, C_out, H', W')

    Examples:
        >>> Conv2d(3, 8, 3, padding=1)(torch.rand(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: PaddingMode = "zeros",
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )


class Conv3d(nn.Conv3d):
    """Convolve, as :class:`torch.nn.Conv3d` does.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode:
            as in torch.nn; ``padding`` also takes ``"same"`` and ``"valid"``.
        bias: add one to the point; off by default, because one between two activations costs a
            folded network further dot products.
        device, dtype: where and how the weight is kept.

    Shape:
        (B, C_in, D, H, W) → (B, C_out, D', H', W')

    Examples:
        >>> Conv3d(3, 8, 3, padding=1)(torch.rand(2, 3, 5, 5, 5)).shape
        torch.Size([2, 8, 5, 5, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: str | int | tuple[int, int, int] = 0,
        dilation: int | tuple[int, int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: PaddingMode = "zeros",
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )


class ConvTranspose1d(nn.ConvTranspose1d):
    """Convolve transposed, as :class:`torch.nn.ConvTranspose1d` does.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, dilation:
            as in torch.nn.
        bias: add one to the point; off by default, because one between two activations costs a
            folded network further dot products.
        padding_mode: ``"zeros"``, the only one torch.nn has here.
        device, dtype: where and how the weight is kept.

    Shape:
        (B, C_in, L) → (B, C_out, L')

    Examples:
        >>> ConvTranspose1d(3, 8, 2, stride=2)(torch.rand(2, 3, 5)).shape
        torch.Size([2, 8, 10])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] = 0,
        output_padding: int | tuple[int] = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: int | tuple[int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
            dilation=dilation,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )


class ConvTranspose2d(nn.ConvTranspose2d):
    """Convolve transposed, as :class:`torch.nn.ConvTranspose2d` does.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, dilation:
            as in torch.nn.
        bias: add one to the point; off by default, because one between two activations costs a
            folded network further dot products.
        padding_mode: ``"zeros"``, the only one torch.nn has here.
        device, dtype: where and how the weight is kept.

    Shape:
        (B, C_in, H, W) → (B, C_out, H', W')

    Examples:
        >>> ConvTranspose2d(3, 8, 2, stride=2)(torch.rand(2, 3, 5, 5)).shape
        torch.Size([2, 8, 10, 10])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: int | tuple[int, int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
            dilation=dilation,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )


class ConvTranspose3d(nn.ConvTranspose3d):
    """Convolve transposed, as :class:`torch.nn.ConvTranspose3d` does.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, dilation:
            as in torch.nn.
        bias: add one to the point; off by default, because one between two activations costs a
            folded network further dot products.
        padding_mode: ``"zeros"``, the only one torch.nn has here.
        device, dtype: where and how the weight is kept.

    Shape:
        (B, C_in, D, H, W) → (B, C_out, D', H', W')

    Examples:
        >>> ConvTranspose3d(3, 8, 2, stride=2)(torch.rand(2, 3, 5, 5, 5)).shape
        torch.Size([2, 8, 10, 10, 10])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] = 0,
        output_padding: int | tuple[int, int, int] = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: int | tuple[int, int, int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
            dilation=dilation,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )


class AvgPool1d(nn.AvgPool1d):
    """Average over windows; every argument of :class:`torch.nn.AvgPool1d`.

    Shape:
        (B, C, L) → (B, C, L')

    Examples:
        >>> AvgPool1d(5)(torch.ones(1, 2, 5)).flatten()
        tensor([1., 1.])
    """


class AvgPool2d(nn.AvgPool2d):
    """Average over windows; every argument of :class:`torch.nn.AvgPool2d`.

    Shape:
        (B, C, H, W) → (B, C, H', W')

    Examples:
        >>> AvgPool2d(5)(torch.ones(1, 2, 5, 5)).flatten()
        tensor([1., 1.])
    """


class AvgPool3d(nn.AvgPool3d):
    """Average over windows; every argument of :class:`torch.nn.AvgPool3d`.

    Shape:
        (B, C, D, H, W) → (B, C, D', H', W')

    Examples:
        >>> AvgPool3d(5)(torch.ones(1, 2, 5, 5, 5)).flatten()
        tensor([1., 1.])
    """


class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """Average to a fixed size; every argument of :class:`torch.nn.AdaptiveAvgPool1d`.

    Shape:
        (B, C, L) → (B, C, L')

    Examples:
        >>> AdaptiveAvgPool1d(1)(torch.ones(1, 2, 5)).flatten()
        tensor([1., 1.])
    """


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """Average to a fixed size; every argument of :class:`torch.nn.AdaptiveAvgPool2d`.

    Shape:
        (B, C, H, W) → (B, C, H', W')

    Examples:
        >>> AdaptiveAvgPool2d(1)(torch.ones(1, 2, 5, 5)).flatten()
        tensor([1., 1.])
    """


class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """Average to a fixed size; every argument of :class:`torch.nn.AdaptiveAvgPool3d`.

    Shape:
        (B, C, D, H, W) → (B, C, D', H', W')

    Examples:
        >>> AdaptiveAvgPool3d(1)(torch.ones(1, 2, 5, 5, 5)).flatten()
        tensor([1., 1.])
    """


class Dropout(nn.Dropout):
    """Drop coefficients while training, as :class:`torch.nn.Dropout`; t stays as it is.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Dropout(0.5).eval()(torch.ones(1, 2))
        tensor([[1., 1.]])
    """


class Flatten(nn.Flatten):
    """Flatten axes, as :class:`torch.nn.Flatten`.

    Shape:
        (B, C, H, W) → (B, C·H·W) with the default arguments

    Examples:
        >>> Flatten()(torch.ones(1, 2, 3)).shape
        torch.Size([1, 6])
    """


class Identity(nn.Identity):
    """Do nothing, as :class:`torch.nn.Identity`.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Identity()(torch.ones(1, 2))
        tensor([[1., 1.]])
    """


class Linear(nn.Linear):
    """Multiply by a matrix, as :class:`torch.nn.Linear` does.

    Args:
        in_features, out_features: as in torch.nn.
        bias: add one to the point; off by default, because one between two activations costs a
            folded network further dot products.
        device, dtype: where and how the weight is kept.

    Shape:
        (B, ..., in_features) → (B, ..., out_features)

    Examples:
        >>> Linear(4, 2)(torch.rand(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
