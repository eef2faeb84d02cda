"""Strategy "banded": image rows as blocks of a symmetric band, upper half only.

A convolution couples a row with the few rows around it, and so does the form it gives. The blocks
``Q_ij`` with ``i ≤ j ≤ i + width`` of one block row i stand side by side, so that all of them are
one batched product over a window that slides down the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...functional import full_precision
from ..certificate import ErrorBudget, holds
from ..stages import Program
from .base import Core, Cost, Request, at_least_float32, normalised, reach, wide
from .dense import matrix_cost, too_large

_BLOCK = 96  # coefficients a block should have at least: smaller products waste the processor


@dataclass(frozen=True)
class Layout:
    """How a sample falls into block rows: ``rows`` image rows each, zeros behind the last one."""

    shape: tuple[int, ...]
    rows: int
    blocks: int
    size: int  # coefficients of a block

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Layout:
        """Take rows of axis 1 until a block is large enough."""
        height = shape[1]
        row = math.prod(shape) // height
        rows = min(height, max(1, round(_BLOCK / row)))
        return cls(shape, rows, -(-height // rows), rows * row)

    def order(self) -> Tensor:
        """Return the position of each coefficient when rows come before channels."""
        index = torch.arange(math.prod(self.shape)).view(self.shape)
        return index.movedim(1, 0).flatten()


class BandedCore(Core):
    """Hold the upper half of the band of each form, as wide as the slack provably asks for."""

    name = "banded"
    settings = (*Core.settings, "layout", "weights", "widths")
    matrix: Tensor

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.layout = Layout.of(request.program.input_shape)
        matrix, self.gain = normalised(request.matrix)
        self.register_buffer("matrix", matrix.to(request.device, request.dtype))
        weights, widths, margins = [], [], []
        for index, form in enumerate(request.forms.values):
            width, margin = _width(index, self.layout, request)
            band, weight = normalised(_pack(form, self.layout, width))
            full = self.layout.blocks - width
            last = _last(band[full:], width, self.layout.size)
            self.register_buffer(f"band{index}", band[:full].to(request.device, request.dtype))
            self.register_buffer(f"last{index}", last.to(request.device, request.dtype))
            weights.append(weight)
            widths.append(width)
            margins.append(margin)
        self.weights, self.widths = tuple(weights), tuple(widths)
        proven = [margin for margin in margins if margin is not None]
        self.certificate = request.certificate(min(proven, default=None))

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse samples without image rows, and what cannot be written out."""
        if len(program.input_shape) < 2 or program.input_shape[1] < 3:
            return "a sample has no image rows"
        return too_large(program)

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Count the blocks of the band: its true width, or the narrowest one before it is built."""
        layout = Layout.of(request.program.input_shape)
        groups = len(request.program.groups)
        if built:
            widths = [_width(i, layout, request)[0] for i in range(groups)]
        else:
            least = 0 if request.slack.requested else _least_width(request.program, layout)
            widths = [least] * groups
        size = sum((w + 1) * layout.blocks * layout.size**2 for w in widths)
        stream = 3 * layout.blocks * layout.size * (1 + groups)
        forms = Cost(
            blocks=size, stream=stream, calls=4 + 4 * groups, bytes=size * request.dtype.itemsize
        )
        return matrix_cost(request) + forms

    def scratch(self) -> int:
        """Count the sample in row order and the products of one form."""
        return 3 * self.layout.blocks * self.layout.size + self.matrix.shape[0]

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        v = (x.flatten(1) @ self.matrix.T).view(-1, *self.output_shape)
        with full_precision(x):
            blocks, size = self.layout.blocks, self.layout.size
            rows = at_least_float32(x).movedim(2, 1).flatten(1)
            if rows.shape[1] < blocks * size:
                rows = torch.nn.functional.pad(rows, (0, blocks * size - rows.shape[1]))
            values = []
            for index, (weight, width) in enumerate(zip(self.weights, self.widths, strict=True)):
                band = getattr(self, f"band{index}").to(rows.dtype)
                last = getattr(self, f"last{index}").to(rows.dtype)
                values.append(wide(_evaluate(rows, band, last, width, size)) * weight)
        return v, tuple(values)


def _evaluate(rows: Tensor, band: Tensor, last: Tensor, width: int, size: int) -> Tensor:
    """Return the value of a form: one product of all full windows, one of the last window."""
    windows = rows.unfold(1, (width + 1) * size, size).transpose(0, 1)  # (blocks - width, B, …)
    images = torch.bmm(windows, band)
    total = (images * windows[..., :size]).sum((0, 2))
    if width == 0:
        return total
    end = rows[:, -width * size :]
    return total + (end @ last * end).sum(1)


def _in_row_order(form: Tensor, layout: Layout) -> Tensor:
    order = layout.order().to(form.device)
    ordered = form[order][:, order]
    extra = layout.blocks * layout.size - len(order)
    return torch.nn.functional.pad(ordered, (0, extra, 0, extra))


def _pack(form: Tensor, layout: Layout, width: int) -> Tensor:
    """Return the band, (blocks, (width + 1)·size, size); off-diagonal blocks count twice."""
    blocks, size = layout.blocks, layout.size
    grid = _in_row_order(form, layout).view(blocks, size, blocks, size)
    band = form.new_zeros(blocks, width + 1, size, size)
    for offset in range(width + 1):
        for i in range(blocks - offset):
            block = grid[i, :, i + offset, :].T  # (columns of block row i + offset, rows of i)
            band[i, offset] = block if offset == 0 else 2 * block
    return band.flatten(1, 2)


def _last(band: Tensor, width: int, size: int) -> Tensor:
    """Return the blocks of the last rows, whose windows would leave the image, as one matrix."""
    blocks = band.view(width, width + 1, size, size) if width else band
    matrix = band.new_zeros(width, size, width, size)
    for i in range(width):
        for offset in range(width - i):
            matrix[i + offset, :, i, :] = blocks[i, offset]
    return matrix.reshape(width * size, width * size)


def _least_width(program: Program, layout: Layout) -> int:
    """Return the band of the first stages, which is never left out in float32."""
    return min(-(-reach(program, 0) // layout.rows), layout.blocks - 1)


def _width(index: int, layout: Layout, request: Request) -> tuple[int, float | None]:
    """Return how many off-diagonal blocks are provably enough, and the margin of the proof.

    The margin is None where all blocks that are not zero are kept.
    """
    key = "width", index, layout
    if key not in request.memo:
        request.memo[key] = _prove_width(request.forms.values[index], layout, request)
    width: tuple[int, float | None] = request.memo[key]
    return width


def _prove_width(form: Tensor, layout: Layout, request: Request) -> tuple[int, float | None]:
    # sums[o]: Schur norm of everything o or more blocks away from the diagonal
    ordered = _in_row_order(form, layout).view(layout.blocks, layout.size, layout.blocks, -1)
    absolute = ordered.abs().sum(3)  # (i, row, j)
    distance = torch.arange(layout.blocks, device=form.device)
    distance = (distance[:, None] - distance[None, :]).abs()  # (i, j)
    sums = [
        float((absolute * (distance >= o)[:, None, :]).sum(2).max())
        for o in range(layout.blocks + 1)
    ]
    exact = max(sum(total > 0 for total in sums) - 1, 0)
    slack, forms = request.slack, request.forms
    if slack.epsilon == 0 or len(forms.values) != 1:
        return exact, None
    room = slack.epsilon * (forms.smallest + request.room)
    found: tuple[int, float | None] = exact, None
    for width in range(exact):
        lost = sums[width + 1] + forms.missing
        if lost <= room:
            found = width, 1 - lost / room
            break
    # Schur's norm is coarse: an eigenvalue test often allows a narrower band.
    radius = 1 / request.room if request.room else float("inf")
    flat = ordered.reshape(layout.blocks * layout.size, -1)
    size = math.prod(layout.shape)  # the zeros behind the last row have no eigenvalue to test
    for width in reversed(range(found[0])):
        kept = (distance <= width).repeat_interleave(layout.size, 0)
        band = flat * kept.repeat_interleave(layout.size, 1)
        inner = ErrorBudget(slack.epsilon, radius)
        margin = holds(flat[:size, :size], band[:size, :size], inner, forms.missing)
        if margin is None:
            break
        found = width, margin
    return found
