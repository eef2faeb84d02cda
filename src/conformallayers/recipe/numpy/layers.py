"""Operations on features, in numpy: one function each, of (operation, network, *input values)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .. import layer_operations as layer
from ..operation import Operation

Array = np.ndarray[Any, Any]
Run = Callable[..., Any]


class Holder(Protocol):
    """What a function of an operation may ask of the network that runs it."""

    dtype: np.dtype[Any]

    def constant(self, name: str) -> Array:
        """Return a constant."""
        ...


def flat(x: Array) -> Array:
    """Return each sample as one row: (B, ...) → (B, n), also where there is none."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


# -- products and convolutions ----------------------------------------------------------------------


def _matmul(op: layer.Matmul, net: Holder, x: Array) -> Array:
    y: Array = x @ net.constant(op.weight).T
    return y if op.bias is None else y + net.constant(op.bias)


def _conv(op: layer.Conv, net: Holder, x: Array) -> Array:
    """Multiply all windows by one matrix for each group."""
    weight, axes, batch = net.constant(op.weight), len(op.stride), len(x)
    outputs, inputs, *kernel = weight.shape
    x = _surrounded(x, [(p, p) for p in op.padding])
    windows = _windows(x, kernel, op.stride, op.dilation)
    positions = windows.shape[2 : 2 + axes]
    windows = windows.reshape(batch, op.groups, inputs, *positions, *kernel)
    order = 1, 0, *range(3, 3 + axes), 2, *range(3 + axes, 3 + 2 * axes)
    rows = windows.transpose(order).reshape(
        op.groups, batch * math.prod(positions), inputs * math.prod(kernel)
    )
    images = rows @ weight.reshape(op.groups, outputs // op.groups, -1).transpose(0, 2, 1)
    images = images.reshape(op.groups, batch, *positions, outputs // op.groups)
    return _channels_first(images, net, op.bias)


def _conv_transpose(op: layer.ConvTranspose, net: Holder, x: Array) -> Array:
    """Add what every place of the kernel gives, then cut the padding off."""
    weight, batch, sizes = net.constant(op.weight), len(x), x.shape[2:]
    inputs, outputs, kernel = len(weight) // op.groups, weight.shape[1], weight.shape[2:]
    weight = weight.reshape(op.groups, inputs, outputs, *kernel)
    rows = np.moveaxis(x.reshape(batch, op.groups, inputs, *sizes), (1, 2), (0, -1))
    rows = rows.reshape(op.groups, batch * math.prod(sizes), inputs)
    every = zip(sizes, op.stride, op.dilation, kernel, op.output_padding, strict=True)
    full = [(n - 1) * s + d * (k - 1) + 1 + o for n, s, d, k, o in every]
    y = np.zeros((op.groups, batch, *full, outputs), np.result_type(x, weight))
    for place in np.ndindex(*kernel):
        image = rows @ weight[(..., *place)]
        at = zip(place, op.dilation, op.stride, sizes, strict=True)
        cut = [slice(p * d, p * d + (n - 1) * s + 1, s) for p, d, s, n in at]
        y[(slice(None), slice(None), *cut)] += image.reshape(op.groups, batch, *sizes, outputs)
    inside = [slice(p, n - p) for p, n in zip(op.padding, full, strict=True)]
    return _channels_first(y[(slice(None), slice(None), *inside)], net, op.bias)


def _channels_first(images: Array, net: Holder, bias: str | None) -> Array:
    """Return (groups, B, ..., C / groups) as (B, C, ...), with one number added to each channel."""
    groups, batch, *spatial, channels = images.shape
    y = np.moveaxis(images, (0, -1), (1, 2)).reshape(batch, groups * channels, *spatial)
    return y if bias is None else y + _by_channel(net.constant(bias), y)


def _by_channel(numbers: Array, x: Array) -> Array:
    """Return (C,) so that it broadcasts to (B, C, ...)."""
    return numbers.reshape(-1, *[1] * (x.ndim - 2))


def _windows(
    x: Array, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Array:
    """Return the windows of (B, C, ...) as a view: (B, C, *positions, *kernel)."""
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    steps = [slice(None, None, step) for step in (*stride, *dilation)]
    windows = sliding_window_view(x, spans, tuple(range(2, x.ndim)))
    return windows[(slice(None), slice(None), *steps)]


# -- pooling ----------------------------------------------------------------------------------------


def _avg_pool(op: layer.AvgPool, net: Holder, x: Array) -> Array:
    total = reduce(np.add, _entries(op, x.astype(np.float64), (1,) * len(op.kernel), 0.0))
    lengths = []  # of the windows along each axis; padding behind the last one never counts
    every = zip(x.shape[2:], total.shape[2:], op.kernel, op.stride, op.padding, strict=True)
    for n, count, k, s, p in every:
        start = np.arange(count) * s - p
        stop = np.minimum(start + k, n + p)
        if not op.count_include_pad:
            start, stop = np.maximum(start, 0), np.minimum(stop, n)
        lengths.append(stop - start)
    divisor = math.prod(np.ix_(*lengths)) if op.divisor is None else op.divisor
    return np.asarray(total / divisor, x.dtype)


def _max_pool(op: layer.MaxPool, net: Holder, x: Array) -> Array:
    return reduce(np.maximum, _entries(op, x, op.dilation, -np.inf))


def _entries(
    op: layer.AvgPool | layer.MaxPool, x: Array, dilation: Sequence[int], fill: float
) -> Iterator[Array]:
    """Yield, for each place of the window, the entries of all windows: each (B, C, *positions)."""
    pads = []
    every = zip(x.shape[2:], op.kernel, op.stride, op.padding, dilation, strict=True)
    for n, k, s, p, d in every:
        span = d * (k - 1) + 1
        last = (layer.windows(n, span, s, p, op.ceil_mode) - 1) * s  # where the last window starts
        pads.append((p, last + span - n - p))
    windows = _windows(_surrounded(x, pads, fill), op.kernel, op.stride, dilation)
    return (windows[(..., *place)] for place in np.ndindex(*op.kernel))


def _adaptive_avg_pool(op: layer.AdaptiveAvgPool, net: Holder, x: Array) -> Array:
    y = x.astype(np.float64)
    for axis, size in enumerate(op.size, 2):
        n, i, later = x.shape[axis], np.arange(size), x.ndim - axis - 1
        first, last = i * n // size, -(-(i + 1) * n // size)
        # reduceat sums from each end to the next one; every second sum is that of a range.
        ends = np.stack([first, last], 1).reshape(-1)
        y = _surrounded(y, [(0, 1), *[(0, 0)] * later])  # it takes no end behind the last entry
        sums = np.add.reduceat(y, ends, axis)[(slice(None),) * axis + (slice(None, None, 2),)]
        y = sums / (last - first).reshape(-1, *[1] * later)
    return y.astype(x.dtype)


# -- margins and interpolation ----------------------------------------------------------------------


def _pad(op: layer.Pad, net: Holder, x: Array) -> Array:
    if op.mode == "zeros":
        return _surrounded(x, op.pads, op.value)
    for axis, (before, after) in enumerate(op.pads, x.ndim - len(op.pads)):
        n = x.shape[axis]
        places = np.arange(-before, n + after)
        if op.mode == "reflect":
            places = n - 1 - np.abs(n - 1 - np.abs(places))
        elif op.mode == "replicate":
            places = np.clip(places, 0, n - 1)
        else:  # what a negative number cuts off does not come around again
            first, last = max(-before, 0), n - max(-after, 0)
            places = first + (places - first) % (last - first)
        x = np.take(x, places, axis)
    return x


def _surrounded(x: Array, pads: Sequence[tuple[int, int]], value: float = 0.0) -> Array:
    """Put a value around the last axes, (before, after); a negative number crops."""
    if not any(end for ends in pads for end in ends):
        return x
    pads = [(0, 0)] * (x.ndim - len(pads)) + list(pads)
    ends = zip(pads, x.shape, strict=True)
    x = x[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in ends)]
    return np.pad(x, [(max(a, 0), max(b, 0)) for a, b in pads], constant_values=value)


def _upsample(op: layer.Upsample, net: Holder, x: Array) -> Array:
    """Interpolate one axis after the other."""
    y = x
    for axis in range(2, x.ndim):
        n, size = x.shape[axis], op.size[axis - 2]
        scale = None if op.scales is None else op.scales[axis - 2]
        if op.mode.startswith("nearest"):
            y = np.take(y, _nearest(op, n, size, scale, x.dtype), axis)
        elif op.mode == "bicubic" or size != n:  # linear modes copy an axis that keeps its size
            column = -1, *[1] * (x.ndim - axis - 1)
            y = reduce(
                np.add,
                [
                    share.reshape(column) * np.take(y, np.clip(places, 0, n - 1), axis)
                    for places, share in _neighbours(op, n, size, scale, x.dtype)
                ],
            )
    return y


def _nearest(
    op: layer.Upsample, n: int, size: int, scale: float | None, dtype: np.dtype[Any]
) -> Array:
    """Return the place that each entry is copied from, rounded as torch does.

    torch has a function of its own for small images: it takes ratios in float32, and ignores the
    scale where the size stays or doubles.
    """
    exact, places = op.mode == "nearest-exact", np.arange(size)
    small = len(op.size) == 2 and sum(op.size) <= 128
    if small and not exact and size in (n, 2 * n):
        return places // (size // n)
    kind = np.float32 if small else dtype.type
    ratio = float(_ratio(n, size, scale, kind))
    source = (places + 0.5) * ratio if exact else places * ratio
    if exact and not small:
        source = (source - 0.5).astype(kind) + kind(0.5)
    low: Array = np.floor(source.astype(np.float32)).astype(int)
    return np.minimum(low, n - 1)


def _neighbours(
    op: layer.Upsample, n: int, size: int, scale: float | None, dtype: np.dtype[Any]
) -> list[tuple[Array, Array]]:
    """Return the places between which each entry lies, with their shares, as torch rounds them."""
    kind, places = dtype.type, np.arange(size, dtype=dtype)
    if op.align_corners:
        source = places * (kind(n - 1) / kind(size - 1) if size > 1 else kind(0))
    else:
        source = _ratio(n, size, scale, kind) * (places + kind(0.5)) - kind(0.5)
    cubic = op.mode == "bicubic"
    source = source if cubic else np.maximum(source, 0)
    low = np.minimum(np.floor(source).astype(int), n - 1)
    t = (source - low).astype(dtype)
    offsets = (-1, 0, 1, 2) if cubic else (0, 1)
    distances = [np.abs(t - offset) for offset in offsets]
    shares = [_cubic_share(d) if cubic else 1 - d for d in distances]
    return [(low + offset, share) for offset, share in zip(offsets, shares, strict=True)]


def _cubic_share(d: Array) -> Array:
    """Return the kernel of cubic interpolation at distances up to 2, with the constant of torch."""
    a = -0.75
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    return np.where(d <= 1, near, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a)


def _ratio(n: int, size: int, scale: float | None, kind: Any) -> Any:
    """Return the step in the input for one step in the output."""
    return kind(n) / kind(size) if scale is None else kind(1 / scale)


# -- sums and shapes --------------------------------------------------------------------------------


def _multiply(op: layer.Multiply, net: Holder, x: Array) -> Array:
    return np.multiply(x, net.constant(op.factor))


def _add_constant(op: layer.AddConstant, net: Holder, x: Array) -> Array:
    return np.add(x, net.constant(op.value))


def _add(op: layer.Add, net: Holder, *values: Array) -> Array:
    return reduce(np.add, values)


def _concatenate(op: layer.Concatenate, net: Holder, *values: Array) -> Array:
    return np.concatenate(values, op.axis + 1)


def _slice(op: layer.Slice, net: Holder, x: Array) -> Array:
    return x[(slice(None),) * (op.axis + 1) + (slice(op.start, op.stop),)]


def _reshape(op: layer.Reshape, net: Holder, x: Array) -> Array:
    return x.reshape(len(x), *op.shape)


def _permute(op: layer.Permute, net: Holder, x: Array) -> Array:
    return x.transpose(0, *(axis + 1 for axis in op.order))


def _cast(op: layer.Cast, net: Holder, x: Array) -> Array:
    return x.astype(np.float64 if op.to == layer.WIDE else net.dtype, copy=False)


# -- functions of single numbers, and normalisations ------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[np.float64])  # numpy has none of its own
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934, 1.6732632423543772848


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(x))


def _gelu_tanh(x: Array) -> Array:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


def _softplus(x: Array, beta: float, threshold: float) -> Array:
    return np.where(x * beta > threshold, x, np.log1p(np.exp(x * beta)) / beta)


_ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x, slope: np.where(x > 0, x, x * slope),
    "elu": _elu,
    "celu": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x / alpha)),
    "selu": lambda x: _SELU_SCALE * _elu(x, _SELU_ALPHA),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype)),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softplus": _softplus,
    "hardtanh": np.clip,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
}


