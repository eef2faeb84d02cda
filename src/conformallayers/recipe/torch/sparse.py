"""Products with a matrix in compressed rows (CSR).

The three arrays of the matrix are dense buffers of a custom operator: a sparse tensor as a buffer would
break deepcopy, safetensors, compilation and export.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...functional import transformed
from ...utils.quiet import ignored_warnings


@torch.library.custom_op("conformallayers::csr_matmul", mutates_args=())
def csr_matmul(rows: Tensor, column: Tensor, value: Tensor, x: Tensor) -> Tensor:
    """Multiply a matrix in compressed rows, (m, n), by x of shape (n, B)."""
    matrix = _csr(rows, column, value, x.shape[0])
    if (
        torch.backends.mkl.is_available() or x.device.type != "cpu"
    ):  # else torch has no such product
        return matrix @ x
    return matrix.to_dense() @ x


@csr_matmul.register_fake
def _(rows: Tensor, column: Tensor, value: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(rows.shape[0] - 1, x.shape[1])


@torch.library.custom_op("conformallayers::csr_adjoint", mutates_args=())
def csr_adjoint(rows: Tensor, column: Tensor, value: Tensor, g: Tensor, size: int) -> Tensor:
    """Multiply the transpose of a matrix in compressed rows, (size, m), by g (m, B)."""
    result: Tensor = torch.sparse.mm(_csr(rows, column, value, size).to_sparse_coo().t(), g)
    return result


@csr_adjoint.register_fake
def _(rows: Tensor, column: Tensor, value: Tensor, g: Tensor, size: int) -> Tensor:
    return g.new_empty(size, g.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.size = inputs[3].shape[0]


def _backward(ctx: Any, g: Tensor) -> tuple[None, None, None, Tensor]:
    rows, column, value = ctx.saved_tensors
    if transformed(g):
        return None, None, None, _dense(rows, column, value, ctx.size).T @ g
    result: Tensor = csr_adjoint(rows, column, value, g, ctx.size)
    return None, None, None, result


def _adjoint_backward(ctx: Any, g: Tensor) -> tuple[None, None, None, Tensor, None]:
    result: Tensor = csr_matmul(*ctx.saved_tensors, g)
    return None, None, None, result, None


csr_matmul.register_autograd(_backward, setup_context=_setup)
csr_adjoint.register_autograd(_adjoint_backward, setup_context=_setup)


def multiply(rows: Tensor, column: Tensor, value: Tensor, x: Tensor) -> Tensor:
    """Multiply x (B, n) by a matrix (m, n) in compressed rows: (B, m)."""
    if transformed():  # torch.func cannot transform custom operators
        return x @ _dense(rows, column, value, x.shape[1]).T
    result: Tensor = csr_matmul(rows, column, value, x.T.contiguous())
    return result.T


def _csr(rows: Tensor, column: Tensor, value: Tensor, columns: int) -> Tensor:
    with ignored_warnings():  # torch calls its sparse formats beta
        shape = rows.shape[0] - 1, columns
        return torch.sparse_csr_tensor(rows, column, value, shape, check_invariants=False)


def _dense(rows: Tensor, column: Tensor, value: Tensor, columns: int) -> Tensor:
    count = rows.shape[0] - 1
    index = torch.arange(count, device=rows.device).repeat_interleave(rows.diff())
    return value.new_zeros(count, columns).index_put((index, column), value)
