"""Strategies that write M and the forms out: "dense", and "banded" with Q as blocks around the diagonal.

A convolution couples an image row with the few rows around it, and so does its form Q = LᵀL. L has the band of the
upper half of Q. The blocks ``L_ij`` with ``i ≤ j ≤ i + width`` of one block row i stand side by side, so
that all of them are one batched product over a window that slides down the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ..forms import is_negligible, row_order, triangular_factor
from ..lower import add_flatten, add_product, add_reshape, normalized
from ..plan import TERMS, Cost, Evaluation, Problem, Strategy


class Dense(Strategy):
    """Multiply by M and, for each form, by a factor of Q; the form is the sum of the squares."""

    name = "dense"

    def refuses(self, problem: Problem) -> str | None:
        """Refuse forms that cannot be written out."""
        return problem.cannot_write_out()

    def cost(self, problem: Problem) -> Cost:
        """Count d_out·d_in for M, and for each form d_in times the rows of its factor."""
        d_in, count = math.prod(problem.stage.input_shape), problem.form_count
        rows = (problem.stage.rows_of(group) for group in range(count))
        size = sum(min(row, d_in) * d_in for row in rows)
        stream, calls = 2 * count * d_in, 4 * count
        forms = Cost(gemm=size, stream=stream, calls=calls, bytes=size * problem.itemsize)
        return problem.matrix_cost() + forms

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append ``‖Lx‖²`` with ``LᵀL = Q`` for each Q, which loses no digits where Q x is small, and M x."""
        rows, energies = add_flatten(builder, x), []
        for group in range(problem.form_count):
            factor = problem.factor(group)
            if factor is None:
                factor = triangular_factor(problem.forms[group])
            factor, peak = normalized(factor)
            z = builder.add(layer.Matmul, rows, weight=builder.constant("factor", factor))
            n = builder.add(point.SumSquares, z, name="n", weight=peak**2)
            energies.append((n,))
        image, gain = add_product(builder, rows, problem.matrix)
        return Evaluation(image, tuple(energies), gain)


_BLOCK = 96  # least coefficients of a block: smaller products are slow
_FIRST = 3  # segments whose terms always count in float32


