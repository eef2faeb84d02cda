"""Strategy "dense": M and every Q written out, one product each."""

from __future__ import annotations

import math

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ..cost import Cost
from ..forms import triangular_factor
from .base import Evaluation, Problem, Strategy, add_flatten, add_product, normalised


class Dense(Strategy):
    """Multiply by M and, for each form, by a factor of Q; the form is the sum of the squares."""

    name = "dense"

    def refuses(self, problem: Problem) -> str | None:
        """Refuse forms that cannot be written out."""
        return problem.cannot_write_out()

    def cost(self, problem: Problem, *, built: bool) -> Cost:
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
                factor = triangular_factor(problem.forms.values[group])
            factor, peak = normalised(factor)
            z = builder.add(layer.Matmul, rows, weight=builder.constant("factor", factor))
            n = builder.add(point.SumSquares, z, name="n", weight=peak**2)
            energies.append((n,))
        image, gain = add_product(builder, rows, problem.matrix)
        return Evaluation(image, tuple(energies), gain)
