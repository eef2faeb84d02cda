"""Strategy "sparse": M and every Q in compressed rows.

The three arrays of a matrix are plain dense buffers behind one custom operator: a sparse tensor as
a buffer would break deepcopy, safetensors, compilation and export.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ...functional import full_precision, transformed
from ..stages import Program
from .base import Core, Cost, Request, as_autocast, at_least_float32, normalised, reach, wide
from .dense import too_large

_LARGEST_MATRIX = 2**24  # entries of M that are looked at to count those that are not zero
_BUILT_IN = 0.05  # density of M that is assumed before anything is built


@torch.library.custom_op("conformallayers::csr_matmul", mutates_args=())
def csr_matmul(crow: Tensor, column: Tensor, value: Tensor, x: Tensor) -> Tensor:
    """Multiply a matrix in compressed rows, (rows, n), by x of shape (n, B)."""
    matrix = _csr(crow, column, value, x.shape[0])
    if torch.backends.mkl.is_available() or x.device.type != "cpu":
        return matrix @ x
    return matrix.to_dense() @ x


@csr_matmul.register_fake
def _(crow: Tensor, column: Tensor, value: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(crow.shape[0] - 1, x.shape[1])


@torch.library.custom_op("conformallayers::csr_adjoint", mutates_args=())
def csr_adjoint(crow: Tensor, column: Tensor, value: Tensor, g: Tensor, size: int) -> Tensor:
    """Multiply the transpose of a matrix in compressed rows, (size, rows), by g (rows, B)."""
    result: Tensor = torch.sparse.mm(_csr(crow, column, value, size).to_sparse_coo().t(), g)
    return result


@csr_adjoint.register_fake
def _(crow: Tensor, column: Tensor, value: Tensor, g: Tensor, size: int) -> Tensor:
    return g.new_empty(size, g.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.size = inputs[3].shape[0]


def _backward(ctx: Any, g: Tensor) -> tuple[None, None, None, Tensor]:
    crow, column, value = ctx.saved_tensors
    if transformed(g):
        return None, None, None, _dense(crow, column, value, ctx.size).T @ g
    result: Tensor = csr_adjoint(crow, column, value, g, ctx.size)
    return None, None, None, result


def _adjoint_backward(ctx: Any, g: Tensor) -> tuple[None, None, None, Tensor, None]:
    result: Tensor = csr_matmul(*ctx.saved_tensors, g)
    return None, None, None, result, None


csr_matmul.register_autograd(_backward, setup_context=_setup)
csr_adjoint.register_autograd(_adjoint_backward, setup_context=_setup)


def _csr(crow: Tensor, column: Tensor, value: Tensor, columns: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse formats beta
        shape = crow.shape[0] - 1, columns
        return torch.sparse_csr_tensor(crow, column, value, shape, check_invariants=False)


def _dense(crow: Tensor, column: Tensor, value: Tensor, columns: int) -> Tensor:
    """Write the matrix out: transforms of torch.func know nothing of custom operators."""
    count = crow.shape[0] - 1
    rows = torch.arange(count, device=crow.device).repeat_interleave(crow.diff())
    return value.new_zeros(count, columns).index_put((rows, column), value)


class SparseCore(Core):
    """Multiply by the entries that are not zero."""

    name = "sparse"
    settings = (*Core.settings, "weights", "largest")

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        matrix, self.gain = normalised(request.matrix)
        self._register("matrix", matrix, request)
        weights = []
        for index, form in enumerate(request.forms.values):
            # Q is symmetric: the upper half, with what is off the diagonal counted twice.
            scaled, weight = normalised(form.triu() + form.triu(1))
            self._register(f"form{index}", scaled, request)
            weights.append(weight)
        self.weights = tuple(weights)
        self.largest = math.prod(request.program.input_shape)
        self.certificate = request.certificate()

    def _register(self, name: str, matrix: Tensor, request: Request) -> None:
        sparse = matrix.to_sparse_coo().coalesce()
        rows, columns = sparse.indices()
        counts = torch.bincount(rows, minlength=matrix.shape[0])
        crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        self.register_buffer(f"{name}_crow", crow.to(request.device))
        self.register_buffer(f"{name}_column", columns.to(torch.int32).to(request.device))
        # A copy: compilers cannot take a view of a sparse tensor.
        value = sparse.values().to(request.device, request.dtype, copy=True)
        self.register_buffer(f"{name}_value", value)

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse what cannot be written out while it is built."""
        return too_large(program)

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Count the entries that are not zero, or assume few before they are known."""
        d_in, d_out = (
            math.prod(shape)
            for shape in (request.program.input_shape, request.program.output_shape)
        )
        groups = len(request.program.groups)
        if built and d_in * d_out <= _LARGEST_MATRIX:
            forms = request.forms.values
            half = (forms.count_nonzero() + forms.diagonal(dim1=1, dim2=2).count_nonzero()) / 2
            entries = int(request.matrix.count_nonzero() + half)
        else:
            dense = any(isinstance(op.module, nn.Linear) for op in request.program.trailing)
            entries = int((1 if dense else _BUILT_IN) * d_out * d_in)
            entries += groups * _least_entries(request.program)
        item = request.dtype.itemsize + 4
        stream = 2 * d_in * (1 + groups) + 2 * d_out
        return Cost(sparse=entries, stream=stream, calls=4 + 5 * groups, bytes=entries * item)

    def check(self) -> None:
        """Refuse indices that point outside of a matrix: nobody looks at them when they are used."""
        for name in ("matrix", *(f"form{index}" for index in range(len(self.weights)))):
            crow, column = getattr(self, f"{name}_crow"), getattr(self, f"{name}_column")
            value = getattr(self, f"{name}_value")
            if (crow.dtype, column.dtype) != (torch.int32, torch.int32) or not (
                crow.dim() == column.dim() == value.dim() == 1
                and len(column) == len(value)
                and value.is_floating_point()
            ):
                raise ValueError(f"{name} is in no compressed rows")
            inside = not len(column) or 0 <= int(column.min()) <= int(column.max()) < self.largest
            counted = int(crow[0]) == 0 and int(crow[-1]) == len(column)
            rises = bool((crow.diff() >= 0).all())
            if not (inside and counted and rises):
                raise ValueError(f"{name} has indices outside of it")

    def written_out(self, name: str) -> Tensor:
        """Return ``"matrix"`` or ``"form0"``, … with its zeros."""
        crow, column = getattr(self, f"{name}_crow"), getattr(self, f"{name}_column")
        return _dense(crow, column, getattr(self, f"{name}_value"), self.largest)

    def scratch(self) -> int:
        """Count the transposed sample and two products."""
        return 4 * self.largest + math.prod(self.output_shape)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        with full_precision(x):
            columns = at_least_float32(x).flatten(1).T.contiguous()
            if columns.shape[0] != self.largest:  # the indices were checked against it
                raise ValueError(f"{columns.shape[0]} coefficients instead of {self.largest}")
            v = self._multiply("matrix", columns).T
            values = []
            for index, weight in enumerate(self.weights):
                product = self._multiply(f"form{index}", columns) * columns
                values.append(wide(product.sum(0)) * weight)
        return as_autocast(v.reshape(-1, *self.output_shape), x), tuple(values)

    def _multiply(self, name: str, columns: Tensor) -> Tensor:
        value: Tensor = getattr(self, f"{name}_value").to(columns.dtype)
        crow, column = getattr(self, f"{name}_crow"), getattr(self, f"{name}_column")
        if transformed():
            return _dense(crow, column, value, columns.shape[0]) @ columns
        result: Tensor = csr_matmul(crow, column, value, columns)
        return result


def _least_entries(program: Program) -> int:
    """Return the upper half of the pairs of coefficients that the first windows have in common."""
    channels, *spatial = program.input_shape
    pairs = channels**2
    for axis, n in enumerate(spatial):
        far = min(reach(program, axis), n - 1)
        pairs *= n * (2 * far + 1) - far * (far + 1)
    return pairs // 2
