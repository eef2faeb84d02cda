"""Operations on features, in ONNX: one function each, of (operation, graph, *input values).

ONNX Runtime has convolutions and average pooling in float32 alone on the CPU: in float64 they become
gathered windows and one product. Functions of single numbers keep NaN by comparisons that are false for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from .. import layer_operations as layer
from .. import places
from ..operation import Operation, Shape
from ..places import Array, Table
from ..torch.layers import Run, runs
from .functions import FUNCTIONS, leaky
from .graph import WIDE, Graph, Value

LAYERS: dict[type[Operation], Run] = {}


@runs(layer.Matmul, LAYERS)
def _matmul(op: layer.Matmul, graph: Graph, x: Value) -> Value:
    weight, bias = graph.constant(op.weight), graph.optional(op.bias)
    shape = graph.result_shape(op)
    if len(shape) == 1:
        more = [] if bias is None else [bias]
        return graph.add("Gemm", x, weight, *more, shape=shape, transB=1)
    y = graph.add("MatMul", x, weight.T, shape=shape)
    return y if bias is None else graph.add("Add", y, bias)


@runs(layer.Conv, LAYERS)
def _conv(op: layer.Conv, graph: Graph, x: Value) -> Value:
    weight, shape = graph.constant(op.weight), graph.result_shape(op)
    if x.dtype == WIDE:
        columns = weight.reshape(op.groups, weight.shape[0] // op.groups, -1)
        return _windowed(op, graph, x, places.sliding, weight.shape[2:], columns)
    return _convolution("Conv", op, graph, x, shape)


@runs(layer.ConvTranspose, LAYERS)
def _conv_transpose(op: layer.ConvTranspose, graph: Graph, x: Value) -> Value:
    weight, shape = graph.constant(op.weight), graph.result_shape(op)
    large = any(extra >= step for extra, step in zip(op.output_padding, op.stride, strict=True))
    if x.dtype == WIDE or large:  # ONNX Runtime wants an output padding below the stride
        split = weight.reshape(op.groups, -1, *weight.shape[1:2], prod(weight.shape[2:]))
        columns = split.transpose(0, 2, 1, 3).reshape(op.groups, weight.shape[1], -1)
        return _windowed(op, graph, x, places.spreading, weight.shape[2:], columns)
    extra = list(op.output_padding)
    return _convolution("ConvTranspose", op, graph, x, shape, output_padding=extra)


def _convolution(
    kind: str,
    op: layer.Conv | layer.ConvTranspose,
    graph: Graph,
    x: Value,
    shape: Shape,
    **more: Any,
) -> Value:
    bias = graph.optional(op.bias)
    return graph.add(
        kind,
        x,
        graph.constant(op.weight),
        *([] if bias is None else [bias]),
        shape=shape,
        strides=list(op.stride),
        pads=[*op.padding, *op.padding],
        dilations=list(op.dilation),
        group=op.groups,
        **more,
    )


def _windowed(
    op: layer.Conv | layer.ConvTranspose,
    graph: Graph,
    x: Value,
    table: Callable[..., Table],
    kernel: Shape,
    columns: Array,  # (groups, C_out / groups, C / groups · taps)
) -> Value:
    """Convolve by gathered windows and one product."""
    shape = graph.result_shape(op)
    axes = zip(x.shape[1:], kernel, shape[1:], op.stride, op.padding, op.dilation, strict=True)
    windows = _windows(graph, x, [table(*axis) for axis in axes])
    rows = graph.reshape(windows, (op.groups, columns.shape[2], prod(shape[1:])))
    y = graph.add("MatMul", columns, rows, shape=(op.groups, columns.shape[1], prod(shape[1:])))
    y, bias = graph.reshape(y, shape), graph.optional(op.bias)
    return y if bias is None else graph.add("Add", y, bias.reshape(-1, *[1] * len(kernel)))


def _windows(graph: Graph, x: Value, tables: Sequence[Table]) -> Value:
    """Gather (C, *spatial) → (C, taps, positions), zeros outside."""
    count = prod(x.shape[1:])
    flat, whole = graph.reshape(x, (x.shape[0], count)), places.flattened(tables, x.shape[1:])
    if (whole < 0).any():
        flat = graph.pad(flat, [(0, 1)])
        whole = np.where(whole < 0, count, whole)
    return graph.add("Gather", flat, whole, shape=(x.shape[0], *whole.shape), axis=2)


@runs(layer.AvgPool, LAYERS)
def _avg_pool(op: layer.AvgPool, graph: Graph, x: Value) -> Value:
    counted = op.padding if op.count_include_pad else (0,) * len(op.padding)
    return _average(
        graph, x, graph.result_shape(op), op.kernel, op.stride, op.padding, counted, op.divisor
    )


def _average(
    graph: Graph,
    x: Value,
    shape: Shape,
    kernel: Shape,
    stride: Shape,
    padding: Shape,
    counted: Shape,
    divisor: int | None = None,
) -> Value:
    """Average windows, where ``counted`` entries of the pads count."""
    axes = list(zip(x.shape[1:], kernel, shape[1:], stride, padding, strict=True))
    sizes = np.ones(()) if divisor is None else np.full((), float(divisor))
    for axis, size in zip(axes, counted, strict=True) if divisor is None else ():
        sizes = sizes[..., None] * places.window_sizes(*axis, size)
    if x.dtype == WIDE:
        windows = _windows(graph, x, [places.sliding(*axis, 1) for axis in axes])
        flat = (x.shape[0], prod(shape[1:]))
        total = graph.reduce("ReduceSum", windows, [2], keepdims=False, shape=flat)
        return graph.add("Div", graph.reshape(total, shape), sizes)
    pads = [*padding, *_ends(axes)]
    options: dict[str, Any] = {"kernel_shape": list(kernel), "strides": list(stride), "pads": pads}
    y = graph.add("AveragePool", x, shape=shape, count_include_pad=1, **options)
    factor = prod(kernel) / sizes
    return y if (factor == 1).all() else graph.add("Mul", y, factor)


def _ends(axes: Sequence[tuple[int, ...]], dilation: Sequence[int] = (1, 1, 1)) -> list[int]:
    """Return how far the last window reaches beyond the end of each axis."""
    return [
        max(0, (m - 1) * s + d * (k - 1) + 1 - n - p)
        for (n, k, m, s, p), d in zip(axes, dilation, strict=False)
    ]


@runs(layer.MaxPool, LAYERS)
def _max_pool(op: layer.MaxPool, graph: Graph, x: Value) -> Value:
    shape = graph.result_shape(op)
    axes = list(zip(x.shape[1:], op.kernel, shape[1:], op.stride, op.padding, strict=True))
    before, after = op.padding, _ends(axes, op.dilation)
    if any(end >= k for end, k in zip(after, op.kernel, strict=True)):  # too long for ONNX Runtime
        x = graph.pad(x, list(zip(before, after, strict=True)), -np.inf)
        before, after = (0,) * len(before), [0] * len(before)
    options: dict[str, Any] = {
        "kernel_shape": list(op.kernel),
        "strides": list(op.stride),
        "pads": [*before, *after],
        "dilations": list(op.dilation),
    }
    y = graph.add("MaxPool", x, shape=shape, **options)
    # A window with a NaN is NaN in torch; ONNX Runtime takes the largest of the others.
    odd = graph.cast(graph.add("IsNaN", x, dtype=bool), x.dtype)
    return graph.add(
        "Where",
        graph.add("Greater", graph.add("MaxPool", odd, shape=shape, **options), 0.0, dtype=bool),
        np.full((), np.nan),
        y,
    )


@runs(layer.AdaptiveAvgPool, LAYERS)
def _adaptive_avg_pool(op: layer.AdaptiveAvgPool, graph: Graph, x: Value) -> Value:
    sizes = list(zip(x.shape[1:], op.size, strict=True))
    if all(n % m == 0 for n, m in sizes):
        window, none = tuple(n // m for n, m in sizes), (0,) * len(sizes)
        return _average(graph, x, (x.shape[0], *op.size), window, window, none, none)
    for axis, (n, m) in enumerate(sizes, start=2):
        x = _weighted(graph, x, axis, *places.adaptive(n, m))
    return x


@runs(layer.Upsample, LAYERS)
def _upsample(op: layer.Upsample, graph: Graph, x: Value) -> Value:
    if op.mode.startswith("nearest"):
        indices = [_nearest(op, x, axis) for axis in range(2, len(x.shape) + 1)]
        for axis, index in enumerate(indices, start=2):
            x = _gather(graph, x, axis, index)
        return x
    scales = op.scales or (None,) * len(op.size)
    for axis, (n, m, scale) in enumerate(zip(x.shape[1:], op.size, scales, strict=True), start=2):
        table = places.interpolated(n, m, op.mode, op.align_corners, scale, x.dtype)
        x = _weighted(graph, x, axis, *table)
    return x


def _nearest(op: layer.Upsample, x: Value, axis: int) -> Table:
    """Return the entry that each position copies, from torch: it rounds small images in another way."""
    n, after = x.shape[axis - 1], len(x.shape) - axis
    ramp = torch.arange(n, dtype=torch.float64 if x.dtype == WIDE else torch.float32)
    sizes: Any = {"size": op.size} if op.scales is None else {"scale_factor": op.scales}
    image = ramp.view(-1, *[1] * after).expand(1, 1, *x.shape[1:])
    found = F.interpolate(image, mode=op.mode, **sizes).movedim(axis, 0)
    return found.flatten(1)[:, 0].long().numpy()


def _weighted(graph: Graph, x: Value, axis: int, table: Table, weights: Array) -> Value:
    """Replace the entries along an axis by weighted sums of a few of them."""
    before, after = x.shape[: axis - 1], x.shape[axis:]
    if (weights == 1).all() and len(table) == 1:
        return _gather(graph, x, axis, table[0])
    y = graph.add("Gather", x, table, shape=(*before, *table.shape, *after), axis=axis)
    y = graph.add("Mul", y, weights.reshape(*weights.shape, *[1] * len(after)))
    shape = (*before, table.shape[1], *after)
    return graph.reduce("ReduceSum", y, [axis], keepdims=False, shape=shape)


def _gather(graph: Graph, x: Value, axis: int, index: Table) -> Value:
    """Take entries along an axis, unless these are all of them in order."""
    if np.array_equal(index, np.arange(x.shape[axis - 1])):
        return x
    shape = (*x.shape[: axis - 1], len(index), *x.shape[axis:])
    return graph.add("Gather", x, index, shape=shape, axis=axis)


@runs(layer.Pad, LAYERS)
def _pad(op: layer.Pad, graph: Graph, x: Value) -> Value:
    if op.mode == "zeros":
        return graph.pad(x, op.pads, op.value)
    for axis, (before, after) in enumerate(op.pads, start=len(x.shape) - len(op.pads) + 1):
        x = _gather(graph, x, axis, places.padded(x.shape[axis - 1], before, after, op.mode))
    return x


@runs(layer.Softmax, LAYERS)
def _softmax(op: layer.Softmax, graph: Graph, x: Value) -> Value:
    if op.log and x.dtype == WIDE:  # ONNX Runtime's own loses NaN there
        shape = (*x.shape[: op.axis], 1, *x.shape[op.axis + 1 :])
        axes = [op.axis + 1]
        return graph.add(
            "Sub", x, graph.reduce("ReduceLogSumExp", x, axes, keepdims=True, shape=shape)
        )
    return graph.add("LogSoftmax" if op.log else "Softmax", x, axis=op.axis + 1)


@runs(layer.LayerNorm, LAYERS)
def _layer_norm(op: layer.LayerNorm, graph: Graph, x: Value) -> Value:
    weight, bias = graph.optional(op.weight), graph.optional(op.bias)
    return _standardize(graph, x, op.axes, op.eps, weight, bias)


@runs(layer.GroupNorm, LAYERS)
def _group_norm(op: layer.GroupNorm, graph: Graph, x: Value) -> Value:
    y = graph.reshape(x, (op.groups, prod(x.shape) // op.groups))
    y = graph.reshape(_standardize(graph, y, 1, op.eps), x.shape)
    for kind, array in (("Mul", graph.optional(op.weight)), ("Add", graph.optional(op.bias))):
        if array is not None:
            y = graph.add(kind, y, array.reshape(-1, *[1] * (len(x.shape) - 1)))
    return y


def _standardize(
    graph: Graph,
    x: Value,
    axes: int,
    eps: float,
    weight: Array | None = None,
    bias: Array | None = None,
) -> Value:
    """Normalise the last axes together, then multiply and add."""
    kept = len(x.shape) - axes
    if x.dtype != WIDE:
        scale = np.ones(x.shape[kept:]) if weight is None else weight
        more = [] if bias is None else [bias]
        return graph.add("LayerNormalization", x, scale, *more, axis=-axes, epsilon=eps)
    # The operator rounds its eps to float32.
    last, shape = list(range(kept + 1, len(x.shape) + 1)), (*x.shape[:kept], *[1] * axes)
    mean = graph.reduce("ReduceMean", x, last, keepdims=True, shape=shape)
    y = graph.add("Sub", x, mean)
    variance = graph.reduce("ReduceMean", graph.add("Mul", y, y), last, keepdims=True, shape=shape)
    y = graph.add("Div", y, graph.add("Sqrt", graph.add("Add", variance, eps)))
    for kind, array in (("Mul", weight), ("Add", bias)):
        y = y if array is None else graph.add(kind, y, array)
    return y


_SIMPLE: dict[type[Operation], Run] = {
    layer.Multiply: lambda op, graph, x: graph.add("Mul", x, graph.constant(op.factor)),
    layer.AddConstant: lambda op, graph, x: graph.add("Add", x, graph.constant(op.value)),
    layer.Add: lambda _, graph, *values: graph.total(values),
    layer.Concatenate: lambda op, graph, *values: graph.add(
        "Concat", *values, shape=graph.result_shape(op), axis=op.axis + 1
    ),
    layer.Slice: lambda op, graph, x: graph.slice(x, op.axis + 1, op.start, op.stop),
    layer.Reshape: lambda op, graph, x: graph.reshape(x, op.shape),
    layer.Permute: lambda op, graph, x: graph.transpose(
        x, 0, *(axis + 1 for axis in op.order), shape=graph.result_shape(op)
    ),
    layer.Cast: lambda op, graph, x: graph.cast(x, WIDE if op.to == layer.WIDE else graph.dtype),
    layer.Elementwise: lambda op, graph, x: FUNCTIONS[op.function](graph, x, *op.parameters),
    layer.PRelu: lambda op, graph, x: leaky(graph, x, graph.constant(op.slope)),
}
LAYERS.update(_SIMPLE)
