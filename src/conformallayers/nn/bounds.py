"""Upper bounds of the operator norms of layers: Young's inequality with channels, and windows.

The bound of a linear layer is an instance of Schur's test, ``‖U‖₂ ≤ sqrt(‖U‖₁·‖U‖∞)``, with the largest
column sum and the largest row sum of absolute values. The largest column sum alone is no bound. That of a
homogeneous map h is the largest ``‖h(x)‖/‖x‖``; a maximum or a norm of windows counts each pixel as often as
windows use it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import Scalar, guarded_root, wide_dtype

Shape = tuple[int, ...]  # one sample, without the batch axis

_COPYING_PADS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.modules.padding._ReflectionPadNd, "reflect"),
    (nn.modules.padding._ReplicationPadNd, "replicate"),
    (nn.modules.padding._CircularPadNd, "circular"),
)
_ADAPTIVE_POOLS = nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd


def young(weight: Tensor, groups: int = 1, copies: float = 1.0) -> Tensor:
    """Bound a convolution by Young's inequality: ``sqrt(‖A‖₁·‖A‖∞)`` with ``A[o,i] = ‖w[o,i]‖₁``.

    Args:
        weight: kernels, shape (C_out, C_in/groups, ...); a transposed convolution's
            (C_in, C_out/groups, ...) serves as well, since a matrix and its transpose share norms.
        groups: the number of groups of the convolution.
        copies: how often the padded image contains its most repeated pixel.

    Examples:
        >>> young(torch.ones(1, 3, 1, 1))  # three channels of ones into one: no column exceeds 1
        tensor(1.7321, dtype=torch.float64)
    """
    norms = weight.unsqueeze(-1).flatten(2).abs().sum(2, dtype=wide_dtype(weight.device))
    blocks = norms.view(groups, -1, norms.shape[1])
    square = blocks.sum(2).amax() * blocks.sum(1).amax()
    return guarded_root(square * copies)  # padding multiplies ‖x‖² by at most copies


def conv_bound(module: Any, shape: Shape) -> Scalar:
    """Bound ``nn.Conv*d`` on an input of the given shape."""
    copies = 1.0
    if module.padding_mode != "zeros":
        axes = zip(shape[1:], conv_pads(module), module.kernel_size, module.dilation, strict=True)
        for size, (before, after), kernel, dilation in axes:
            if module.padding_mode == "circular":
                # A circular convolution covers every output once until the image wraps around.
                outputs = size + before + after - dilation * (kernel - 1)
                copies *= math.ceil(outputs / size)
            else:
                copies *= pad_copies(size, before, after, module.padding_mode)
    return young(module.weight, module.groups, max(copies, 1.0))


def weight_bound(module: Any, shape: Shape) -> Scalar:
    """Bound ``nn.Linear``, and ``nn.ConvTranspose*d`` as the adjoint of a convolution."""
    return young(module.weight, getattr(module, "groups", 1))


def one(module: Any, shape: Shape) -> float:
    """Bound a module that only moves, drops or averages coefficients: 1."""
    return 1.0


def avg_pool_bound(module: Any, shape: Shape) -> Scalar:
    """Bound ``nn.AvgPool*d`` by 1, or by its row and column sums where 1 is no bound.

    The windows of ``nn.AdaptiveAvgPool*d`` overlap unevenly.
    """
    override = getattr(module, "divisor_override", None)
    if getattr(module, "count_include_pad", False) and override is None:
        return 1.0
    windows = pool_windows(module, shape)
    if override is None:
        return _window_bound(windows, averaged=True)
    return _window_bound(windows, averaged=False) / abs(int(override))


def max_pool_bound(module: Any, shape: Shape) -> Scalar:
    """Bound ``nn.MaxPool*d`` and ``nn.AdaptiveMaxPool*d`` by the square root of how often windows use a pixel."""
    return math.sqrt(math.prod(_column_sum(axis) for axis in pool_windows(module, shape)))


def norm_pool_bound(module: Any, shape: Shape) -> Scalar:
    """Return the norm of ``nn.LPPool*d`` with p = 2.

    A window of length n that the end of the image cuts off counts kernel/n times.
    """
    kernels = per_axis(module.kernel_size, len(shape) - 1)
    square = 1.0
    for axis, kernel in zip(pool_windows(module, shape), kernels, strict=True):
        square *= _column_sum(axis, [kernel / len(window) for window in axis])
    return math.sqrt(square)


def leaky_bound(module: Any, shape: Shape) -> Scalar:
    """Bound ``nn.LeakyReLU`` by the larger of its two slopes."""
    return max(1.0, abs(float(module.negative_slope)))


def largest(name: str, least: float = 0.0) -> Callable[[Any, Shape], Scalar]:
    """Return the bound of modules that multiply by a tensor: its largest entry, and 1 without the tensor."""

    def bound(module: Any, shape: Shape) -> Scalar:
        factor: Tensor | None = getattr(module, name)
        if factor is None:
            return 1.0
        return factor.abs().max().to(wide_dtype(factor.device)).clamp_min(least)

    return bound


def pad_bound(module: Any, shape: Shape) -> Scalar:
    """Bound a padding module by the square root of how often it repeats a pixel."""
    mode = pad_mode(module)
    pads = tuple(module.padding)  # last axis first: (before, after, before, after, ...)
    copies = 1.0
    if mode != "zeros":
        for axis, size in enumerate(reversed(shape[-(len(pads) // 2) :])):
            copies *= pad_copies(size, pads[2 * axis], pads[2 * axis + 1], mode)
    return math.sqrt(copies)


def channel_factor(module: Any) -> Tensor:
    """Return the factor per channel of ``nn.BatchNorm*d`` in evaluation, in the wide dtype."""
    variance: Tensor = module.running_var
    variance = variance.to(wide_dtype(variance.device))
    factor: Tensor = (variance + module.eps).rsqrt()
    if module.weight is not None:
        factor = module.weight.to(variance.dtype) * factor
    return factor


def repeat_bound(module: Any, shape: Shape) -> float:
    """Bound ``cl.RepeatChannels`` by √times, since the energy is multiplied by ``times``."""
    return math.sqrt(module.times)


def upsample_bound(module: Any, shape: Shape) -> Scalar:
    """Bound ``nn.Upsample`` by the row and column sums of its matrix, a product over the axes."""
    factor = repeated_pixels(module, shape)
    if factor is not None:
        return factor
    size, scale = (
        None if value is None else per_axis(value, len(shape) - 1)
        for value in (module.size, module.scale_factor)
    )
    options = module.mode, module.align_corners, module.recompute_scale_factor
    return math.sqrt(math.prod(_interpolation_sums(shape[1:], size, scale, *options)))


def repeated_pixels(module: Any, shape: Shape) -> float | None:
    """Return the norm factor of ``nn.Upsample`` if it repeats pixels, else None."""
    if module.mode not in ("nearest", "nearest-exact"):
        return None
    return math.sqrt(math.prod(per_axis(module.scale_factor, len(shape) - 1)))


@lru_cache(maxsize=256)
def _interpolation_sums(
    spatial: Shape, size: Shape | None, scale: tuple[float, ...] | None, *options: Any
) -> list[float]:
    """Return the largest column sum of a linear interpolation along each axis; rows have the sum 1."""
    layer, products = nn.Upsample(size, scale, *options), []
    for axis, n in enumerate(spatial):
        # The image of 0, 1, 2, … gives the place of each row, and so its two weights.
        ramp = torch.arange(n, dtype=torch.float64).view(n, *[1] * (len(spatial) - axis - 1))
        image: Tensor = layer(ramp.expand(1, 1, *spatial))[0, 0].movedim(axis, -1)
        place = image.reshape(-1, image.shape[-1])[0]
        low = place.floor()
        columns = torch.zeros(n + 1, dtype=torch.float64)  # the last entry stays 0
        columns.index_add_(0, low.long(), 1 - (place - low))
        columns.index_add_(0, low.long() + 1, place - low)
        products.append(float(columns.max()))
    return products


def pad_mode(module: nn.Module) -> str:
    """Return how a padding module fills its margin: "zeros" for any constant, or a way to copy pixels."""
    return next((mode for kind, mode in _COPYING_PADS if isinstance(module, kind)), "zeros")


def pad_copies(size: int, before: int, after: int, mode: str) -> int:
    """Count the occurrences of the most repeated pixel of an axis after padding.

    Negative padding crops.

    Examples:
        >>> pad_copies(8, 1, 1, "replicate"), pad_copies(8, 2, 2, "reflect")
        (2, 2)
    """
    if mode == "circular":
        return -(-(size + before + after) // size)
    last, places = size - 1, range(-before, size + after)
    if mode == "replicate":
        return max(Counter(min(max(place, 0), last) for place in places).values())
    # Reflect at pixel 0, then at the last pixel.
    return max(Counter(last - abs(last - abs(place)) for place in places).values())


def conv_pads(module: Any) -> tuple[tuple[int, int], ...]:
    """Return the padding of a convolution before and after each axis."""
    if module.padding == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(p), int(p)) for p in module.padding)


def per_axis(value: Any, axes: int) -> tuple[Any, ...]:
    """Return one value per axis; a single value, or a sequence of one, counts for every axis.

    Examples:
        >>> per_axis(3, 2), per_axis((3,), 2), per_axis((3, 1), 2)
        ((3, 3), (3, 3), (3, 1))
    """
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * axes if len(values) == 1 else values


def pool_axes(module: Any, axes: int) -> dict[str, tuple[int, ...]]:
    """Return kernel, stride, padding and dilation of a pooling layer, one number for each axis."""
    stride = module.kernel_size if module.stride is None else module.stride
    padding, dilation = getattr(module, "padding", 0), getattr(module, "dilation", 1)
    found = {"kernel": module.kernel_size, "stride": stride, "padding": padding}
    return {name: per_axis(n, axes) for name, n in (*found.items(), ("dilation", dilation))}


def pool_windows(module: Any, shape: Shape) -> list[tuple[range, ...]]:
    """Return the windows of a pooling layer along each axis: the pixels of the image in each of them."""
    if isinstance(module, _ADAPTIVE_POOLS):
        found = []
        for n, wanted in zip(shape[1:], per_axis(module.output_size, len(shape) - 1), strict=True):
            out = n if wanted is None else wanted
            found.append(tuple(range(i * n // out, -((i + 1) * n // -out)) for i in range(out)))
        return found
    options = pool_axes(module, len(shape) - 1)
    found = []
    for size, kernel, stride, padding, dilation in zip(shape[1:], *options.values(), strict=True):
        reach = dilation * (kernel - 1) + 1
        # With ceil_mode the last window may end outside, but starts inside.
        last = size + padding - reach
        starts = range(-padding, min(size, last + stride) if module.ceil_mode else last + 1, stride)
        # The first pixel of a dilated window that starts in the padding is not pixel 0.
        found.append(
            tuple(
                range(s if s >= 0 else s % dilation, min(s + reach, size), dilation) for s in starts
            )
        )
    return found


def _column_sum(axis: Sequence[range], weights: Sequence[float] | None = None) -> float:
    """Return the largest weight that the windows of an axis give to one pixel together; each is 1 by default."""
    sums = [0.0] * max(max(window, default=-1) + 1 for window in axis)
    for index, window in enumerate(axis):
        for position in window:
            sums[position] += 1.0 if weights is None else weights[index]
    return max(sums, default=0.0)


def _window_bound(windows: Sequence[Sequence[range]], *, averaged: bool) -> float:
    """Return ``sqrt(max row sum · max column sum)``; both are products over the axes."""
    rows = columns = 1.0
    for axis in windows:
        lengths = [len(window) for window in axis]
        rows *= 1.0 if averaged else max(lengths)
        columns *= _column_sum(axis, [1 / n for n in lengths] if averaged else None)
    return math.sqrt(rows * columns)
