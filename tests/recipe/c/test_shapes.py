"""Changes of shape in C: entries stay where they are, or are copied once."""

from __future__ import annotations

import torch

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.c.export import write
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder


def written(recipe: Recipe) -> list[str]:
    return write(recipe).lines


def test_reshapes_and_slices_of_leading_axes_are_free() -> None:
    builder = RecipeBuilder((4, 3))
    half = builder.add(layer.Slice, INPUT, axis=0, start=2, stop=4)
    flat = builder.add(layer.Reshape, half, shape=(6,))
    y = builder.add(
        layer.Matmul, flat, weight=builder.constant("w", torch.ones(2, 6, dtype=torch.float64))
    )
    lines = written(builder.recipe(y))
    assert lines == [f"conv(image + 6, k_w, k_{y}_bias, out);"]
