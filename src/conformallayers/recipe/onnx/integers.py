"""Operations on whole numbers, in ONNX: one function each, of (operation, graph, *input values).

Features are whole numbers in float32, which ONNX Runtime convolves and multiplies exactly where it has all
sums, and everything behind a sum is float64: the same numbers as those of integer operators, which saturate in
16 bits on some processors. A sample with NaN is marked where it is read, and has NaN as its outputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np

from .. import integer_operations as integer
from .. import layer_operations as layer
from ..places import Array
from ..point_operations import LARGEST
from .graph import WIDE, OnnxGraph, Value
from .layers import convolution, pooling, windowed
from .points import RUN

__all__ = ["RUN"]
_SINGLE = np.dtype(np.float32)


def _clipped(graph: OnnxGraph, x: Value, low: int = -integer.LEVELS) -> Value:
    found = graph.add("Clip", graph.add("Round", x), float(low), float(integer.LEVELS))
    return graph.cast(found, _SINGLE)


def _column(graph: OnnxGraph, scalar: Value, x: Value) -> Value:
    return graph.reshape(scalar, (1,) * len(x.shape))


def _shifted(op: integer.Quantize | integer.QuantizePoint, graph: OnnxGraph, x: Value) -> Value:
    """Add the addend to x in float32, and mark samples with NaN."""
    x = graph.cast(x, _SINGLE)
    odd = graph.cast(graph.add("IsNaN", x, dtype=bool), _SINGLE)
    graph.mark(graph.reduce_sample("ReduceMax", odd))
    if op.addend is None:
        return x
    addend = graph.constant(op.addend).astype(np.float32) * np.float32(2.0**-op.exponent)
    return graph.add("Add", x, addend)


@RUN.runs(integer.Quantize)
def _quantize(op: integer.Quantize, graph: OnnxGraph, x: Value) -> Value:
    return _clipped(graph, graph.add("Mul", _shifted(op, graph, x), op.factor))


@RUN.runs(integer.QuantizePoint)
def _quantize_point(
    op: integer.QuantizePoint, graph: OnnxGraph, x: Value
) -> tuple[Value, Value, Value]:
    x = _shifted(op, graph, x)
    peak = graph.reduce_sample("ReduceMax", graph.add("Abs", x))
    least = max(op.offset, integer.SMALLEST_PEAK)
    peak = graph.add("Clip", peak, least, integer.LARGEST_PEAK)
    q = _clipped(graph, graph.add("Mul", x, graph.add("Div", op.levels, peak)))
    m, squares = graph.scalar(peak), _squares(graph, q)
    share = graph.add("Div", op.offset, m)
    total = graph.add("Mul", squares, integer.inverse_square(op.levels))
    tau = graph.add("Sqrt", graph.add("Add", total, graph.add("Mul", share, share)))
    zero = graph.add("Equal", tau, 0.0, dtype=bool)
    return q, m, graph.add("Where", zero, 1.0, tau)


def _squares(graph: OnnxGraph, q: Value) -> Value:
    """Append ‖q‖² of each sample in float64."""
    return graph.scalar(graph.reduce_sample("ReduceSumSquare", graph.cast(q, WIDE)))


def _finished(
    op: integer.Accumulated | integer.Requantize,
    graph: OnnxGraph,
    parts: Value,
    taus: tuple[Value, ...],
    addend: Array | None,
) -> Value:
    """Turn whole numbers, times 2^shift, into features."""
    parts = graph.add("Mul", parts, 2.0**-op.shift)
    if not taus and addend is None:
        return _clipped(graph, parts, op.low)
    parts = graph.add("Round", parts)
    for tau in taus:
        factor = graph.add("Round", graph.add("Div", 2.0**integer.FACTOR_BITS, tau))
        factor = graph.add("Min", factor, float(integer.MULTIPLIERS - 1))
        product = graph.add("Mul", parts, _column(graph, factor, parts))
        parts = graph.add("Round", graph.add("Mul", product, 2.0**-integer.FACTOR_BITS))
    if addend is not None:
        parts = graph.add("Add", parts, addend)
    return _clipped(graph, graph.add("Mul", parts, 2.0**-integer.PART_BITS), op.low)


@RUN.runs(integer.IntegerMatmul, integer.IntegerConv)
def _accumulated(
    op: integer.IntegerMatmul | integer.IntegerConv, graph: OnnxGraph, q: Value, *taus: Value
) -> Value:
    sums = graph.add("Round", graph.cast(_sums(op, graph, q), WIDE))
    after = len(sums.shape) - 1 if isinstance(op, layer.Conv) else 0

    def of_channels(name: str) -> Array:
        return graph.constant(name).astype(np.float64).reshape(-1, *[1] * after)

    addend = None if op.addend is None else of_channels(op.addend)
    sums = sums if op.bias is None else graph.add("Add", sums, of_channels(op.bias))
    products = graph.add("Mul", sums, of_channels(op.factors))
    if op.multiplier is not None:
        return _finished(op, graph, products, taus, addend)
    y = _over(graph, products, taus)
    return _numbers(graph, y if addend is None else graph.add("Add", y, addend))


def _sums(op: layer.Matmul | layer.Conv, graph: OnnxGraph, q: Value) -> Value:
    weight = graph.constant(op.weight)
    single = integer.fits_single(weight.shape)
    dtype, shape = _SINGLE if single else WIDE, graph.result_shape(op)
    q = graph.cast(q, dtype)
    if isinstance(op, layer.Matmul):
        return graph.add("MatMul", q, graph.unpacked(weight.T, dtype), shape=shape)
    plain = replace(op, bias=None)
    if single:
        return convolution("Conv", plain, graph, q, graph.unpacked(weight, dtype))
    return windowed(plain, graph, q, weight.astype(np.float64), op.stride, op.padding)


def _over(graph: OnnxGraph, y: Value, taus: tuple[Value, ...]) -> Value:
    return reduce(lambda z, tau: graph.add("Div", z, _column(graph, tau, z)), taus, y)


def _numbers(graph: OnnxGraph, y: Value) -> Value:
    """Return the numbers of outputs in the dtype of the fold, NaN where a sample has NaN."""
    return graph.marked(graph.cast(y, graph.dtype))


@RUN.runs(integer.IntegerPool)
def _pool(op: integer.IntegerPool, graph: OnnxGraph, q: Value) -> Value:
    norms, channels = op.function == "norm", q.shape[0]
    entries = graph.add("Mul", q, q) if norms else q
    options, _ = pooling(op, q)
    ones, shape = np.ones((channels, 1, *op.kernel)), graph.result_shape(op)
    sums = graph.add("Conv", entries, ones, shape=shape, group=channels, **options)
    sums = graph.add("Round", graph.cast(sums, WIDE))
    if norms:
        roots = graph.add("Sqrt", graph.add("Mul", sums, 4.0**op.root_bits))
        sums = graph.add("Floor", roots)
    products = graph.add("Mul", sums, float(op.multiplier))
    return _clipped(graph, graph.add("Mul", products, 2.0**-op.shift))


@RUN.runs(integer.Requantize)
def _requantize(op: integer.Requantize, graph: OnnxGraph, *values: Value) -> Value:
    count = len(op.multipliers)
    products = [
        graph.add("Mul", graph.cast(q, WIDE), float(n))
        for q, n in zip(values[:count], op.multipliers, strict=True)
    ]
    addend = None if op.addend is None else graph.constant(op.addend).astype(np.float64)
    return _finished(op, graph, graph.total(products), values[count:], addend)


@RUN.runs(integer.Dequantize)
def _dequantize(op: integer.Dequantize, graph: OnnxGraph, q: Value, *taus: Value) -> Value:
    return _numbers(graph, _over(graph, graph.add("Mul", graph.cast(q, WIDE), op.scale), taus))


RUN[integer.IntegerEnergy] = lambda op, graph, q: graph.add("Mul", _squares(graph, q), op.weight)


@RUN.runs(integer.IntegerAdvance)
def _advance(
    op: integer.IntegerAdvance, graph: OnnxGraph, tau: Value, m: Value, *energies: Value
) -> Value:
    n = reduce(lambda a, b: graph.add("Add", a, b), energies)
    if op.rule == "published":
        return graph.add("Add", tau, graph.add("Mul", m, n))
    if op.rule == "projective":
        return graph.add("Add", tau, graph.add("Div", n, tau))
    return graph.add("Sqrt", graph.add("Add", graph.add("Mul", tau, tau), n))


@RUN.runs(integer.IntegerRebase)
def _rebase(
    op: integer.IntegerRebase, graph: OnnxGraph, m: Value, tau: Value
) -> tuple[Value, Value]:
    coordinate = graph.add("Mul", graph.add("Mul", m, op.coordinate), tau)
    one = graph.add("Where", graph.add("IsNaN", tau, dtype=bool), tau, 1.0)
    return graph.add("Min", coordinate, LARGEST), one
