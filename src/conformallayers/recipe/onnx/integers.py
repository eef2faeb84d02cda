"""Operations on whole numbers, in ONNX: one function each, of (operation, graph, *input values).

Features are integers in float32, which ONNX Runtime convolves and multiplies exactly while sums stay below
2^24; everything behind a sum is float64. Its integer operators would saturate in 16 bits on some processors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np

from .. import integer_operations as integer
from .. import layer_operations as layer
from ..places import Array
from ..point_operations import LARGEST_COORDINATE
from .graph import WIDE, OnnxGraph, Value
from .layers import convolution, pooling, windowed
from .points import FORMULA, RUN

__all__ = ["RUN"]
_SINGLE = np.dtype(np.float32)


def _clipped(x: Value, low: int = -integer.LEVELS) -> Value:
    return x.node("Round").node("Clip", float(low), float(integer.LEVELS)).cast(_SINGLE)


def _read(op: integer.Quantize | integer.QuantizePoint, graph: OnnxGraph, x: Value) -> Value:
    """Add the addend to x in float32, and replace NaN by 0."""
    x = x.cast(_SINGLE)
    if op.addend is not None:
        x = x + graph.constant(op.addend).astype(np.float32) * np.float32(2.0**-op.exponent)
    return x.node("IsNaN").node("Where", 0.0, x)


@RUN.runs(integer.QuantizePoint)
def _quantize_point(
    op: integer.QuantizePoint, graph: OnnxGraph, x: Value
) -> tuple[Value, Value, Value]:
    x = _read(op, graph, x)
    least = max(op.offset, integer.SMALLEST_PEAK)
    peak = abs(x).reduce_sample("ReduceMax").node("Clip", least, integer.LARGEST_PEAK)
    q, m = _clipped(x * (op.levels / peak)), peak.scalar()
    share = op.offset / m
    squares = _squares(q) * integer.inverse_square(op.levels)
    tau = (squares + share * share).node("Sqrt")
    return q, m, tau.node("Equal", 0.0).node("Where", 1.0, tau)


def _squares(q: Value) -> Value:
    """Append ‖q‖² of each sample in float64."""
    return q.cast(WIDE).reduce_sample("ReduceSumSquare").scalar()


def _finished(
    op: integer.Accumulated | integer.Requantize,
    parts: Value,
    taus: tuple[Value, ...],
    addend: Array | None,
) -> Value:
    """Turn sums, in units of 2^-shift, into features: divide by τ, add the addend, round and clip."""
    parts = parts * 2.0**-op.shift
    if not taus and addend is None:
        return _clipped(parts, op.low)
    parts = parts.node("Round")
    for tau in taus:
        factor = (2.0**integer.FACTOR_BITS / tau).node("Round")
        factor = factor.node("Min", float(integer.MULTIPLIERS - 1))
        product = parts * factor.column(parts)
        parts = (product * 2.0**-integer.FACTOR_BITS).node("Round")
    if addend is not None:
        parts = parts + addend
    return _clipped(parts * 2.0**-integer.PART_BITS, op.low)


@RUN.runs(integer.IntegerMatmul, integer.IntegerConv)
def _accumulated(
    op: integer.IntegerMatmul | integer.IntegerConv, graph: OnnxGraph, q: Value, *taus: Value
) -> Value:
    sums = _sums(op, graph, q).cast(WIDE).node("Round")
    after = len(sums.shape) - 1 if isinstance(op, layer.Conv) else 0

    def of_channels(name: str) -> Array:
        return graph.constant(name).astype(np.float64).reshape(-1, *[1] * after)

    sums = sums if op.bias is None else sums + of_channels(op.bias)
    if op.multiplier is not None:
        addend = None if op.addend is None else of_channels(op.addend)
        return _finished(op, sums * of_channels(op.multiplier), taus, addend)
    y = _over(sums * of_channels(str(op.scale)), taus)
    return (y if op.offset is None else y + of_channels(op.offset)).cast(graph.dtype)


def _sums(op: layer.Matmul | layer.Conv, graph: OnnxGraph, q: Value) -> Value:
    weight = graph.constant(op.weight)
    single = integer.fits_single(weight.shape)
    dtype = _SINGLE if single else WIDE
    q = q.cast(dtype)
    if isinstance(op, layer.Matmul):
        return q.node("MatMul", graph.unpacked(weight.T, dtype), shape=graph.result_shape(op))
    plain = replace(op, bias=None)
    if single:
        return convolution("Conv", plain, q, graph.unpacked(weight, dtype))
    return windowed(plain, q, weight.astype(np.float64), op.stride, op.padding)


def _over(y: Value, taus: tuple[Value, ...]) -> Value:
    return reduce(lambda z, tau: z / tau.column(z), taus, y)


@RUN.runs(integer.IntegerPool)
def _pool(op: integer.IntegerPool, graph: OnnxGraph, q: Value) -> Value:
    norms, channels = op.function == "norm", q.shape[0]
    options, _ = pooling(op, q)
    options |= {"shape": graph.result_shape(op), "group": channels}
    sums = (q * q if norms else q).node("Conv", np.ones((channels, 1, *op.kernel)), **options)
    sums = sums.cast(WIDE).node("Round")
    if norms:
        sums = (sums * 4.0 ** integer.root_bits(op.kernel)).node("Sqrt").node("Floor")
    return _clipped(sums * float(op.multiplier) * 2.0**-op.shift)


@RUN.runs(integer.Requantize)
def _requantize(op: integer.Requantize, graph: OnnxGraph, *values: Value) -> Value:
    count = len(op.multipliers)
    pairs = zip(values[:count], op.multipliers, strict=True)
    total = graph.total([q.cast(WIDE) * float(n) for q, n in pairs])
    addend = None if op.addend is None else graph.constant(op.addend).astype(np.float64)
    return _finished(op, total, values[count:], addend)


@RUN.runs(integer.IntegerAdvance)
def _advance(
    op: integer.IntegerAdvance, graph: OnnxGraph, tau: Value, m: Value, *energies: Value
) -> Value:
    values = {"tau": tau, "m": m, "n": reduce(add, energies)}
    found: Value = op.parsed.evaluate(values, FORMULA)
    return found


@RUN.runs(integer.IntegerRebase)
def _rebase(
    op: integer.IntegerRebase, graph: OnnxGraph, m: Value, tau: Value
) -> tuple[Value, Value]:
    return (m * op.coordinate * tau).node("Min", LARGEST_COORDINATE), tau.node("Pow", 0.0)


@RUN.runs(integer.Dequantize)
def _dequantize(op: integer.Dequantize, graph: OnnxGraph, q: Value, *taus: Value) -> Value:
    return _over(q.cast(WIDE) * op.scale, taus).cast(graph.dtype)


RUN[integer.IntegerEnergy] = lambda op, _, q: _squares(q) * op.weight
RUN[integer.Quantize] = lambda op, graph, x: _clipped(_read(op, graph, x) * op.factor)
