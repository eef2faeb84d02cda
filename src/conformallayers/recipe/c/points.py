"""Operations on points in C: one function each, of (operation, program), which appends statements.

Scalars of a sample are variables of type double; see ``point_operations.py`` for the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...errors import refusal
from .. import point_operations as point
from ..point_operations import Key
from .constants import form, number
from .layers import WRITE
from .program import Program
from .text import helpers

__all__ = ["WRITE"]


@WRITE.runs(point.Normalize)
def _normalize(op: point.Normalize, program: Program) -> None:
    (x,), (unit, m, tau) = op.inputs, op.outputs
    suffix, count, source = program.suffix(x), program.count(x), program.read(x)
    peak = program.define(m, f"(double)peak{suffix}({source}, {count})")
    target = program.write(unit, over=x)
    program.call("divide", x, source, program.factor(peak, x), target, count)
    program.define(tau, f"sqrt(squares{suffix}({target}, {count}))")


@WRITE.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, program: Program) -> None:
    (z,) = op.inputs
    call = f"squares{program.suffix(z)}({program.read(z)}, {program.count(z)})"
    program.define(op.outputs[0], f"{number(op.weight)} * {call}")
    program.multiply_adds += program.count(z)


@WRITE.runs(point.Dot)
def _dot(op: point.Dot, program: Program) -> None:
    a, b = op.inputs
    call = f"inner{program.suffix(a)}({program.read(a)}, {program.read(b)}, {program.count(a)})"
    program.define(op.outputs[0], f"{number(op.weight)} * {call}")
    program.multiply_adds += program.count(a)


@WRITE.runs(point.Rescale)
def _rescale(op: point.Rescale, program: Program) -> None:
    (z, m, tau), (scaled, m_next, tau_next, n) = op.inputs, op.outputs
    suffix, count, source = program.suffix(z), program.count(z), program.read(z)
    old_m, old_tau = program.scalar(m), program.scalar(tau)
    squares, c = (program.identifier(f"s_{n}_{what}") for what in ("squares", "power"))
    program.say(
        f"const double {squares} = squares{suffix}({source}, {count});",
        f"const double {c} = nearer({squares});",
    )
    target = program.write(scaled, over=z)
    program.call("multiply", z, source, program.factor(c, z), target, count)
    program.define(m_next, f"{old_m} / {c}")
    program.define(tau_next, f"{old_tau} * {c}")
    program.define(n, f"{number(op.weight)} * ({c} * {c} * {squares})")
    program.multiply_adds += count


@WRITE.runs(point.QuadraticForm)
def _quadratic_form(op: point.QuadraticForm, program: Program) -> None:
    (x,), (n,) = op.inputs, op.outputs
    if program.wide(x):
        stored = program.weights(op.form, form, x)
    else:
        values = program.array(op.form)
        stored = program.keep(op.form, f"form {n}", lambda to: program.proofs.store(to, op, values))
    call = f"form{stored.suffix}({stored.arguments}, {program.read(x)}, {program.count(x)})"
    program.define(n, f"{number(op.weight)} * {call}")
    program.multiply_adds += stored.entries


@WRITE.runs(point.Advance)
def _advance(op: point.Advance, program: Program) -> None:
    t, m, *energies = op.inputs
    tau, n = program.scalar(t), " + ".join(program.scalar(energy) for energy in energies)
    n = f"({n})" if len(energies) > 1 else n
    if op.rule == "published":
        program.define(op.outputs[0], f"{tau} + {program.scalar(m)} * {n}")
    elif op.rule == "projective":
        program.define(op.outputs[0], f"{tau} + ratio({n}, {tau})")
    else:
        q = f"ratio(ratio({n}, {tau}), {tau})"
        program.define(op.outputs[0], f"{tau} * {_growth(op.rule, q)}")


def _growth(rule: str, q: str) -> str:
    """Call the growth of a rule."""
    function = f"growth_{rule}"
    if function not in helpers():
        remedy = "Use another activation, or another runtime."
        raise refusal("export_c(folded)", "activations that C has", rule, remedy)
    return f"{function}({q})"


@WRITE.runs(point.Divide)
def _divide(op: point.Divide, program: Program) -> None:
    v, tau, _ = op.inputs
    _scale(program, v, op.outputs[0], f"ratio({number(op.scale)}, {program.scalar(tau)})")


def _scale(program: Program, x: str, y: str, factor: str) -> None:
    source, target = program.read(x), program.write(y, over=x)
    program.call("multiply", x, source, program.factor(factor, x), target, program.count(x))


@WRITE.runs(point.Rebase)
def _rebase(op: point.Rebase, program: Program) -> None:
    (z, m, tau), (scaled, coordinate, alive) = op.inputs, op.outputs
    old_m, t = program.scalar(m), program.scalar(tau)
    _scale(program, z, scaled, f"ratio({number(op.scale)}, {t})")
    program.define(coordinate, f"limited({old_m} * {number(op.coordinate)} * {t})")
    program.define(alive, f"{t} != {t} ? {t} : {t} != 0 ? 1.0 : 0.0")


@WRITE.runs(point.Grow)
def _grow(op: point.Grow, program: Program) -> None:
    m, tau, *values = op.inputs
    dots = values.pop(0) if op.constant_parts else None
    forms, sites = values[: op.form_count], values[op.form_count :]
    t = program.scalar(tau)
    result = program.identifier(f"s_{op.outputs[0]}_growth")
    program.say(f"double {result};", "{", *_coefficients(op, program, sites, t))
    program.say("double q = 0;")
    used = iter(forms)
    for a in range(len(op.linear)):
        for b in range(a, len(op.linear)):
            twice = "" if a == b else "2 * "
            program.say(f"q += {twice}k[{a}] * k[{b}] * {program.scalar(next(used))};")
    if op.gram is not None and dots is not None:
        count = len(op.constant_parts)
        products = program.exact(op.gram, "double")
        program.say(f"q += gram(c, {products}, {count});")
        for a in range(len(op.linear)):
            place = program.read(dots, a * count)
            program.say(f"q += 2 * k[{a}] * mixed{program.suffix(dots)}(c, {place}, {count});")
    program.say("q = q < 0 ? 0 : q;")
    if op.rule == "published":
        coordinate = f"{program.scalar(m)} * {t} * {number(op.factor)}"
        for first, last in _spans(op.coordinate):
            coordinate = f"grown({coordinate}, g, {first}, {last})"
        program.say(f"{result} = limited(1 + {coordinate} * q);", "}")
    else:
        program.say(f"{result} = limited({_growth(op.rule, 'q')});", "}")
    program.define(op.outputs[0], result)


@WRITE.runs(point.Combine)
def _combine(op: point.Combine, program: Program) -> None:
    (v, tau, *sites), (y,) = op.inputs, op.outputs
    count, parts = len(op.constant_parts), len(op.linear)
    lines = _coefficients(op, program, sites, program.scalar(tau), f"{number(op.scale)} * ")
    program.say("{", *lines)
    vectors = "0, 0, 0"
    if op.vectors is not None:
        vectors = f"{program.exact(op.vectors, program.ctype(v))}, c, {count}"
    arguments = f"{program.read(v)}, k, {parts}, {vectors}, {program.write(y)}"
    program.say(f"combine{program.suffix(v)}({arguments}, {program.count(y)});", "}")
    program.multiply_adds += (parts + count) * program.count(y)


def _coefficients(
    op: point.Grow | point.Combine,
    program: Program,
    sites: Sequence[str],
    tau: str,
    scale: str = "",
) -> Iterator[str]:
    """Declare g, the growths, and k and c, the coefficients of linear and of constant parts."""
    coordinate = op.coordinate if isinstance(op, point.Grow) and op.rule == "published" else ()
    if any([*op.linear, *op.constant_parts, coordinate]):
        yield from _list("g", [program.scalar(site) for site in sites])
    yield from _list("k", [scale + _over(f"ratio(1, {tau})", key) for key in op.linear])
    alive = f"({tau} == 0 ? 0.0 : 1.0)"
    yield from _list("c", [_over(alive, key) for key in op.constant_parts])


def _list(name: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield f"const double {name}[{len(items)}] = {{"
        yield from (f"{item}," for item in items)
        yield "};"


def _spans(key: Key) -> Iterator[tuple[int, int]]:
    """Yield the stretches of a key that follow each other.

    Examples:
        >>> list(_spans((0, 1, 2, 5)))
        [(0, 3), (5, 6)]
    """
    start = 0
    for index in range(1, len(key) + 1):
        if index == len(key) or key[index] != key[index - 1] + 1:
            yield key[start], key[index - 1] + 1
            start = index


def _over(first: str, key: Key) -> str:
    for start, stop in _spans(key):
        first = f"over({first}, g, {start}, {stop})"
    return first
