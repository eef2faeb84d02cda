"""Operations on integers, in ONNX: the shared arithmetic on float32 wherever it is exact.

ONNX Runtime convolves and multiplies integers in float32 exactly while sums stay below 2^24. QLinearConv is
faster and as exact on features that are not negative: processors without VNNI add two products of bytes in 16 bits,
and 2·127·128 fits.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .. import layer_operations as layer
from ..integer_arithmetic import IntegerArithmetic
from ..integer_operations import EXACT_SINGLE, LEVELS, IntegerConv, IntegerMatmul, IntegerPool
from ..places import Array
from .graph import SINGLE, WIDE, OnnxGraph, Value
from .layers import convolution, pooling
from .points import RUN

__all__ = ["RUN"]
_BYTE = np.dtype(np.uint8)
_ZERO = 128  # stands for 0 where bytes have a sign
_ONE, _NONE = np.ones((), SINGLE), np.zeros((), _BYTE)


def _cast(x: Any, dtype: Any) -> Any:
    return x.cast(dtype) if isinstance(x, Value) else x.astype(dtype)  # a constant is an array


def _products(op: IntegerMatmul | IntegerConv, graph: OnnxGraph, q: Value) -> Value:
    weight, bias = graph.constant(op.weight), graph.optional(op.bias)
    if max(op.largest_sums(graph.constant)) < EXACT_SINGLE:
        sums = _product(op, q, weight, *(array.astype(SINGLE) for array in bias))
        return sums if op.fits_single(graph.constant) else sums.cast(WIDE)
    # Sums of digits of the weights, few enough bits that float32 holds them.
    length = weight[0].size * LEVELS
    bits = next(bits for bits in (4, 2, 1) if length << bits < EXACT_SINGLE or bits == 1)
    digits = [weight >> at & 2**bits - 1 for at in range(0, 8 - bits, bits)] + [weight >> 8 - bits]
    parts = [
        _product(op, q, digit).cast(WIDE) * 2.0 ** (bits * i) for i, digit in enumerate(digits)
    ]
    total = graph.total(parts)
    return total if not bias else total + bias[0].astype(WIDE).reshape(-1, *[1] * (weight.ndim - 2))


def _product(op: IntegerMatmul | IntegerConv, q: Value, weight: Array, *bias: Array) -> Value:
    graph = q.graph
    if isinstance(op, layer.Conv):
        return convolution("Conv", op, q, graph.unpacked(weight, SINGLE), *bias)
    sums = q.node("MatMul", graph.unpacked(weight.T, SINGLE), shape=graph.result_shape(op))
    return sums + bias[0] if bias else sums


def _windows(op: IntegerPool, graph: OnnxGraph, q: Value, factor: float) -> Value:
    options, _ = pooling(op, q)
    options |= {"shape": graph.result_shape(op), "group": q.shape[0]}
    sums = q.node("Conv", np.full((q.shape[0], 1, *op.kernel), factor), **options)
    return _apart(sums) if op.fits_single else sums.cast(WIDE)


def _apart(sums: Value) -> Value:
    """Keep ONNX Runtime from merging a factor with the weights, where sums may need too many bits."""
    return sums.node("Clip", -float(EXACT_SINGLE), float(EXACT_SINGLE))


def _squares(q: Value) -> Value:
    """Add squares, those of each channel in float32 if they fit."""
    if len(q.shape) > 1 and np.prod(q.shape[1:]) * LEVELS**2 < EXACT_SINGLE:
        # A convolution of the whole map: ONNX Runtime keeps the layout of the convolutions beside it.
        kernel = np.ones((q.shape[0], 1, *q.shape[1:]))
        shape = (q.shape[0], *[1] * len(q.shape[1:]))
        sums = (q * q).node("Conv", kernel, shape=shape, group=q.shape[0])
        return sums.cast(WIDE).reduce_sample("ReduceSum").scalar()
    return q.cast(WIDE).reduce_sample("ReduceSumSquare").scalar()


_ARITHMETIC = IntegerArithmetic(
    single=lambda x: _cast(x, SINGLE),
    wide=lambda x: _cast(x, WIDE),
    cast=_cast,
    without_nan=lambda x: x.node("IsNaN").node("Where", 0.0, x),
    peak=lambda x: abs(x).reduce_sample("ReduceMax"),
    squares=_squares,
    scalar=lambda x: x.scalar(),
    root=lambda x: x.node("Sqrt"),
    products=_products,
    windows=_windows,
    rounded=lambda x: x.node("Round"),
    floor=lambda x: x.node("Floor"),
    clip=lambda x, low, high: x.node("Clip", low, high),
    column=lambda scalars, x: scalars.column(x),
    one_for_zero=lambda x: x.node("Equal", 0.0).node("Where", 1.0, x),
)
RUN.update(_ARITHMETIC.functions)


@RUN.runs(IntegerConv)
def _conv(op: IntegerConv, graph: OnnxGraph, q: Value, *taus: Value) -> Value:
    """Convolve bytes where features have no sign and float32 would be exact, else as all runtimes do."""
    if not op.fits_single(graph.constant) or op.multiplier is None:
        return _ARITHMETIC.functions[IntegerConv](op, graph, q, *taus)  # type: ignore[no-any-return]
    weight = graph.constant(op.weight)
    if len(op.stride) != 2:
        return _rounded_by_convolution(op, graph, q)
    if op.inputs[0] in graph.unsigned:
        q = q.cast(_BYTE)
    elif q.name in graph.signed and op.groups == 1 and weight.min() >= -LEVELS:
        # Features and their negatives, both without those below 0.
        q, start, stop = graph.signed[q.name]
        both = graph.concatenate([q, q.slice(1, start, stop).node("Neg")])
        q = both.node("QuantizeLinear", _ONE, _NONE, dtype=_BYTE)
        weight = np.concatenate([weight, -weight[:, start:stop]], axis=1)
    else:
        return _rounded_by_convolution(op, graph, q)
    zero = 0 if op.low == 0 else _ZERO
    scales = (graph.constant(op.multiplier) * 2.0**-op.shift).astype(SINGLE)
    at = np.full((), zero, _BYTE)
    constants = _ONE, _NONE, weight, scales, np.zeros(len(weight), np.int8), _ONE, at
    y = convolution("QLinearConv", op, q, *constants, *graph.optional(op.bias))
    ends = (np.full((), zero + end, _BYTE) for end in (op.low, LEVELS))
    y = y.node("Clip", *ends).cast(SINGLE)
    return y - float(zero) if zero else y


def _rounded_by_convolution(op: IntegerConv, graph: OnnxGraph, q: Value) -> Value:
    """Convolve, and round in what ONNX Runtime merges with convolutions; Round would change the layout of the map.

    The spacing of float32 from 1/2 to 1 is 2^-24, so that x·2^-24 + 3/4 is x rounded.
    """
    sums, multiplier = _products(op, graph, q), graph.constant(op.multiplier or "").astype(np.int64)
    odd = multiplier // np.maximum(multiplier & -multiplier, 1)
    pairs = zip(op.largest_sums(graph.constant), odd.tolist(), strict=True)
    if max(map(prod, pairs)) >= EXACT_SINGLE:
        sums = _apart(sums)
    ones = (1,) * len(op.stride)
    y = sums * (multiplier * 2.0**-op.shift).reshape(-1, *ones)
    near = y.node("HardSigmoid", alpha=1 / EXACT_SINGLE, beta=0.75)
    weight = np.full((len(multiplier), 1, *ones), float(EXACT_SINGLE))
    bias = np.full(len(weight), -0.75 * EXACT_SINGLE)
    whole = near.node("Conv", weight, bias, group=len(weight))
    return whole.node("Clip", float(op.low), float(LEVELS))
