"""Strategy "spectral" without circular padding: the energy on a torus minus that of its border.

A stack that does not pad, or pads with zeros in its first layer alone, is one convolution up to
each activation. On a torus all their energies are one transform and one form per frequency; the
few outputs whose windows wrap around are computed apart and subtracted. A difference may be much
smaller than its parts, so all of this runs in the widest dtype of the device. Even so, a sample
whose energy lies at the border loses about 1e-16·‖x‖ of its denominator, relatively.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ...functional import full_precision, wide_dtype
from ..stages import Program
from .base import Core, Cost, Request, exact_certificate, no_image, normalised, too_many_entries
from .circular import CircularCore, half_weights, multiply
from .dense import matrix_cost
from .routes import CONVOLVE, Chain, Move, Window, fewest, kernel_of

_WIDE = 4  # how much slower a convolution in float64 is: the width, and no kernel of its own


class TorusCore(Core):
    """Sum ``X(f)* G(f) X(f)`` over the frequencies, and subtract what wraps around."""

    name = "spectral"
    settings = (*Core.settings, "axes", "padding", "spatial", "wraps", "group_of", "forms")
    foreseen = True
    matrix: Tensor | None
    high: Tensor
    low: Tensor
    last: Tensor

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        program = request.program
        chain = Chain(program)
        self.axes = chain.axes
        windows = _windows(chain)
        if windows is None:
            raise TypeError(str(self.refuses(program)))
        self.padding = windows[0].padding
        self.spatial = _padded(program, self.padding)
        place = request.device, request.dtype
        self.wraps = tuple(tuple(w - 1 for w in window.size) for window in windows)
        self.group_of = tuple(stage.group for stage in program.stages)
        symbols: list[Tensor | None] = [None] * len(program.groups)
        kernel = torch.zeros(0)
        for index, segment in enumerate(program.segments):
            kernel = _kernel(chain, index)
            # The form on the torus and its border must come from the same rounded kernel.
            rounded = (fewest(kernel) * math.sqrt(segment.weight)).to(request.dtype)
            self.register_buffer(f"kernel{index}", rounded.to(request.device))
            gram = _gram(rounded.double(), self.spatial)
            group = self.group_of[index]
            symbols[group] = gram if (sum_ := symbols[group]) is None else sum_ + gram
        stacked = torch.view_as_real(torch.stack([s for s in symbols if s is not None]))
        # Two arrays of the fold's dtype whose sum is as wide as the proof of no loss needs.
        self.register_buffer("high", stacked.to(*place))
        low = stacked - self.high.to(stacked)
        self.register_buffer("low", low.to(*place))
        self.forms = len(program.groups)
        if program.trailing:
            matrix, self.gain = normalised(request.matrix)
            self.register_buffer("matrix", matrix.to(*place))
        else:
            last, self.gain = normalised(kernel)
            self.register_buffer("last", last.to(*place))
            self.register_buffer("matrix", None)
        self.certificate = exact_certificate(request)

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse stacks that are not one convolution of stride 1 up to each activation."""
        if (reason := no_image(program)) is not None:
            return reason
        if _windows(Chain(program)) is None:
            return "a layer has a stride, pads behind the first layer, or sees too large a window"
        return too_many_entries(program)

    @classmethod
    def caution(cls, request: Request) -> str:
        """Leave float64 to other strategies: there is nothing wider to take a difference in."""
        return "a difference in float64 may lose digits" if request.dtype == torch.float64 else ""

    @classmethod
    def effort(cls, request: Request) -> float:
        """Count M; kernels are small."""
        return request.effort_of_matrix() if request.program.trailing else 0.0

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Count the transform, the form of each frequency, and the outputs that wrap."""
        program = request.program
        chain = Chain(program)
        windows = _windows(chain)
        if windows is None:
            return Cost()
        channels = program.input_shape[0]
        spatial = _padded(program, windows[0].padding)
        n = math.prod(spatial)
        half = n // spatial[-1] * (spatial[-1] // 2 + 1)
        groups = len(program.groups)
        cost = Cost(
            fft=2 * channels * n * math.log2(max(n, 2)),
            stream=8 * half * channels * (channels + 1) * groups,
            calls=8 + 2 * groups * (channels + 2),
            bytes=4 * groups * channels**2 * half * request.dtype.itemsize,
        )
        for end, window in zip(chain.ends, windows, strict=True):
            patch = channels * math.prod(window.size)
            rows = min(chain.shape(end)[0], patch)
            wrapped = n - math.prod(chain.shape(end)[1:])
            cost += Cost(
                conv=rows * patch * wrapped,
                idle=(_WIDE - 1) * rows * patch * wrapped,
                stream=8 * rows * wrapped,
                calls=12 * chain.axes,
                bytes=rows * patch * request.dtype.itemsize,
            )
        if program.trailing:
            return cost + matrix_cost(request)
        taps = channels * math.prod(windows[-1].size)
        outputs = chain.shape(chain.ends[-1])
        return cost + Cost(
            conv=taps * math.prod(outputs),
            stream=2 * math.prod(outputs),
            calls=2,
            bytes=taps * outputs[0] * request.dtype.itemsize,
        )

    def scratch(self) -> int:
        """Count the spectra of sample and result, and the widest strip, all in float64."""
        channels, half = self.high.shape[1], self.high.shape[3]
        strips = max(
            (len(getattr(self, f"kernel{i}")) + channels)
            * sum(w * math.prod(self.spatial) // n for w, n in zip(wrap, self.spatial, strict=True))
            for i, wrap in enumerate(self.wraps)
        )
        return 12 * half * channels + 4 * strips

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        dtype = torch.promote_types(wide_dtype(x.device), x.dtype)
        dims = tuple(range(2, x.dim()))
        if x.shape[0] == 0:  # the transform does not take an empty batch
            empty = x.new_zeros(0, *self.output_shape)
            return empty, tuple(x.new_zeros(0, dtype=dtype) for _ in range(self.forms))
        with full_precision(x):
            pads = [p for p in reversed(self.padding) for _ in range(2)]
            exact = F.pad(x.to(dtype), pads) if any(pads) else x.to(dtype)
            spectrum = torch.fft.rfftn(exact, dim=dims).flatten(2)
            values = []
            for symbol in torch.view_as_complex(self.high.to(dtype) + self.low.to(dtype)):
                product = torch.view_as_real(multiply(symbol, spectrum)) * torch.view_as_real(
                    spectrum
                )
                values.append(product.sum((1, 2, 3)))
        return self.finished(x, exact, values)

    def finished(
        self, x: Tensor, exact: Tensor, values: list[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the forms without what wraps around.

        Args:
            x: the batch.
            exact: the batch as it was transformed: wide, with its margin.
            values: the forms on the torus.
        """
        with full_precision(x):
            for index, group in enumerate(self.group_of):
                values[group] = values[group] - self._wrapped(exact, index)
            # Rounding may leave a difference of equals a little below zero.
            forms = tuple(value.clamp_min(0) for value in values)
        if self.matrix is None:
            return CONVOLVE[self.axes](x, self.last, padding=self.padding), forms
        return (x.flatten(1) @ self.matrix.T).view(-1, *self.output_shape), forms

    def _wrapped(self, x: Tensor, index: int) -> Tensor:
        """Return the energy of the outputs whose window wraps around along some axis."""
        kernel = getattr(self, f"kernel{index}").to(x.dtype)
        total = x.new_zeros(x.shape[0])
        for axis, wrap in enumerate(self.wraps[index], 2):
            if wrap == 0:
                continue
            strip = torch.cat(
                [x.narrow(axis, x.shape[axis] - wrap, wrap), x.narrow(axis, 0, wrap)], axis
            )
            for later, more in enumerate(self.wraps[index][axis - 1 :], axis + 1):
                if more:  # along later axes all outputs count, along earlier ones those within
                    strip = torch.cat([strip, strip.narrow(later, 0, more)], later)
            y = CONVOLVE[self.axes](strip, kernel)
            total = total + y.square().sum(tuple(range(1, y.dim())))
        return total


