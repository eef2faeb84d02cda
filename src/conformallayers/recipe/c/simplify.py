"""Rewrite a recipe in operations that C has: bands as forms, other linear layers as matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...errors import refusal
from ..layer_operations import ConvTranspose, Matmul, Reshape, Upsample
from ..operation import Operation, Shape
from ..point_operations import BandedForm, QuadraticForm
from ..recipe import INPUT, Recipe
from ..torch.module import RecipeModule
from .constants import LARGEST_PLACE
from .program import wide_values

_ENTRIES = 2**24  # of a layer that is written out as a matrix
_AT_ONCE = 256  # columns


def simplified(recipe: Recipe) -> Recipe:
    """Return a recipe with the same values, and constants in float64."""
    arrays = {name: _double(array) for name, array in recipe.constants.items()}
    recipe = replace(recipe, constants=arrays)
    shapes, wide = recipe.shapes(), wide_values(recipe)
    constants, kept_wide, operations = dict(arrays), set(recipe.wide), list[Operation]()
    for operation in recipe.operations:
        added: dict[str, Tensor] = {}
        if isinstance(operation, BandedForm):
            operations.append(_form(operation, recipe, shapes, added))
        elif isinstance(operation, (ConvTranspose, Upsample)):
            operations += _matrix(operation, recipe, shapes, added)
        else:
            if isinstance(operation, QuadraticForm):
                # A form is what its two halves are together; where both are equal, this is exact.
                half = constants[operation.form]
                constants[operation.form] = (half + half.T) / 2
            operations.append(operation)
        constants |= added
        if operation.inputs[0] in wide:
            kept_wide |= set(added)
    used = {name for operation in operations for _, name in operation.constants()}
    return replace(
        recipe,
        operations=tuple(operations),
        constants={name: array for name, array in constants.items() if name in used},
        wide=frozenset(kept_wide & used),
    )


def _double(array: Any) -> Tensor:
    tensor: Tensor = array.detach().cpu().to(torch.float64)
    return tensor


def _form(
    operation: BandedForm, recipe: Recipe, shapes: dict[str, Shape], added: dict[str, Tensor]
) -> Operation:
    """Write a band out, in the order of the value that it is a form of."""
    band, last = (recipe.constants[name] for name in (operation.band, operation.last))
    size, width = operation.size, operation.width
    (total,) = shapes[operation.inputs[0]]
    form = torch.zeros(total, total, dtype=torch.float64)
    for index, block in enumerate(band):
        start = index * size
        form[start : start + (width + 1) * size, start : start + size] += block
    if width:
        form[-width * size :, -width * size :] += last
    name = _fresh(f"{operation.band}_form", recipe)
    added[name] = (form + form.T) / 2
    ends = {"inputs": operation.inputs, "outputs": operation.outputs}
    return QuadraticForm(**ends, form=name, weight=operation.weight)


def _matrix(
    operation: ConvTranspose | Upsample,
    recipe: Recipe,
    shapes: dict[str, Shape],
    added: dict[str, Tensor],
) -> Iterator[Operation]:
    """Write a linear layer as a product with a matrix, column by column."""
    (x,), (y,) = operation.inputs, operation.outputs
    rows, columns = prod(shapes[y]), prod(shapes[x])
    if rows * columns > _ENTRIES or columns > LARGEST_PLACE:
        raise refusal(
            "export_c(folded)",
            f"a layer whose matrix has at most {_ENTRIES} entries",
            f"{operation.kind} with {rows} × {columns}",
            'Fold with strategy="dense".',
        )
    weight = _fresh(f"{y}_matrix", recipe)
    bias = None
    alone = replace(operation, inputs=(INPUT,), outputs=("y",))
    if isinstance(alone, ConvTranspose) and alone.bias is not None:
        bias = _fresh(f"{y}_bias", recipe)
        added[bias] = recipe.constants[alone.bias].repeat_interleave(prod(shapes[y][1:]))
        alone = replace(alone, bias=None)
    run = RecipeModule(Recipe(shapes[x], shapes[y], (alone,), "y", recipe.constants), torch.float64)
    with torch.no_grad():
        units = torch.eye(columns, dtype=torch.float64).split(_AT_ONCE)
        images = [run(unit.reshape(-1, *shapes[x])).flatten(1) for unit in units]
    added[weight] = torch.cat(images).T.contiguous()
    flat, product = f"{y}.flat", f"{y}.product"  # no builder gives such names
    yield Reshape(inputs=(x,), outputs=(flat,), shape=(columns,))
    yield Matmul(inputs=(flat,), outputs=(product,), weight=weight, bias=bias)
    yield Reshape(inputs=(product,), outputs=(y,), shape=shapes[y])


def _fresh(name: str, recipe: Recipe) -> str:
    while name in recipe.constants:
        name += "_"
    return name
