"""Operations on points in C: one function each, of (operation, program), which appends statements.

Scalars of a sample are variables of type double; see ``point_operations.py`` for the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...formula import FUNCTIONS, OPERATORS, Formula
from .. import point_operations as point
from .constants import number
from .layers import WRITE
from .program import Program

__all__ = ["WRITE"]


@WRITE.runs(point.Normalize)
def _normalize(op: point.Normalize, program: Program) -> None:
    (x,), (unit, m, tau) = op.inputs, op.outputs
    source = program.read(x)
    squares = f"inner{program.suffix(x)}({source}, {source}, {program.count(x)})"
    program.alias(unit, x)
    program.define(m, "1.0")
    program.define(
        tau, f"sqrt({squares} + {number(op.offset**2)})" if op.offset else f"sqrt({squares})"
    )


@WRITE.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, program: Program) -> None:
    (z,), z_in_c = op.inputs, program.read(op.inputs[0])
    call = f"inner{program.suffix(z)}({z_in_c}, {z_in_c}, {program.count(z)})"
    program.define(op.outputs[0], f"{number(op.weight)} * {call}")
    program.multiply_adds += program.count(z)


@WRITE.runs(point.Rescale)
def _rescale(op: point.Rescale, program: Program) -> None:
    (z, m, tau), (scaled, m_next, tau_next, n) = op.inputs, op.outputs
    suffix, count, source = program.suffix(z), program.count(z), program.read(z)
    old_m, old_tau = program.scalar(m), program.scalar(tau)
    squares, c = (program.identifier(f"s_{n}_{what}") for what in ("squares", "power"))
    program.emit(
        f"const double {squares} = inner{suffix}({source}, {source}, {count});",
        f"const double {c} = power_near({squares});",
    )
    target = program.write(scaled, over=z)
    program.call("multiply", z, source, target, count, c)
    program.define(m_next, f"{old_m} / {c}")
    program.define(tau_next, f"{old_tau} * {c}")
    program.define(n, f"{number(op.weight)} * ({c} * {c} * {squares})")
    program.multiply_adds += count


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
    v, tau, _ = op.inputs
    _scale(program, v, op.outputs[0], f"ratio({number(op.scale)}, {program.scalar(tau)})")


def _scale(program: Program, x: str, y: str, factor: str) -> None:
    source, target = program.read(x), program.write(y, over=x)
    program.call("multiply", x, source, target, program.count(x), factor)


@WRITE.runs(point.Rebase)
def _rebase(op: point.Rebase, program: Program) -> None:
    (z, m, tau), (scaled, coordinate, alive) = op.inputs, op.outputs
    old_m, t = program.scalar(m), program.scalar(tau)
    _scale(program, z, scaled, f"ratio({number(op.scale)}, {t})")
    program.define(coordinate, f"limited({old_m} * {number(op.coordinate)} * {t})")
    program.define(alive, f"{t} != {t} ? {t} : {t} != 0 ? 1.0 : 0.0")
