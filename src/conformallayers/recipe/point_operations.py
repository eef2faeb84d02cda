"""Operations on points: embedding, energies, the coordinate t, and the final division.

Letters as in docs/mathematics.md: τ is the coordinate in the balanced scaling, n an energy
``weight·‖z‖²``, m the coordinate of the points that entered a stage with biases, else 1. m, τ and n are float64, shape (B,).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..nn.formula import FUNCTIONS, OPERATORS, Formula, parse
from .recipe import (
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

SCALAR: Shape = ()
LARGEST_COORDINATE = 1.7e308  # coordinates are cut here, so that they stay finite


@operation("normalize")
class Normalize(Operation):
    """x → x, m, τ: the sample itself, ``m = 1`` and ``τ = √(‖x‖² + offset²)``."""

    offset: float = 0.0

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        (x,) = inputs
        expect(0 <= self.offset < math.inf, f"an offset of {self.offset}")
        return (x, SCALAR, SCALAR)


@operation("sum_squares")
class SumSquares(Operation):
    """z → ``weight·‖z‖²``."""

    weight: float = 1.0

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        return SCALAR


@operation("banded_form")
class BandedForm(Operation):
    """x (blocks·size,) → ``weight·‖R x‖²`` with R an upper triangular band of blocks.

    ``band`` (blocks − width, (width + 1)·size, size) holds, for the block row i, the transposed blocks
    ``R[i, i + o]`` with o = 0 … width one below the other. ``last`` (width·size, width·size) holds the last
    ``width`` block rows as one transposed matrix.
    """

    band: str = constant()
    last: str = constant()
    size: Positive
    width: Size
    weight: float

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        expect(len(x) == 1 and x[0] % self.size == 0, f"blocks of {self.size} in {x}")
        full = x[0] // self.size - self.width
        expect(full >= 1, f"a band of {self.width} blocks in {x}")
        expect_shape(
            constant(self.band), (full, (self.width + 1) * self.size, self.size), "the band"
        )
        rest = self.width * self.size
        expect_shape(constant(self.last), (rest, rest), "the end of the band")
        return SCALAR


@dataclass(frozen=True, kw_only=True)
class FormulaOperation(Operation):
    """τ, m, n, … → the next τ by a formula in tau, m and n."""

    formula: str

    @cached_property
    def parsed(self) -> Formula:
        """The formula of the text."""
        return parse(self.formula)

    @property
    def divides(self) -> bool:
        """Whether the formula may be undefined where τ is 0."""
        return "/" in self.formula or "log" in self.formula

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect(len(inputs) > 2, "no energy")
        known = {"tau", "m", "n", *OPERATORS, *FUNCTIONS}
        heads = (head for head in self.parsed.heads() if isinstance(head, str))
        expect(known.issuperset(heads), f"a formula of other variables: {self.formula:.60}")
        return expect_scalars(inputs)


@operation("advance")
class Advance(FormulaOperation):
    """τ, m, n, … → the next τ by the formula of an activation in tau, m and n; energies are added first.

    For example ``tau + m * n`` for ReSPro as published, ``tau + n / tau`` in the projective form. Where τ is
    0 it stays 0.
    """


@operation("divide")
class Divide(Operation):
    """v, τ, m → ``scale·v/τ``, 0 where τ = 0."""

    scale: float

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect_scalars(inputs[1:])
        expect(len(inputs) == 3, "not v, τ and m")
        return (inputs[0],)


@operation("rebase")
class Rebase(Operation):
    """z, m, τ → the point ``scale·z/τ``, its coordinate as the new m, and τ = 1; all 0 where τ = 0.

    The coordinate is ``m·coordinate·τ``, at most 1.7e308. NaN stays NaN.
    """

    scale: float
    coordinate: float

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect_scalars(inputs[1:])
        expect(len(inputs) == 3, "not z, m and τ")
        return (inputs[0], SCALAR, SCALAR)


def expect_scalars(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Refuse values that are not scalars of samples; return the shapes of one scalar output."""
    expect(all(shape == SCALAR for shape in shapes), "one number for each sample")
    return (SCALAR,)
