"""Average and norm pooling.

In training on the CPU, windows are summed by a matrix product where maps are small, and row by row where
windows tile a map. Both take a fraction of the time of torch's kernels, forward and backward. Groups of
channels that are pooled in different ways take one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functional import (
    apply,
    at_least_float32,
    autocasts,
    guarded_inverse,
    guarded_root,
    is_plain_gradient,
    may_look,
)

_AVG_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_SMALL = 10**4  # entries of a matrix; its product is cheaper than torch's kernels
_SMALL_TILED = 10**3  # entries of a matrix; its product is cheaper than adding rows
Sizes = tuple[int, ...]  # one number per axis
# Ranges of channels, and whether norms are taken of them; together all channels in order.
Groups = tuple[tuple[slice, bool], ...]
_ALL = slice(None)
_AVERAGES: Groups = ((_ALL, False),)
_NORMS: Groups = ((_ALL, True),)


def avg_pool(x: Tensor, kernel: Sizes, stride: Sizes) -> Tensor | None:
    """Return the average of every window of x (B, C, H, W), or None where torch's pooling must be used."""
    return pool_groups(x, kernel, stride, _AVERAGES)


def pool_groups(x: Tensor, kernel: Sizes, stride: Sizes, groups: Groups) -> Tensor | None:
    """Return averages of windows of some channels of x (B, C, H, W) and norms of others.

    None where torch's pooling must be used.
    """
    windows = _fast_windows(x, kernel, stride)
    if windows is None:
        return None
    pooled: Tensor = apply(_Pool, x, windows.add(x.detach(), groups), windows, groups)
    return pooled


def _part(x: Tensor, channels: slice) -> Tensor:
    return x if channels == _ALL else x[:, channels]


def norm_pool(x: Tensor, kernel: Sizes, stride: Sizes, ceil_mode: bool = False) -> Tensor:
    """Return the Euclidean norm of every window of x (B, C, ...), as ``nn.LPPool*d`` with p = 2.

    The gradient is 0 where a window is 0. With ``ceil_mode`` a window that is cut off at the end is scaled
    to a whole one. kernel and stride have one number per spatial axis.

    Examples:
        >>> norm_pool(torch.tensor([[[3.0, 4.0, 0.0, 0.0]]]), (2,), (2,))
        tensor([[[5., 0.]]])
    """
    pooled = None if ceil_mode else pool_groups(x, kernel, stride, _NORMS)
    if pooled is not None:
        return pooled
    squares = x.to(at_least_float32(x.dtype)).square()
    means: Tensor = _AVG_POOL[len(kernel)](squares, kernel, stride, 0, ceil_mode)
    return guarded_root(means * math.prod(kernel)).to(x.dtype)


