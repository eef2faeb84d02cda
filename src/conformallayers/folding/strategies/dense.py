"""Strategy "dense": M and every Q written out, one product each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ..cost import Cost
from ..forms import triangular_factor
from ..problem import Conditions, Problem
from ..stages import Stage
from .base import Evaluation, Strategy, Values, add_matrix, matrix_cost, normalised, out_of_range

MOST_COEFFICIENTS = 8192  # coefficients of a sample; building a larger Q would not fit into memory
ENTRIES = 2**29  # of all arrays that are written out together: 4 GiB


def too_large(problem: Problem) -> str | None:
    """Return why the forms of a problem cannot be written out, or None if they can."""
    stage = problem.stage
    d_in, d_out = math.prod(stage.input_shape), math.prod(stage.output_shape)
    return too_many_entries(d_in, d_out)


def stage_too_large(stage: Stage) -> str | None:
    """Return why the forms of a stage cannot be written out in float64, or None if they can."""
    return too_large(Problem(stage, Conditions(torch.float64, stage.device)))


def too_many_entries(d_in: int, d_out: int) -> str | None:
    """Return why a form (d_in, d_in) and a matrix (d_out, d_in) cannot be written out, or None."""
    if d_in > MOST_COEFFICIENTS:
        return f"a sample has {d_in} coefficients, a written-out form at most {MOST_COEFFICIENTS}"
    if d_in * d_out > MOST_COEFFICIENTS * 4 * MOST_COEFFICIENTS:
        return f"M would have {d_out} × {d_in} entries"
    return None


class Dense(Strategy):
    """Multiply by M and, for each form, by a factor of Q; the form is the sum of the squares."""

    name = "dense"
    in_stages = "if small"

    def refuses(self, problem: Problem) -> str | None:
        """Refuse forms that cannot be written out."""
        return too_large(problem) or out_of_range(problem)

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count d_out·d_in for M, and for each form d_in times the rows of its factor."""
        d_in, count = math.prod(problem.stage.input_shape), problem.form_count
        rows = (problem.stage.chain.rows_of(group) for group in range(count))
        size = sum(min(row, d_in) * d_in for row in rows)
        stream, calls = 2 * count * d_in, 4 * count
        forms = Cost(gemm=size, stream=stream, calls=calls, bytes=size * problem.itemsize)
        return matrix_cost(problem) + forms

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append a form for each Q and the product with M."""
        energies = []
        for index in range(problem.form_count):
            factor = problem.factor(index)
            if factor is None:
                factor = triangular_factor(problem.forms.values[index])
            energies.append((add_squares(values, factor),))
        image, gain = add_matrix(problem, values)
        return Evaluation(image, tuple(energies), gain)


def add_squares(values: Values, factor: Tensor) -> str:
    """Append ``‖Lx‖²`` with ``LᵀL = Q``: it loses no digits where Q x is small, and is never negative."""
    factor, peak = normalised(factor)
    held = values.constant("factor", factor)
    z = values.builder.add(layer.Matmul, values.flat, weight=held)
    return values.builder.add(point.SumSquares, z, name="n", weight=peak**2)