def _elementwise(op: layer.Elementwise, net: Holder, x: Array) -> Array:
    return _ELEMENTWISE[op.function](x, *op.parameters)


def _prelu(op: layer.PRelu, net: Holder, x: Array) -> Array:
    return np.where(x > 0, x, x * net.constant(op.slope))


def _softmax(op: layer.Softmax, net: Holder, x: Array) -> Array:
    axis = op.axis + 1
    x = x - x.max(axis, keepdims=True)
    powers = np.exp(x)
    total = powers.sum(axis, keepdims=True)
    return np.asarray(x - np.log(total) if op.log else powers / total)


def _layer_norm(op: layer.LayerNorm, net: Holder, x: Array) -> Array:
    y = _standardized(x, tuple(range(x.ndim - op.axes, x.ndim)), op.eps)
    y = y if op.weight is None else y * net.constant(op.weight)
    return y if op.bias is None else y + net.constant(op.bias)


def _group_norm(op: layer.GroupNorm, net: Holder, x: Array) -> Array:
    groups = x.reshape(len(x), op.groups, math.prod(x.shape[1:]) // op.groups)
    y = _standardized(groups, (2,), op.eps).reshape(x.shape)
    y = y if op.weight is None else y * _by_channel(net.constant(op.weight), x)
    return y if op.bias is None else y + _by_channel(net.constant(op.bias), x)


def _standardized(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """Subtract the mean over axes and divide by ``√(variance + eps)``, in float64."""
    wide = x.astype(np.float64)
    wide = wide - wide.mean(axes, keepdims=True)
    variance = np.square(wide).mean(axes, keepdims=True)
    return np.asarray(wide / np.sqrt(variance + eps), x.dtype)


RUN_LAYERS: dict[type[Operation], Run] = {
    layer.Matmul: _matmul,
    layer.Conv: _conv,
    layer.ConvTranspose: _conv_transpose,
    layer.AvgPool: _avg_pool,
    layer.MaxPool: _max_pool,
    layer.AdaptiveAvgPool: _adaptive_avg_pool,
    layer.Pad: _pad,
    layer.Upsample: _upsample,
    layer.Multiply: _multiply,
    layer.AddConstant: _add_constant,
    layer.Add: _add,
    layer.Concatenate: _concatenate,
    layer.Slice: _slice,
    layer.Reshape: _reshape,
    layer.Permute: _permute,
    layer.Cast: _cast,
    layer.Elementwise: _elementwise,
    layer.PRelu: _prelu,
    layer.Softmax: _softmax,
    layer.LayerNorm: _layer_norm,
    layer.GroupNorm: _group_norm,
}
