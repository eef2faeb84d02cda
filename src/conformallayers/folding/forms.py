"""The matrix M and the quadratic forms Q of a radial stage, in float64 and bounded memory.

A column of Q is half the gradient of the form at an impulse: two passes through the layers, never a Gram product over
their many rows. Stacks of same-size convolutions take the responses to single image rows instead: such a response
spreads by a few rows per layer, and rows far from the border respond alike. There, terms of deep layers are left out
once their sum is proven to be below the rounding of the dtype.

With an error E of Q, ``|xᵀEx| ≤ ε·(‖x‖ + xᵀQx)`` holds for every x if ``εQ ± E ⪰ 0``. Where the denominator is
``‖x‖ + xᵀQx/‖x‖`` or ``√(‖x‖² + xᵀQx)``, ``ε(Q + I) ± E ⪰ 0`` is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..nn.bounds import Shape, conv_pads
from ..nn.registry import find_spec
from ..utils.progress import progress
from .stages import (
    CONVOLUTIONS,
    Operator,
    RadialStage,
    Segment,
    adjoint,
    apply_all,
    impulses,
    is_plain,
)

COLUMN_BYTES = 256 * 2**20  # memory that one batch of columns may hold


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


def forms_of(stage: RadialStage, epsilon: float = 0.0) -> Tensor:
    """Return every Q of a stage in float64, (groups, d_in, d_in), without the last terms that are negligible.

    Together they change the denominator by less than ``epsilon`` times itself.
    """
    operators = [op for segment in stage.segments for op in segment.operators]
    if len(stage.input_shape) > 1 and all(_reach(op) is not None for op in operators):
        return _forms_by_row(stage, epsilon)

    def energies(z: Tensor) -> list[Tensor]:
        found = [z.new_zeros(())] * len(stage.groups)
        for segment in stage.segments:
            z = segment.apply(z)
            found[segment.group] = found[segment.group] + segment.weight * z.square().sum()
        return found

    size, chunk = math.prod(stage.input_shape), _chunk(stage.input_shape, stage.operators)
    batches = impulses(stage.input_shape, chunk, stage.device)
    forms = _from_gradients(energies, progress(batches, -(-size // chunk), "folding Q"))
    # Rounding leaves Q a few ulps from symmetric; the mean of both halves is the better value.
    return (forms + forms.transpose(1, 2)) / 2


def _from_gradients(
    energies: Callable[[Tensor], Sequence[Tensor]], batches: Iterable[Tensor]
) -> Tensor:
    """Return the forms of energies: the gradient of xᵀQx/2 at an impulse is a column of Q."""
    rows = []
    for batch in batches:
        x = batch.requires_grad_()
        with torch.enable_grad():
            halves = [value.sum() / 2 for value in energies(x)]
        slopes = [torch.autograd.grad(half, x, retain_graph=True)[0] for half in halves]
        rows.append(torch.stack([slope.flatten(1) for slope in slopes]))
    return torch.cat(rows, 1)


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

    To a singular form, the first of a few multiples of I is added with which the factorization succeeds.
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

    The backward error of a Cholesky factorization is at most the trace times (n + 1) roundings (Rump,
    "Verification of positive definiteness", 2006); three more cover the shift.
    """
    size, unit = len(form), torch.finfo(form.dtype).eps / 2
    guard = (size + 4) * unit * float(form.diagonal().abs().sum())
    shifted = form.clone()
    shifted.diagonal().sub_(guard)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


# -- forms from the responses to image rows ---------------------------------------------------------


class _Response(NamedTuple):
    """The response to one image row: feature-map rows from ``first`` on, (inputs, rows, C, …)."""

    first: int
    values: Tensor

    @property
    def last(self) -> int:
        """The last row."""
        return self.first + self.values.shape[1] - 1


def _tail(segments: Sequence[Segment], depth: int) -> float:
    """Return κ with ``Σ_{l>depth} weight_l ‖z_l‖² ≤ κ ‖z_depth‖²``."""
    total, product = 0.0, 1.0
    for segment in segments[depth:]:
        product *= segment.factor**2 * math.prod(op.norm for op in segment.operators) ** 2
        total += segment.weight * product
    return total


