"""Rewrite a recipe in operations that C has: bands as matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .. import layer_operations as layer
from .. import point_operations as point
from ..operation import Operation
from ..places import Array
from ..recipe import Recipe
from ..simplify import simplified


def lowered_for_c(recipe: Recipe) -> Recipe:
    """Return a shorter recipe with the same result, and constants as arrays of numpy in float64."""
    short = simplified(recipe.with_constants(lambda _, array: _double(array)))
    constants: dict[str, Any] = dict(short.constants)
    operations: list[Operation] = []
    for op in short.operations:
        operations += _factor(op, constants, short) if isinstance(op, point.BandedForm) else [op]
    return replace(short, operations=tuple(operations), constants=constants).pruned()


def _double(array: Any) -> Array:
    return np.asarray(array.detach().cpu().to(torch.float64).numpy())


def _factor(op: point.BandedForm, constants: dict[str, Array], recipe: Recipe) -> list[Operation]:
    """Return a band as the product with one matrix, and the energy of that."""
    size, width = op.size, op.width
    (total,) = recipe.shapes()[op.inputs[0]]
    band = np.zeros((total, total))
    for start, block in zip(range(0, total, size), constants[op.band], strict=False):
        band[start : start + (width + 1) * size, start : start + size] += block
    rest = total - width * size
    band[rest:, rest:] += constants[op.last]
    factor, image = f"{op.outputs[0]}.factor", f"{op.outputs[0]}.image"
    constants[factor] = band.T
    return [
        layer.Matmul(op.inputs, (image,), weight=factor),
        point.SumSquares((image,), op.outputs, weight=op.weight),
    ]
