"""Operations on features, in ONNX: one function each, of (operation, graph, *input values).

Functions of single numbers keep NaN by comparisons that are false for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import numpy as np

from .. import layer_operations as layer
from .. import places
from ..integer_operations import LEVELS, MULTIPLIERS, IntegerPool, root_bits
from ..places import Array
from ..recipe import Operation, Recipe, Runtime, Shape, ShapeOf
from .graph import SINGLE, WIDE, OnnxGraph, Value

RUN = Runtime("ONNX")
LARGEST_WINDOW = 2**10  # that is averaged in float32: ONNX Runtime adds the entries one by one
_BLOCK = 8  # for other multiples of channels, ONNX Runtime's pooling is slower than its convolution


def _with_constant(kind: str, y: Value, name: str | None) -> Value:
    """Multiply by a constant or add it, if there is one."""
    return y if name is None else y.node(kind, y.graph.constant(name))


@RUN.runs(layer.Matmul)
def _matmul(op: layer.Matmul, graph: OnnxGraph, x: Value) -> Value:
    weight, shape = graph.constant(op.weight), graph.result_shape(op)
    if weight.shape[1] > layer.LONG_ROW:
        # ONNX Runtime adds in float32: only the sums of short pieces are added in float64.
        sums = []
        for start in range(0, weight.shape[1], layer.LONG_ROW):
            part = weight[:, start : start + layer.LONG_ROW]
            piece = x.slice(len(x.shape), start, start + part.shape[1])
            sums.append((piece @ part.T).cast(WIDE))
        return _with_constant("Add", graph.total(sums).cast(x.dtype), op.bias)
    if len(shape) == 1:
        return x.node("Gemm", weight, *graph.optional(op.bias), shape=shape, transB=1)
    return _with_constant("Add", x @ weight.T, op.bias)


@RUN.runs(layer.Conv)
def _conv(op: layer.Conv, graph: OnnxGraph, x: Value) -> Value:
    return convolution("Conv", op, x, graph.constant(op.weight), *graph.optional(op.bias))


@RUN.runs(layer.ConvTranspose)
def _conv_transpose(op: layer.ConvTranspose, graph: OnnxGraph, x: Value) -> Value:
    weight, bias = graph.constant(op.weight), graph.optional(op.bias)
    if all(e < step for e, step in zip(op.output_padding, op.stride, strict=True)):
        extra = {"output_padding": list(op.output_padding)}
        return convolution("ConvTranspose", op, x, weight, *bias, **extra)
    # ONNX Runtime wants an output padding below the stride: pad or crop the whole result instead.
    none = (0,) * len(op.stride)
    whole = replace(op, padding=none, output_padding=none)
    shape = whole.shape_of(x.shape, graph.recipe.constant_shape)
    y = convolution("ConvTranspose", whole, x, weight, shape=shape)
    y = y.pad([(-p, e - p) for p, e in zip(op.padding, op.output_padding, strict=True)])
    return y + bias[0].reshape(-1, *[1] * len(none)) if bias else y


def convolution(
    kind: str,
    op: layer.Conv | layer.ConvTranspose,
    x: Value,
    *constants: Value | Array,
    **more: Any,
) -> Value:
    """Append a convolution with a weight, and perhaps a bias."""
    return x.node(
        kind,
        *constants,
        shape=more.pop("shape", None) or x.graph.result_shape(op),
        strides=list(op.stride),
        pads=[*op.padding, *op.padding],
        dilations=list(op.dilation),
        group=op.groups,
        **more,
    )


@RUN.runs(layer.AvgPool)
def avg_pool(op: layer.AvgPool, graph: OnnxGraph, x: Value, scale: float = 1.0) -> Value:
    """Average windows, times a number."""
    # With a Pad merged into the pooling, ONNX Runtime refuses pads as long as the window.
    if prod(op.kernel) > LARGEST_WINDOW or graph.is_padded(x):
        return _resample(op, graph, x.cast(WIDE)).weighted(scale).cast(x.dtype)
    shape = graph.result_shape(op)
    options, _ = pooling(op, x)
    if len(op.kernel) == 2 and x.shape[0] % _BLOCK:
        weight = np.full((x.shape[0], 1, *op.kernel), 1 / prod(op.kernel))
        y = x.node("Conv", weight, shape=shape, group=x.shape[0], **options)
    else:
        y = x.node("AveragePool", shape=shape, count_include_pad=1, **options)
    factor = scale * prod(op.kernel) / places.divisors(op, x.shape)
    same = bool((factor == factor.flat[0]).all())
    return y.weighted(factor.flat[0]) if same else y * factor


@RUN.runs(layer.NormPool)
def _norm_pool(op: layer.NormPool, graph: OnnxGraph, x: Value) -> Value:
    # ONNX Runtime's LpPool is slow, and treats windows that are cut off differently from torch.
    # Dividing by the peak of a sample keeps squares in range; norms far below the peak do not matter.
    peak = abs(x).reduce_sample("ReduceMax").node("Max", float(np.finfo(x.dtype).tiny))
    unit = x / peak
    sums = avg_pool(op.averages, graph, unit * unit, float(prod(op.kernel)))
    return sums.node("Sqrt") * peak


def pooling(op: layer.Pool, x: Value) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return the attributes of a pooling, and its pads."""
    pads = [(before, max(0, after)) for before, after in places.margins(op, x.shape)]
    ends = [end for both in zip(*pads, strict=True) for end in both]
    return {"kernel_shape": list(op.kernel), "strides": list(op.stride), "pads": ends}, pads


