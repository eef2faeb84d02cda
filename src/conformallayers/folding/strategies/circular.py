"""Strategy "spectral" for circular convolutions: one small Hermitian matrix per frequency.

Circular convolutions of stride 1 commute with shifts, so the Fourier transform splits Z_l into
matrices of C_l × C_in, one per frequency, and Q into C_in × C_in: n numbers instead of n².
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ..cost import Cost
from ..operators import CONVOLUTIONS, Operator, adjoint, impulses, is_plain
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
    refused_layer,
)

_ROWS = 64  # of M that are built at a time


class Circular(Strategy):
    """Transform the sample and sum ``X(f)* G(f) X(f)`` over the frequencies."""

    name = "spectral"
    foreseen = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse layers that do not commute with shifts on a torus."""
        reason = not_a_chain(problem) or no_image(problem)
        if reason is not None:
            return reason
        fault = "is no circular convolution of stride 1"
        return refused_layer(problem, _commutes, fault) or out_of_range(problem)

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the transform and C_in² per frequency and form."""
        stage, item = problem.stage, problem.itemsize
        channels, spatial = stage.input_shape[0], stage.input_shape[1:]
        n, half = math.prod(spatial), point.frequencies(spatial)
        forms = Cost(
            fft=channels * n * math.log2(max(n, 2)),
            stream=4 * half * channels * (channels + 1) * problem.form_count,
            calls=4 + 2 * problem.form_count * (channels + 2),
            bytes=2 * problem.form_count * channels**2 * half * item,
        )
        if stage.chain.trailing:
            return forms + matrix_cost(problem)
        out = math.prod(stage.output_shape) // n
        return forms + Cost(
            fft=out * n * math.log2(max(n, 2)),
            stream=4 * half * channels * out,
            calls=3 + channels,
            bytes=2 * channels * out * half * item,
        )

    def effort(self, problem: Problem) -> float:
        """Count one impulse per channel; M comes through the spectrum."""
        once = sum(operator.multiply_adds() for operator in problem.stage.operators)
        return float(once * problem.stage.input_shape[0])

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the spectrum, a form for each Q, and M or the product with Z_k per frequency."""
        builder = values.builder
        symbols, transfer = _symbols(problem)
        spectrum = builder.add(point.Fourier, values.unit, name="spectrum")
        energies = []
        for array in symbols:
            scaled, weight = normalised(array)
            symbol = values.constant("symbol", torch.view_as_real(scaled).clone())
            n = builder.add(point.SpectralForm, spectrum, name="n", symbol=symbol, weight=weight)
            energies.append((n,))
        if problem.stage.chain.trailing:
            image, gain = add_matrix(problem, values, _matrix(problem, transfer))
        else:
            scaled, gain = normalised(transfer)
            held = values.constant("transfer", torch.view_as_real(scaled).clone())
            product = builder.add(point.SpectralProduct, spectrum, name="image", transfer=held)
            size = problem.stage.input_shape[1:]
            image = builder.add(point.InverseFourier, product, name="image", size=size)
            if not values.wide:
                image = builder.add(layer.Cast, image, name="image", to=layer.WORKING)
        rounding = problem.rounding(math.prod(problem.stage.input_shape), squares=False)
        certificate = problem.certificate(rounding, margin=1.0)
        return Evaluation(image, tuple(energies), gain, certificate)


def half_weights(spatial: tuple[int, ...], frequencies: int) -> Tensor:
    """Return the share of each frequency of a half spectrum in the energy, in float64.

    A half spectrum leaves out mirror images, so each frequency that has one counts twice.
    """
    double = torch.full((spatial[-1] // 2 + 1,), 2.0, dtype=torch.float64)
    double[0] = 1
    if spatial[-1] % 2 == 0:
        double[-1] = 1
    return double.repeat(frequencies // len(double)) / math.prod(spatial)


def _symbols(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return G of every group, (groups, C_in, C_in, F), and Z_k, (C_k, C_in, F)."""
    chain = problem.stage.chain
    channels, spatial = chain.input_shape[0], chain.input_shape[1:]
    axes = tuple(range(2, 2 + len(spatial)))
    device = problem.stage.device
    z = torch.zeros(channels, channels, *spatial, dtype=torch.float64, device=device)
    for channel in range(channels):
        z[(channel, channel, *[0] * len(spatial))] = 1
    count = point.frequencies(spatial)
    share = half_weights(spatial, count).to(z.device)
    shape = len(chain.groups), channels, channels, count
    groups = torch.zeros(shape, dtype=torch.complex128, device=z.device)
    spectrum = torch.fft.rfftn(z, dim=axes).flatten(2)
    for segment in chain.segments:
        z = segment.apply(z)
        spectrum = torch.fft.rfftn(z, dim=axes).flatten(2)  # (C_in, C_l, F)
        gram = torch.einsum("aof,bof->abf", spectrum.conj(), spectrum)
        groups[segment.group] += segment.weight * share * gram
    return groups, spectrum.transpose(0, 1).contiguous()


def _matrix(problem: Problem, transfer: Tensor) -> Tensor:
    """Return M, (d_out, d_in): the rows of the trailing layers, multiplied by Z_k per frequency."""
    chain = problem.stage.chain
    spatial = chain.input_shape[1:]
    axes = tuple(range(2, 2 + len(spatial)))
    like = torch.empty(0, dtype=torch.float64, device=problem.stage.device)
    parts = []
    for rows in impulses(chain.output_shape, _ROWS, like):
        spectrum = torch.fft.rfftn(adjoint(chain.trailing, rows), dim=axes).flatten(2)
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
