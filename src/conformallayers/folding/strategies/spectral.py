"""Strategy "spectral": Fourier transforms, for convolutions of stride 1.

On a torus such convolutions commute with shifts, so the transform splits Z_l into matrices of C_l × C_in, one
per frequency, and Q into C_in × C_in: n numbers instead of n². Circular convolutions are on a torus as they
are. A stack that does not pad, or pads with zeros in its first layer only, is one convolution up to each
activation: the few outputs whose windows wrap around are computed separately and subtracted.

Forms are stored as factors, so energies are sums of squares and keep their digits in the dtype of the fold. Two
things need float64: what is subtracted at a border may be nearly all of an energy, and an image that is
transformed back has errors relative to the largest frequencies of the sample, which the stack may suppress. Even so, a
sample whose energy lies at the border loses about 1e-16·‖x‖ of its denominator, relatively.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...utils.progress import progress
from ..cost import Cost
from ..forms import COLUMN_BYTES
from ..operators import CONVOLUTIONS, Operator, adjoint, impulses, is_plain
from ..problem import Problem
from ..stages import Chain
from . import base
from .base import Evaluation, Strategy, Values
from .routes import Move, RouteMap, Window, fewest, kernel_of

_LARGEST = 2**27  # entries of M that are written out: 512 MiB in float32
_WIDE = 4  # slowdown of a convolution in float64: twice the width, and no fast kernel


class Spectral(Strategy):
    """Sum ``‖R(f) X(f)‖²`` over the frequencies, and subtract the outputs that wrap around."""

    name = "spectral"
    exact_cost = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse stacks that are neither circular nor one convolution up to each activation."""
        if (reason := base.no_axes(problem)) is not None:
            return reason
        stage, chain = problem.stage, problem.stage.chain
        if not chain.segments:
            return "there is no activation inside"
        reason = _not_circular(chain)
        if reason is not None and _windows(RouteMap(chain)) is None:
            if any(getattr(op.module, "padding_mode", "") == "circular" for op in chain.operators):
                return reason
            return (
                "a layer is no convolution, has a stride, pads behind the first layer, "
                "or sees too large a window"
            )
        size = math.prod(stage.input_shape) * math.prod(stage.output_shape)
        if chain.trailing and size > _LARGEST:
            return f"M would have {size} entries"
        return base.out_of_range(problem)

    def caution(self, problem: Problem) -> str:
        """Advise against what is lost: differences in float64, and zeros that a layer may amplify."""
        chain = problem.stage.chain
        if _not_circular(chain) is not None:
            return "float64 may lose digits of a difference" * (problem.dtype == torch.float64)
        if chain.trailing or problem.last:
            return ""
        return "zeros of an inverse transform are not exact, and layers follow"

    def effort(self, problem: Problem) -> float:
        """Bound the work of the factors and of M."""
        chain, channels = problem.stage.chain, problem.stage.input_shape[0]
        frequencies = point.frequencies(_torus(chain)[1])
        factors = 100.0 * frequencies * channels**3 * problem.form_count  # of eigenvalues
        if not chain.trailing:
            return factors
        if _not_circular(chain) is not None:
            return factors + problem.effort_of_matrix()
        return factors + min(_effort_by_spectrum(problem), problem.effort_of_matrix())

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the transform, the form of each frequency, the outputs that wrap, and M x̂."""
        stage, item = problem.stage, problem.dtype.itemsize
        channels, places = stage.input_shape[0], RouteMap(stage.chain)
        windows, spatial = _torus(stage.chain)
        n, half = math.prod(spatial), point.frequencies(spatial)
        narrow = windows is None and stage.chain.trailing
        width = max(item, 4) if narrow else 8
        fft = width / 4 * n * math.log2(max(n, 2))  # of one channel
        cost = Cost(
            fft=channels * fft,
            stream=width * half * channels * (channels + 1) * problem.form_count,
            calls=8 + 2 * problem.form_count * (channels + 2),
            bytes=2 * width * problem.form_count * channels**2 * half,
        )
        for end, window in zip(places.ends, windows or (), strict=windows is not None):
            cost += _border_cost(places, end, window, n, item)
        if stage.chain.trailing:
            return cost + base.matrix_cost(problem)
        outputs = stage.output_shape
        if windows is None:
            return cost + Cost(
                fft=outputs[0] * fft,
                stream=width * half * channels * outputs[0],
                calls=3 + channels,
                bytes=2 * width * channels * outputs[0] * half,
            )
        taps = channels * math.prod(windows[-1].size)
        return cost + Cost(
            conv=taps * math.prod(outputs),
            stream=2 * math.prod(outputs),
            calls=2,
            bytes=taps * outputs[0] * item,
        )

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the forms on the torus, minus the energy of the border, and M x̂."""
        builder, chain = values.builder, problem.stage.chain
        windows, spatial = _torus(chain)
        if windows is None:
            return _evaluate_circular(problem, values, spatial)
        exact = _add_exact(values, windows[0].padding)
        spectrum = builder.add(point.Fourier, exact, name="spectrum")
        kernels, border = _kernels(chain), [list[str]() for _ in chain.groups]
        for segment, item, window in zip(chain.segments, kernels, windows, strict=True):
            weighted = fewest(item) * math.sqrt(segment.weight)
            wraps = tuple(size - 1 for size in window.size)
            border[segment.group] += _add_border(values, exact, weighted, wraps)
        transfers = [_transfer(fewest(item), spatial).conj() for item in kernels]
        energies = tuple(
            (_add_form(values, spectrum, factor, parts, wide=True),)
            for (factor, _), parts in zip(_factors(chain, transfers, spatial), border, strict=True)
        )
        if chain.trailing:
            image, gain = base.add_matrix(problem, values)
        else:
            last, gain = base.normalised(kernels[-1])
            weight = values.constant("kernel", last)
            image = _add_conv(values, values.unit, "image", weight, windows[0].padding)
        return Evaluation(image, energies, gain)


