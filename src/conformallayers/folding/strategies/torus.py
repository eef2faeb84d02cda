"""Strategy "spectral" without circular padding: the energy on a torus minus that of its border.

A stack that does not pad, or pads with zeros in its first layer only, is one convolution up to
each activation. On a torus all energies are one transform and one form per frequency; the
few outputs whose windows wrap around are computed separately and subtracted. A difference may be much
smaller than its terms, so all of this runs in float64. Even so, a sample whose energy lies at the
border loses about 1e-16·‖x‖ of its denominator, relatively.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...functional import wide_dtype
from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ..cost import Cost
from ..problem import Problem
from .base import (
    Evaluation,
    Strategy,
    Values,
    add_matrix,
    matrix_cost,
    no_image,
    normalised,
    not_a_chain,
    out_of_range,
    too_many_entries,
)
from .circular import half_weights
from .routes import Move, RouteMap, Window, fewest, kernel_of

_WIDE = 4  # slowdown of a convolution in float64: twice the width, and no fast kernel


class Torus(Strategy):
    """Sum ``X(f)* G(f) X(f)`` over the frequencies, and subtract the outputs that wrap around."""

    name = "spectral"
    foreseen = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse stacks that are not one convolution of stride 1 up to each activation."""
        reason = not_a_chain(problem) or no_image(problem)
        if reason is not None:
            return reason
        if _windows(RouteMap(problem.stage.chain)) is None:
            return (
                "a layer is no convolution, has a stride, pads behind the first layer, "
                "or sees too large a window"
            )
        return too_many_entries(problem) or out_of_range(problem)

    def caution(self, problem: Problem) -> str:
        """Advise against float64: no wider dtype is there to compute the difference in."""
        return "a difference in float64 may lose digits" if problem.dtype == torch.float64 else ""

    def effort(self, problem: Problem) -> float:
        """Bound the work of M; kernels are small."""
        return problem.effort_of_matrix() if problem.stage.chain.trailing else 0.0

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the transform, the form of each frequency, and the outputs that wrap."""
        stage, item = problem.stage, problem.dtype.itemsize
        places = RouteMap(stage.chain)
        windows = _windows(places)
        if windows is None:
            return Cost()
        channels = stage.input_shape[0]
        spatial = _padded(problem, windows[0].padding)
        n, half = math.prod(spatial), point.frequencies(spatial)
        cost = Cost(
            fft=2 * channels * n * math.log2(max(n, 2)),
            stream=8 * half * channels * (channels + 1) * problem.form_count,
            calls=8 + 2 * problem.form_count * (channels + 2),
            bytes=4 * problem.form_count * channels**2 * half * item,
        )
        for end, window in zip(places.ends, windows, strict=True):
            patch = channels * math.prod(window.size)
            rows = min(places.shape(end)[0], patch)
            wrapped = n - math.prod(places.shape(end)[1:])
            cost += Cost(
                conv=rows * patch * wrapped,
                idle=(_WIDE - 1) * rows * patch * wrapped,
                stream=8 * rows * wrapped,
                calls=12 * places.axes,
                bytes=rows * patch * item,
            )
        if stage.chain.trailing:
            return cost + matrix_cost(problem)
        taps = channels * math.prod(windows[-1].size)
        outputs = places.shape(places.ends[-1])
        return cost + Cost(
            conv=taps * math.prod(outputs),
            stream=2 * math.prod(outputs),
            calls=2,
            bytes=taps * outputs[0] * item,
        )

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the forms on the torus, minus the energy of the border, and M or the last kernel."""
        builder, chain = values.builder, problem.stage.chain
        places = RouteMap(chain)
        windows = _windows(places)
        if windows is None:
            raise TypeError(str(self.refuses(problem)))
        padding = windows[0].padding
        spatial = _padded(problem, padding)
        exact = _add_exact(values, padding)
        terms: list[list[str]] = [[] for _ in chain.groups]
        symbols: list[Tensor | None] = [None] * len(chain.groups)
        kernel = torch.zeros(0)
        for index, segment in enumerate(chain.segments):
            kernel = kernel_of(places, Move("conv", 0, places.ends[index], (0, index + 1), index))
            weighted = fewest(kernel) * math.sqrt(segment.weight)
            gram, known = _gram(weighted, spatial), symbols[segment.group]
            symbols[segment.group] = gram if known is None else known + gram
            wraps = tuple(size - 1 for size in windows[index].size)
            terms[segment.group] += _add_border(values, exact, weighted, wraps)
        spectrum = builder.add(point.Fourier, exact, name="spectrum")
        energies = []
        for total, border in zip(symbols, terms, strict=True):
            if total is None:
                raise TypeError("a form without a term")
            symbol = values.constant("symbol", torch.view_as_real(total).clone(), wide=True)
            n = builder.add(point.SpectralForm, spectrum, name="n", symbol=symbol, weight=1.0)
            if border:
                # Rounding may leave a difference of equals a little below zero.
                n = builder.add(layer.Add, n, *border, name="n")
                n = builder.add(layer.Elementwise, n, name="n", function="relu")
            energies.append((n,))
        if chain.trailing:
            image, gain = add_matrix(problem, values)
        else:
            last, gain = normalised(kernel)
            weight = values.constant("kernel", last)
            ones = (1,) * len(padding)
            options: dict[str, Any] = {"stride": ones, "padding": padding, "dilation": ones}
            image = builder.add(layer.Conv, values.unit, name="image", weight=weight, **options)
        size, wide = math.prod(problem.stage.input_shape), wide_dtype(problem.device)
        rounding = problem.rounding(size, squares=False, dtype=wide)
        certificate = problem.certificate(rounding, margin=1.0)
        return Evaluation(image, tuple(energies), gain, certificate)