@RUN.runs(layer.MaxPool)
def _max_pool(op: layer.MaxPool, graph: OnnxGraph, x: Value) -> Value:
    shape = graph.result_shape(op)
    options, pads = pooling(op, x)
    options["dilations"] = list(op.dilation)
    # Sums of zeros that are NaN where a window has NaN, which ONNX Runtime's pooling skips.
    zeros = [np.zeros((x.shape[0], 1, *op.kernel))] * (op.inputs[0] not in graph.integers)
    flags = [x.node("Conv", zero, shape=shape, group=x.shape[0], **options) for zero in zeros]
    if any(after >= k for (_, after), k in zip(pads, op.kernel, strict=True)):
        x = x.pad(pads, -np.inf)  # too long for ONNX Runtime
        options["pads"] = [0] * len(options["pads"])
    if graph.is_padded(x):  # ONNX Runtime would take zeros for the pads of the pooling
        x = x.node("Max", -np.inf)
    return graph.total([x.node("MaxPool", shape=shape, **options), *flags])


@RUN.runs(layer.AdaptiveAvgPool, layer.AdaptiveMaxPool)
def _adaptive_pool(
    op: layer.AdaptiveAvgPool | layer.AdaptiveMaxPool, graph: OnnxGraph, x: Value
) -> Value:
    regular = op.regular(x.shape)
    if regular is not None:
        return RUN[type(regular)](regular, graph, x)  # type: ignore[no-any-return]
    found = _resample(op, graph, x)
    if isinstance(op, layer.AdaptiveAvgPool):
        return found
    means = layer.AdaptiveAvgPool(op.inputs, op.outputs, size=op.size)
    return found + _resample(means, graph, x * 0.0)  # keeps NaN


@RUN.runs(layer.Upsample)
def _resample(
    op: layer.AdaptiveAvgPool | layer.AdaptiveMaxPool | layer.AvgPool | layer.Pad | layer.Upsample,
    graph: OnnxGraph,
    x: Value,
) -> Value:
    """Replace the entries along each axis by weighted sums of a few of them, or by the largest."""
    for axis, table, weights in places.resampled(op, x.shape):
        if places.copies_entries(weights):
            x = x.gather(axis + 1, table[0])
            continue
        y, kind = x.gather(axis + 1, table), "ReduceMax"
        if not isinstance(op, layer.AdaptiveMaxPool):
            y = y * weights.reshape(*weights.shape, *[1] * len(x.shape[axis + 1 :]))
            kind = "ReduceSum"
        x = y.reduce(kind, [axis + 1], keepdims=False)
    return x


@RUN.runs(layer.Pad)
def _pad(op: layer.Pad, graph: OnnxGraph, x: Value) -> Value:
    return x.pad(op.pads, op.value) if op.mode == "zeros" else _resample(op, graph, x)