def _evaluate_circular(problem: Problem, values: Values, spatial: tuple[int, ...]) -> Evaluation:
    """Append the forms of a circular stack, and M x̂ as one product or at each frequency."""
    builder, chain = values.builder, problem.stage.chain
    wide = not chain.trailing
    source = _add_exact(values, ()) if wide else values.unit
    spectrum = builder.add(point.Fourier, source, name="spectrum")
    responses = _responses(problem)
    transfers = [_transfer(z, spatial).transpose(0, 1) for z in responses]
    factors = _factors(chain, transfers, spatial)
    energies = tuple((_add_form(values, spectrum, item, [], wide=wide),) for item, _ in factors)
    if chain.trailing:
        by_layers = problem.effort_of_matrix() < _effort_by_spectrum(problem)
        matrix = problem.matrix if by_layers else _matrix(problem, responses[-1])
        matrix, gain = base.normalised(matrix)
        image = base.add_product(values, values.flat, matrix, gain)
    else:
        image, gain = _add_inverse(values, spectrum, transfers[-1], spatial)
    return Evaluation(image, energies, gain)


def _add_exact(values: Values, padding: tuple[int, ...]) -> str:
    """Append the sample in float64, with its margin of zeros."""
    builder, exact = values.builder, values.unit
    exact = builder.add(layer.Cast, exact, name="exact", to=layer.WIDE)
    if any(padding):
        pads = tuple((p, p) for p in padding)
        exact = builder.add(layer.Pad, exact, name="exact", pads=pads)
    return exact


def _add_form(
    values: Values, spectrum: str, factor: Tensor, border: list[str], *, wide: bool
) -> str:
    """Append the form of a group, less the energy of its border."""
    builder = values.builder
    scaled, peak = base.normalised(factor)
    symbol = values.constant("symbol", torch.view_as_real(scaled).clone(), wide=wide)
    fields = {"symbol": symbol, "weight": peak**2, "factor": True}
    n = builder.add(point.SpectralForm, spectrum, name="n", **fields)
    if not border:
        return n
    # Rounding may leave a difference of equals a little below zero.
    n = builder.add(layer.Add, n, *border, name="n")
    return builder.add(layer.Elementwise, n, name="n", function="relu")


