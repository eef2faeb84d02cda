"""Operations on points in C: one function each, of (operation, program), which appends statements.

Scalars of a sample are variables of type double; see ``point_operations.py`` for the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...nn.formula import FUNCTIONS, OPERATORS, Formula
from .. import point_operations as point
from .constants import number
from .layers import factor_text, multiply, scale
from .program import Program
from .shapes import WRITE, dense, first

__all__ = ["WRITE"]


@WRITE.runs(point.Normalize)
def _normalize(op: point.Normalize, program: Program) -> None:
    (x,), (unit, m, tau) = op.inputs, op.outputs
    program.alias(unit, x)
    program.define(m, "1.0")
    offset = f" + {number(op.offset**2)}" if op.offset else ""
    program.define(tau, f"sqrt({_squares(program, x)}{offset})")


def _squares(program: Program, z: str) -> str:
    """Return the call that computes a squared norm."""
    program.multiply_adds += program.count(z)
    return f"squares({program.read(dense(program, z))}, {program.count(z)})"


@WRITE.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, program: Program) -> None:
    program.define(op.outputs[0], f"{number(op.weight)} * {_squares(program, op.inputs[0])}")


@WRITE.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, program: Program) -> None:
    """Append the product with the band as one matrix, and the energy of that."""
    x, (n,), (size, width) = first(program, op.inputs[0]), op.outputs, (op.size, op.width)
    total = program.count(x)
    band = np.zeros((total, total))
    for start, block in zip(range(0, total, size), program.constant(op.band), strict=False):
        band[start : start + (width + 1) * size, start : start + size] += block
    rest = total - width * size
    band[rest:, rest:] += program.constant(op.last)
    image, bias = program.temporary(x), program.array(f"{n}_bias", np.zeros(total))
    multiply(program, op.band, band.T, (program.read(x), bias, program.write(image)))
    program.define(n, f"{number(op.weight)} * {_squares(program, image)}")


@WRITE.runs(point.Advance)
def _advance(op: point.Advance, program: Program) -> None:
    tau, formula = program.scalar(op.inputs[0]), op.parsed
    found = formula_text(program, op.inputs, formula, "({} * {})")
    program.define(op.outputs[0], f"{tau} == 0 ? 0 : {found}" if op.divides else found)


def formula_text(program: Program, inputs: Sequence[str], formula: Formula, product: str) -> str:
    """Return a formula of τ, m and energies in C."""
    tau, m, *energies = (program.scalar(name) for name in inputs)
    n = " + ".join(energies)
    values = {"tau": tau, "m": m, "n": f"({n})" if len(energies) > 1 else n}
    functions = {name: f"{name}({{}})".format for name in FUNCTIONS}
    functions |= {sign: f"({{}} {sign} {{}})".format for sign in OPERATORS} | {"*": product.format}
    text: str = formula.evaluate(values, functions, number)
    return text


@WRITE.runs(point.Divide)
def _divide(op: point.Divide, program: Program) -> None:
    scale(program, op.inputs[0], op.outputs[0], factor_text(op, program))


@WRITE.runs(point.Rebase)
def _rebase(op: point.Rebase, program: Program) -> None:
    (z, m, tau), (scaled, coordinate, alive) = op.inputs, op.outputs
    old_m, t = program.scalar(m), program.scalar(tau)
    scale(program, z, scaled, factor_text(op, program))
    program.define(coordinate, f"limited({old_m} * {number(op.coordinate)} * {t})")
    program.define(alive, f"{t} != {t} ? {t} : {t} != 0 ? 1.0 : 0.0")