def _add_exact(values: Values, padding: tuple[int, ...]) -> str:
    """Append the sample in float64 with its margin of zeros."""
    builder, exact = values.builder, values.unit
    if not values.wide:
        exact = builder.add(layer.Cast, exact, name="exact", to=layer.WIDE)
    if any(padding):
        pads = tuple((p, p) for p in padding)
        exact = builder.add(layer.Pad, exact, name="exact", pads=pads)
    return exact


def _add_border(values: Values, x: str, kernel: Tensor, wraps: tuple[int, ...]) -> list[str]:
    """Append minus the energy of the outputs whose window wraps around, one value for each axis.

    An output may wrap along several axes and must be subtracted once. The value of an axis counts the outputs
    that wrap along it but along no earlier axis.
    """
    builder = values.builder
    weight = None
    found = []
    for axis, wrap in enumerate(wraps):
        if wrap == 0:
            continue
        size = builder.shape(x)[axis + 1]
        ends = (size - wrap, size), (0, wrap)
        parts = [
            builder.add(layer.Slice, x, name="strip", axis=axis + 1, start=start, stop=stop)
            for start, stop in ends
        ]
        strip = builder.add(layer.Concatenate, *parts, name="strip", axis=axis + 1)
        for later, more in enumerate(wraps[axis + 1 :], axis + 1):
            if more:  # along later axes all outputs count, wrapping ones included
                fields: dict[str, Any] = {"axis": later + 1, "start": 0, "stop": more}
                begin = builder.add(layer.Slice, strip, name="strip", **fields)
                strip = builder.add(layer.Concatenate, strip, begin, name="strip", axis=later + 1)
        weight = weight or values.constant("kernel", kernel, wide=True)
        ones, zeros = (1,) * len(wraps), (0,) * len(wraps)
        options: dict[str, Any] = {"stride": ones, "padding": zeros, "dilation": ones}
        y = builder.add(layer.Conv, strip, weight=weight, **options)
        found.append(builder.add(point.SumSquares, y, name="n", weight=-1.0))
    return found


def _windows(places: RouteMap) -> list[Window] | None:
    """Return the window up to each activation, or None if they are not all of stride 1."""
    windows = [places.window(0, end) for end in places.ends]
    found = [w for w in windows if w is not None and all(s == 1 for s in w.stride)]
    return found if len(found) == len(windows) and found else None


def _padded(problem: Problem, padding: tuple[int, ...]) -> tuple[int, ...]:
    spatial = problem.stage.input_shape[1:]
    return tuple(n + 2 * p for n, p in zip(spatial, padding, strict=True))


def _gram(kernel: Tensor, spatial: tuple[int, ...]) -> Tensor:
    """Return the form of a convolution on a torus: (C_in, C_in, frequencies), shares included."""
    transfer = torch.fft.rfftn(kernel, s=spatial, dim=tuple(range(2, kernel.dim()))).flatten(2)
    gram = torch.einsum("oaf,obf->abf", transfer, transfer.conj())
    return gram * half_weights(spatial, gram.shape[-1]).to(gram.device)