def _add_inverse(
    values: Values, spectrum: str, transfer: Tensor, spatial: tuple[int, ...]
) -> tuple[str, float]:
    """Append the product with Z_k at each frequency and the way back; return the value and the gain."""
    builder = values.builder
    scaled, gain = base.normalised(transfer)
    held = values.constant("transfer", torch.view_as_real(scaled).clone(), wide=True)
    product = builder.add(point.SpectralProduct, spectrum, name="image", transfer=held)
    image = builder.add(point.InverseFourier, product, name="image", size=spatial)
    image = builder.add(layer.Cast, image, name="image", to=layer.WORKING)
    return image, gain


def _matrix(problem: Problem, response: Tensor) -> Tensor:
    """Return M, (d_out, d_in): the rows of the layers behind, taken back through Z_k at each frequency.

    A transform leaves rounding errors where the layers give 0. Those places are known: the same product with
    1 for each number that is not 0 counts the terms of each entry.
    """
    chain, spatial = problem.stage.chain, problem.stage.chain.input_shape[1:]
    adjoints = [
        _transfer(item, spatial).permute(2, 1, 0).conj().contiguous()
        for item in (response, (response != 0).double())
    ]

    def product(rows: Tensor, through: Tensor) -> Tensor:
        spectrum = _transfer(rows, spatial).permute(2, 0, 1).contiguous()
        image = (spectrum @ through).permute(1, 2, 0).unflatten(2, (*spatial[:-1], -1))
        back: Tensor = torch.fft.irfftn(image, s=spatial, dim=tuple(range(2, image.dim())))
        return back.flatten(1)

    # The rows, their spectrum and its products, as complex numbers, with their marks of what is not 0.
    kept = 12 * response.shape[1] * math.prod(spatial)
    chunk, total = max(1, COLUMN_BYTES // (8 * kept)), math.prod(chain.output_shape)
    parts = []
    batches = impulses(chain.output_shape, chunk, problem.stage.device)
    for impulse in progress(batches, -(-total // chunk), "folding M"):
        rows = adjoint(chain.trailing, impulse)
        count = product((rows != 0).double(), adjoints[1])
        parts.append(product(rows, adjoints[0]).masked_fill_(count < 0.5, 0.0))
    return torch.cat(parts)


def _effort_by_spectrum(problem: Problem) -> float:
    """Bound the multiply-adds of M through the spectrum: the layers behind, transforms, products."""
    chain, spatial = problem.stage.chain, problem.stage.chain.input_shape[1:]
    n = math.prod(spatial)
    before = chain.trailing[0].input_shape[0]
    transforms = 20.0 * n * math.log2(max(n, 2)) * (before + chain.input_shape[0])
    products = 4.0 * n * before * chain.input_shape[0]
    layers = sum(operator.multiply_adds() for operator in chain.trailing)
    return math.prod(chain.output_shape) * (2 * layers + transforms + products)


def _add_conv(values: Values, x: str, name: str, weight: str, padding: tuple[int, ...]) -> str:
    ones = (1,) * len(padding)
    options: dict[str, Any] = {"stride": ones, "padding": padding, "dilation": ones}
    return values.builder.add(layer.Conv, x, name=name, weight=weight, **options)


def _add_border(values: Values, x: str, kernel: Tensor, wraps: tuple[int, ...]) -> list[str]:
    """Append minus the energy of the outputs whose window wraps around, one value for each axis.

    An output may wrap along several axes and must be subtracted once. The value of an axis counts the outputs
    that wrap along it but along no earlier axis.
    """
    builder = values.builder
    found: list[str] = []
    if not any(wraps):
        return found
    weight = values.constant("kernel", kernel, wide=True)
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
        y = _add_conv(values, strip, "z", weight, (0,) * len(wraps))
        found.append(builder.add(point.SumSquares, y, name="n", weight=-1.0))
    return found


def _border_cost(places: RouteMap, end: int, window: Window, n: int, item: int) -> Cost:
    """Return the cost of the outputs of one activation that wrap around."""
    patch = places.shape(0)[0] * math.prod(window.size)
    rows = min(places.shape(end)[0], patch)
    wrapped = n - math.prod(places.shape(end)[1:])
    return Cost(
        conv=rows * patch * wrapped,
        idle=(_WIDE - 1) * rows * patch * wrapped,
        stream=8 * rows * wrapped,
        calls=12 * places.axes,
        bytes=rows * patch * item,
    )


def _factors(
    chain: Chain, transfers: list[Tensor], spatial: tuple[int, ...]
) -> list[tuple[Tensor, float]]:
    """Return R of every group, (C_in, C_in, frequencies), and the norm of its form.

    ``R* R`` is G at each frequency, times the share of the frequency in ``‖x‖²``. A half spectrum leaves out
    mirror images, so each frequency that has one counts twice.
    """
    channels, count = chain.input_shape[0], point.frequencies(spatial)
    double = torch.full((spatial[-1] // 2 + 1,), 2.0, dtype=torch.float64)
    double[0] = 1
    if spatial[-1] % 2 == 0:
        double[-1] = 1
    share = double.repeat(count // len(double)) / math.prod(spatial)
    shape = len(chain.groups), count, channels, channels
    groups = torch.zeros(shape, dtype=torch.complex128, device=transfers[0].device)
    for segment, transfer in zip(chain.segments, transfers, strict=True):
        matrices = transfer.permute(2, 0, 1).contiguous()
        groups[segment.group] += segment.weight * (matrices.mH @ matrices)
    found = []
    for values, vectors in (torch.linalg.eigh(group) for group in groups):
        roots = (values.clamp_min(0) * share.to(values.device)[:, None]).sqrt()
        found.append(((roots[:, :, None] * vectors.mH).permute(1, 2, 0), float(values.max())))
    return found


def _transfer(kernel: Tensor, spatial: tuple[int, ...]) -> Tensor:
    """Return the transform of kernels: (C_l, C_in, *window) → (C_l, C_in, frequencies)."""
    spectrum: Tensor = torch.fft.rfftn(kernel, s=spatial, dim=tuple(range(2, kernel.dim())))
    return spectrum.flatten(2)


def _kernels(chain: Chain) -> list[Tensor]:
    """Return the composed kernel up to each activation."""
    places = RouteMap(chain)
    moves = (Move("conv", 0, end, (0, i + 1), i) for i, end in enumerate(places.ends))
    return [kernel_of(places, move) for move in moves]


def _responses(problem: Problem) -> list[Tensor]:
    """Return what each activation sees of one impulse per channel, (C_in, C_l, ...)."""
    chain = problem.stage.chain
    channels, spatial = chain.input_shape[0], chain.input_shape[1:]
    z = torch.zeros(channels, channels, *spatial, dtype=torch.float64, device=problem.stage.device)
    for channel in range(channels):
        z[(channel, channel, *[0] * len(spatial))] = 1
    found = []
    for segment in chain.segments:
        z = segment.apply(z)
        found.append(z)
    return found


def _windows(places: RouteMap) -> list[Window] | None:
    """Return the window up to each activation, or None if they are not all of stride 1."""
    windows = [places.window(0, end) for end in places.ends]
    found = [w for w in windows if w is not None and all(s == 1 for s in w.stride)]
    return found if len(found) == len(windows) and found else None


def _torus(chain: Chain) -> tuple[list[Window] | None, tuple[int, ...]]:
    """Return the window up to each activation, None for a circular stack, and the sizes of the torus."""
    spatial = chain.input_shape[1:]
    windows = None if _not_circular(chain) is None else _windows(RouteMap(chain))
    if windows is None:
        return None, spatial
    return windows, tuple(n + 2 * p for n, p in zip(spatial, windows[0].padding, strict=True))


def _not_circular(chain: Chain) -> str | None:
    """Name the first layer up to the last activation that does not commute with shifts."""
    for segment in chain.segments:
        for operator in segment.operators:
            fault = _fault(operator)
            if fault is not None:
                name = type(operator.module).__name__
                return f"{name} in front of the activation at {segment.site.path} {fault}"
    return None


def _fault(operator: Operator) -> str | None:
    """Return why an operator does not commute with shifts on a torus, or None if it does."""
    module: Any = operator.module
    if not is_plain(module, CONVOLUTIONS):
        return None if operator.multiple else "is no convolution"
    if any(s != 1 for s in module.stride):
        return "has a stride"
    if module.padding_mode != "circular" and any(k != 1 for k in module.kernel_size):
        return f"has padding_mode={module.padding_mode!r}"
    sized = operator.input_shape[1:] == operator.output_shape[1:]
    return None if sized else "changes the size of a map"
