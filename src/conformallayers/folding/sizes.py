"""Other spatial sizes: which operations of a fold depend on the shape it was made for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import shape_text
from ..recipe import layer_operations as layer
from ..recipe.operation import Operation, Shape, ShapeOf, expect
from ..recipe.recipe import INPUT, Recipe
from ..recipe.torch.operations import RUN

_ANY_SIZE = (
    *(
        layer.Conv,
        layer.ConvTranspose,
        layer.Matmul,
        layer.Multiply,
        layer.AddConstant,
        layer.PRelu,
    ),
    *(layer.AvgPool, layer.MaxPool, layer.NormPool, layer.AdaptiveAvgPool, layer.AdaptiveMaxPool),
    *(layer.Pad, layer.Upsample, layer.Add, layer.Concatenate, layer.Slice, layer.Permute),
    *(layer.Elementwise, layer.Softmax, layer.Reshape, layer.Call),
)


def check_size(op: Operation, before: Shape, given: Shape) -> None:
    """Raise ValueError for an operation that is exact for samples of the shape before only."""
    fixed = isinstance(op, layer.Reshape) or (isinstance(op, layer.Slice) and op.axis > 0)
    known = isinstance(op, _ANY_SIZE) and not (fixed and before != given)
    expect(known, f"{op.kind} reads samples of shape {shape_text(before)}")


def run_resized(recipe: Recipe, holder: Any, x: Tensor) -> Tensor:
    """Run a recipe on samples of another size; raise ValueError for an operation that is exact for one only."""
    shapes, values = recipe.shapes(), {INPUT: x}
    for op, dropped in zip(recipe.operations, recipe.last_uses(), strict=True):
        given = [tuple(values[name].shape[1:]) for name in op.inputs]
        check_size(op, shapes[op.inputs[0]], given[0])
        op.shapes(given, recipe.constant_shape)
        RUN.step(op, holder, values)
        for name in dropped:
            del values[name]
    return values[recipe.output]


def size_sentence(recipe: Recipe) -> str:
    """Say whether a fold takes other spatial sizes, or what fixes the size."""
    shape, shapes = recipe.input_shape, recipe.shapes()
    if len(shape) < 2:
        return f"Takes samples of shape {shape_text(shape)} only."
    found: dict[str, Shape] = {INPUT: (shape[0], *(2 * n for n in shape[1:]))}
    constant: ShapeOf = recipe.constant_shape
    for op in recipe.operations:
        given = [found[name] for name in op.inputs]
        try:
            check_size(op, shapes[op.inputs[0]], given[0])
            after = op.shapes(given, constant)
        except ValueError as error:
            return f"Takes samples of shape {shape_text(shape)} only: {error}."
        kept = isinstance(op, layer.Call) and op.result == shapes[op.inputs[0]]
        found.update(zip(op.outputs, [given[0]] if kept else after, strict=True))
    return "Takes other spatial sizes as well, if the model does."
