"""The arithmetic on integers, for numpy arrays, torch tensors and values of ONNX graphs alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add, truediv
from typing import Any

from . import integer_operations as integer
from .layer_operations import Conv
from .point_operations import LARGEST_COORDINATE
from .recipe import Operation, Run

Number = Any  # an array, a tensor or a value of a graph
Holder = Any  # holds the constants: a numpy network, a torch module or a graph
Function = Callable[..., Number]


def flat(x: Number) -> Number:
    """Flatten each sample: (B, ...) → (B, n), also for B = 0."""
    return x.reshape(x.shape[0], prod(x.shape[1:]))


def column(scalars: Number, x: Number) -> Number:
    """Reshape scalars of samples, (B,), so that they broadcast to x (B, ...)."""
    return scalars.reshape(-1, *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class IntegerArithmetic:
    """The operations on integers, made of functions in which numpy, torch and ONNX differ.

    Features are integers in float32, scalars of samples are float64. Sums are float64 too, or float32 where
    ``fits_single`` of the operation allows it.

    Args:
        single, wide: convert to float32 and to float64.
        cast: (x, dtype) → x in the dtype of the holder.
        without_nan: 0 for NaN.
        peak, squares: the largest magnitude of each sample, and the sum of its squares in float64.
        scalar, one_for_zero: numbers of samples as float64; 1 instead of 0.
        root: √x as IEEE 754 rounds it.
        products: (operation, holder, q) → the exact sums of products of a convolution or matrix, with the bias.
        windows: (operation, holder, q, factor) → the exact sums of windows, times a power of two.
        ratio: (number, x) → their quotient, rounded once.
        rounded, floor, clip: to integers, ties to even; downwards; between two numbers.
        column: (scalars, x) → the scalars in a shape that broadcasts to x.
    """

    single: Function
    wide: Function
    cast: Function
    without_nan: Function
    peak: Function
    squares: Function
    scalar: Function
    root: Function
    products: Function
    windows: Function
    ratio: Function = truediv
    rounded: Function = lambda x: x.round()
    floor: Function = lambda x: x // 1
    clip: Function = lambda x, low, high: x.clip(low, high)
    column: Function = column
    one_for_zero: Function = lambda x: x + (x == 0)

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
            integer.IntegerEnergy: lambda op, _, q: self.squares(q) * op.weight,
            integer.IntegerAdvance: self._advance,
            integer.IntegerRebase: self._rebase,
        }

    def _clipped(self, x: Number, low: int = -integer.LEVELS) -> Number:
        return self.single(self.clip(self.rounded(x), float(low), float(integer.LEVELS)))

    def _over(self, y: Number, taus: Sequence[Number]) -> Number:
        return reduce(lambda z, tau: z / self.column(tau, z), taus, y)

    def _read(self, op: integer.Quantize | integer.QuantizePoint, to: Holder, x: Number) -> Number:
        """Return x with the addend in float32, and 0 for NaN."""
        x = self.single(x)
        if op.addend is not None:
            x = x + self.single(to.constant(op.addend)) * 2.0**-op.exponent
        return self.without_nan(x)

    def _quantize(self, op: integer.Quantize, to: Holder, x: Number) -> Number:
        return self._clipped(self._read(op, to, x) * op.factor)

    def _quantize_point(
        self, op: integer.QuantizePoint, to: Holder, x: Number
    ) -> tuple[Number, Number, Number]:
        x = self._read(op, to, x)
        least = max(op.offset, integer.SMALLEST_PEAK)
        peak = self.clip(self.peak(x), least, integer.LARGEST_PEAK)
        q = self._clipped(x * self.column(self.ratio(op.levels, peak), x))
        m = self.scalar(peak)
        share = self.ratio(op.offset, m)
        square = self.squares(q) * integer.inverse_square(op.levels) + share * share
        positive = op.offset >= integer.SMALLEST_PEAK
        return q, m, self.root(square if positive else self.one_for_zero(square))

    def _finished(
        self,
        op: integer.Accumulated | integer.Requantize,
        parts: Number,
        taus: Sequence[Number],
        addend: Number | None,
    ) -> Number:
        """Turn numbers of parts or of features into features."""
        if not taus and addend is None:
            return self._clipped(parts, op.low)
        parts = self.rounded(parts)
        # Division by τ as a product with G = round(2^23/τ), so that all that follows is integers.
        for tau in taus:
            factor = self._over_tau(2.0**integer.FACTOR_BITS, tau) * 2.0**-integer.FACTOR_BITS
            parts = self.rounded(parts * self.column(factor, parts))
        if addend is not None:
            parts = parts + addend
        return self._clipped(parts * 2.0**-integer.PART_BITS, op.low)

    def _over_tau(self, number: float, tau: Number) -> Number:
        """Return number/τ as an integer of 24 bits at most."""
        found = self.rounded(self.ratio(number, tau))
        return self.clip(found, 0.0, integer.MULTIPLIERS - 1.0)

    def _accumulated(
        self, op: integer.IntegerMatmul | integer.IntegerConv, to: Holder, q: Number, *taus: Number
    ) -> Number:
        after = len(op.stride) if isinstance(op, Conv) else 0
        multiplier, addend, scale, offset = (
            None if name is None else self.wide(to.constant(name)).reshape(-1, *[1] * after)
            for name in (op.multiplier, op.addend, op.scale, op.offset)
        )
        sums = self.products(op, to, q)
        if multiplier is not None:
            return self._finished(op, sums * (multiplier * 2.0**-op.shift), taus, addend)
        y = self._over(sums * scale, taus)
        return self.cast(y if offset is None else y + offset, to.dtype)

    def _pool(self, op: integer.IntegerPool, to: Holder, q: Number, *taus: Number) -> Number:
        norms = op.function == "norm"
        if norms:
            squares = self.windows(op, to, q * q, 4.0 ** integer.root_bits(op.kernel))
            sums = self.floor(self.root(squares))
        else:
            sums = self.windows(op, to, q, 1.0)
        factor = op.multiplier * 2.0**-op.shift
        for tau in taus:
            wide = self.single if op.fits_single else self.wide
            found = wide(self._over_tau(float(op.multiplier), tau) * 2.0**-op.shift)
            factor = self.column(found, sums)
        return self._clipped(sums * factor)

    def _requantize(self, op: integer.Requantize, to: Holder, *values: Number) -> Number:
        count = len(op.multipliers)
        pairs = zip(values[:count], op.multipliers, strict=True)
        wide = self.single if op.fits_single else self.wide
        total = reduce(add, (wide(q) * (n * 2.0**-op.shift) for q, n in pairs))
        addend = None if op.addend is None else self.wide(to.constant(op.addend))
        return self._finished(op, total, values[count:], addend)

    def _dequantize(self, op: integer.Dequantize, to: Holder, q: Number, *taus: Number) -> Number:
        return self.cast(self._over(self.wide(q) * op.scale, taus), to.dtype)

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
        coordinate = self.clip(m * op.coordinate * tau, 0.0, LARGEST_COORDINATE)
        return coordinate, self.clip(tau, 1.0, 1.0)
