"""Strategy "dense": M and every Q as they are, one product each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...functional import full_precision
from ..stages import Program
from .base import Core, Cost, Request, at_least_float32, normalised, wide

LARGEST = 8192  # coefficients of a sample; a larger Q does not fit into memory while it is built


def too_large(program: Program) -> str | None:
    """Return why a program's forms cannot be written out, or None if they can."""
    d_in, d_out = math.prod(program.input_shape), math.prod(program.output_shape)
    if d_in > LARGEST:
        return f"a sample has {d_in} coefficients, a written-out form at most {LARGEST}"
    if d_in * d_out > LARGEST * 4 * LARGEST:
        return f"M would have {d_out} × {d_in} entries"
    return None


def matrix_cost(request: Request) -> Cost:
    """Return the cost of M as one product."""
    size = math.prod(request.program.input_shape) * math.prod(request.program.output_shape)
    return Cost(gemm=size, calls=2, bytes=size * request.dtype.itemsize)


class DenseCore(Core):
    """Multiply by M; for each form take the dot product of x̂ and Q x̂."""

    name = "dense"
    settings = (*Core.settings, "weights")
    matrix: Tensor
    forms: Tensor

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        matrix, self.gain = normalised(request.matrix)
        scaled = [normalised(form) for form in request.forms.values]
        self.weights = tuple(weight for _, weight in scaled)
        values = torch.stack([form for form, _ in scaled]) if scaled else request.forms.values
        self.register_buffer("matrix", matrix.to(request.device, request.dtype))
        self.register_buffer("forms", values.to(request.device, request.dtype))
        self.certificate = request.certificate()

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse what cannot be written out."""
        return too_large(program)

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Count d_out·d_in for M and d_in² for each form."""
        d_in, groups = math.prod(request.program.input_shape), len(request.program.groups)
        size = groups * d_in**2
        forms = Cost(
            gemm=size,
            stream=2 * groups * d_in,
            calls=4 * groups,
            bytes=size * request.dtype.itemsize,
        )
        return matrix_cost(request) + forms

    def scratch(self) -> int:
        """Count Q x̂ and its product with x̂."""
        return 2 * self.matrix.shape[1] + self.matrix.shape[0]

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        flat = x.flatten(1)
        v = (flat @ self.matrix.T).view(-1, *self.output_shape)
        values = []
        with full_precision(x):
            exact = at_least_float32(flat)
            for form, weight in zip(self.forms, self.weights, strict=True):
                values.append(wide((exact @ form.to(exact.dtype) * exact).sum(1)) * weight)
        return v, tuple(values)
