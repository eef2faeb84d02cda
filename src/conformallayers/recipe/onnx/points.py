"""Operations on points, in ONNX: one function each, of (operation, graph, *input values).

Nothing here branches on values. t is kept from 0 by its offset or by a number far below every norm; samples of
zeros stay 0 without biases, and with biases a flag makes them 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...nn.formula import FUNCTIONS
from .. import point_operations as point
from ..point_operations import LARGEST_COORDINATE
from .graph import WIDE, OnnxGraph, Value
from .layers import RUN

__all__ = ["RUN"]
LONG = 2**12  # numbers that are cast to float64 before they are added
WHOLE = 2**11  # numbers that one convolution adds up: ONNX Runtime adds products in blocks
ROW = 2**8  # numbers that it adds one by one
_ROWS = 2**10  # channels that one convolution adds up
_LEAST = 1e-30  # keeps t from 0, far below the least norm
_SHORTEST = 2**3  # numbers of a row that are worth a reduction


@dataclass(frozen=True)
class Sum:
    """``Σ weight·parts + number``, added up by one node as soon as something else needs the value.

    Parts are features (batch, channels, …) whose entries are all added, or scalars of samples.
    """

    graph: OnnxGraph
    terms: tuple[tuple[Value, float], ...]
    number: float = 0.0

    def __add__(self, other: Sum | Value | float) -> Sum:
        if isinstance(other, float):
            return replace(self, number=self.number + other)
        if isinstance(other, Value):
            return replace(self, terms=((other, 1.0), *self.terms))
        return replace(self, terms=self.terms + other.terms, number=self.number + other.number)

    __radd__ = __add__

    def __mul__(self, other: Value | float) -> Sum | Value:
        if not isinstance(other, float):
            return self.value() * other
        terms = tuple((parts, weight * other) for parts, weight in self.terms)
        return Sum(self.graph, terms, self.number * other)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Any:
        return self + -1.0 * other

    def __rsub__(self, other: Any) -> Any:
        return -1.0 * self + other

    def __truediv__(self, other: Sum | Value | float) -> Any:
        return self * (1 / other) if isinstance(other, float) else self.value() / _value(other)

    def __rtruediv__(self, other: Value | float) -> Value:
        return other / self.value()

    def value(self) -> Value:
        """Append the sum."""
        graph, parts = self.graph, [x for x, _ in self.terms]
        rank = max(len(x.shape) for x in parts)
        convolves = (
            rank > 1 and graph.scalar_dtype != WIDE and sum(x.shape[0] for x in parts) <= _ROWS
        )
        if not convolves or {len(x.shape) for x in parts} != {rank}:
            totals = (x.scalar() if prod(x.shape) == 1 else reduced("ReduceSum", x) for x in parts)
            values = [x.weighted(weight) for x, (_, weight) in zip(totals, self.terms, strict=True)]
            return graph.total(values) + self.number if self.number else graph.total(values)
        if len(parts) > 1 or prod(parts[0].shape) > WHOLE:
            return _weighted_sum(graph, [_averaged(*term) for term in self.terms], self.number)
        return _weighted_sum(graph, list(self.terms), self.number)


def _averaged(parts: Value, weight: float) -> tuple[Value, float]:
    """Return the means of channels instead of their entries."""
    count = prod(parts.shape[1:])
    if count == 1:
        return parts, weight
    shape = (parts.shape[0], *[1] * len(parts.shape[1:]))
    return parts.node("GlobalAveragePool", shape=shape), weight * count


def _weighted_sum(graph: OnnxGraph, terms: list[tuple[Value, float]], number: float) -> Value:
    """Add all entries by one convolution, whose bias is the number."""
    features = graph.concatenate([x for x, _ in terms])
    weights = [np.full((1, *x.shape), weight) for x, weight in terms]
    bias = [np.array([number])] if number else []
    shape = (1,) * len(features.shape)
    return features.node("Conv", np.concatenate(weights, 1), *bias, shape=shape).scalar()


def _value(x: Sum | Value | float) -> Any:
    return x.value() if isinstance(x, Sum) else x


# Functions of formulas.
FORMULA: dict[str, Callable[..., Any]] = {
    name: partial(lambda kind, x: _value(x).node(kind), name.capitalize()) for name in FUNCTIONS
}


@dataclass(frozen=True)
class Tau:
    """A coordinate that is not 0, and a flag that is 0 for samples of zeros, if biases can tell."""

    value: Sum | Value | float
    alive: Value | None = None

    def divide(self, z: Value, scale: float) -> Value:
        """Append ``scale·z/τ``."""
        if isinstance(self.value, float):
            found = z.weighted(scale / self.value)
        else:
            tau: Value = _value(self.value * (1 / scale) if scale != 1 else self.value)
            found = z / tau.cast(z.dtype).column(z)
        return found if self.alive is None else found.scale(self.alive)


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, graph: OnnxGraph, x: Value) -> tuple[Value, float, Tau]:
    if graph.normalizes(op):
        scale = np.full(x.shape, prod(x.shape) ** -0.5)
        epsilon = op.offset**2 / prod(x.shape)
        return x.node("RMSNormalization", scale, axis=1, epsilon=epsilon), 1.0, Tau(1.0)
    if op.offset:
        return x, 1.0, Tau((reduced("ReduceSumSquare", x) + op.offset**2).node("Sqrt"))
    length = reduced("ReduceL2", x)
    biased = any(isinstance(other, point.Rebase) for other in graph.recipe.operations)
    return x, 1.0, Tau(length + _LEAST, length.node("Sign") if biased else None)


@RUN.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, graph: OnnxGraph, z: Value) -> Sum | Value:
    (n,) = op.outputs
    readers = [other for other in graph.recipe.operations if n in other.inputs]
    if n == graph.recipe.output or not all(isinstance(x, point.Advance) for x in readers):
        return reduced("ReduceSumSquare", z).weighted(op.weight)
    if graph.scalar_dtype == WIDE or len(z.shape) < 2 or prod(z.shape[1:]) > LONG:
        return Sum(graph, ((reduced("ReduceSumSquare", z), op.weight),))
    return Sum(graph, ((z * z, op.weight),))


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, graph: OnnxGraph, x: Value) -> Value:
    # Batches come last, so that one product with stacked blocks takes the windows of all samples.
    band, (count,) = graph.constant(op.band), x.shape
    full, span, size = band.shape
    columns = x.node("Transpose", perm=[1, 0])  # (n, batch)
    first = np.arange(full)[:, None] * size
    windows = columns.node("Gather", first + np.arange(span), shape=(full, span), axis=0)
    images = graph.add("MatMul", band.transpose(0, 2, 1), windows, shape=(full, size))
    products = (images * images).cast(WIDE)
    value = products.node("ReduceSum", np.array([0, 1]), shape=(), keepdims=0).scalar()
    if op.width:
        image = x.slice(1, count - op.width * op.size, count) @ graph.constant(op.last)
        value = value + reduced("ReduceSumSquare", image)
    return value.weighted(op.weight)


@RUN.runs(point.Advance)
def _advance(op: point.Advance, graph: OnnxGraph, tau: Tau, m: Any, *energies: Sum | Value) -> Tau:
    total: Any = energies[0]
    for energy in energies[1:]:
        total = total + energy
    values = {"tau": tau.value, "m": m, "n": total}
    return replace(tau, value=op.parsed.evaluate(values, FORMULA))


@RUN.runs(point.Divide)
def _divide(op: point.Divide, graph: OnnxGraph, v: Value, tau: Tau, m: object) -> Value:
    return tau.divide(v, op.scale)


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, graph: OnnxGraph, z: Value, m: Any, tau: Tau
) -> tuple[Value, Any, Tau]:
    coordinate = _value(tau.value * (m * op.coordinate))
    if isinstance(coordinate, Value) and coordinate.dtype == WIDE:
        coordinate = coordinate.node("Min", LARGEST_COORDINATE)
    return tau.divide(z, op.scale), coordinate, replace(tau, value=1.0)


def reduced(kind: str, z: Value) -> Value:
    """Reduce samples to scalars: rows in float32 first, then the rest in the dtype of scalars."""
    count, row, rank = prod(z.shape), z.shape[-1], len(z.graph.scalar_shape)
    if count > ROW:
        if not _SHORTEST <= row <= ROW:
            row = max(n for n in range(1, ROW + 1) if count % n == 0)
            z = z.reshape((*[1] * (rank - 1), count // row, row))
        if row >= _SHORTEST:
            # Without the last axis, a map of one axis more has the rank of scalars already.
            z = z.reduce(kind, [len(z.shape)], keepdims=len(z.shape) == rank)
            kind = "ReduceSum" if kind == "ReduceSumSquare" else kind
    wide = z.graph.scalar_dtype == WIDE or prod(z.shape) > LONG
    return z.cast(WIDE if wide else z.dtype).reduce_sample(kind).scalar()