@RUN.runs(layer.Softmax)
def _softmax(op: layer.Softmax, graph: OnnxGraph, x: Value) -> Value:
    return x.node("LogSoftmax" if op.log else "Softmax", axis=op.axis + 1)


# -- functions of single numbers --------------------------------------------------------------------


def _leaky(x: Value, slope: float | Array) -> Value:
    return (x > 0.0).node("Where", x, x * slope)


def _one_and_exp(x: Value) -> Value:
    """Return ``1 + exp(−x)``; the Sigmoid of ONNX Runtime in float32 is constant below −18."""
    return x.node("Neg").node("Exp") + 1.0


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": abs,
    # ONNX Runtime merges it with the product before it, and keeps NaN.
    "relu": lambda x: x.node("Relu"),
    "clip": lambda x, low, high: x.node("Clip", low, high),
    "leaky_relu": _leaky,
    "gelu": lambda x: x * 0.5 * ((x * sqrt(0.5)).node("Erf") + 1.0),
    "silu": lambda x: x / _one_and_exp(x),
    "sigmoid": lambda x: 1.0 / _one_and_exp(x),
    "tanh": lambda x: x.node("Tanh"),
    "hardswish": lambda x: x / 6.0 * (x + 3.0).node("Clip", 0.0, 6.0),
    "hardsigmoid": lambda x: (x + 3.0).node("Clip", 0.0, 6.0) / 6.0,
}


RUN[layer.Elementwise] = lambda op, _, x: _FUNCTIONS[op.function](x, *op.parameters)
RUN[layer.PRelu] = lambda op, graph, x: _leaky(x, graph.constant(op.slope))
RUN[layer.Multiply] = lambda op, _, x: _with_constant("Mul", x, op.factor)
RUN[layer.AddConstant] = lambda op, _, x: _with_constant("Add", x, op.value)
RUN[layer.Add] = lambda _, graph, *values: graph.total(values)
RUN[layer.Product] = lambda op, graph, x, y: x.node("Mul", y, shape=graph.result_shape(op))
RUN[layer.Concatenate] = lambda op, graph, *values: graph.concatenate(values, op.axis + 1)
RUN[layer.Slice] = lambda op, _, x: x.slice(op.axis + 1, op.start, op.stop)
RUN[layer.Reshape] = lambda op, _, x: x.reshape(op.shape)
RUN[layer.Permute] = lambda op, graph, x: x.node(
    "Transpose", perm=[0, *(axis + 1 for axis in op.order)], shape=graph.result_shape(op)
)


# -- poolings of several kinds as one operation -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MixedPool(Operation):
    """Average windows of the channels where ``norms`` is False, and take norms of windows where it is True."""

    kind = "mixed_pool"
    averages: layer.AvgPool
    norms: tuple[bool, ...]  # (channels,)
    pools: tuple[IntegerPool, ...] = ()  # of integers, the pooling of each channel

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        """Return the shape of the averages."""
        return self.averages.shapes(inputs[:1], constant)


def merged_pools(recipe: Recipe) -> Recipe:
    """Replace concatenated poolings of consecutive slices, and norms of windows, if all windows are whole."""
    writer = {name: op for op in recipe.operations for name in op.outputs}
    shapes = recipe.shapes()
    operations = [_merged(op, writer, shapes) or op for op in recipe.operations]
    return replace(recipe, operations=tuple(operations)).pruned()