@dataclass(frozen=True)
class BlockLayout:
    """The partition of a sample into block rows of ``rows`` image rows, zeros after the last one."""

    shape: tuple[int, ...]
    rows: int
    blocks: int
    size: int  # coefficients of a block

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> BlockLayout:
        """Take rows of axis 1 until a block is large enough."""
        height = shape[1]
        row = math.prod(shape) // height
        rows = min(height, max(1, round(_BLOCK / row)))
        return cls(shape, rows, -(-height // rows), rows * row)


class Banded(Strategy):
    """Store the factor of the band of each form, without the blocks that are provably negligible."""

    name = "banded"

    def refuses(self, problem: Problem) -> str | None:
        """Refuse samples without image rows, and forms that cannot be written out."""
        shape = problem.stage.input_shape
        if len(shape) < 2 or shape[1] < 3:
            return "a sample has no image rows"
        return problem.cannot_write_out()

    def cost(self, problem: Problem) -> Cost:
        """Count the blocks of the bands that the layers let expect."""
        layout, count = BlockLayout.of(problem.stage.input_shape), problem.form_count
        widths = (_expected_width(index, layout, problem) for index in range(count))
        size = sum((w + 1) * layout.blocks * layout.size**2 for w in widths)
        stream = 3 * layout.blocks * layout.size * (1 + count)
        calls = 4 + 4 * count
        forms = Cost(blocks=size, stream=stream, calls=calls, bytes=size * problem.itemsize)
        return problem.matrix_cost() + forms

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append a banded form for each Q, of the sample in row order, and the product with M."""
        layout = BlockLayout.of(problem.stage.input_shape)
        rows, energies = _add_rows(builder, x, layout), []
        for index, form in enumerate(problem.forms):
            width = _proven_width(form, layout, problem)
            factor = _banded_factor(form, problem.factor(index), layout, width)
            factor, peak = normalized(factor)
            full = layout.blocks - width
            band = builder.constant("band", _pack(factor, layout, width)[:full].contiguous())
            # The blocks of the last rows, whose windows would leave the image, are one matrix.
            ends = factor[full * layout.size :, full * layout.size :].T
            ends = ends.clone(memory_format=torch.contiguous_format)  # also if there are none
            last = builder.constant("last", ends)
            fields = {"band": band, "last": last, "size": layout.size, "width": width}
            n = builder.add(point.BandedForm, rows, name="n", weight=peak**2, **fields)
            energies.append((n,))
        image, gain = add_product(builder, add_flatten(builder, x), problem.matrix)
        return Evaluation(image, tuple(energies), gain)


def _expected_width(index: int, layout: BlockLayout, problem: Problem) -> int:
    """Return how many off-diagonal blocks a form needs, by the image rows over which its layers couple coefficients."""
    stage, reach, step = problem.stage, 0, 1
    segments = [segment for group in stage.groups[: index + 1] for segment in group]
    if problem.proves_terms:
        segments = segments[:_FIRST]
    for operator in (op for segment in segments for op in segment.operators):
        sizes = (
            getattr(operator.module, name, 1) for name in ("kernel_size", "stride", "dilation")
        )
        kernel, stride, dilation = (n[0] if isinstance(n, tuple) else n for n in sizes)
        reach += (kernel - 1) * dilation * step
        step *= stride
    return min(-(-reach // layout.rows), layout.blocks - 1)


def _add_rows(builder: RecipeBuilder, x: str, layout: BlockLayout) -> str:
    """Append the sample with its image rows one after the other, and zeros after the last one."""
    shape, rows = layout.shape, x
    if shape[0] > 1:
        order = (1, 0, *range(2, len(shape)))
        rows = builder.add(layer.Permute, rows, name="z", order=order)
    rows = add_reshape(builder, rows, (math.prod(shape),))
    extra = layout.blocks * layout.size - math.prod(shape)
    return builder.add(layer.Pad, rows, name="rows", pads=((0, extra),)) if extra else rows


def _in_row_order(form: Tensor, layout: BlockLayout) -> Tensor:
    order = row_order(layout.shape, form.device)
    ordered = form[order][:, order]
    extra = layout.blocks * layout.size - len(order)
    return F.pad(ordered, (0, extra, 0, extra))


def _banded_factor(form: Tensor, exact: Tensor | None, layout: BlockLayout, width: int) -> Tensor:
    """Return the triangular factor of the band of a form, in row order.

    The factor has the same band. It is made of an exact factor where that is given.
    """
    ordered = _in_row_order(form, layout)
    block = torch.arange(len(ordered), device=form.device) // layout.size
    outside = (block[:, None] - block).abs() > width
    if exact is not None:
        triangle = torch.linalg.qr(exact[:, row_order(layout.shape, form.device)], mode="r").R
        rows, columns = triangle.shape
        factor = F.pad(triangle, (0, len(ordered) - columns, 0, len(ordered) - rows))
        # Of a singular form there are other triangles, which may leave the band.
        limit = len(form) * torch.finfo(form.dtype).eps * float(factor.abs().max())
        if not bool((factor.abs() > limit)[outside].any()):
            return factor.masked_fill(outside, 0.0)
    return triangular_factor(ordered.masked_fill_(outside, 0.0))


def _pack(factor: Tensor, layout: BlockLayout, width: int) -> Tensor:
    """Return the upper blocks of a band, (blocks, (width + 1)·size, size)."""
    blocks, size = layout.blocks, layout.size
    grid = factor.view(blocks, size, blocks, size)
    band = factor.new_zeros(blocks, width + 1, size, size)
    for offset in range(width + 1):
        for i in range(blocks - offset):
            band[i, offset] = grid[i, :, i + offset, :].T  # (columns of i + offset, rows of i)
    return band.flatten(1, 2)


def _proven_width(form: Tensor, layout: BlockLayout, problem: Problem) -> int:
    """Bisect for a narrow band such that the blocks outside are zero, or proven to be negligible."""
    ordered = _in_row_order(form, layout).view(layout.blocks, layout.size, layout.blocks, -1)
    i, j = ordered.ne(0).any(3).any(1).nonzero(as_tuple=True)
    narrowest, width = 0, int((i - j).abs().max()) if len(i) else 0
    if not problem.proves_terms:
        return width
    order = row_order(layout.shape, form.device)
    ordered = form[order][:, order]
    block = torch.arange(len(ordered), device=form.device) // layout.size
    distance = (block[:, None] - block).abs()
    while narrowest < width:
        middle = (narrowest + width) // 2
        lost = ordered.masked_fill(distance <= middle, 0.0)
        if is_negligible(ordered, lost, (1 - TERMS) * problem.epsilon, problem.stage.unit):
            width = middle
        else:
            narrowest = middle + 1
    return width
