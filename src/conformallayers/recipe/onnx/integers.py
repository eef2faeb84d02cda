"""Operations on whole numbers, in ONNX: the functions that ``integer_arithmetic.py`` needs.

ONNX Runtime convolves and multiplies whole numbers in float32 exactly while sums stay below 2^24. Its integer
operators would saturate in 16 bits on some processors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import layer_operations as layer
from ..integer_arithmetic import IntegerArithmetic
from ..integer_operations import IntegerConv, IntegerMatmul, IntegerPool, fits_single
from .graph import WIDE, OnnxGraph, Value
from .layers import convolution, pooling, windowed
from .points import RUN

__all__ = ["RUN"]
_SINGLE = np.dtype(np.float32)


def _cast(x: Any, dtype: Any) -> Any:
    return x.cast(dtype) if isinstance(x, Value) else x.astype(dtype)  # a constant is an array


def _products(op: IntegerMatmul | IntegerConv, graph: OnnxGraph, q: Value) -> Value:
    weight = graph.constant(op.weight)
    dtype = _SINGLE if fits_single(weight.shape) else WIDE
    q = q.cast(dtype)
    if isinstance(op, layer.Matmul):
        packed = graph.unpacked(weight.T, dtype)
        sums = q.node("MatMul", packed, shape=graph.result_shape(op))
    else:
        plain: layer.Conv = replace(op, bias=None)
        if dtype == _SINGLE:
            sums = convolution("Conv", plain, q, graph.unpacked(weight, dtype))
        else:
            sums = windowed(plain, q, weight.astype(WIDE), op.stride, op.padding)
    return sums.cast(WIDE).node("Round")


def _windows(op: IntegerPool, graph: OnnxGraph, q: Value) -> Value:
    options, _ = pooling(op, q)
    options |= {"shape": graph.result_shape(op), "group": q.shape[0]}
    sums = q.node("Conv", np.ones((q.shape[0], 1, *op.kernel)), **options)
    return sums.cast(WIDE).node("Round")


_ARITHMETIC = IntegerArithmetic(
    single=lambda x: _cast(x, _SINGLE),
    wide=lambda x: _cast(x, WIDE),
    cast=_cast,
    without_nan=lambda x: x.node("IsNaN").node("Where", 0.0, x),
    peak=lambda x: abs(x).reduce_sample("ReduceMax"),
    squares=lambda q: q.cast(WIDE).reduce_sample("ReduceSumSquare").scalar(),
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