def _forms_by_row(stage: RadialStage, epsilon: float) -> Tensor:
    """Return the forms, term by term until the rest is proven to be negligible."""
    shape, segments, device = stage.input_shape, stage.segments, stage.device
    height, size = shape[1], math.prod(shape) // shape[1]
    forms = len(stage.groups), height, size
    blocks = torch.zeros(*forms, height, size, dtype=torch.float64, device=device)
    narrow = (1, shape[0], *shape[2:])  # an image row
    responses = {0: _Response(0, next(impulses(narrow, size, device)))}
    level = 0, 0  # how far the responses spread up and down so far
    for depth, segment in enumerate(progress(segments, len(segments), "folding Q"), 1):
        spread = [_reach(op) or (0, 0) for op in segment.operators]
        after_segment = level[0] + sum(up for up, _ in spread), level[1] + sum(d for _, d in spread)
        responses = {
            row: _step(segment, _shifted(row, responses, level, height), height)
            for row in _distinct_rows(height, *after_segment)
        }
        level = after_segment
        norm = _add_products(blocks[segment.group], responses, level, segment.weight)
        if len(blocks) == 1 and epsilon > 0 and 2 <= depth < len(segments):
            form = blocks[0].reshape(height * size, -1)
            missing = _tail(segments, depth) * norm
            # No eigenvalue is proven to be larger than the mean; the proof takes much longer than the mean.
            if missing > epsilon * (float(form.diagonal().mean()) + stage.unit):
                continue
            lost = missing * torch.eye(len(form), dtype=form.dtype, device=device)
            if is_negligible(form, lost, epsilon, stage.unit):
                break
    order = row_order(shape, device).argsort()  # from (row, channel, …) to (channel, row, …)
    return blocks.view(len(blocks), height * size, -1)[:, order][:, :, order]


def _distinct_rows(height: int, before: int, after: int) -> list[int]:
    """Return the rows near the border, and one row that represents all the others."""
    if before + after + 1 >= height:
        return list(range(height))
    return [*range(before + 1), *range(height - after, height)]


def _shifted(
    row: int, responses: dict[int, _Response], level: tuple[int, int], height: int
) -> _Response:
    """Return the response of any row: its own near the border, a shifted one elsewhere."""
    if row in responses:
        return responses[row]
    middle = next(r for r in responses if level[0] <= r < height - level[1])
    return _Response(responses[middle].first + row - middle, responses[middle].values)


def _add_products(
    blocks: Tensor, responses: dict[int, _Response], level: tuple[int, int], weight: float
) -> float:
    """Add ``weight · Zᵀ Z`` to the blocks of Q, computing products that only shift once.

    Returns:
        A bound of ‖Z‖²: the largest absolute row sum of Zᵀ Z.
    """
    height = len(blocks)
    # Blocks of rows that respond alike depend on their distance only: -1 stands for every such row.
    known: dict[tuple[int, int, int], Tensor] = {}
    sums = blocks.new_zeros(blocks.shape[:2])
    for i in range(height):
        for j in range(i, min(height, i + sum(level) + 1)):
            key = _class(i, level, height), _class(j, level, height), j - i
            if key not in known:
                pair = (_shifted(row, responses, level, height) for row in (i, j))
                known[key] = _product(*pair)
            block = known[key]
            blocks[i, :, j, :].add_(block, alpha=weight)
            sums[i] += block.abs().sum(1)
            if i != j:
                blocks[j, :, i, :].add_(block.T, alpha=weight)
                sums[j] += block.abs().sum(0)
    return float(sums.max())


def _class(row: int, level: tuple[int, int], height: int) -> int:
    """Return the row itself near the border, -1 for all rows that respond alike."""
    return row if row < level[0] or row >= height - level[1] else -1


def _product(a: _Response, b: _Response) -> Tensor:
    """Return the inner products of two responses over the rows that both reach."""
    first, last = max(a.first, b.first), min(a.last, b.last)
    if last < first:
        return a.values.new_zeros(a.values.shape[0], b.values.shape[0])
    left = a.values[:, first - a.first : last - a.first + 1].flatten(1)
    right = b.values[:, first - b.first : last - b.first + 1].flatten(1)
    return left @ right.T


def _step(segment: Segment, response: _Response, height: int) -> _Response:
    """Run a segment on the rows that a response can reach; all other rows are zero."""
    first, z = response.first, response.values.transpose(1, 2)
    for operator in segment.operators:
        up, down = _reach(operator) or (0, 0)
        top = min(up, first)
        bottom = min(down, height - first - z.shape[2])
        # Rows of zeros make room for the rows that the response reaches next, up to the border.
        pads = [0, 0] * (z.dim() - 3) + [top, bottom]
        z = operator.apply(F.pad(z, pads))
        first -= top
    # Rows before channels: a range of rows is then a matrix without copying.
    return _Response(first, (z * segment.factor).transpose(1, 2).contiguous())


def _reach(operator: Operator) -> tuple[int, int] | None:
    """Return how many rows up and down an operator spreads a row; None for other operators."""
    module: Any = operator.module
    spec = find_spec(module)
    if spec is not None and spec.multiple:
        return 0, 0
    if not is_plain(module, CONVOLUTIONS) or module.padding_mode != "zeros":
        return None
    if module.stride[0] != 1 or operator.input_shape[1] != operator.output_shape[1]:
        return None
    span = module.dilation[0] * (module.kernel_size[0] - 1)
    before, _ = conv_pads(module)[0]
    return span - before, before


def row_order(shape: Shape, device: torch.device) -> Tensor:
    """Return the position of each coefficient when image rows come before channels."""
    return torch.arange(math.prod(shape), device=device).view(shape).movedim(1, 0).flatten()