def _merged(
    op: Operation, writer: dict[str, Operation], shapes: dict[str, Shape]
) -> MixedPool | None:
    if isinstance(op, layer.NormPool):
        parts: list[Operation | None] = [op]
        whole = layer.Slice(op.inputs, (), axis=0, start=0, stop=shapes[op.inputs[0]][0])
        slices: list[Operation | None] = [whole]
    elif isinstance(op, layer.Concatenate) and op.axis == 0:
        parts = [writer.get(name) for name in op.inputs]
        slices = [writer.get(part.inputs[0]) if part else None for part in parts]
    else:
        return None
    norms: list[bool] = []
    pools: list[IntegerPool] = []
    windows = set()
    for part, piece in zip(parts, slices, strict=True):
        if not isinstance(part, (layer.AvgPool, layer.NormPool, IntegerPool)):
            return None
        if not isinstance(piece, layer.Slice) or (piece.axis, piece.start) != (0, len(norms)):
            return None
        channels, ends = piece.stop - piece.start, (piece.inputs + part.inputs[1:], op.outputs)
        norms += [isinstance(part, layer.NormPool)] * channels
        if isinstance(part, IntegerPool):
            norms[-channels:] = [part.function == "norm"] * channels
            pools += [part] * channels
        averages = part.averages if isinstance(part, layer.NormPool) else part
        kept = "kernel", "stride", "padding", "ceil_mode"
        options: dict[str, Any] = {field: getattr(averages, field) for field in kept}
        windows.add((isinstance(part, IntegerPool), layer.AvgPool(*ends, **options)))
    if len(windows) > 1 or not any(norms):
        return None
    ((_, window),) = windows
    shape = shapes[window.inputs[0]]
    divisors = places.divisors(window, shape)
    complete = bool((divisors == prod(window.kernel)).all()) and not any(window.padding)
    if not complete or len(norms) != shape[0]:
        return None
    # The sum of a window of integers is at most its norm in parts.
    fits = 4 ** root_bits(window.kernel) >= prod(window.kernel)
    if pools and not (fits and all(pool.fits_single for pool in pools)):
        return None
    both = tuple(norms), tuple(pools)
    return MixedPool(window.inputs, op.outputs, averages=window, norms=both[0], pools=both[1])


@RUN.runs(MixedPool)
def _mixed_pool(op: MixedPool, graph: OnnxGraph, x: Value, *taus: Value) -> Value:
    if op.pools:
        return _mixed_integers(op, graph, x, *taus)
    # All channels are pooled twice: to split a map, ONNX Runtime would copy it to another layout first.
    norms = np.array(op.norms)
    roots = _weighted_windows(op, x * x, np.ones(len(norms))).node("Sqrt")
    if norms.all():
        return roots
    # The mean of a window is at most its norm. In channels of norms the largest number replaces the mean.
    shares = np.where(norms, 0.0, 1 / prod(op.averages.kernel))
    bias = np.where(norms, float(np.finfo(x.dtype).max), 0.0)
    return roots.node("Min", _weighted_windows(op, x, shares, bias))


def _mixed_integers(op: MixedPool, graph: OnnxGraph, x: Value, *taus: Value) -> Value:
    norms = np.array(op.norms)
    squares = np.full(len(norms), 4.0 ** root_bits(op.averages.kernel))
    # As of floats; a norm in parts has at most 12 bits.
    others = np.where(norms, 0.0, 1.0), np.where(norms, 2.0**12, 0.0)
    roots = _weighted_windows(op, x * x, squares).node("Sqrt")
    parts = roots.node("Min", _weighted_windows(op, x, *others)).node("Floor")
    shape = len(norms), *[1] * len(op.averages.kernel)
    multiplier = np.array([float(pool.multiplier) for pool in op.pools]).reshape(shape)
    unit = np.array([2.0**-pool.shift for pool in op.pools]).reshape(shape)
    factor: Any = multiplier * unit
    for tau in taus:
        found = graph.add("Div", multiplier, tau.column(x), shape=shape).node("Round")
        factor = (found.node("Clip", 0.0, MULTIPLIERS - 1.0) * unit).cast(SINGLE)
    y: Value = (parts * factor).node("Clip", -float(LEVELS), float(LEVELS))
    signed = np.flatnonzero(~norms)
    if len(signed) and signed[-1] - signed[0] < len(signed):
        graph.signed[y.node("Round").name] = y, int(signed[0]), int(signed[-1]) + 1
    return y.node("Round")


def _weighted_windows(op: MixedPool, x: Value, weights: Array, *bias: Array) -> Value:
    """Add the entries of windows times the weight of their channel."""
    kernel, channels = op.averages.kernel, len(op.norms)
    weight = np.broadcast_to(weights.reshape(-1, *[1] * (len(kernel) + 1)), (channels, 1, *kernel))
    options = {"kernel_shape": list(kernel), "strides": list(op.averages.stride), "group": channels}
    return x.node("Conv", weight, *bias, shape=x.graph.result_shape(op), **options)
