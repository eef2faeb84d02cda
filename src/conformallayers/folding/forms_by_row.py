"""Quadratic forms of stacks of same-size convolutions, from the responses to single image rows.

The response to a row spreads by a few rows per layer, and rows far from the border respond alike.
So each layer needs the responses of few rows on few rows, and a block of Q is the product of two
of them. Terms are added layer by layer until the rest is proven to be negligible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..nn.bounds import Shape, conv_pads
from ..utils.progress import progress
from .negligible import is_negligible
from .operators import CONVOLUTIONS, Operator, impulses, is_plain
from .stages import Chain, Segment

TERMS = 0.25  # the share of the rounding error that deep terms may take


class Response(NamedTuple):
    """The response to one image row: feature-map rows from ``first`` on, (inputs, rows, C, …)."""

    first: int
    values: Tensor

    @property
    def last(self) -> int:
        """The last row."""
        return self.first + self.values.shape[1] - 1


def tail(segments: Sequence[Segment], depth: int) -> float:
    """Return κ with ``Σ_{l>depth} weight_l ‖z_l‖² ≤ κ ‖z_depth‖²``."""
    total, product = 0.0, 1.0
    for segment in segments[depth:]:
        product *= segment.factor**2 * math.prod(op.norm for op in segment.operators) ** 2
        total += segment.weight * product
    return total


def applies(input_shape: Shape, segments: Sequence[Segment]) -> bool:
    """Tell whether every operator keeps image rows where they are."""
    operators = [op for segment in segments for op in segment.operators]
    return (
        len(input_shape) >= 2
        and bool(operators)
        and all(_reach(op) is not None for op in operators)
    )


def forms_by_row(chain: Chain, device: torch.device, epsilon: float) -> tuple[Tensor, float]:
    """Return the forms, (groups, d_in, d_in), and a bound of the norm of the terms left out."""
    input_shape, segments = chain.input_shape, chain.segments
    height = input_shape[1]
    size = math.prod(input_shape) // height
    groups = 1 + segments[-1].group
    blocks = torch.zeros(groups, height, size, height, size, dtype=torch.float64, device=device)
    narrow = (1, input_shape[0], *input_shape[2:])  # an image row
    responses = {0: Response(0, next(impulses(narrow, size, device)))}
    level = 0, 0  # how far the responses spread up and down so far
    truncates = groups == 1 and epsilon > 0
    for depth, segment in enumerate(progress(segments, len(segments), "folding Q"), 1):
        spread = [_reach(op) or (0, 0) for op in segment.operators]
        after_segment = level[0] + sum(up for up, _ in spread), level[1] + sum(d for _, d in spread)
        responses = {
            row: _step(segment, _shifted(row, responses, level, height), height)
            for row in _distinct_rows(height, *after_segment)
        }
        level = after_segment
        norm = _add_products(blocks[segment.group], responses, level, segment.weight)
        if truncates and 2 <= depth < len(segments):
            missing = tail(segments, depth) * norm
            form = blocks[0].reshape(height * size, -1)
            # No eigenvalue is proven to be larger than the mean; the proof takes much longer than the mean.
            possible = missing <= TERMS * epsilon * (float(form.diagonal().mean()) + chain.unit)
            if possible and is_negligible(form, TERMS * epsilon, chain.unit, norm=missing):
                return _in_input_order(blocks, input_shape), missing
    return _in_input_order(blocks, input_shape), 0.0


def _distinct_rows(height: int, before: int, after: int) -> list[int]:
    """Return the rows near the border, and one row that represents all the others."""
    if before + after + 1 >= height:
        return list(range(height))
    return [*range(before + 1), *range(height - after, height)]


def _shifted(
    row: int, responses: dict[int, Response], level: tuple[int, int], height: int
) -> Response:
    """Return the response of any row: its own near the border, a shifted one elsewhere."""
    if row in responses:
        return responses[row]
    middle = next(r for r in responses if level[0] <= r < height - level[1])
    return Response(responses[middle].first + row - middle, responses[middle].values)


def _add_products(
    blocks: Tensor, responses: dict[int, Response], level: tuple[int, int], weight: float
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


def _product(a: Response, b: Response) -> Tensor:
    """Return the inner products of two responses over the rows that both reach."""
    first, last = max(a.first, b.first), min(a.last, b.last)
    if last < first:
        return a.values.new_zeros(a.values.shape[0], b.values.shape[0])
    left = a.values[:, first - a.first : last - a.first + 1].flatten(1)
    right = b.values[:, first - b.first : last - b.first + 1].flatten(1)
    return left @ right.T


def _step(segment: Segment, response: Response, height: int) -> Response:
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
    return Response(first, (z * segment.factor).transpose(1, 2).contiguous())


def _reach(operator: Operator) -> tuple[int, int] | None:
    """Return how many rows up and down an operator spreads a row; None for other operators."""
    module: Any = operator.module
    if operator.multiple:
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


def _in_input_order(blocks: Tensor, input_shape: Shape) -> Tensor:
    """Reorder (row, channel, …) to (channel, row, …) on both sides."""
    size, order = math.prod(input_shape), row_order(input_shape, blocks.device)
    forms = torch.empty(blocks.shape[0], size, size, dtype=blocks.dtype, device=blocks.device)
    for form, block in zip(forms, blocks, strict=True):
        rows = torch.empty(size, size, dtype=blocks.dtype, device=blocks.device)
        rows[order] = block.reshape(size, size)
        form[:, order] = rows
    return forms
