"""Strategy "sparse": M and every Q in compressed rows, for small windows without a dense head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ..cost import Cost
from ..operators import receptive_field
from ..problem import Problem
from ..stages import Chain
from . import base
from .base import Evaluation, Strategy, Values
from .dense import too_large

_LARGEST_MATRIX = 2**24  # entries of M that are looked at to count those that are not zero


class Sparse(Strategy):
    """Multiply by the entries that are not zero."""

    name = "sparse"

    def refuses(self, problem: Problem) -> str | None:
        """Refuse branches, and what cannot be written out while it is built."""
        return too_large(problem) or base.out_of_range(problem)

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the entries that are not zero, or those inside windows before they are known."""
        chain, count = problem.stage.chain, problem.form_count
        d_in, d_out = math.prod(chain.input_shape), math.prod(chain.output_shape)
        if built and d_in * d_out <= _LARGEST_MATRIX:
            matrix = int(problem.matrix.count_nonzero())
            wide = sum(int(form.count_nonzero()) for form in _arrays(problem)[0])
        else:
            matrix = int(_density(chain) * d_out * d_in)
            wide = count * _least_entries(chain)
        # Entries of forms are float64, twice as wide as those of most matrices.
        stream = 2 * d_in * (1 + 2 * count) + 2 * d_out + wide
        size = matrix * (problem.itemsize + 4) + wide * (8 + 4)
        return Cost(sparse=matrix + wide, stream=stream, calls=5 + 5 * count, bytes=size)

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append a product and a dot product for each Q, and the product with M."""
        builder, energies = values.builder, []
        forms, squares = _arrays(problem)
        exact = values.flat
        if not squares:  # a form cancels where Q x is small
            exact = builder.add(layer.Cast, exact, name="exact", to=layer.WIDE)
        for form in forms:
            scaled, weight = base.normalised(form)
            image = _add_product(values, exact, "form", scaled, wide=not squares)
            if squares:
                n = builder.add(point.SumSquares, image, name="n", weight=weight**2)
            else:
                n = builder.add(point.Dot, image, exact, name="n", weight=weight)
            energies.append((n,))
        matrix, gain = base.normalised(problem.matrix)
        image = _add_product(values, values.flat, "matrix", matrix)
        return Evaluation(image, tuple(energies), gain)


def _arrays(problem: Problem) -> tuple[list[Tensor], bool]:
    """Return the factors of all forms and True, or their upper halves and False.

    What is off the diagonal of a half counts twice. A factor of Q itself would have many more entries.
    """
    factors = [problem.factor(index) for index in range(problem.form_count)]
    found = [factor for factor in factors if factor is not None]
    if len(found) == len(factors):
        return found, True
    return [form.triu() + form.triu(1) for form in problem.forms.values], False


def _add_product(values: Values, x: str, name: str, matrix: Tensor, *, wide: bool = False) -> str:
    """Append the product of a value with a matrix in compressed rows."""
    entries = matrix.to_sparse_coo().coalesce()
    index, column = entries.indices()
    counts = torch.bincount(index, minlength=matrix.shape[0])
    rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    arrays = {
        "rows": values.builder.constant(f"{name}_rows", rows.to(torch.int32)),
        "column": values.builder.constant(f"{name}_column", column.to(torch.int32)),
        # A copy: compilers cannot take a view of a sparse tensor.
        "value": values.constant(f"{name}_value", entries.values().clone(), wide=wide),
    }
    return values.builder.add(layer.SparseMatmul, x, name="image", **arrays)


def _density(chain: Chain) -> float:
    """Return the share of the inputs that lie in the window of an output."""
    if any(isinstance(op.module, nn.Linear) for op in chain.operators):
        return 1.0
    spatial = enumerate(chain.input_shape[1:])
    windows = ((receptive_field(chain.operators, axis)[0], n) for axis, n in spatial)
    return math.prod(min(1.0, size / n) for size, n in windows)


def _least_entries(chain: Chain) -> int:
    """Return the upper half of the pairs of coefficients that the first windows have in common."""
    channels, *spatial = chain.input_shape
    pairs = channels**2
    for axis, n in enumerate(spatial):
        far = min(base.first_reach(chain, axis), n - 1)
        pairs *= n * (2 * far + 1) - far * (far + 1)
    return pairs // 2
