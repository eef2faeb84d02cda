"""Operations on whole numbers, in torch: the functions that ``integer_arithmetic.py`` needs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...functional import full_precision
from .. import layer_operations as layer
from ..integer_arithmetic import IntegerArithmetic, flat
from ..integer_operations import IntegerConv, IntegerMatmul, fits_single
from .layers import Context, averages, convolved
from .points import RUN

__all__ = ["RUN"]
_SPLIT = 2.0**27 + 1  # splits a number of 53 bits into two of 26 (Dekker)


def _ratio(number: float, by: Tensor) -> Tensor:
    """Return ``number/by``, rounded once; torch multiplies a number by the inverse of a tensor."""
    return by.new_tensor(number) / by


def _root(x: Tensor) -> Tensor:
    """Return √x as IEEE 754 rounds it; torch's own misses the last bit of one number in a hundred."""
    r = x.sqrt()
    # One step of Newton with an exact remainder x - r²: products of the halves of r have no rounding.
    high = r * _SPLIT - (r * _SPLIT - r)
    low, square = r - high, r * r
    lost = ((high * high - square) + 2 * high * low) + low * low
    found = r + ((x - square) - lost) / (2 * r)
    return torch.where(found.isfinite(), found, r)


def _products(op: IntegerMatmul | IntegerConv, module: Context, q: Tensor) -> Tensor:
    weight = module.constant(op.weight)
    dtype = torch.float32 if fits_single(weight.shape) else torch.float64
    weight, q = weight.to(dtype), q.to(dtype)
    with full_precision(q):
        if isinstance(op, layer.Matmul):
            return F.linear(q, weight).round().double()
        return convolved(op, q, weight, None).round().double()  # a fast convolution is not exact


_ARITHMETIC = IntegerArithmetic(
    single=lambda x: x.detach().float(),  # rounding has no gradient
    wide=lambda x: x.double(),
    cast=lambda x, dtype: x.to(dtype),
    without_nan=lambda x: torch.where(x.isnan(), 0.0, x),
    peak=lambda x: flat(x).abs().amax(1),
    squares=lambda q: flat(q).double().square().sum(1),
    scalar=lambda x: x.double(),
    root=_root,
    products=_products,
    windows=lambda op, _, x: averages(op.sums, x.double()),
    ratio=_ratio,
)
RUN.update(_ARITHMETIC.functions)
