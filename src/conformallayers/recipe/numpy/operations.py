"""All operations in numpy: one function each, of (operation, network, *input values).

The scalars of samples, m, τ and n, are float64 arrays of shape (B,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...nn.formula import FUNCTIONS
from .. import layer_operations as layer
from .. import places
from .. import point_operations as point
from ..integer_arithmetic import IntegerArithmetic, column, flat
from ..integer_operations import IntegerConv, IntegerMatmul
from ..places import Array, Resampling
from ..recipe import Runtime

RUN = Runtime("numpy")


Context = Any  # a Network


def _plus(net: Context, y: Array, bias: str | None) -> Array:
    """Add a bias (channels,) to (B, channels, ...), if there is one."""
    if bias is None:
        return y
    return np.asarray(y + net.constant(bias).reshape(-1, *[1] * (y.ndim - 2)))


# -- products and convolutions ----------------------------------------------------------------------


@RUN.runs(layer.Matmul)
def _matmul(op: layer.Matmul, net: Context, x: Array) -> Array:
    weight = net.constant(op.weight)
    if weight.shape[1] <= layer.LONG_ROW:
        y = x @ weight.T
    else:
        y = _long_product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], len(weight))
    return y if op.bias is None else np.asarray(y + net.constant(op.bias))


def _long_product(x: Array, weight: Array) -> Array:
    """Return x Wᵀ of long rows, (B, n) and (m, n), in one batched product of blocks and one of the rest."""
    cut, block = x.shape[1] // layer.BLOCK * layer.BLOCK, layer.BLOCK
    blocks = x[:, :cut].reshape(len(x), cut // block, block).transpose(1, 0, 2)
    columns = weight[:, :cut].reshape(len(weight), cut // block, block).transpose(1, 2, 0)
    sums = (blocks @ columns).sum(0, dtype=np.float64)
    return np.asarray(sums + x[:, cut:] @ weight[:, cut:].T, x.dtype)


@RUN.runs(layer.Conv)
def _conv(op: layer.Conv, net: Context, x: Array) -> Array:
    return _plus(net, _convolved(op, net.constant(op.weight), x), op.bias)


def _convolved(op: layer.Conv, weight: Array, x: Array) -> Array:
    """Convolve (B, C, ...) by products of all windows with the kernel."""
    axes, batch = len(op.stride), len(x)
    outputs, inputs, *kernel = weight.shape
    x = _surrounded(x, [(p, p) for p in op.padding])
    windows = _windows(x, kernel, op.stride, op.dilation)
    positions = windows.shape[2 : 2 + axes]
    windows = windows.reshape(batch, op.groups, inputs, *positions, *kernel)
    # (groups, B·positions, inputs·kernel): one product for each group
    order = 1, 0, *range(3, 3 + axes), 2, *range(3 + axes, 3 + 2 * axes)
    rows = windows.transpose(order).reshape(
        op.groups, batch * math.prod(positions), inputs * math.prod(kernel)
    )
    images = rows @ weight.reshape(op.groups, outputs // op.groups, -1).transpose(0, 2, 1)
    images = images.reshape(op.groups, batch, *positions, outputs // op.groups)
    return np.moveaxis(images, (0, -1), (1, 2)).reshape(batch, outputs, *positions)


@RUN.runs(layer.ConvTranspose)
def _conv_transpose(op: layer.ConvTranspose, net: Context, x: Array) -> Array:
    """Add the products with each entry of the kernel where they belong."""
    weight, spatial = net.constant(op.weight), x.shape[2:]
    _, *size = op.shape_of(x.shape[1:], lambda name: net.constant(name).shape)
    inputs, outputs = x.shape[1] // op.groups, weight.shape[1] * op.groups
    rows = x.reshape(len(x), op.groups, inputs, math.prod(spatial))
    whole = [n + 2 * p for n, p in zip(size, op.padding, strict=True)]
    y: Any = np.zeros((len(x), outputs, *whole), x.dtype)
    for place in np.ndindex(*weight.shape[2:]):
        matrix = weight[(..., *place)].reshape(op.groups, inputs, weight.shape[1])
        products = (matrix.swapaxes(1, 2) @ rows).reshape(len(x), outputs, *spatial)
        starts = (i * d for i, d in zip(place, op.dilation, strict=True))
        ends = zip(starts, spatial, op.stride, strict=True)
        y[(..., *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in ends))] += products
    inside = (slice(p, p + n) for p, n in zip(op.padding, size, strict=True))
    return _plus(net, y[(..., *inside)], op.bias)


def _windows(
    x: Array, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Array:
    """Return the windows of (B, C, ...) as a view: (B, C, *positions, *kernel)."""
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    steps = [slice(None, None, step) for step in (*stride, *dilation)]
    windows = sliding_window_view(x, spans, tuple(range(2, x.ndim)))
    return windows[(slice(None), slice(None), *steps)]


# -- windows, margins and interpolation -------------------------------------------------------------


@RUN.runs(layer.AvgPool)
def _avg_pool(op: layer.AvgPool, net: Context, x: Array) -> Array:
    total = reduce(np.add, _entries(op, x.astype(np.float64), 0.0))
    divisors = places.divisors(op, x.shape[1:])
    return np.asarray(total / divisors, x.dtype)


@RUN.runs(layer.NormPool)
def _norm_pool(op: layer.NormPool, net: Context, x: Array) -> Array:
    means = _avg_pool(op.averages, net, np.square(x, dtype=np.float64))
    return np.asarray(np.sqrt(means * math.prod(op.kernel)), x.dtype)


@RUN.runs(layer.MaxPool)
def _max_pool(op: layer.MaxPool, net: Context, x: Array) -> Array:
    return reduce(np.maximum, _entries(op, x, -np.inf))


def _entries(op: layer.Pool, x: Array, fill: float) -> Iterator[Array]:
    """Yield, for each place of the window, the entries of all windows: each (B, C, *positions)."""
    dilation = [d for *_, d in op.axes(x.shape[1:])]
    surrounded = _surrounded(x, places.margins(op, x.shape[1:]), fill)
    windows = _windows(surrounded, op.kernel, op.stride, dilation)
    return (windows[(..., *place)] for place in np.ndindex(*op.kernel))


@RUN.runs(layer.AdaptiveAvgPool, layer.AdaptiveMaxPool, layer.Upsample)
def _resample(op: Resampling, _: Context, x: Array) -> Array:
    """Replace the entries along each axis by weighted sums of a few of them, or by the largest."""
    for axis, table, weights in places.resampled(op, x.shape[1:]):
        if places.copies_entries(weights):
            x = np.take(x, table[0], axis + 1)
        elif isinstance(op, layer.AdaptiveMaxPool):
            x = np.take(x, table, axis + 1).max(axis + 1)
        else:
            column = weights.reshape(*weights.shape, *[1] * (x.ndim - axis - 2))
            y = (np.take(x, table, axis + 1) * column).sum(axis + 1)
            x = y.astype(x.dtype)
    return x


@RUN.runs(layer.Pad)
def _pad(op: layer.Pad, net: Context, x: Array) -> Array:
    return _surrounded(x, op.pads, op.value) if op.mode == "zeros" else _resample(op, net, x)


def _surrounded(x: Array, pads: Sequence[tuple[int, int]], value: float = 0.0) -> Array:
    """Put a value around the last axes, (before, after); a negative number crops."""
    if not any(end for ends in pads for end in ends):
        return x
    pads = [(0, 0)] * (x.ndim - len(pads)) + list(pads)
    ends = zip(pads, x.shape, strict=True)
    x = x[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in ends)]
    return np.pad(x, [(max(a, 0), max(b, 0)) for a, b in pads], constant_values=value)


# -- sums and shapes --------------------------------------------------------------------------------


RUN[layer.Multiply] = lambda op, net, x: x * net.constant(op.factor)
RUN[layer.AddConstant] = lambda op, net, x: x + net.constant(op.value)
RUN[layer.Add] = lambda _op, _net, *values: reduce(np.add, values)
RUN[layer.Product] = lambda _op, _net, x, y: x * y
RUN[layer.Concatenate] = lambda op, _, *values: np.concatenate(values, op.axis + 1)
RUN[layer.Slice] = lambda op, _, x: x[(slice(None),) * (op.axis + 1) + (slice(op.start, op.stop),)]
RUN[layer.Reshape] = lambda op, _, x: x.reshape(len(x), *op.shape)
RUN[layer.Permute] = lambda op, _, x: x.transpose(0, *(axis + 1 for axis in op.order))


# -- functions of single numbers --------------------------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[np.float64])  # numpy has none of its own


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


_ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "relu": lambda x: np.maximum(x, 0),
    "clip": np.clip,
    "leaky_relu": lambda x, slope: np.where(x > 0, x, x * slope),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype)),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
}


RUN[layer.Elementwise] = lambda op, _, x: _ELEMENTWISE[op.function](x, *op.parameters)
RUN[layer.PRelu] = lambda op, net, x: np.where(x > 0, x, x * net.constant(op.slope))


@RUN.runs(layer.Softmax)
def _softmax(op: layer.Softmax, net: Context, x: Array) -> Array:
    axis = op.axis + 1
    x = x - x.max(axis, keepdims=True)
    powers = np.exp(x)
    total = powers.sum(axis, keepdims=True)
    return np.asarray(x - np.log(total) if op.log else powers / total)


# -- points: embedding and energies -----------------------------------------------------------------

_FORMULA = {name: getattr(np, name) for name in FUNCTIONS}


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, net: Context, x: Array) -> tuple[Array, Array, Array]:
    tau = np.sqrt(_squared_norm(x) + op.offset**2)
    return x, np.ones_like(tau), tau


RUN[point.SumSquares] = lambda op, _, z: _squared_norm(z) * op.weight


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, net: Context, x: Array) -> Array:
    size, width = op.size, op.width
    windows = sliding_window_view(x, (width + 1) * size, 1)[:, ::size]
    windows = windows.transpose(1, 0, 2)  # (blocks - width, B, …)
    images = windows @ net.constant(op.band)
    end = x[:, x.shape[1] - width * size :] @ net.constant(op.last)
    total = np.square(images, dtype=np.float64).sum((0, 2)) + _squared_norm(end)
    return np.asarray(total * op.weight)


# -- the coordinate, and leaving --------------------------------------------------------------------


@RUN.runs(point.Advance)
def _advance(op: point.Advance, net: Context, tau: Array, m: Array, *energies: Array) -> Array:
    zero = tau == 0
    values = {"tau": np.where(zero, 1.0, tau), "m": m, "n": reduce(np.add, energies)}
    return np.where(zero, 0.0, op.parsed.evaluate(values, _FORMULA))


RUN[point.Divide] = lambda op, _net, v, tau, _m: _scaled(v, op.scale * _inverse(tau))


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, net: Context, z: Array, m: Array, tau: Array
) -> tuple[Array, Array, Array]:
    coordinate = np.minimum(m * op.coordinate * tau, point.LARGEST_COORDINATE)
    alive = np.where(np.isnan(tau), tau, tau != 0)
    return _scaled(z, op.scale * _inverse(tau)), coordinate, alive


def _squared_norm(z: Array) -> Array:
    """Return ‖z‖² of each sample in float64."""
    return np.asarray(np.square(flat(z), dtype=np.float64).sum(1))


def _inverse(t: Array) -> Array:
    """Return 1/t, and 0 where t = 0; NaN stays NaN."""
    return np.divide(1.0, t, out=np.zeros_like(t), where=t != 0)


def _scaled(z: Array, factor: Array) -> Array:
    """Multiply each sample by its factor (B,), in the dtype of z."""
    return np.asarray(z * column(factor, z).astype(z.dtype))


# -- integers ----------------------------------------------------------------------------------------


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _products(op: IntegerMatmul | IntegerConv, net: Context, q: Array) -> Array:
    dtype = np.float32 if op.sums_fit_single(net.recipe.constant_shape) else np.float64
    weight, q = net.constant(op.weight).astype(dtype), q.astype(dtype)
    if isinstance(op, layer.Matmul):
        sums = _wide(q @ weight.T)
        return sums if op.bias is None else sums + net.constant(op.bias)
    return _plus(net, _wide(_convolved(op, weight, q)), op.bias)


_ARITHMETIC = IntegerArithmetic(
    single=lambda x: x.astype(np.float32),
    wide=_wide,
    cast=lambda x, dtype: x.astype(dtype),
    without_nan=lambda x: np.where(np.isnan(x), np.float32(0), x),
    peak=lambda x: np.abs(flat(x)).max(1),
    squares=lambda q: np.square(_wide(flat(q))).sum(1),
    scalar=_wide,
    root=np.sqrt,
    products=_products,
    windows=lambda op, _, x, factor: reduce(np.add, _entries(op, _wide(x), 0.0)) * factor,
)
RUN.update(_ARITHMETIC.functions)
