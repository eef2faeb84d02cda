"""Matrices and quadratic forms of a chain of operators, in float64 and bounded memory.

A column of Q is half the gradient of the form at an impulse: two passes through the layers, never
a Gram product over their many rows. Terms of deep layers are left out once their sum is proven to be
below the rounding of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn.bounds import Shape
from ..utils.progress import progress
from .forms_by_row import TERMS, applies, forms_by_row, tail
from .negligible import is_negligible
from .operators import Operator, adjoint, apply_all, impulses
from .stages import Chain, Segment

COLUMN_BYTES = 256 * 2**20  # memory that one batch of columns may hold
_SAMPLE = 48  # columns from which the decay of the terms is estimated


@dataclass(frozen=True)
class Forms:
    """Quadratic forms, and a bound of the terms left out."""

    values: Tensor  # float64 (groups, d_in, d_in)
    missing: float = 0.0  # a bound of the spectral norm of the terms left out


def dense_matrix(
    input_shape: Shape, output_shape: Shape, operators: Sequence[Operator], device: torch.device
) -> Tensor:
    """Return the matrix of a chain of operators, (d_out, d_in), by columns or by rows, whichever are fewer."""
    chunk = _chunk(input_shape, operators)
    if math.prod(output_shape) < math.prod(input_shape):
        parts = [adjoint(operators, g) for g in impulses(output_shape, chunk, device)]
        return torch.cat([part.flatten(1) for part in parts])
    total = -(-math.prod(input_shape) // chunk)
    batches = progress(impulses(input_shape, chunk, device), total, "folding M")
    return torch.cat([apply_all(operators, x).flatten(1).T for x in batches], 1)


def matrix_of(chain: Chain, device: torch.device) -> Tensor:
    """Return M = V Z_k of a chain in float64, (d_out, d_in)."""
    matrix = dense_matrix(chain.input_shape, chain.output_shape, chain.operators, device)
    return matrix * math.prod(segment.factor for segment in chain.segments)


def forms_of(chain: Chain, device: torch.device, epsilon: float = 0.0) -> Forms:
    """Return every Q of a chain in float64, without the last terms that are negligible.

    Together they change the denominator by less than ``epsilon`` times itself.
    """
    input_shape, segments = chain.input_shape, chain.segments
    if not segments:
        size = math.prod(input_shape)
        return Forms(torch.zeros(0, size, size, dtype=torch.float64, device=device))
    if len(segments) > 2 and applies(input_shape, segments):
        return Forms(*forms_by_row(chain, device, epsilon))
    depth = _guess_depth(chain, device, epsilon)
    while True:
        values, last = _forms(input_shape, segments[:depth], device)
        if depth == len(segments):
            return Forms(values)
        missing = tail(segments, depth) * last
        if is_negligible(values[0], TERMS * epsilon, chain.unit, norm=missing):
            return Forms(values, missing)
        depth = min(len(segments), depth + 3)


def _forms(
    input_shape: Shape, segments: Sequence[Segment], device: torch.device
) -> tuple[Tensor, float]:
    """Return the forms of all segments, and a bound of ``‖Z‖²`` of the last one."""
    d_in = math.prod(input_shape)
    groups = 1 + segments[-1].group
    chunk = _chunk(input_shape, [op for segment in segments for op in segment.operators])
    forms = torch.zeros(groups, d_in, d_in, dtype=torch.float64, device=device)
    frobenius = columns = 0.0
    rows = torch.zeros(1, dtype=torch.float64, device=device)  # absolute row sums of Z so far
    start = 0
    for batch in progress(impulses(input_shape, chunk, device), -(-d_in // chunk), "folding Q"):
        x = batch.requires_grad_()
        energies = [x.new_zeros(())] * groups
        with torch.enable_grad():
            z = x
            for segment in segments:
                z = segment.apply(z)
                n = segment.weight / 2 * z.square().sum()
                energies[segment.group] = energies[segment.group] + n
        stop = start + len(batch)
        for group, value in enumerate(energies):
            (part,) = torch.autograd.grad(value, x, retain_graph=group + 1 < groups)
            forms[group, start:stop] = part.flatten(1)
        absolute = z.detach().flatten(1).abs()
        frobenius += float(absolute.square().sum())
        columns = max(columns, float(absolute.sum(1).max()))
        rows = rows + absolute.sum(0)
        start = stop
    # ‖Z‖² ≤ ‖Z‖_F², and ‖Z‖² ≤ ‖Z‖_1·‖Z‖_∞, the largest column sum times the largest row sum.
    # Rounding leaves Q a few ulps from symmetric; the mean of both halves is the better value.
    last = min(frobenius, columns * float(rows.max()))
    return (forms + forms.transpose(1, 2)) / 2, last


def stacked_layers(chain: Chain, group: int, device: torch.device) -> Tensor:
    """Return the rows ``√weight·Z_l`` of all layers of a form, (rows, d_in): ``Q = LᵀL``, never squared."""
    chunk = _chunk(
        chain.input_shape, [op for segment in chain.segments for op in segment.operators]
    )
    columns = []
    for z in impulses(chain.input_shape, chunk, device):
        parts = []
        for segment in chain.segments:
            z = segment.apply(z)
            if segment.group == group:
                parts.append(math.sqrt(segment.weight) * z.flatten(1))
        columns.append(torch.cat(parts, 1))
    return torch.cat(columns).T


def triangular_factor(form: Tensor) -> Tensor:
    """Return L, upper triangular, with ``LᵀL = Q`` to a few roundings of float64.

    To a singular form, the first of a few multiples of I is added with which the factorisation succeeds.
    """
    size, peak = len(form), float(form.diagonal().abs().max())
    if peak == 0:
        return torch.zeros_like(form)
    # Rounding makes zero eigenvalues negative by a few roundings of the largest entry, by n(n + 1) at worst.
    for roundings in (0, 1, 30, 1000, size * (size + 1)):
        shifted = form.clone()
        shifted.diagonal().add_(roundings * torch.finfo(form.dtype).eps * peak)
        found = torch.linalg.cholesky_ex(shifted, upper=True)
        if int(found.info) == 0:
            factor: Tensor = found.L
            return factor
    return torch.full_like(form, math.nan)


def _guess_depth(chain: Chain, device: torch.device, epsilon: float) -> int:
    """Estimate from a few columns how many terms count; the proof comes afterwards."""
    input_shape, segments = chain.input_shape, chain.segments
    if epsilon == 0 or len(chain.groups) != 1 or len(segments) < 3:
        return len(segments)
    d_in = math.prod(input_shape)
    picks = torch.linspace(0, d_in - 1, min(_SAMPLE, d_in)).long()
    z = torch.zeros(len(picks), d_in, dtype=torch.float64, device=device)
    z[torch.arange(len(picks)), picks] = 1
    z = z.view(-1, *input_shape)
    total = 0.0
    with torch.no_grad():
        for depth, segment in enumerate(segments, 1):
            z = segment.apply(z)
            mean = float(z.square().sum()) / len(picks)
            total += segment.weight * mean
            # ‖Z‖² is at most d_in times the mean of its squared columns; λ_min(Q) is guessed as 1/100 of
            # the mean diagonal. A wrong guess costs time, not correctness.
            small = TERMS * epsilon * (total / 100 + chain.unit)
            if depth < len(segments) and 3 * d_in * mean * tail(segments, depth) < small:
                return depth
    return len(segments)


def _chunk(input_shape: Shape, operators: Sequence[Operator]) -> int:
    kept = 3 * sum(math.prod(op.output_shape) for op in operators) + math.prod(input_shape)
    return max(1, min(math.prod(input_shape), COLUMN_BYTES // (8 * kept)))
