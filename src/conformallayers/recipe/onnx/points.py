"""Operations on points, in ONNX: one function each, of (operation, graph, *input values).

Nothing here branches on values. Where a guard such as ``Max`` may lose a NaN in some runtime, τ is NaN as
well, and with it the whole sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...formula import FUNCTIONS
from .. import point_operations as point
from ..point_operations import LARGEST_COORDINATE
from .graph import WIDE, OnnxGraph, Value
from .layers import RUN

__all__ = ["RUN"]
# Functions of formulas; m = 1 is a number.
FORMULA: dict[str, Callable[..., Any]] = {
    name: partial(OnnxGraph.apply, name.capitalize()) for name in FUNCTIONS
} | {"*": lambda a, b: b if a == 1.0 else a * b}
LONG = 2**12  # numbers that are cast to float64 before they are added
ROW = 2**8  # numbers of a longer map that are added in float32: ONNX Runtime adds them one by one

_SHORTEST = 2**3  # numbers of such a row that are worth a reduction


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, graph: OnnxGraph, x: Value) -> tuple[Value, float, Value]:
    if op.offset == 0:
        tau = reduced("ReduceL2", x)
    else:
        tau = (reduced("ReduceSumSquare", x) + op.offset**2).node("Sqrt")
    return x, 1.0, tau


@RUN.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, graph: OnnxGraph, z: Value) -> Value:
    return reduced("ReduceSumSquare", z).weighted(op.weight)


@RUN.runs(point.Rescale)
def _rescale(
    op: point.Rescale, graph: OnnxGraph, z: Value, m: Value | float, tau: Value
) -> tuple[Value, Value, Value, Value]:
    # The divisor is 1 or the peak: it rounds each number once, and a power of two needs a logarithm.
    peak = abs(z).reduce_sample("ReduceMax")
    high = float(np.finfo(z.dtype).max) ** 0.3
    fits = peak.node("Equal", peak.node("Clip", 1 / high, high))
    divisor = fits.node("Or", peak.node("Equal", 0.0)).node("Where", 1.0, peak)
    z, factor = z / divisor, divisor.scalar()
    return z, factor * m, tau / factor, reduced("ReduceSumSquare", z).weighted(op.weight)


@RUN.runs(point.QuadraticForm)
def _quadratic_form(op: point.QuadraticForm, graph: OnnxGraph, x: Value) -> Value:
    return reduced("ReduceSum", x @ graph.constant(op.form) * x).weighted(op.weight)


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, graph: OnnxGraph, x: Value) -> Value:
    # Batches come last, so that one product with stacked blocks takes the windows of all samples.
    band, (count,) = graph.constant(op.band), x.shape
    full, span, size = band.shape
    columns = x.node("Transpose", perm=[1, 0])  # (n, batch)
    first = np.arange(full)[:, None] * size
    windows = columns.node("Gather", first + np.arange(span), shape=(full, span), axis=0)
    images = graph.add("MatMul", band.transpose(0, 2, 1), windows, shape=(full, size))
    others = images
    if not op.factor:
        others = columns.node("Gather", first + np.arange(size), shape=(full, size), axis=0)
    value = _total(images * others, [0, 1])
    if op.width:
        end = x.slice(1, count - op.width * op.size, count)
        image = end @ graph.constant(op.last)
        value = value + reduced("ReduceSum", image * (image if op.factor else end))
    return value.weighted(op.weight)


def _total(products: Value, axes: list[int]) -> Value:
    """Add products in float64 along axes that are all but that of the batch."""
    wide = products.cast(WIDE)
    return wide.node("ReduceSum", np.array(axes), shape=(), keepdims=0).scalar()


@RUN.runs(point.Advance)
def _advance(
    op: point.Advance, graph: OnnxGraph, tau: Value, m: Value | float, *energies: Value
) -> Value:
    zero, formula = tau.node("Equal", 0.0), op.parsed
    safe = zero.node("Where", 1.0, tau) if op.divides else tau
    found: Value = formula.evaluate({"tau": safe, "m": m, "n": graph.total(energies)}, FORMULA)
    return zero.node("Where", 0.0, found) if op.divides else found


@RUN.runs(point.Divide)
def _divide(op: point.Divide, graph: OnnxGraph, v: Value, tau: Value, m: object) -> Value:
    return v.scale(_inverse(tau, op.scale))


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, graph: OnnxGraph, z: Value, m: Value | float, tau: Value
) -> tuple[Value, Value, Value]:
    t = (tau if isinstance(m, float) else m * tau).weighted(op.coordinate)
    return z.scale(_inverse(tau, op.scale)), t.node("Min", LARGEST_COORDINATE), tau.node("Sign")


def reduced(kind: str, z: Value) -> Value:
    """Reduce samples to scalars in float64; long maps add short rows in their own dtype first."""
    count, row, rank = prod(z.shape), z.shape[-1], len(z.graph.scalar_shape)
    if z.dtype != WIDE and count > LONG:
        if not _SHORTEST <= row <= ROW:
            row = max(n for n in range(1, ROW + 1) if count % n == 0)
            z = z.reshape((*[1] * (rank - 1), count // row, row))
        if row >= _SHORTEST:
            # Without the last axis, a map of one axis more has the rank of scalars already.
            z = z.reduce(kind, [len(z.shape)], keepdims=len(z.shape) == rank)
            kind = "ReduceSum" if kind == "ReduceSumSquare" else kind
    return z.cast(WIDE).reduce_sample(kind).scalar()


def _inverse(tau: Value, scale: float = 1.0) -> Value:
    """Return ``scale/τ``, and 0 where τ is."""
    return tau.node("Equal", 0.0).node("Where", 0.0, scale / tau)
