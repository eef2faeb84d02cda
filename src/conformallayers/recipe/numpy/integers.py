"""Operations on whole numbers, in numpy: the functions that ``integer_arithmetic.py`` needs."""

from __future__ import annotations

from functools import reduce

import numpy as np

from .. import layer_operations as layer
from ..integer_arithmetic import IntegerArithmetic, flat
from ..integer_operations import IntegerConv, IntegerMatmul, fits_single
from ..places import Array
from .layers import Context, convolved, entries
from .points import RUN

__all__ = ["RUN"]


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _products(op: IntegerMatmul | IntegerConv, net: Context, q: Array) -> Array:
    weight = net.constant(op.weight)
    dtype = np.float32 if fits_single(weight.shape) else np.float64
    weight, q = weight.astype(dtype), q.astype(dtype)
    return _wide(q @ weight.T if isinstance(op, layer.Matmul) else convolved(op, weight, q))


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
    windows=lambda op, _, x: reduce(np.add, entries(op, _wide(x), 0.0)),
)
RUN.update(_ARITHMETIC.functions)
