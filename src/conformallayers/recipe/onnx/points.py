"""Operations on points, in ONNX: one function each, of (operation, graph, *input values).

Nothing here branches on values. Where a guard such as ``Max`` may lose a NaN in some runtime, τ is NaN as
well, and with it the whole sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

import numpy as np

from ...errors import refusal
from .. import point_operations as point
from ..operation import Shape
from ..places import Array
from ..point_operations import LARGEST, Key
from .graph import WIDE, OnnxGraph, Value
from .layers import RUN

__all__ = ["RUN"]
LEAST = 1e-300  # divides the energy 0 of a zero sample
LONG = 2**12  # numbers that are cast to float64 before they are added
ROW = 2**8  # numbers of a longer map that are added in float32: ONNX Runtime adds them one by one

_SHORTEST = 2**3  # numbers of such a row that are worth a reduction


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, graph: OnnxGraph, x: Value) -> tuple[Value, Value, Value]:
    # Where scalars are (batch, 1), rows of numbers spare reshaping m and τ; others read rows as well.
    rows = graph.reshape(x, (prod(x.shape),)) if graph.scalar_shape == (1,) else x
    peak = graph.reduce_sample("ReduceMax", graph.add("Abs", rows))
    limits = np.finfo(x.dtype)
    # Without an offset the least peak is that of a zero sample, whose τ is 0.
    peak = graph.add("Max", peak, min(max(op.offset, limits.tiny), limits.max))
    unit, m = graph.add("Div", rows, peak), graph.scalar(peak)
    if op.offset == 0:
        tau = reduced(graph, "ReduceL2", unit)
    else:
        share = graph.add("Div", op.offset, m)
        squares = reduced(graph, "ReduceSumSquare", unit)
        tau = graph.add("Sqrt", graph.add("Add", squares, graph.add("Mul", share, share)))
    return graph.reshape(unit, x.shape), m, tau


@RUN.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, graph: OnnxGraph, z: Value) -> Value:
    return weighted(graph, reduced(graph, "ReduceSumSquare", z), op.weight)


@RUN.runs(point.Dot)
def _dot(op: point.Dot, graph: OnnxGraph, a: Value, b: Value) -> Value:
    return weighted(graph, reduced(graph, "ReduceSum", graph.add("Mul", a, b)), op.weight)


@RUN.runs(point.Rescale)
def _rescale(
    op: point.Rescale, graph: OnnxGraph, z: Value, m: Value, tau: Value
) -> tuple[Value, Value, Value, Value]:
    # The divisor is 1 or the peak: it rounds each number once, and a power of two needs a logarithm.
    peak = graph.reduce_sample("ReduceMax", graph.add("Abs", z))
    high = float(np.finfo(z.dtype).max) ** 0.3
    fits = graph.add("Equal", peak, graph.add("Clip", peak, 1 / high, high), dtype=bool)
    zero = graph.add("Equal", peak, 0.0, dtype=bool)
    divisor = graph.add("Where", graph.add("Or", fits, zero, dtype=bool), 1.0, peak)
    z, factor = graph.add("Div", z, divisor), graph.scalar(divisor)
    n = weighted(graph, reduced(graph, "ReduceSumSquare", z), op.weight)
    return z, graph.add("Mul", m, factor), graph.add("Div", tau, factor), n


@RUN.runs(point.QuadraticForm)
def _quadratic_form(op: point.QuadraticForm, graph: OnnxGraph, x: Value) -> Value:
    return weighted(graph, _form(graph, x, graph.constant(op.form)), op.weight)


def _form(graph: OnnxGraph, x: Value, form: Array) -> Value:
    return reduced(graph, "ReduceSum", graph.add("Mul", graph.add("MatMul", x, form), x))


def _squares(graph: OnnxGraph, x: Value, factor: Array) -> Value:
    image = graph.add("MatMul", x, factor)
    return reduced(graph, "ReduceSum", graph.add("Mul", image, image))


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, graph: OnnxGraph, x: Value) -> Value:
    band, (count,) = graph.constant(op.band), x.shape
    full, span, size = band.shape
    columns = graph.transpose(x, 1, 0, shape=(count,))  # (n, batch)
    first = np.arange(full)[:, None] * size
    windows = graph.add("Gather", columns, first + np.arange(span), shape=(full, span), axis=0)
    images = graph.add("MatMul", band.transpose(0, 2, 1), windows, shape=(full, size))
    others = images
    if not op.factor:
        others = graph.add("Gather", columns, first + np.arange(size), shape=(full, size), axis=0)
    value = _total(graph, graph.add("Mul", images, others), [0, 1])
    if op.width:
        end = graph.slice(x, 1, count - op.width * op.size, count)
        last = graph.constant(op.last)
        rest = _squares(graph, end, last) if op.factor else _form(graph, end, last)
        value = graph.add("Add", value, rest)
    return weighted(graph, value, op.weight)


def _total(graph: OnnxGraph, products: Value, axes: list[int]) -> Value:
    """Add products in float64 along axes that are all but that of the batch."""
    products = graph.cast(products, WIDE)
    return graph.scalar(graph.reduce("ReduceSum", products, axes, keepdims=False, shape=()))


@RUN.runs(point.Fourier)
def _fourier(op: point.Fourier, graph: OnnxGraph, x: Value) -> Value:
    """Transform by one product with cosines and sines for each axis, the last axis first.

    The result is (frequencies, batch, 2·C): real parts of all channels, then imaginary ones. On the way
    there it is (batch, C, axes to come, 2, axes that are done).
    """
    channels, *before, n = x.shape
    kept = n // 2 + 1
    cos, sin = _waves(n)
    waves = np.concatenate([cos[:, :kept], -sin[:, :kept]], 1)
    z, done = graph.add("MatMul", x, waves, shape=(channels, *before, 2 * kept)), kept
    for n in reversed(before):
        before.pop()
        cos, sin = _waves(n)
        # Entries (place, part) become (part, frequency).
        both = np.stack([np.stack([cos, sin], 2), np.stack([-sin, cos], 2)]).reshape(2 * n, 2 * n)
        shape = (channels, *before, 2 * n, done)
        z, done = graph.add("MatMul", both, graph.reshape(z, shape), shape=shape), done * n
    parts = graph.reshape(z, (channels, 2, done))
    moved = graph.transpose(parts, 3, 0, 2, 1, shape=(done, 2, channels))
    return _regroup(graph, moved, (done, -1, 2 * channels))


@RUN.runs(point.InverseFourier)
def _inverse_fourier(op: point.InverseFourier, graph: OnnxGraph, spectrum: Value) -> Value:
    """Transform back, the first axis first; see :func:`_fourier`."""
    done, channels = spectrum.shape[0], spectrum.shape[1] // 2
    *before, last = op.size
    parts = _regroup(graph, spectrum, (done, -1, 2, channels))
    z = graph.transpose(parts, 1, 3, 2, 0, shape=(channels, 2, done))
    places: Shape = ()
    for n in before:
        done //= n
        cos, sin = _waves(n)
        # Entries (part, frequency) become (place, part).
        both = np.stack([np.stack([cos, -sin], 1), np.stack([sin, cos], 1)], 1) / n
        shape = (channels, *places, 2 * n, done)
        z = graph.add("MatMul", both.reshape(2 * n, 2 * n), graph.reshape(z, shape), shape=shape)
        places = (*places, n)
    cos, sin = (wave[:done] for wave in _waves(last))
    share = np.full((done, 1), 2.0 / last)  # of a frequency and its conjugate
    share[0] = 1.0 / last
    if last % 2 == 0:
        share[-1] = 1.0 / last
    waves = np.concatenate([cos * share, -sin * share])
    rows = graph.reshape(z, (channels, *places, 2 * done))
    return graph.add("MatMul", rows, waves, shape=(channels, *op.size))


def _regroup(graph: OnnxGraph, x: Value, axes: Sequence[int]) -> Value:
    """Reshape a value whose second axis is that of the batch."""
    shape = tuple(n for n in axes if n > 0)
    return graph.add("Reshape", x, np.array(axes), shape=shape)


def _waves(n: int) -> tuple[Array, Array]:
    """Return cosines and sines of 2π·j·k/n, from angles below one turn."""
    index = np.arange(n)
    turns = np.outer(index, index) % n / n
    angle = 2 * np.pi * turns
    return np.cos(angle), np.where(2 * turns % 1 == 0, 0.0, np.sin(angle))


@RUN.runs(point.SpectralForm)
def _spectral_form(op: point.SpectralForm, graph: OnnxGraph, spectrum: Value) -> Value:
    images = graph.add("MatMul", spectrum, _blocks(graph.constant(op.symbol)))
    value = _total(graph, graph.add("Mul", images, spectrum), [0, 2])
    return weighted(graph, value, op.weight)


@RUN.runs(point.SpectralProduct)
def _spectral_product(op: point.SpectralProduct, graph: OnnxGraph, spectrum: Value) -> Value:
    blocks = _blocks(graph.constant(op.transfer))
    return graph.add("MatMul", spectrum, blocks, shape=(len(blocks), blocks.shape[2]))


def _blocks(symbol: Array) -> Array:
    """Return complex (C_out, C_in, F, 2) as real matrices of rows, (F, 2·C_in, 2·C_out)."""
    real, imaginary = symbol.transpose(3, 2, 1, 0)
    return np.block([[real, imaginary], [-imaginary, real]])


@RUN.runs(point.Advance)
def _advance(op: point.Advance, graph: OnnxGraph, tau: Value, m: Value, *energies: Value) -> Value:
    n = graph.total(energies)
    if op.rule == "published":
        return graph.add("Add", tau, graph.add("Mul", m, n))
    if any(isinstance(other, point.Rebase) for other in graph.recipe.operations):
        # A bias may have given a zero sample an energy; its τ = 0 switches that off.
        n = graph.add("Where", graph.add("Equal", tau, 0.0, dtype=bool), 0.0, n)
    some = graph.add("Max", tau, LEAST)
    ratio = graph.add("Div", n, some)
    if op.rule == "projective":
        return graph.add("Add", tau, ratio)
    return graph.add("Mul", tau, _growth(graph, op.rule, graph.add("Div", ratio, some)))


def _growth(graph: OnnxGraph, rule: str, q: Value) -> Value:
    if rule not in GROWTHS:
        remedy = f"Use one of {', '.join(GROWTHS)}, or another runtime."
        raise refusal("export_onnx(folded)", "activations that ONNX has", rule, remedy)
    return GROWTHS[rule](graph, q)


def _radial_tanh(graph: OnnxGraph, q: Value) -> Value:
    u = graph.add("Sqrt", graph.add("Max", q, 1e-20))  # u / tanh u is 1 there
    return graph.add("Div", u, graph.add("Tanh", u))


# The growth of t by rule, as a function of q; "published" grows by the coordinate as well.
GROWTHS: dict[str, Callable[[OnnxGraph, Value], Value]] = {
    "projective": lambda graph, q: graph.add("Add", q, 1.0),
    "gnomonic": lambda graph, q: graph.add("Sqrt", graph.add("Add", q, 1.0)),
    "radial_tanh": _radial_tanh,
}


@RUN.runs(point.Divide)
def _divide(op: point.Divide, graph: OnnxGraph, v: Value, tau: Value, m: Value) -> Value:
    return graph.scale(v, _inverse(graph, tau, op.scale))


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, graph: OnnxGraph, z: Value, m: Value, tau: Value
) -> tuple[Value, Value, Value]:
    t = weighted(graph, graph.add("Mul", m, tau), op.coordinate)
    z = graph.scale(z, _inverse(graph, tau, op.scale))
    return z, graph.add("Min", t, LARGEST), graph.add("Sign", tau)


@RUN.runs(point.Grow)
def _grow(op: point.Grow, graph: OnnxGraph, m: Value, tau: Value, *values: Value) -> Value:
    products, forms, growths = op.split(values)
    linear = [_along(graph, key, _inverse(graph, tau), growths) for key in op.linear]
    pairs = [(a, b) for a in range(len(linear)) for b in range(a, len(linear))]
    terms = []
    for (a, b), form in zip(pairs, forms, strict=True):
        term = graph.add("Mul", graph.add("Mul", linear[a], linear[b]), form)
        terms.append(term if a == b else graph.add("Mul", term, 2.0))
    if op.gram is not None:
        ks, gram = _constant_coefficients(op, graph, tau, growths), graph.constant(op.gram)
        inner = [graph.add("MatMul", ks, gram)]
        for index, k in enumerate(linear):
            dots = graph.slice(products[0], 1, index * len(gram), (index + 1) * len(gram))
            inner.append(graph.scale(dots, graph.add("Mul", k, 2.0)))
        product = graph.add("Mul", graph.total(inner), ks)
        terms.append(graph.scalar(graph.reduce_sample("ReduceSum", product)))
    q = graph.add("Max", graph.total(terms), 0.0)
    if op.rule != "published":
        return graph.add("Min", _growth(graph, op.rule, q), LARGEST)
    t = weighted(graph, graph.add("Mul", m, tau), op.factor)
    for site in op.coordinate:  # one by one: a product of many could overflow on its way
        t = graph.add("Min", graph.add("Mul", t, growths[site]), LARGEST)
    return graph.add("Min", graph.add("Add", graph.add("Mul", t, q), 1.0), LARGEST)


@RUN.runs(point.Combine)
def _combine(op: point.Combine, graph: OnnxGraph, v: Value, tau: Value, *growths: Value) -> Value:
    shape, size = v.shape[1:], prod(v.shape[1:])
    inverse = _inverse(graph, tau, op.scale)
    ks = _side_by_side(graph, [_along(graph, key, inverse, growths) for key in op.linear])
    rows = graph.reshape(graph.cast(ks, v.dtype), (1, len(op.linear)))
    parts = graph.reshape(v, (len(op.linear), size))
    y = graph.reshape(graph.add("MatMul", rows, parts, shape=(1, size)), (size,))
    if op.vectors is not None:
        ks = graph.cast(_constant_coefficients(op, graph, tau, growths), v.dtype)
        vectors = graph.constant(op.vectors).reshape(-1, size)
        y = graph.add("Gemm", ks, vectors, y, shape=(size,))
    return graph.reshape(y, shape)


def _constant_coefficients(
    op: point.Grow | point.Combine, graph: OnnxGraph, tau: Value, growths: Sequence[Value]
) -> Value:
    """Return the coefficients of the constant parts, (batch, parts); 0 where τ is."""
    alive = graph.add("Sign", tau)
    found = [_along(graph, key, alive, growths) for key in op.constant_parts]
    return _side_by_side(graph, found)


def _side_by_side(graph: OnnxGraph, scalars: Sequence[Value]) -> Value:
    count = len(scalars)
    shape = (count, *graph.scalar_shape[1:])
    both = scalars[0] if count == 1 else graph.add("Concat", *scalars, shape=shape, axis=1)
    return graph.reshape(both, (count,))


def _along(graph: OnnxGraph, key: Key, coefficient: Value, growths: Sequence[Value]) -> Value:
    """Divide a coefficient by the growth of every site that its part has passed."""
    return reduce(lambda k, site: graph.add("Div", k, growths[site]), key, coefficient)


def reduced(graph: OnnxGraph, kind: str, z: Value) -> Value:
    """Reduce samples to scalars in float64; long maps add short rows in their own dtype first."""
    count, row, rank = prod(z.shape), z.shape[-1], len(graph.scalar_shape)
    if z.dtype != WIDE and count > LONG:
        if not _SHORTEST <= row <= ROW:
            row = max(n for n in range(1, ROW + 1) if count % n == 0)
            z = graph.reshape(z, (*[1] * (rank - 1), count // row, row))
        if row >= _SHORTEST:
            keep = len(z.shape) == rank  # else the rank of scalars is reached without this axis
            shape = (*z.shape[:-1], 1) if keep else z.shape[:-1]
            z = graph.reduce(kind, z, [len(z.shape)], keepdims=keep, shape=shape)
            kind = "ReduceSum" if kind == "ReduceSumSquare" else kind
    return graph.scalar(graph.reduce_sample(kind, graph.cast(z, WIDE)))


def weighted(graph: OnnxGraph, n: Value, weight: float) -> Value:
    """Multiply by a number, unless it is 1."""
    return n if weight == 1.0 else graph.add("Mul", n, weight)


def _inverse(graph: OnnxGraph, tau: Value, scale: float = 1.0) -> Value:
    """Return ``scale/τ``, and 0 where τ is."""
    zero = graph.add("Equal", tau, 0.0, dtype=bool)
    return graph.add("Where", zero, 0.0, graph.add("Div", scale, tau))
