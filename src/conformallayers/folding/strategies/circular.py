"""Strategy "spectral": on a torus every form is one small Hermitian matrix per frequency.

Circular convolutions of stride 1 commute with shifts, so the Fourier transform splits Z_l into
matrices of C_l × C_in, one per frequency, and Q into C_in × C_in: n numbers instead of n².
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...functional import full_precision
from ..operators import CONVOLUTIONS, Operator, adjoint, impulses, is_plain
from ..stages import Program
from .base import (
    Core,
    Cost,
    Request,
    as_autocast,
    at_least_float32,
    exact_certificate,
    no_image,
    normalised,
    refused_layer,
    wide,
)
from .dense import matrix_cost

_ROWS = 64  # of M that are built at a time


class CircularCore(Core):
    """Transform the sample, sum ``X(f)* G(f) X(f)`` over the frequencies; M apart or the same way."""

    name = "spectral"
    settings = (*Core.settings, "spatial", "weights")
    foreseen = True
    matrix: Tensor | None
    transfer: Tensor | None
    symbols: Tensor

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        program = request.program
        self.spatial = program.input_shape[1:]
        symbols, transfer = _symbols(program)
        scaled = [normalised(symbol) for symbol in symbols]
        self.weights = tuple(weight for _, weight in scaled)
        place = request.device, request.dtype
        # Complex buffers would stay behind in .double(); their real view does not.
        stacked = torch.stack([symbol for symbol, _ in scaled])  # (groups, C, C, frequencies)
        self.register_buffer("symbols", torch.view_as_real(stacked).to(*place))
        self.certificate = exact_certificate(request)
        if program.trailing:
            matrix, self.gain = normalised(_matrix(program, transfer))
            self.register_buffer("matrix", matrix.to(*place))
            self.register_buffer("transfer", None)
        else:
            last, self.gain = normalised(transfer)
            self.register_buffer("matrix", None)
            self.register_buffer("transfer", torch.view_as_real(last).to(*place))

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse whatever does not commute with shifts on a torus."""
        if (reason := no_image(program)) is not None:
            return reason
        return refused_layer(program, _commutes, "is no circular convolution of stride 1")

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Count the transform and C_in² per frequency and form."""
        program = request.program
        channels, spatial = program.input_shape[0], program.input_shape[1:]
        n = math.prod(spatial)
        half = n // spatial[-1] * (spatial[-1] // 2 + 1)
        groups = len(program.groups)
        item = request.dtype.itemsize
        forms = Cost(
            fft=channels * n * math.log2(max(n, 2)),
            stream=4 * half * channels * (channels + 1) * groups,
            calls=4 + 2 * groups * (channels + 2),
            bytes=2 * groups * channels**2 * half * item,
        )
        if program.trailing:
            return forms + matrix_cost(request)
        out = math.prod(program.output_shape) // n
        return forms + Cost(
            fft=out * n * math.log2(max(n, 2)),
            stream=4 * half * channels * out,
            calls=3 + channels,
            bytes=2 * channels * out * half * item,
        )

    @classmethod
    def effort(cls, request: Request) -> float:
        """Count one impulse per channel; M comes through the spectrum."""
        program = request.program
        once = sum(operator.multiply_adds() for operator in program.operators)
        return float(once * program.input_shape[0])

    def scratch(self) -> int:
        """Count the spectrum of the sample and of the result."""
        channels = self.symbols.shape[1]
        half = self.symbols.shape[3]
        out = 0 if self.transfer is None else self.transfer.shape[0]
        return 2 * half * (3 * channels + 2 * out) + math.prod(self.output_shape)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        if x.shape[0] == 0:  # the transform does not take an empty batch
            empty = x.new_zeros(0, *self.output_shape)
            return empty, tuple(wide(x.new_zeros(0)) for _ in self.weights)
        with full_precision(x):
            exact = at_least_float32(x)
            spectrum = torch.fft.rfftn(exact, dim=tuple(range(2, x.dim()))).flatten(2)
            values = []
            for symbol, weight in zip(_complex(self.symbols, exact), self.weights, strict=True):
                images = multiply(symbol, spectrum)
                product = torch.view_as_real(images) * torch.view_as_real(spectrum)
                values.append(wide(product.sum((1, 2, 3))) * weight)
            if self.transfer is not None:
                v = multiply(_complex(self.transfer, exact), spectrum)
                v = v.unflatten(2, (*self.spatial[:-1], -1))
                v = torch.fft.irfftn(v, s=self.spatial, dim=tuple(range(2, x.dim())))
        if self.matrix is None:
            return as_autocast(v, x), tuple(values)
        return (x.flatten(1) @ self.matrix.T).view(-1, *self.output_shape), tuple(values)


def multiply(symbol: Tensor, spectrum: Tensor) -> Tensor:
    """Multiply (C_out, C_in, F) by (B, C_in, F) at each frequency: (B, C_out, F)."""
    total = symbol[:, 0] * spectrum[:, :1]
    for channel in range(1, symbol.shape[1]):
        total = torch.addcmul(total, symbol[:, channel], spectrum[:, channel : channel + 1])
    return total


def _complex(pairs: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.to(like.dtype))


def half_weights(spatial: tuple[int, ...], frequencies: int) -> Tensor:
    """Return the share of each frequency of a half spectrum in the energy, in float64.

    A half spectrum counts twice what has a mirror image that it leaves out.
    """
    double = torch.full((spatial[-1] // 2 + 1,), 2.0, dtype=torch.float64)
    double[0] = 1
    if spatial[-1] % 2 == 0:
        double[-1] = 1
    return double.repeat(frequencies // len(double)) / math.prod(spatial)


def _symbols(program: Program) -> tuple[Tensor, Tensor]:
    """Return G of every group, (groups, C_in, C_in, F), and Z_k, (C_k, C_in, F)."""
    channels, spatial = program.input_shape[0], program.input_shape[1:]
    axes = tuple(range(2, 2 + len(spatial)))
    x = torch.zeros(channels, channels, *spatial, dtype=torch.float64, device=program.device)
    origin = (0,) * len(spatial)
    for channel in range(channels):
        x[(channel, channel, *origin)] = 1
    frequencies = torch.fft.rfftn(x[:1, :1], dim=axes).numel()
    share = half_weights(spatial, frequencies).to(x.device)
    groups = torch.zeros(
        len(program.groups),
        channels,
        channels,
        frequencies,
        dtype=torch.complex128,
        device=x.device,
    )
    z = x
    spectrum = torch.fft.rfftn(z, dim=axes).flatten(2)
    for stage in program.stages:
        z = stage.apply(z)
        spectrum = torch.fft.rfftn(z, dim=axes).flatten(2)  # (C_in, C_l, F)
        gram = torch.einsum("aof,bof->abf", spectrum.conj(), spectrum)
        groups[stage.group] += stage.weight * share * gram
    return groups, spectrum.transpose(0, 1).contiguous()


def _matrix(program: Program, transfer: Tensor) -> Tensor:
    """Return M, (d_out, d_in): the rows of the layers behind, taken back through Z_k at once."""
    spatial = program.input_shape[1:]
    axes = tuple(range(2, 2 + len(spatial)))
    like = torch.empty(0, dtype=torch.float64, device=program.device)
    parts = []
    for rows in impulses(program.output_shape, _ROWS, like):
        spectrum = torch.fft.rfftn(adjoint(program.trailing, rows), dim=axes).flatten(2)
        image = torch.einsum("oif,bof->bif", transfer.conj(), spectrum)
        image = image.unflatten(2, (*spatial[:-1], -1))
        parts.append(torch.fft.irfftn(image, s=spatial, dim=axes).flatten(1))
    return torch.cat(parts)


def _commutes(operator: Operator) -> bool:
    module: Any = operator.module
    if is_plain(module, CONVOLUTIONS):
        return (
            (module.padding_mode == "circular" or all(k == 1 for k in module.kernel_size))
            and all(s == 1 for s in module.stride)
            and operator.input_shape[1:] == operator.output_shape[1:]
        )
    return operator.multiple