@dataclass(frozen=True)
class _Windows:
    """The windows of a map, without padding."""

    sizes: Sizes
    kernel: Sizes
    stride: Sizes

    @cached_property
    def counts(self) -> Sizes:
        """The number of windows along each axis."""
        axes = zip(self.sizes, self.kernel, self.stride, strict=True)
        return tuple((size - kernel) // stride + 1 for size, kernel, stride in axes)

    @cached_property
    def tile(self) -> bool:
        """Whether no two windows overlap or leave a gap."""
        return self.kernel == self.stride

    @cached_property
    def small(self) -> bool:
        """Whether a matrix product is cheaper than other ways."""
        entries = math.prod(self.sizes) * math.prod(self.counts)
        return entries <= (_SMALL_TILED if self.tile else _SMALL)

    def add(self, x: Tensor, groups: Groups) -> Tensor:
        """Sum each window, or its squares, (B, C, H, W) → (B, C, H', W'); without a derivative."""
        total = x.new_empty((*x.shape[:2], *self.counts))
        if self.small:
            whole = torch.empty_like(x, memory_format=torch.contiguous_format)
            for channels, squared in groups:  # a product copies faster than copy_
                part = _part(x, channels)
                torch.mul(part, part if squared else 1.0, out=_part(whole, channels))
            maps = total.view(-1, math.prod(self.counts))
            torch.mm(whole.view(-1, math.prod(self.sizes)), _matrix(self, x.dtype), out=maps)
            return total
        for channels, squared in groups:
            self._add_tiles(_part(x, channels), squared, _part(total, channels))
        return total

    def _add_tiles(self, x: Tensor, squared: bool, out: Tensor) -> None:
        """Add the rows of windows, which are contiguous, and then their columns."""
        columns, width = self.counts[1], self.kernel[1]
        first, *others = self._rows(x)
        rows = first.square() if squared else first.clone(memory_format=torch.contiguous_format)
        for other in others:
            rows.addcmul_(other, other) if squared else rows.add_(other)
        out.copy_(rows[..., : columns * width : width])
        for start in range(1, width):
            out += rows[..., start : columns * width : width]

    def spread(self, g: Tensor) -> Tensor:
        """Sum, for each pixel, the numbers of its windows: (B, C, H', W') → (B, C, H, W)."""
        if self.small:
            maps = g.reshape(-1, math.prod(self.counts))
            return (maps @ _matrix(self, g.dtype).t()).view(*g.shape[:2], *self.sizes)
        (rows, columns), (height, width) = self.counts, self.kernel
        tiles = g.view(*g.shape, 1, 1).expand(*g.shape, height, width).transpose(3, 4)
        tiles = tiles.reshape(*g.shape[:2], rows * height, columns * width)
        bottom, right = self.sizes[0] - rows * height, self.sizes[1] - columns * width
        return F.pad(tiles, (0, right, 0, bottom)) if bottom or right else tiles

    def spread_times(self, g: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """Return ``spread(g)``, times x in channels of norms, in one pass and without a derivative."""
        if self.small:
            whole = self.spread(g)
            for channels, norms in groups:
                if norms:
                    _part(whole, channels).mul_(_part(x, channels))
            return whole
        covered = [count * kernel for count, kernel in zip(self.counts, self.kernel, strict=True)]
        shape, exact = (*g.shape[:2], *self.sizes), tuple(covered) == self.sizes
        result = g.new_empty(shape) if exact else g.new_zeros(shape)
        wide = _repeat_columns(g, self.kernel[1])
        for channels, norms in groups:
            places = self._rows(_part(result, channels)[..., : covered[1]])
            rows: Sequence[Tensor | float] = [1.0] * len(places)
            if norms:
                rows = self._rows(_part(x, channels)[..., : covered[1]])
            for row, place in zip(rows, places, strict=True):
                torch.mul(_part(wide, channels), row, out=place)
        return result

    def _rows(self, x: Tensor) -> list[Tensor]:
        """Return a view for each row of a window: that row of all windows, which tile the map."""
        rows, height = self.counts[0], self.kernel[0]
        return [x[:, :, start : rows * height : height] for start in range(height)]


def _repeat_columns(g: Tensor, times: int) -> Tensor:
    """Repeat every column of a map."""
    if times == 2:  # complex numbers with equal parts are faster than repeat_interleave
        return torch.view_as_real(torch.complex(g, g)).flatten(3)
    return g.repeat_interleave(times, 3)


@lru_cache(maxsize=128)
def _matrix(windows: _Windows, dtype: torch.dtype) -> Tensor:
    """Return the matrix of zeros and ones, pixels × windows, that sums windows."""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.ones(1, 1, dtype=dtype, device="cpu")
        for size, kernel, stride in zip(windows.sizes, windows.kernel, windows.stride, strict=True):
            pixel = torch.arange(size, device="cpu").unsqueeze(1)
            start = stride * torch.arange((size - kernel) // stride + 1, device="cpu")
            whole = torch.kron(whole, ((start <= pixel) & (pixel < start + kernel)).to(dtype))
    return whole


def _fast_windows(x: Tensor, kernel: Sizes, stride: Sizes) -> _Windows | None:
    """Return the windows in a training step on the CPU that is faster without torch's kernels, else None."""
    plain = (
        x.dim() == 4
        and x.requires_grad
        and torch.is_grad_enabled()
        and may_look(x)
        and x.dtype in (torch.float32, torch.float64)
        and x.stride()[1:] == (x.shape[2] * x.shape[3], x.shape[3], 1)  # or some of the channels
        and not autocasts(x)
    )
    return _windows(tuple(x.shape[2:]), kernel, stride) if plain else None


@lru_cache(maxsize=128)
def _windows(sizes: Sizes, kernel: Sizes, stride: Sizes) -> _Windows | None:
    if any(length > size for length, size in zip(kernel, sizes, strict=True)):
        return None
    windows = _Windows(sizes, kernel, stride)
    return windows if windows.small or windows.tile else None


class _Pool(torch.autograd.Function):
    """Turn sums of windows into averages, and sums of squares into norms, with a gradient of 0 at 0.

    The caller has checked :func:`may_look`, so that no transform is active in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Tensor, windows: _Windows, groups: Groups) -> Tensor:
        for channels, norms in groups:
            part = _part(sums, channels)
            part.sqrt_() if norms else part.mul_(1 / math.prod(windows.kernel))
        ctx.mark_dirty(sums)
        if any(norms for _, norms in groups):
            ctx.save_for_backward(x, sums)
        ctx.windows, ctx.groups = windows, groups
        return sums

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        windows, groups, share = ctx.windows, ctx.groups, 1 / math.prod(ctx.windows.kernel)
        x, y = ctx.saved_tensors or (g, g)  # averages need neither
        if is_plain_gradient(g):
            ratio = torch.empty_like(g, memory_format=torch.contiguous_format)
            for channels, norms in groups:
                part, to = _part(g, channels), _part(ratio, channels)
                torch.div(part, _part(y, channels), out=to) if norms else torch.mul(
                    part, share, out=to
                )
                if norms:
                    to.masked_fill_(_part(y, channels) == 0, 0.0)
            return windows.spread_times(ratio, x, groups), None, None, None
        spread = [
            windows.spread(_part(g, channels) * guarded_inverse(_part(y, channels)))
            * _part(x, channels)
            if norms
            else windows.spread(_part(g, channels) * share)
            for channels, norms in groups
        ]
        return spread[0] if len(spread) == 1 else torch.cat(spread, 1), None, None, None
