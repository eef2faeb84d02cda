"""Operations on whole numbers, in torch: what ``arithmetic.py`` needs of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...functional import full_precision
from .. import layer_operations as layer
from ..arithmetic import IntegerArithmetic
from .layers import averages, convolved
from .points import RULES, RUN

__all__ = ["RULES", "RUN"]
_SPLIT = 2.0**27 + 1  # times a number of 53 bits, its upper 26 are left


def _ratio(number: float, by: Tensor) -> Tensor:
    """Return ``number/by``, rounded once; torch multiplies a number by the inverse of a tensor."""
    return by.new_tensor(number) / by


def _root(x: Tensor) -> Tensor:
    """Return √x as IEEE 754 rounds it; torch's own misses the last bit of one number in a hundred.

    The remainder ``x - r²`` is exact: r is split into halves, whose products float64 has (Dekker).
    """
    r = x.sqrt()
    high = r * _SPLIT - (r * _SPLIT - r)
    low, square = r - high, r * r
    lost = ((high * high - square) + 2 * high * low) + low * low
    found = r + ((x - square) - lost) / (2 * r)
    return torch.where(found.isfinite(), found, r)


def _whole_root(n: Tensor) -> Tensor:
    """Return ⌊√n⌋ of whole numbers below 2^52."""
    r = n.sqrt().floor()
    r = r - (r * r > n).to(r.dtype)
    return r + ((r + 1) * (r + 1) <= n).to(r.dtype)


def _products(op: layer.Matmul | layer.Conv, weight: Tensor, q: Tensor) -> Tensor:
    with full_precision(q):
        if isinstance(op, layer.Matmul):
            return F.linear(q, weight).round()
        # A fast convolution may miss a whole number by a little.
        return convolved(op, q, weight, None).round()


_ARITHMETIC = IntegerArithmetic(
    single=lambda x: x.detach().float(),  # rounding has no gradient
    wide=lambda x: x.double(),
    cast=lambda x, dtype: x.to(dtype),
    where=torch.where,
    largest=torch.amax,
    ratio=_ratio,
    root=_root,
    whole_root=_whole_root,
    products=_products,
    windows=lambda op, x: averages(op.sums, x),
)
RUN.update(_ARITHMETIC.functions)
