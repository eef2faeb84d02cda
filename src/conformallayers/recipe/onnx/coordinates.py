"""Points in ONNX without guards: few nodes, for recipes whose coordinates cannot be 0.

With an offset t is never 0, and without biases a zero sample stays 0 whatever its coordinate is. So a sample
is divided by t at once, ``x̂ = x/t`` with m = t and τ = 1. m is kept as its inverse and τ as a fraction, so
that published activations only add energies to the numerator: ``τ + m·n = (r + n)/r`` with ``r = 1/m``.
Without an offset, t is at least the smallest normal number of the dtype. With an offset that is not small, one
node, RMSNormalization, normalises samples of entries up to 1e32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import numpy as np

from .. import layer_operations as layer
from .. import point_operations as point
from ..operation import Operation, Runtime
from ..recipe import Recipe
from .graph import WIDE, OnnxGraph, Value, between
from .layers import avg_pool
from .merge import RmsPool, is_shifted_behind, mean_windows, moderate, pooling_of, rounded
from .points import LONG, ROW, RUN, reduced

DIRECT = Runtime(RUN.name)
DIRECT.update(RUN)
_ROWS = 2**10  # numbers that ONNX Runtime adds in lanes, in float32
_NARROWED = 2.0**-50  # times entries up to 1e32, squares do not overflow
_LEAST_EPSILON = 1e-33  # beside which squares that underflow do not matter
_RMS_OPSET = 23  # the first with RMSNormalization
_READS = {point.Advance: (1, 0), point.Rebase: (1, 2), point.Divide: (2, 1)}  # places of m and τ
_GUARDED = point.Rescale, layer.Cast  # need guards, or float64
Peak = Callable[[], Value]  # 1/m, a scalar of samples that the first call appends
_LOSES_NAN = layer.MaxPool, layer.AdaptiveMaxPool, layer.PRelu


def is_direct(recipe: Recipe, dtype: np.dtype[Any]) -> bool:
    """Tell whether the coordinates of a recipe need no guards, and only the usual operations read them."""
    operations = recipe.operations
    offsets = [op.offset for op in operations if isinstance(op, point.Normalize)]
    biased = any(isinstance(op, point.Rebase) for op in operations)
    if dtype == WIDE or recipe.wide or any(isinstance(op, _GUARDED) for op in operations):
        return False
    if not offsets or not all(1e-30 < c < 1e30 or (c == 0 and not biased) for c in offsets):
        return False
    coordinates = {name for op in operations for name in _coordinates(op)}
    inside = between(recipe)
    return recipe.output not in coordinates and all(
        _reads_as_usual(op, coordinates) and not (_loses_nan(op) and op.inputs[0] in inside)
        for op in operations
    )


def _coordinates(op: Operation) -> tuple[str, ...]:
    """Return the outputs of an operation that are m or τ."""
    if isinstance(op, (point.Normalize, point.Rebase)):
        return op.outputs[1:]
    return op.outputs if isinstance(op, point.Advance) else ()


def _reads_as_usual(op: Operation, coordinates: set[str]) -> bool:
    if isinstance(op, point.Advance) and op.formula not in ("tau + m * n", "tau + n / tau"):
        return False
    places = _READS.get(type(op), ())
    return all((name in coordinates) == (i in places) for i, name in enumerate(op.inputs))


def _loses_nan(op: Operation) -> bool:
    """Tell whether ONNX Runtime loses NaN in an operation that is otherwise a single node."""
    leaky = isinstance(op, layer.Elementwise) and op.function == "leaky_relu"
    return leaky or isinstance(op, _LOSES_NAN)


@dataclass(frozen=True)
class Energy:
    """An energy ``weight·Σ parts``, with one part for each channel."""

    parts: Value
    weight: float


@dataclass(frozen=True)
class Tau:
    """τ as a fraction: the sum of ``terms`` divided by ``divisor``, None for 1."""

    terms: tuple[Value | Energy | float, ...] = (1.0,)
    divisor: Value | None = None

    @property
    def is_one(self) -> bool:
        """Whether no activation has changed τ since the last division."""
        return self.terms == (1.0,)

    def value(self, graph: OnnxGraph) -> Value:
        """Append the fraction."""
        above = _sum(graph, self.terms)
        return above if self.divisor is None else above / self.divisor


def _sum(graph: OnnxGraph, terms: Sequence[Value | Energy | float]) -> Value:
    """Add scalars and energies, or energies and a number: all parts by one node where ranks agree.

    A 1×1 convolution weighs the parts of energies, adds them and adds the number as its bias.
    """
    values = [term for term in terms if isinstance(term, Value)]
    energies = [term for term in terms if isinstance(term, Energy)]
    numbers = [term for term in terms if isinstance(term, float)]
    features = [*values, *(n.parts for n in energies)]
    ranks, count = {len(v.shape) for v in features}, sum(v.shape[0] for v in features)
    alike = len(ranks) == 1 and count <= _ROWS and _scalar_dtype(graph) == graph.dtype
    if energies and alike and not values:
        weights = np.concatenate([np.full(n.parts.shape[0], n.weight) for n in energies])
        weight = weights.reshape(1, -1, *[1] * (len(features[0].shape) - 1))
        bias = [np.array(numbers)] if numbers else []
        shape = (1,) * len(features[0].shape)
        return _scalar(graph.concatenate(features).node("Conv", weight, *bias, shape=shape))
    if energies and alike and not numbers:
        parts = graph.concatenate([*values, *(n.parts.weighted(n.weight) for n in energies)])
        return _scalar(parts.reduce_sample("ReduceSum"))
    for n in energies:
        values.append(_scalar(n.parts.reduce_sample("ReduceSum")).weighted(n.weight))
    if len(values) == 1 and not numbers:
        return values[0]
    return graph.add("Add" if len(values + numbers) == 2 else "Sum", *values, *numbers)


def _is_published(recipe: Recipe) -> bool:
    """Tell whether some activation reads m."""
    advances = (op for op in recipe.operations if isinstance(op, point.Advance))
    return any("m" in op.parsed.heads() for op in advances)


def _scalar_dtype(graph: OnnxGraph) -> np.dtype[Any]:
    """Return float64 where scalars could leave the range of float32, as behind published activations."""
    published = _is_published(graph.recipe)
    factors = [1.0]
    for op in graph.recipe.operations:
        if isinstance(op, point.Rebase):
            factors += [op.scale, np.inf if published else 1.0]
        elif isinstance(op, (point.SumSquares, point.Divide)):
            factors.append(op.weight if isinstance(op, point.SumSquares) else op.scale)
        elif isinstance(op, (point.QuadraticForm, point.BandedForm)):
            factors.append(np.inf)
    return graph.dtype if all(moderate(abs(factor)) for factor in factors) else WIDE


def _scalar(x: Value) -> Value:
    return x.cast(_scalar_dtype(x.graph)).reshape(x.graph.scalar_shape)


@DIRECT.runs(point.Normalize)
def _normalize(op: point.Normalize, graph: OnnxGraph, x: Value) -> tuple[Value, Peak, Tau]:
    def inverse() -> Value:
        return _square_of_t(op, x).node("Pow", -0.5)

    peak, count = cache(lambda: _scalar(inverse())), prod(x.shape)
    epsilon = op.offset**2 / count * _NARROWED**2
    usual = _LEAST_EPSILON < epsilon < 1 and is_shifted_behind(graph.recipe, op.outputs[0])
    if graph.opset < _RMS_OPSET or count > LONG or not usual or _is_published(graph.recipe):
        return x.scale(inverse()), peak, Tau()
    scale = np.full(x.shape, count**-0.5)
    unit = (x * _NARROWED).node("RMSNormalization", scale, axis=1, epsilon=epsilon)
    return unit, peak, Tau()


def _square_of_t(op: point.Normalize, x: Value) -> Value:
    wide = x.cast(WIDE)
    # ONNX Runtime adds numbers in lanes, but squares one by one.
    total = (wide * wide).reduce_sample("ReduceSum")
    if op.offset:
        return total + op.offset**2
    return total.node("Max", float(np.finfo(x.dtype).tiny) ** 2)


@DIRECT.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, graph: OnnxGraph, z: Value) -> Value | Energy:
    pool = pooling_of(graph.recipe.operations, op.inputs[0])
    windows = mean_windows(z.shape, pool)
    if windows is None:
        return _total(z).weighted(op.weight)
    squares = z * z
    if pool is not None and windows == pool.averages.kernel:
        squares = avg_pool(pool.averages, graph, squares)
    means = squares.node("GlobalAveragePool", shape=(z.shape[0], *[1] * len(windows)))
    return Energy(means, rounded(op.weight * prod(z.shape[1:])))


def _total(z: Value) -> Value:
    """Add the squares of samples in two steps, so that no sum in float32 is long."""
    rank, count = len(z.shape), prod(z.shape)
    sizes = list(accumulate(reversed(z.shape), mul))[:-1]
    fitting = [n for n in sizes if n <= ROW and count // n <= _ROWS]
    if not fitting:
        return _scalar(reduced("ReduceSumSquare", z))
    axes = sizes.index(min(fitting, key=lambda n: n + count // n)) + 1
    rows = z.reduce("ReduceSumSquare", range(rank - axes + 1, rank + 1))
    return _scalar(rows.reduce_sample("ReduceSum"))


@DIRECT.runs(point.Advance)
def _advance(
    op: point.Advance, graph: OnnxGraph, tau: Tau, m: Peak, *energies: Value | Energy
) -> Tau:
    terms = [n if isinstance(n, Energy) else _scalar(n) for n in energies]
    if "m" in op.parsed.heads():
        r = m()
        before: Sequence[Value | Energy | float] = (r,)
        if tau.divisor == r:
            before = tau.terms
        elif not tau.is_one:
            before = (tau.value(graph) * r,)
        return Tau((*before, *terms), r)
    if tau.is_one:
        return Tau((1.0, *terms))
    value = tau.value(graph)
    return Tau((value, _sum(graph, terms) / value))


@DIRECT.runs(point.Divide)
def _divide(op: point.Divide, graph: OnnxGraph, v: Value, tau: Tau, m: Peak) -> Value:
    return _divided(v, tau, op.scale)


@DIRECT.runs(point.Rebase)
def _rebase(
    op: point.Rebase, graph: OnnxGraph, z: Value, m: Peak, tau: Tau
) -> tuple[Value, Peak, Tau]:
    def inverse() -> Value:
        r = m() * (1 / op.coordinate)
        return r if tau.is_one else r / tau.value(graph)

    return _divided(z, tau, op.scale), cache(inverse), Tau()


def _divided(z: Value, tau: Tau, scale: float) -> Value:
    """Append ``scale·z/τ``."""
    if tau.is_one:
        return z.weighted(scale)
    above = _sum(z.graph, tau.terms)
    if tau.divisor is not None:
        return z.scale((tau.divisor / above).weighted(scale))
    if scale != 1.0:
        return z.scale(scale / above)
    return z / above.cast(z.dtype).column(z)


@DIRECT.runs(RmsPool)
def _rms_pool(op: RmsPool, graph: OnnxGraph, x: Value) -> Value:
    # All channels are pooled twice: to split a map, ONNX Runtime would copy it to another layout first.
    roots = avg_pool(op.averages, graph, x * x).node("Sqrt")
    if all(op.norms):
        return roots
    # The mean of a window is at most the root of its mean square, so Min selects the mean. In channels
    # of norms the largest number of the dtype replaces the mean, so Min selects the root.
    kernel, channels = op.averages.kernel, len(op.norms)
    share = np.where(op.norms, 0.0, 1 / prod(kernel)).reshape(-1, *[1] * (len(kernel) + 1))
    weight = np.broadcast_to(share, (channels, 1, *kernel))
    bias = np.where(op.norms, float(np.finfo(x.dtype).max), 0.0)
    strides = {"kernel_shape": list(kernel), "strides": list(op.averages.stride)}
    means = x.node("Conv", weight, bias, shape=roots.shape, group=channels, **strides)
    return roots.node("Min", means)
