"""Pooling of windows: averages and Euclidean norms.

In training on the CPU, windows are added up by a matrix product where maps are small, and by adding slices
where windows tile a map. Both take a fraction of the time of torch's kernels, forward and backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .functional import (
    at_least_float32,
    autocasts,
    guarded_inverse,
    guarded_root,
    may_look,
    transformed,
)

_AVG_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
# limit, up, down: sums of squares from 2^-limit to 2^limit have all digits, and so have their second
# derivatives. Smaller and larger ones are computed again with the coefficients times 2^up and 2^down.
_SQUARES = {torch.float32: (80, 72, -72), torch.float64: (600, 560, -560)}
_SMALL = 10**4  # entries of a matrix whose product is cheaper than adding slices
Sizes = tuple[int, ...]  # one number per axis


def avg_pool(x: Tensor, kernel: Sizes, stride: Sizes) -> Tensor | None:
    """Return the average of every window of x (B, C, H, W), or None where torch's own pooling is to be used."""
    windows = _fast_windows(x, kernel, stride)
    if windows is None:
        return None
    averages: Tensor = _AvgPool.apply(x, windows)  # type: ignore[no-untyped-call]
    return averages


def norm_pool(x: Tensor, kernel: Sizes, stride: Sizes, ceil_mode: bool = False) -> Tensor:
    """Return the Euclidean norm of every window, as ``nn.LPPool*d`` with p = 2 has it.

    The gradient is 0 where a window is 0, and a window whose squares would leave the range of the dtype
    is right all the same. With ``ceil_mode`` a window that is cut off at the end counts as a whole one. x
    has the shape (B, C, ...), kernel and stride one number for each of the last axes.

    Examples:
        >>> norm_pool(torch.tensor([[[3.0, 4.0, 0.0, 0.0]]]), (2,), (2,))
        tensor([[[5., 0.]]])
    """
    wide = x.to(at_least_float32(x.dtype))
    limit, *exponents = _SQUARES[wide.dtype]
    low, high = 2.0**-limit, 2.0**limit

    def squares(scaled: Tensor) -> Tensor:
        mean: Tensor = _AVG_POOL[len(kernel)](scaled.square(), kernel, stride, 0, ceil_mode)
        return mean * math.prod(kernel)

    windows = None if ceil_mode else _fast_windows(x, kernel, stride)
    total = squares(wide) if windows is None else windows.add(x.detach().square())
    if may_look(x) and total.numel():
        least, most = (float(end) for end in torch.aminmax(total.detach()))
        fits = low < least and most < high
        if fits or (most < high and not _any_within(wide.detach(), 2.0 ** (-limit // 2))):
            if windows is not None:
                norms: Tensor = _NormPool.apply(x, total, windows, fits)  # type: ignore[no-untyped-call]
                return norms
            return (total.sqrt() if fits else guarded_root(total)).to(x.dtype)
    if windows is not None:
        total = squares(wide)  # the matrix of windows spreads an infinity
    # Each window is taken from one of three scales; an infinity in the others would make gradients NaN.
    small, large, end = total < low, total > high, 2.0 ** (limit // 2)
    result = guarded_root(squares(wide.clamp(-end, end)), ~(small | large))
    for exponent, taken in zip(exponents, (small, large), strict=True):
        scaled = wide * 2.0**exponent if exponent < 0 else (wide * 2.0**exponent).clamp(-end, end)
        result = result + guarded_root(squares(scaled), taken) * 2.0**-exponent
    return result.to(x.dtype)


def _any_within(x: Tensor, bound: float) -> bool:
    """Check for numbers, other than zeros, of at most this magnitude."""
    size = x.abs()
    return bool(size.masked_fill_(size == 0, math.inf).min() <= bound)


@dataclass(frozen=True)
class _Windows:
    """Windows on a map of some size, without padding."""

    sizes: Sizes
    kernel: Sizes
    stride: Sizes

    @property
    def counts(self) -> Sizes:
        """The number of windows along each axis."""
        axes = zip(self.sizes, self.kernel, self.stride, strict=True)
        return tuple((size - kernel) // stride + 1 for size, kernel, stride in axes)

    @property
    def small(self) -> bool:
        """Whether a matrix product is cheaper than other ways."""
        return math.prod(self.sizes) * math.prod(self.counts) <= _SMALL

    @property
    def tile(self) -> bool:
        """Whether no two windows overlap or leave a gap."""
        return self.kernel == self.stride

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of each window, (B, C, H, W) → (B, C, H', W')."""
        if self.small:
            sums = x.reshape(-1, math.prod(self.sizes)) @ _matrix(self, x.dtype)
            return sums.view(*x.shape[:2], *self.counts)
        first, *others = self._slices(x)
        total = first.clone(memory_format=torch.contiguous_format)
        for other in others:
            total += other
        return total

    def spread(self, g: Tensor) -> Tensor:
        """Give each pixel the sum of its windows' numbers, (B, C, H', W') → (B, C, H, W)."""
        if self.small:
            maps = g.reshape(-1, math.prod(self.counts))
            return (maps @ _matrix(self, g.dtype).t()).view(*g.shape[:2], *self.sizes)
        (rows, columns), (height, width) = self.counts, self.kernel
        tiles = g.view(*g.shape, 1, 1).expand(*g.shape, height, width).transpose(3, 4)
        tiles = tiles.reshape(*g.shape[:2], rows * height, columns * width)
        bottom, right = self.sizes[0] - rows * height, self.sizes[1] - columns * width
        return F.pad(tiles, (0, right, 0, bottom)) if bottom or right else tiles

    def spread_times(self, g: Tensor, factor: Tensor | None) -> Tensor:
        """Return the same times a map of factors, in one pass and without a derivative."""
        if self.small:
            whole = self.spread(g)
            return whole if factor is None else whole.mul_(factor)
        exact = all(
            size % kernel == 0 for size, kernel in zip(self.sizes, self.kernel, strict=True)
        )
        shape = (*g.shape[:2], *self.sizes)
        result = g.new_empty(shape) if exact else g.new_zeros(shape)
        factors = [None] * math.prod(self.kernel) if factor is None else self._slices(factor)
        for part, times in zip(self._slices(result), factors, strict=True):
            part.copy_(g) if times is None else torch.mul(g, times, out=part)
        return result

    def _slices(self, x: Tensor) -> list[Tensor]:
        """Return a view for each place in a window, of that place in all windows that tile the map."""
        (rows, columns), (height, width) = self.counts, self.kernel
        return [
            x[..., i : rows * height : height, j : columns * width : width]
            for i in range(height)
            for j in range(width)
        ]


@lru_cache(maxsize=128)
def _matrix(windows: _Windows, dtype: torch.dtype) -> Tensor:
    """Return the matrix of zeros and ones, pixels × windows, that adds up windows."""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.ones(1, 1, dtype=dtype, device="cpu")
        for size, kernel, stride in zip(windows.sizes, windows.kernel, windows.stride, strict=True):
            pixel = torch.arange(size, device="cpu").unsqueeze(1)
            start = stride * torch.arange((size - kernel) // stride + 1, device="cpu")
            whole = torch.kron(whole, ((start <= pixel) & (pixel < start + kernel)).to(dtype))
    return whole


def _fast_windows(x: Tensor, kernel: Sizes, stride: Sizes) -> _Windows | None:
    """Return the windows if they are those of a training step on the CPU that need no kernel of torch."""
    plain = (
        x.dim() == 4
        and x.requires_grad
        and torch.is_grad_enabled()
        and may_look(x)
        and x.dtype in (torch.float32, torch.float64)
        and x.stride()[1:] == (x.shape[2] * x.shape[3], x.shape[3], 1)  # or some of the channels
        and not autocasts(x)
    )
    if not plain or any(k > size for k, size in zip(kernel, x.shape[2:], strict=True)):
        return None
    windows = _Windows(tuple(x.shape[2:]), kernel, stride)
    return windows if windows.small or windows.tile else None


def _is_plain(g: Tensor) -> bool:
    """Check that a gradient is neither differentiated again nor a batch of gradients."""
    return not (torch.is_grad_enabled() or transformed(g))


class _AvgPool(torch.autograd.Function):
    """Average windows. Only for tensors that may be read, so that no transform sees it forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: _Windows) -> Tensor:
        ctx.windows = windows
        return windows.add(x).mul_(1 / math.prod(windows.kernel))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        share, windows = g * (1 / math.prod(ctx.windows.kernel)), ctx.windows
        plain = _is_plain(g)
        return windows.spread_times(share, None) if plain else windows.spread(share), None


class _NormPool(torch.autograd.Function):
    """Take the square roots of sums of squares, with a gradient of 0 where they are not positive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, windows: _Windows, positive: bool) -> Tensor:
        y = total.sqrt()
        ctx.save_for_backward(x, y)
        ctx.windows, ctx.positive = windows, positive
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        x, y = ctx.saved_tensors
        ratio = g / y if ctx.positive else g * guarded_inverse(y)
        if _is_plain(g):
            return ctx.windows.spread_times(ratio, x), None, None, None
        return ctx.windows.spread(ratio) * x, None, None, None
