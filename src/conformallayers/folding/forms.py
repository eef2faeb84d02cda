"""The matrix M and the quadratic forms Q of a radial stage, in float64 and bounded memory.

A column of Q is half the gradient of the form at an impulse: two passes through the layers, never a Gram product over
their many rows.

With an error E of Q, ``|xᵀEx| ≤ ε·(‖x‖ + xᵀQx)`` holds for every x if ``εQ ± E ⪰ 0``. Where the denominator is
``‖x‖ + xᵀQx/‖x‖`` or ``√(‖x‖² + xᵀQx)``, ``ε(Q + I) ± E ⪰ 0`` is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..nn.bounds import Shape, conv_pads
from ..utils.progress import progress
from .operators import CONVOLUTIONS, Operator, adjoint, apply_all, impulses, is_plain
from .stages import RadialStage

COLUMN_BYTES = 256 * 2**20  # memory that one batch of columns may hold
MOST_COEFFICIENTS = 8192  # coefficients of a sample; building a larger Q would not fit into memory


def too_many_entries(d_in: int, d_out: int) -> str | None:
    """Return why a form (d_in, d_in) and a matrix (d_out, d_in) cannot be written out, or None."""
    if d_in > MOST_COEFFICIENTS:
        return f"a sample has {d_in} coefficients, a written-out form at most {MOST_COEFFICIENTS}"
    if d_in * d_out > MOST_COEFFICIENTS * 4 * MOST_COEFFICIENTS:
        return f"M would have {d_out} × {d_in} entries"
    return None


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


def matrix_of(stage: RadialStage) -> Tensor:
    """Return M = V Z_k of a stage in float64, (d_out, d_in)."""
    matrix = dense_matrix(stage.input_shape, stage.output_shape, stage.operators, stage.device)
    return matrix * math.prod(segment.factor for segment in stage.segments)


def forms_of(stage: RadialStage) -> Tensor:
    """Return every Q of a stage in float64, (groups, d_in, d_in), from their gradients at impulses."""
    shape, groups = stage.input_shape, len(stage.groups)

    def energies(z: Tensor) -> list[Tensor]:
        found = [z.new_zeros(())] * groups
        for segment in stage.segments:
            z = segment.apply(z)
            found[segment.group] = found[segment.group] + segment.weight * z.square().sum()
        return found

    def columns(part: Shape, wanted: Tensor) -> Tensor:
        return _from_gradients(energies, impulses(part, chunk, stage.device, wanted))

    chunk, reach = _chunk(shape, stage.operators), _reach(stage)
    if reach is not None and sum(reach) + 1 < shape[1]:
        return _symmetric(_forms_by_row(shape, reach, groups, stage.device, columns))
    parts = torch.arange(math.prod(shape), device=stage.device).split(chunk)
    return _symmetric(
        torch.cat([columns(shape, part) for part in progress(parts, len(parts), "folding Q")], 1)
    )


def _forms_by_row(
    shape: Shape,
    reach: tuple[int, int],
    groups: int,
    device: torch.device,
    columns: Callable[[Shape, Tensor], Tensor],
) -> Tensor:
    """Return forms by image rows: those near the border, and one that stands for all others.

    The block of two rows that are ``reach`` away from the border depends on their distance alone. A row of Q
    is zero beyond twice that reach.
    """
    height, (up, down) = shape[1], reach
    size, end = math.prod(shape) // height, height - down
    blocks = torch.zeros(groups, height, size, height, size, dtype=torch.float64, device=device)
    for row in progress([*range(up + 1), *range(end, height)], up + 1 + down, "folding Q"):
        top, bottom = max(0, row - up - down), min(height, row + up + down + 1)
        part = (shape[0], bottom - top, *shape[2:])
        order = row_order(part, device)
        found = columns(part, order.view(bottom - top, size)[row - top])[:, :, order]
        blocks[:, row, :, top:bottom] = found.view(groups, size, -1, size)
        blocks[:, top:bottom, :, row] = found.view(groups, size, -1, size).permute(0, 2, 3, 1)
    for row in range(up + 1, end):
        block = blocks[:, up, :, up : up + end - row]
        blocks[:, row, :, row:end] = block
        blocks[:, row:end, :, row] = block.permute(0, 2, 3, 1)
    back = row_order(shape, device).argsort()
    return blocks.view(groups, height * size, -1)[:, back][:, :, back]


def _symmetric(forms: Tensor) -> Tensor:
    """Remove what rounding has left: the mean of both halves is the better value."""
    return (forms + forms.transpose(1, 2)) / 2


def _from_gradients(
    energies: Callable[[Tensor], Sequence[Tensor]], batches: Iterable[Tensor]
) -> Tensor:
    """Return rows of the forms of energies: the gradient of xᵀQx/2 at an impulse is a row of Q."""
    rows = []
    for batch in batches:
        x = batch.requires_grad_()
        with torch.enable_grad():
            halves = [value.sum() / 2 for value in energies(x)]
        slopes = [torch.autograd.grad(half, x, retain_graph=True)[0] for half in halves]
        rows.append(torch.stack([slope.flatten(1) for slope in slopes]))
    return torch.cat(rows, 1)


def _reach(stage: RadialStage) -> tuple[int, int] | None:
    """Return how many image rows a row spreads up and down before the last activation, at most.

    None if some layer does not keep image rows where they are.
    """
    up = down = 0
    for operator in (op for segment in stage.segments for op in segment.operators):
        module: Any = operator.module
        if operator.multiple:
            continue
        if not is_plain(module, CONVOLUTIONS) or module.padding_mode != "zeros":
            return None
        if module.stride[0] != 1 or operator.input_shape[1] != operator.output_shape[1]:
            return None
        before, after = conv_pads(module)[0]
        up, down = up + after, down + before
    return (up, down) if len(stage.input_shape) > 1 else None


def stacked_layers(stage: RadialStage, group: int) -> Tensor:
    """Return the rows ``√weight·Z_l`` of all layers of a form, (rows, d_in): ``Q = LᵀL``, never squared."""
    columns = []
    chunk = _chunk(stage.input_shape, stage.operators)
    for z in impulses(stage.input_shape, chunk, stage.device):
        parts = []
        for segment in stage.segments:
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


def _chunk(input_shape: Shape, operators: Sequence[Operator]) -> int:
    kept = 3 * sum(math.prod(op.output_shape) for op in operators) + math.prod(input_shape)
    return max(1, min(math.prod(input_shape), COLUMN_BYTES // (8 * kept)))


# -- terms that rounding hides ----------------------------------------------------------------------


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error of a denominator that the dtype rounds away.

    It is the unit roundoff of float32, for shorter dtypes too, and 0 for float64, the dtype of the proofs.
    """
    return 0.0 if dtype == torch.float64 else torch.finfo(torch.float32).eps / 2


