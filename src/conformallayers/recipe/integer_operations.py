"""Operations on integers: 8-bit features and weights, 32-bit sums, bit-exact in every runtime.

A feature is an integer q from -127 to 127. It represents ``s·q`` with a scale s, or ``s·q/τ`` with the
coordinate τ of the sample; recipes hold no scales, only factors between them. A sum p of products becomes a
feature by a multiplier M and a shift, ``q = clip(p·M/2^shift)``. Quotients by powers of two are rounded to
the nearest integer, ties to even. No number passes 2^53, so that float64 is as exact as int64. With a
shift of at most 17 float32 is as exact: products of 24 bits and more are clipped.
ReLU, max pooling, pads of zeros and changes of shape are the operations of float features.

With a coordinate or an addend, ``p·M/2^shift`` counts parts of a feature, 2^6 of them: it is multiplied by
``G = round(2^23/τ)`` and divided by 2^23, the addend is added, and the sum is divided by 2^6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from .layer_operations import Conv, Matmul, Pool, expect_broadcast
from .point_operations import SCALAR, FormulaOperation, expect_scalars
from .recipe import (
    OPERATIONS,
    ArrayOf,
    Operation,
    Positive,
    Shape,
    ShapeOf,
    Size,
    constant,
    expect,
    expect_shape,
    operation,
)

LEVELS = 127  # the largest feature
MULTIPLIERS = 2**24  # above every multiplier and every G
SHIFTS = 62  # above every shift
PART_BITS = 6
FACTOR_BITS = 23
EXACT = 2**53  # below it float64 has every integer
EXACT_SINGLE = 2**24  # below it float32 has every integer
SINGLE_SHIFT = 17  # the largest with which float32 has p·M, or p·M is clipped: 127.5·2^17 < 2^24
LARGEST_WINDOW = 2**10  # of a pooling: its squares fit into float32
SMALLEST_PEAK, LARGEST_PEAK = 1e-30, 3e38  # of samples: quotients and products with them are finite
INEXACT = {"exp", "log", "tanh"}  # functions that do not round alike everywhere


def inverse_square(levels: float) -> float:
    """Return the factor of ‖q‖² in τ²."""
    return 1.0 / (levels * levels)


@dataclass(frozen=True, kw_only=True)
class _Quantized(Operation):
    addend: str | None = constant(optional=True, dtype="int8")
    exponent: Size = 0

    def _check(self, x: Shape, constant: ShapeOf) -> None:
        expect(self.exponent <= 100, f"an exponent of {self.exponent}")
        if self.addend is not None:
            expect_broadcast(constant(self.addend), x)


@operation("quantize")
class Quantize(_Quantized):
    """x → ``clip(round((x + addend/2^exponent)·factor))`` in float32, 0 for NaN; the 8-bit addend broadcasts."""

    factor: float

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        self._check(x, constant)
        expect(0 < self.factor < 1e30, f"a factor of {self.factor}")
        return x


@operation("quantize_point")
class QuantizePoint(_Quantized):
    """x → q, m, τ: the features ``clip(round(x·(levels/m)))`` in float32, and the scalars of ``normalize``.

    ``addend/2^exponent`` is added to x first, as in :class:`Quantize`. ``m = max(max|x|, offset)``, between 1e-30
    and 3e38. ``τ = √(‖q‖²/levels² + (offset/m)²)``, and 1 instead of 0.
    """

    levels: float
    offset: float = 0.0

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        (x,) = inputs
        self._check(x, constant)
        expect(1 <= self.levels <= 1e7, f"{self.levels} levels")
        expect(0 <= self.offset < 1e30, f"an offset of {self.offset}")
        return (x, SCALAR, SCALAR)


@dataclass(frozen=True, kw_only=True)
class Accumulated(Operation):
    """Sum products p of features with 8-bit weights, and scale the sums channel by channel.

    The bias, 32 bits, is added to p. With ``multiplier`` the result is a feature, at least ``low``. With
    ``scale`` it is the number ``p·scale/τ + offset`` in float64. τ is the second input, if there is one.
    """

    weight: str = constant(dtype="int8")
    bias: str | None = constant(optional=True, dtype="int32")
    multiplier: str | None = constant(optional=True, dtype="int32")
    addend: str | None = constant(optional=True, dtype="int32")
    scale: str | None = constant(optional=True, dtype="float64")
    offset: str | None = constant(optional=True, dtype="float64")
    shift: Size = 0
    low: int = -LEVELS

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        x, *taus = inputs
        _expect_feature(self, taus)
        names = (self.multiplier, self.addend), (self.scale, self.offset)
        given, others = names if self.scale is None else reversed(names)
        expect(given[0] is not None and others == (None, None), "a multiplier or a scale")
        for name in filter(None, given):
            expect_shape(constant(name), constant(self.weight)[:1], "a constant of channels")
        return (self.shape_of(x, constant),)

    def check_values(self, inputs: Sequence[Shape], constant: ArrayOf) -> None:
        most = self.largest_sums(constant)
        expect(max(most) < 2**31, "sums of more than 32 bits")
        factors = [] if self.multiplier is None else constant(self.multiplier).tolist()
        for total, factor in zip(most, factors, strict=False):
            fits = 0 <= factor < MULTIPLIERS and total * factor < EXACT
            expect(fits, f"a multiplier of {factor}")
            parts = total * factor >> self.shift
            expect(len(inputs) == 1 or parts < EXACT // MULTIPLIERS, "parts of too many bits")

    def sums_fit_single(self, constant: ShapeOf) -> bool:
        """Tell whether float32 is exact for all sums of products, without the bias, whatever the weights."""
        return prod(constant(self.weight)[1:]) * 128 * LEVELS < EXACT_SINGLE

    def fits_single(self, constant: ArrayOf) -> bool:
        """Tell whether float32 is exact for all sums, and for what becomes of them."""
        plain = self.multiplier is not None and self.addend is None and len(self.inputs) == 1
        fits = self.shift <= SINGLE_SHIFT and max(self.largest_sums(constant)) < EXACT_SINGLE
        return plain and fits

    def largest_sums(self, constant: ArrayOf) -> list[int]:
        """Return an upper bound of the sums of each channel."""
        weight = constant(self.weight)
        most = [LEVELS * sum(map(abs, row)) for row in weight.reshape(len(weight), -1).tolist()]
        if self.bias is None:
            return most
        return [a + abs(b) for a, b in zip(most, constant(self.bias).tolist(), strict=True)]


@operation("integer_matmul")
class IntegerMatmul(Accumulated, Matmul):
    """q, or q and τ → the product of ``matmul`` as :class:`Accumulated` says; channels are the last axis."""


@operation("integer_conv")
class IntegerConv(Accumulated, Conv):
    """q, or q and τ → the convolution of ``conv`` as :class:`Accumulated` says."""


@operation("integer_pool")
class IntegerPool(Pool):
    """q, or q and τ → ``clip(p·M/2^shift)`` with p the sum of each window, or its norm in parts.

    M is the multiplier, or ``round(multiplier/τ)``.

    The norm is ``⌊√(4^j·S)⌋`` of the sum S of squares, j as large as 24 bits allow: float32 has such a root exactly.
    """

    padding: tuple[Size, ...]
    function: str
    multiplier: Positive
    shift: Size = 0

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        x, *taus = inputs
        expect(len(taus) <= 1, "more than one coordinate")
        expect_scalars(taus)
        expect(self.function in ("sum", "norm"), f"no function {self.function!r:.60}")
        expect(self.multiplier < MULTIPLIERS, f"a multiplier of {self.multiplier}")
        expect(self.shift < SHIFTS, f"a shift of {self.shift}")
        expect(prod(self.kernel) <= LARGEST_WINDOW, f"windows of {self.kernel}")
        return (self.shape_of(x, constant),)

    @property
    def fits_single(self) -> bool:
        """Whether float32 is exact for sums and norms, and for what becomes of them."""
        return self.shift <= SINGLE_SHIFT


def root_bits(kernel: Shape) -> int:
    """Return the number j of binary places of the norm of a window."""
    return (24 - (prod(kernel) * LEVELS**2).bit_length()) // 2


@operation("requantize")
class Requantize(Operation):
    """q, …, or q, … and τ → ``clip((Σ q·multiplier)/2^shift)``; the 32-bit addend broadcasts."""

    multipliers: tuple[Size, ...]
    addend: str | None = constant(optional=True, dtype="int32")
    shift: Size = 0
    low: int = -LEVELS

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        features, taus = inputs[: len(self.multipliers)], inputs[len(self.multipliers) :]
        expect(features and len(set(features)) == 1, f"a sum of {list(features)}")
        _expect_feature(self, taus)
        small = max(self.multipliers) < MULTIPLIERS and LEVELS * sum(self.multipliers) < EXACT
        expect(small, f"multipliers {self.multipliers}")
        parts = LEVELS * sum(self.multipliers) >> self.shift
        expect(not taus or parts < EXACT // MULTIPLIERS, "parts of too many bits")
        if self.addend is not None:
            expect_broadcast(constant(self.addend), features[0])
        return (features[0],)

    @property
    def fits_single(self) -> bool:
        """Whether float32 is exact for the sum, and for what becomes of it."""
        plain = self.addend is None and len(self.inputs) == len(self.multipliers)
        exact = LEVELS * max(self.multipliers) < EXACT_SINGLE
        return plain and exact and self.shift <= SINGLE_SHIFT


def _expect_feature(op: Accumulated | Requantize, taus: Sequence[Shape]) -> None:
    """Refuse coordinates and settings that turn no sum into a feature."""
    expect(len(taus) <= 1, "more than one coordinate")
    expect_scalars(taus)
    expect(op.shift < SHIFTS and op.low in (-LEVELS, 0), f"shift {op.shift}, low {op.low}")


@operation("dequantize")
class Dequantize(Operation):
    """q, or q and τ → ``q·scale``, or ``q·scale/τ``, computed in float64."""

    scale: float

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect(1 <= len(inputs) <= 2, "more than one coordinate")
        expect_scalars(inputs[1:])
        return (inputs[0],)


@operation("integer_energy")
class IntegerEnergy(Operation):
    """q → ``weight·‖q‖²``."""

    weight: float

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        expect(x, "an energy of a scalar")
        return SCALAR


@operation("integer_advance")
class IntegerAdvance(FormulaOperation):
    """τ, m, n, … → the next τ by a formula without exp, log and tanh; energies are added first, one by one."""

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect(INEXACT.isdisjoint(self.parsed.heads()), f"{self.formula:.60} in integers")
        return super().shapes(inputs, constant)


@operation("integer_rebase")
class IntegerRebase(Operation):
    """m, τ → the scalars of ``rebase``: ``m·coordinate·τ``, at most 1.7e308, and τ = 1."""

    coordinate: float

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect(len(inputs) == 2, "not m and τ")
        expect_scalars(inputs)
        return (SCALAR, SCALAR)


KINDS = tuple(kind for kind in OPERATIONS.values() if kind.__module__ == __name__)


def makes_integers(op: Operation) -> bool:
    """Check whether an operation writes 8-bit features whatever it reads."""
    if isinstance(op, Accumulated):
        return op.multiplier is not None
    return isinstance(op, (Quantize, QuantizePoint, IntegerPool, Requantize))


def integer_values(operations: Iterable[Operation]) -> frozenset[str]:
    """Return the names of all 8-bit features."""
    found: set[str] = set()
    for op in operations:
        if makes_integers(op) or (op.keeps_integers and op.inputs[0] in found):
            found.add(op.outputs[0])
    return frozenset(found)


def unsigned_values(operations: Iterable[Operation]) -> frozenset[str]:
    """Return the names of 8-bit features that are never negative."""
    operations = tuple(operations)
    integers, found = integer_values(operations), set[str]()
    for op in operations:
        (y, *_) = op.outputs
        positive = getattr(op, "low", -1) == 0 or getattr(op, "function", "") in (
            "relu",
            "abs",
            "norm",
        )
        keeps = op.keeps_integers or isinstance(op, IntegerPool)
        if y in integers and (positive or (keeps and found.issuperset(integers & {*op.inputs}))):
            found.add(y)
    return frozenset(found)
