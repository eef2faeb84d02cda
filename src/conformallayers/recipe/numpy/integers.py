"""Operations on whole numbers, in numpy: one function each, of (operation, network, *input values).

Features are whole numbers in float32, sums in float32 where it has all of them, or in float64.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from .. import integer_operations as integer
from .. import layer_operations as layer
from ..places import Array
from .layers import RUN, convolved, entries, flat
from .points import column

if TYPE_CHECKING:
    from .network import Network

__all__ = ["RUN"]


def _clipped(x: Array, low: int = -integer.LEVELS) -> Array:
    return np.clip(np.rint(x), low, integer.LEVELS).astype(np.float32)


def _squares(q: Array) -> Array:
    """Return ‖q‖² of each sample in float64."""
    return np.asarray(np.square(flat(q), dtype=np.float64).sum(1))


def _shifted(op: integer.Quantize | integer.QuantizePoint, net: Network, x: Array) -> Array:
    x = x.astype(np.float32)
    if op.addend is None:
        return x
    addend = net.constant(op.addend).astype(np.float32) * np.float32(2.0**-op.exponent)
    return np.asarray(x + addend)


@RUN.runs(integer.Quantize)
def _quantize(op: integer.Quantize, net: Network, x: Array) -> Array:
    q = _clipped(_shifted(op, net, x) * np.float32(op.factor))
    odd = column(np.asarray(np.isnan(flat(x)).any(1)), x)
    return np.where(odd, np.float32(np.nan), q)


@RUN.runs(integer.QuantizePoint)
def _quantize_point(
    op: integer.QuantizePoint, net: Network, x: Array
) -> tuple[Array, Array, Array]:
    x = _shifted(op, net, x)
    least = np.float32(max(op.offset, integer.SMALLEST_PEAK))
    peak = np.clip(np.abs(flat(x)).max(1), least, np.float32(integer.LARGEST_PEAK))
    q = _clipped(x * column(np.float32(op.levels) / peak, x))
    m = peak.astype(np.float64)
    share = op.offset / m
    tau = np.sqrt(_squares(q) * integer.inverse_square(op.levels) + share * share)
    return q, m, np.where(tau == 0, 1.0, tau)


def _finished(
    op: integer.Accumulated | integer.Requantize,
    parts: Array,
    taus: tuple[Array, ...],
    addend: Array | None,
) -> Array:
    """Turn whole numbers, times 2^shift, into features."""
    parts = parts * 2.0**-op.shift
    if not taus and addend is None:
        return _clipped(parts, op.low)
    parts = np.rint(parts)
    for tau in taus:
        factor = np.rint(2.0**integer.FACTOR_BITS / tau)
        factor = column(np.minimum(factor, integer.MULTIPLIERS - 1), parts)
        parts = np.rint(parts * factor * 2.0**-integer.FACTOR_BITS)
    if addend is not None:
        parts = parts + addend
    return _clipped(parts * 2.0**-integer.PART_BITS, op.low)


@RUN.runs(integer.IntegerMatmul, integer.IntegerConv)
def _accumulated(
    op: integer.IntegerMatmul | integer.IntegerConv, net: Network, q: Array, *taus: Array
) -> Array:
    weight = net.constant(op.weight)
    dtype = np.float32 if integer.fits_single(weight.shape) else np.float64
    sums = _sums(op, weight.astype(dtype), q.astype(dtype)).astype(np.float64)
    after = sums.ndim - 2 if isinstance(op, layer.Conv) else 0

    def of_channels(name: str) -> Array:
        return net.constant(name).reshape(-1, *[1] * after)

    addend = None if op.addend is None else of_channels(op.addend)
    sums = sums if op.bias is None else sums + of_channels(op.bias)
    products = sums * of_channels(op.factors)
    if op.multiplier is not None:
        return _finished(op, products, taus, addend)
    y = reduce(lambda z, tau: z / column(tau, z), taus, products)
    return np.asarray(y if addend is None else y + addend, net.dtype)


def _sums(op: layer.Matmul | layer.Conv, weight: Array, q: Array) -> Array:
    return q @ weight.T if isinstance(op, layer.Matmul) else convolved(op, weight, q)


@RUN.runs(integer.IntegerPool)
def _pool(op: integer.IntegerPool, net: Network, q: Array) -> Array:
    wide = q.astype(np.float64)
    norms = op.function == "norm"
    sums = reduce(np.add, entries(op, np.square(wide) if norms else wide, 0.0))
    if norms:
        sums = np.floor(np.sqrt(sums * 4.0**op.root_bits))
    return _clipped(sums * op.multiplier * 2.0**-op.shift)


@RUN.runs(integer.Requantize)
def _requantize(op: integer.Requantize, net: Network, *values: Array) -> Array:
    count = len(op.multipliers)
    products = (
        q.astype(np.float64) * n for q, n in zip(values[:count], op.multipliers, strict=True)
    )
    addend = None if op.addend is None else net.constant(op.addend)
    return _finished(op, reduce(np.add, products), values[count:], addend)


@RUN.runs(integer.Dequantize)
def _dequantize(op: integer.Dequantize, net: Network, q: Array, *taus: Array) -> Array:
    y = reduce(lambda z, tau: z / column(tau, z), taus, q.astype(np.float64) * op.scale)
    return y.astype(net.dtype)


RUN[integer.IntegerEnergy] = lambda op, _, q: _squares(q) * op.weight


@RUN.runs(integer.IntegerAdvance)
def _advance(
    op: integer.IntegerAdvance, net: Network, tau: Array, m: Array, *energies: Array
) -> Array:
    n = reduce(np.add, energies)
    if op.rule == "published":
        return np.asarray(tau + m * n)
    return np.asarray(tau + n / tau if op.rule == "projective" else np.sqrt(tau * tau + n))


@RUN.runs(integer.IntegerRebase)
def _rebase(op: integer.IntegerRebase, net: Network, m: Array, tau: Array) -> tuple[Array, Array]:
    coordinate = np.minimum(m * op.coordinate * tau, integer.LARGEST)
    return coordinate, np.where(np.isnan(tau), tau, 1.0)