def is_negligible(form: Tensor, error: Tensor, epsilon: float, unit: float) -> bool:
    """Prove ``ε(Q + unit·I) ± E ⪰ 0``: leaving out E changes the denominator by less than ε times itself.

    Args:
        form: Q in float64.
        error: E in float64.
        epsilon: the error to keep below, relative to the denominator.
        unit: 1 where the denominator is proportional to ‖x‖, else 0.
    """
    room = epsilon * form
    room.diagonal().add_(epsilon * unit)
    return _positive_definite(room + error) and _positive_definite(room - error)


def _positive_definite(form: Tensor) -> bool:
    """Prove that a symmetric matrix is positive definite, rounding included.

    The backward error of a Cholesky factorisation is at most the trace times (n + 1) roundings (Rump,
    "Verification of positive definiteness", 2006); three more cover the shift.
    """
    size, unit = len(form), torch.finfo(form.dtype).eps / 2
    guard = (size + 4) * unit * float(form.diagonal().abs().sum())
    shifted = form.clone()
    shifted.diagonal().sub_(guard)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


def row_order(shape: Shape, device: torch.device) -> Tensor:
    """Return the position of each coefficient when image rows come before channels."""
    return torch.arange(math.prod(shape), device=device).view(shape).movedim(1, 0).flatten()
