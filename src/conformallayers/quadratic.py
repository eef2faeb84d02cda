"""Matrices and quadratic forms of a chain of operators, column by column in bounded memory.

A column of Q is half the gradient of the form at an impulse: two passes through the layers, never
a Gram product over their many rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._progress import progress
from .bounds import Shape
from .operators import Operator, apply_all, impulses

CHUNK_BYTES = 256 * 2**20  # what one batch of impulses may keep alive


class Stage(NamedTuple):
    """``z ← factor · U z``, then ``weight · ‖z‖²`` goes to the form of the given group."""

    operators: Sequence[Operator]
    factor: float
    weight: float
    group: int


def dense_arrays(
    input_shape: Shape,
    stages: Sequence[Stage],
    trailing: Sequence[Operator],
    device: torch.device,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Return the matrix and the quadratic forms of a chain, in float64.

    Args:
        input_shape: of one sample; d_in coefficients.
        stages: the chain up to the last activation.
        trailing: the operators after it; d_out coefficients.
        device: where to compute.
        chunk_bytes: memory for one batch of columns.

    Returns:
        M of shape (d_out, d_in) and Q of shape (groups, d_in, d_in).
    """
    like = torch.empty(0, dtype=torch.float64, device=device)
    d_in = math.prod(input_shape)
    groups = 1 + max((stage.group for stage in stages), default=-1)
    chunk = _chunk(input_shape, stages, trailing, chunk_bytes)
    forms = torch.zeros(groups, d_in, d_in, dtype=torch.float64, device=device)
    columns: list[Tensor] = []
    start = 0
    for batch in progress(impulses(input_shape, chunk, like), -(-d_in // chunk), "folding"):
        x = batch.requires_grad_()
        energies: list[Tensor | None] = [None] * groups
        with torch.enable_grad():
            z = x
            for stage in stages:
                z = apply_all(stage.operators, z) * stage.factor
                n = stage.weight / 2 * z.square().sum()
                energies[stage.group] = n if (e := energies[stage.group]) is None else e + n
        with torch.no_grad():
            columns.append(apply_all(trailing, z.detach()).flatten(1).T.contiguous())
        stop = start + len(batch)
        for group, value in enumerate(energies):
            if value is not None:
                (rows,) = torch.autograd.grad(value, x, retain_graph=group + 1 < groups)
                forms[group, start:stop] = rows.flatten(1)
        start = stop
    # Rounding leaves Q a few ulps from symmetric; the mean of both halves is the better value.
    return torch.cat(columns, 1), (forms + forms.transpose(1, 2)) / 2


def _chunk(
    input_shape: Shape, stages: Sequence[Stage], trailing: Sequence[Operator], limit: int
) -> int:
    operators = [op for stage in stages for op in stage.operators] + list(trailing)
    kept = 3 * sum(math.prod(op.output_shape) for op in operators) + math.prod(input_shape)
    return max(1, min(math.prod(input_shape), limit // (8 * kept)))
