"""Operations on whole numbers, in numpy: the functions that ``integer_arithmetic.py`` needs."""

from __future__ import annotations

from functools import reduce

import numpy as np

from .. import layer_operations as layer
from ..integer_arithmetic import IntegerArithmetic
from ..places import Array
from .layers import convolved, entries
from .points import RUN

__all__ = ["RUN"]


def _products(op: layer.Matmul | layer.Conv, weight: Array, q: Array) -> Array:
    return q @ weight.T if isinstance(op, layer.Matmul) else convolved(op, weight, q)


_ARITHMETIC = IntegerArithmetic(
    module=np,
    single=lambda x: x.astype(np.float32),
    wide=lambda x: x.astype(np.float64),
    cast=lambda x, dtype: x.astype(dtype),
    ratio=np.divide,
    root=np.sqrt,
    products=_products,
    windows=lambda op, x: reduce(np.add, entries(op, x, 0.0)),
)
RUN.update(_ARITHMETIC.functions)