class SpectralCore(Core):
    """The one of both that a network allows."""

    name = "spectral"
    foreseen = True

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse what neither can express."""
        circular, torus = CircularCore.refuses(program), TorusCore.refuses(program)
        if circular is None or torus is None:
            return None
        modes = (getattr(operator.module, "padding_mode", "") for operator in program.operators)
        return circular if "circular" in modes else torus

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Return the cost of the one that applies."""
        return _kind(request.program).cost(request, built=built)

    @classmethod
    def caution(cls, request: Request) -> str:
        """Return the caution of the one that applies."""
        return _kind(request.program).caution(request)

    @classmethod
    def effort(cls, request: Request) -> float:
        """Return the effort of the one that applies."""
        return _kind(request.program).effort(request)

    @classmethod
    def make(cls, request: Request) -> Core:
        """Build the one that applies."""
        return _kind(request.program)(request)


def _kind(program: Program) -> type[Core]:
    return CircularCore if CircularCore.refuses(program) is None else TorusCore


def _windows(chain: Chain) -> list[Window] | None:
    """Return the window up to each activation, or None if some part is no such convolution."""
    windows = [chain.window(0, end) for end in chain.ends]
    found = [w for w in windows if w is not None and all(s == 1 for s in w.stride)]
    return found if len(found) == len(windows) and found else None


def _padded(program: Program, padding: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n + 2 * p for n, p in zip(program.input_shape[1:], padding, strict=True))


def _kernel(chain: Chain, index: int) -> Tensor:
    return kernel_of(chain, Move("conv", 0, chain.ends[index], (0, index + 1), index))


def _gram(kernel: Tensor, spatial: tuple[int, ...]) -> Tensor:
    """Return the form of a convolution on a torus: (C_in, C_in, frequencies), shares included."""
    transfer = torch.fft.rfftn(kernel, s=spatial, dim=tuple(range(2, kernel.dim()))).flatten(2)
    gram = torch.einsum("oaf,obf->abf", transfer, transfer.conj())
    return gram * half_weights(spatial, gram.shape[-1]).to(gram.device)
