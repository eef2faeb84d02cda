"""Formulas for numpy arrays and torch tensors alike: the arithmetic on whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add
from typing import Any

from . import integer_operations as integer
from .layer_operations import Conv
from .operation import Operation, Run
from .point_operations import LARGEST_COORDINATE

Number = Any  # an array or a tensor
Holder = Any  # holds the constants: a numpy network or a torch module
Function = Callable[..., Number]


def flat(x: Number) -> Number:
    """Flatten each sample: (B, ...) → (B, n), also for B = 0."""
    return x.reshape(x.shape[0], prod(x.shape[1:]))


def column(scalars: Number, x: Number) -> Number:
    """Reshape scalars of samples, (B,), so that they broadcast to x (B, ...)."""
    return scalars.reshape(-1, *[1] * (x.ndim - 1))


def _over(y: Number, taus: Sequence[Number]) -> Number:
    return reduce(lambda z, tau: z / column(tau, z), taus, y)


@dataclass(frozen=True)
class IntegerArithmetic:
    """The operations on whole numbers, made of functions in which numpy and torch differ.

    Features are whole numbers in float32. Sums are in float32 where that is exact, else in float64.

    Args:
        module: numpy or torch.
        single, wide: convert to float32 and to float64.
        cast: (x, dtype) → x in the dtype of the holder.
        ratio: (number, x) → their quotient, rounded once.
        root: √x as IEEE 754 rounds it.
        products: (operation, weight, q) → the sums of products of a convolution or matrix, exact.
        windows: (operation, x) → the sums of windows.
    """

    module: Any
    single: Function
    wide: Function
    cast: Function
    ratio: Function
    root: Function
    products: Function
    windows: Function

    @property
    def functions(self) -> dict[type[Operation], Run]:
        """The function of each operation, of (operation, holder, *input values)."""
        return {
            integer.Quantize: self._quantize,
            integer.QuantizePoint: self._quantize_point,
            integer.IntegerMatmul: self._accumulated,
            integer.IntegerConv: self._accumulated,
            integer.IntegerPool: self._pool,
            integer.Requantize: self._requantize,
            integer.Dequantize: self._dequantize,
            integer.IntegerEnergy: lambda op, _, q: self._squares(q) * op.weight,
            integer.IntegerAdvance: self._advance,
            integer.IntegerRebase: self._rebase,
        }

    def _clipped(self, x: Number, low: int = -integer.LEVELS) -> Number:
        return self.single(x.round().clip(low, integer.LEVELS))

    def _squares(self, q: Number) -> Number:
        """Return ‖q‖² of each sample in float64."""
        rows = self.wide(flat(q))
        return (rows * rows).sum(1)

    def _read(self, op: integer.Quantize | integer.QuantizePoint, to: Holder, x: Number) -> Number:
        """Return x with the addend in float32, and 0 for NaN."""
        x = self.single(x)
        if op.addend is not None:
            x = x + self.single(to.constant(op.addend)) * 2.0**-op.exponent
        return self.single(self.module.where(x == x, x, 0.0))

    def _quantize(self, op: integer.Quantize, to: Holder, x: Number) -> Number:
        return self._clipped(self._read(op, to, x) * op.factor)

    def _quantize_point(
        self, op: integer.QuantizePoint, to: Holder, x: Number
    ) -> tuple[Number, Number, Number]:
        x = self._read(op, to, x)
        least = max(op.offset, integer.SMALLEST_PEAK)
        peak = self.module.amax(abs(flat(x)), 1).clip(least, integer.LARGEST_PEAK)
        q, m = self._clipped(x * column(self.ratio(op.levels, peak), x)), self.wide(peak)
        share = self.ratio(op.offset, m)
        tau = self.root(self._squares(q) * integer.inverse_square(op.levels) + share * share)
        return q, m, self.module.where(tau == 0, 1.0, tau)

    def _finished(
        self,
        op: integer.Accumulated | integer.Requantize,
        parts: Number,
        taus: Sequence[Number],
        addend: Number | None,
    ) -> Number:
        """Turn whole numbers, in units of 2^-shift parts or features, into features."""
        parts = parts * 2.0**-op.shift
        if not taus and addend is None:
            return self._clipped(parts, op.low)
        parts = parts.round()
        # Division by τ as a product with G = round(2^23/τ), so that all that follows are whole numbers.
        for tau in taus:
            factor = self.ratio(2.0**integer.FACTOR_BITS, tau).round()
            factor = column(factor.clip(max=integer.MULTIPLIERS - 1), parts)
            parts = (parts * factor * 2.0**-integer.FACTOR_BITS).round()
        if addend is not None:
            parts = parts + addend
        return self._clipped(parts * 2.0**-integer.PART_BITS, op.low)

    def _accumulated(
        self, op: integer.IntegerMatmul | integer.IntegerConv, to: Holder, q: Number, *taus: Number
    ) -> Number:
        weight = to.constant(op.weight)
        exact = self.single if integer.fits_single(weight.shape) else self.wide
        sums = self.wide(self.products(op, exact(weight), exact(q)))
        after = sums.ndim - 2 if isinstance(op, Conv) else 0
        bias, multiplier, addend, scale, offset = (
            None if name is None else to.constant(name).reshape(-1, *[1] * after)
            for name in (op.bias, op.multiplier, op.addend, op.scale, op.offset)
        )
        sums = sums if bias is None else sums + bias
        if multiplier is not None:
            return self._finished(op, sums * multiplier, taus, addend)
        y = _over(sums * scale, taus)
        return self.cast(y if offset is None else y + offset, to.dtype)

    def _pool(self, op: integer.IntegerPool, to: Holder, q: Number) -> Number:
        wide, norms = self.wide(q), op.function == "norm"
        sums = self.windows(op, wide * wide if norms else wide)
        if norms:
            sums = self.root(sums * 4.0 ** integer.root_bits(op.kernel)) // 1
        return self._clipped(sums * op.multiplier * 2.0**-op.shift)

    def _requantize(self, op: integer.Requantize, to: Holder, *values: Number) -> Number:
        count = len(op.multipliers)
        pairs = zip(values[:count], op.multipliers, strict=True)
        total = reduce(add, (self.wide(q) * n for q, n in pairs))
        addend = None if op.addend is None else to.constant(op.addend)
        return self._finished(op, total, values[count:], addend)

    def _dequantize(self, op: integer.Dequantize, to: Holder, q: Number, *taus: Number) -> Number:
        return self.cast(_over(self.wide(q) * op.scale, taus), to.dtype)

    def _advance(
        self, op: integer.IntegerAdvance, to: Holder, tau: Number, m: Number, *energies: Number
    ) -> Number:
        values = {"tau": tau, "m": m, "n": reduce(add, energies)}
        return op.parsed.evaluate(values, {"sqrt": self.root, "/": self._quotient})

    def _quotient(self, n: Number, by: Number) -> Number:
        return self.ratio(n, by) if isinstance(n, float) else n / by

    def _rebase(
        self, op: integer.IntegerRebase, to: Holder, m: Number, tau: Number
    ) -> tuple[Number, Number]:
        coordinate = (m * op.coordinate * tau).clip(max=LARGEST_COORDINATE)
        return coordinate, self.module.ones_like(tau)
