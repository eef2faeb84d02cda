"""Operations on whole numbers, in torch: one function each, of (operation, module, *input values).

Features are whole numbers in float32, sums in float32 where it has all of them, or in float64.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...functional import full_precision
from .. import integer_operations as integer
from .. import layer_operations as layer
from .layers import averages, convolved
from .points import RULES, RUN

if TYPE_CHECKING:
    from .module import RecipeModule

__all__ = ["RULES", "RUN"]
_SPLIT = 2.0**27 + 1  # times a number of 53 bits, its upper 26 are left


def _clipped(x: Tensor, low: int = -integer.LEVELS) -> Tensor:
    return x.round().clamp(low, integer.LEVELS).float()


def _column(scalars: Tensor, x: Tensor) -> Tensor:
    return scalars.view(-1, *[1] * (x.dim() - 1))


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


def _squares(q: Tensor) -> Tensor:
    """Return ‖q‖² of each sample in float64."""
    return q.flatten(1).double().square().sum(1)


def _shifted(
    op: integer.Quantize | integer.QuantizePoint, module: RecipeModule, x: Tensor
) -> Tensor:
    addend, x = module.optional(op.addend), x.detach().float()  # rounding has no gradient
    return x if addend is None else x + addend.float() * 2.0**-op.exponent


@RUN.runs(integer.Quantize)
def _quantize(op: integer.Quantize, module: RecipeModule, x: Tensor) -> Tensor:
    x = _shifted(op, module, x)
    odd = _column(x.isnan().flatten(1).any(1), x)
    return _clipped(x * x.new_tensor(op.factor)).masked_fill(odd, float("nan"))


@RUN.runs(integer.QuantizePoint)
def _quantize_point(
    op: integer.QuantizePoint, module: RecipeModule, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x = _shifted(op, module, x)
    least = max(op.offset, integer.SMALLEST_PEAK)
    peak = x.flatten(1).abs().amax(1).clamp(least, integer.LARGEST_PEAK)
    q = _clipped(x * _column(_ratio(op.levels, peak), x))
    m = peak.double()
    share = _ratio(op.offset, m)
    tau = _root(_squares(q) * integer.inverse_square(op.levels) + share * share)
    return q, m, torch.where(tau == 0, 1.0, tau)


def _finished(
    op: integer.Accumulated | integer.Requantize,
    parts: Tensor,
    taus: tuple[Tensor, ...],
    addend: Tensor | None,
) -> Tensor:
    """Turn whole numbers, times 2^shift, into features."""
    parts = parts * 2.0**-op.shift
    if not taus and addend is None:
        return _clipped(parts, op.low)
    parts = parts.round()
    for tau in taus:
        factor = _ratio(2.0**integer.FACTOR_BITS, tau).round().clamp_max(integer.MULTIPLIERS - 1)
        parts = (parts * _column(factor, parts) * 2.0**-integer.FACTOR_BITS).round()
    if addend is not None:
        parts = parts + addend
    return _clipped(parts * 2.0**-integer.PART_BITS, op.low)


@RUN.runs(integer.IntegerMatmul, integer.IntegerConv)
def _accumulated(
    op: integer.IntegerMatmul | integer.IntegerConv,
    module: RecipeModule,
    q: Tensor,
    *taus: Tensor,
) -> Tensor:
    weight = module.constant(op.weight)
    dtype = torch.float32 if integer.fits_single(tuple(weight.shape)) else torch.float64
    with full_precision(q):
        sums = _sums(op, weight.to(dtype), q.to(dtype)).double().round()
    after = sums.dim() - 2 if isinstance(op, layer.Conv) else 0

    def of_channels(name: str) -> Tensor:
        return module.constant(name).view(-1, *[1] * after)

    addend = None if op.addend is None else of_channels(op.addend)
    sums = sums if op.bias is None else sums + of_channels(op.bias)
    products = sums * of_channels(op.factors)
    if op.multiplier is not None:
        return _finished(op, products, taus, addend)
    y = reduce(lambda z, tau: z / _column(tau, z), taus, products)
    return (y if addend is None else y + addend).to(module.dtype)


def _sums(op: layer.Matmul | layer.Conv, weight: Tensor, q: Tensor) -> Tensor:
    # A fast convolution may miss a whole number by a little; its result is rounded.
    return F.linear(q, weight) if isinstance(op, layer.Matmul) else convolved(op, q, weight, None)


@RUN.runs(integer.IntegerPool)
def _pool(op: integer.IntegerPool, module: RecipeModule, q: Tensor) -> Tensor:
    wide, norms = q.double(), op.function == "norm"
    sums = averages(op.sums, wide.square() if norms else wide)
    if norms:
        sums = _whole_root(sums * 4.0**op.root_bits)
    return _clipped(sums * op.multiplier * 2.0**-op.shift)


@RUN.runs(integer.Requantize)
def _requantize(op: integer.Requantize, module: RecipeModule, *values: Tensor) -> Tensor:
    count = len(op.multipliers)
    products = (q.double() * n for q, n in zip(values[:count], op.multipliers, strict=True))
    return _finished(op, reduce(torch.add, products), values[count:], module.optional(op.addend))


@RUN.runs(integer.Dequantize)
def _dequantize(op: integer.Dequantize, module: RecipeModule, q: Tensor, *taus: Tensor) -> Tensor:
    y = reduce(lambda z, tau: z / _column(tau, z), taus, q.double() * op.scale)
    return y.to(module.dtype)


RUN[integer.IntegerEnergy] = lambda op, _, q: _squares(q) * op.weight


@RUN.runs(integer.IntegerAdvance)
def _advance(
    op: integer.IntegerAdvance, module: RecipeModule, tau: Tensor, m: Tensor, *energies: Tensor
) -> Tensor:
    n = reduce(torch.add, energies)
    if op.rule == "published":
        return tau + m * n
    return tau + n / tau if op.rule == "projective" else _root(tau * tau + n)


@RUN.runs(integer.IntegerRebase)
def _rebase(
    op: integer.IntegerRebase, module: RecipeModule, m: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    coordinate = (m * op.coordinate * tau).clamp_max(integer.LARGEST)
    return coordinate, torch.where(tau.isnan(), tau, 1.0)
