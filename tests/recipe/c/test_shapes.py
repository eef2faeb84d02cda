"""Changes of shape in C: entries stay where they are, or are copied once."""

from __future__ import annotations

import re

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


def test_maps_are_concatenated_where_they_are_written() -> None:
    builder = RecipeBuilder((4, 6, 6))
    window = {"stride": (2, 2), "padding": (0, 0)}
    z = builder.add(layer.Elementwise, INPUT, function="relu")
    parts = [
        builder.add(
            layer.AvgPool,
            builder.add(layer.Slice, z, axis=0, start=0, stop=1),
            kernel=(2, 2),
            **window,
        ),
        builder.add(
            layer.MaxPool,
            builder.add(layer.Slice, z, axis=0, start=1, stop=4),
            kernel=(2, 2),
            dilation=(1, 1),
            **window,
        ),
    ]
    y = builder.add(layer.Concatenate, *parts, axis=0)
    lines = written(builder.recipe(builder.add(layer.Reshape, y, shape=(36,))))
    pools = [re.search(r"pool\w*\(\w+(?: \+ \d+)?, work(?: \+ (\d+))?,", line) for line in lines]
    first, second = (int(found[1] or 0) for found in pools if found)
    assert second == first + 1


def test_results_that_are_no_value_of_their_own_are_copied() -> None:
    builder = RecipeBuilder((4, 3))
    y = builder.add(layer.Slice, INPUT, axis=0, start=2, stop=4)
    lines = written(builder.recipe(y))
    assert re.fullmatch(r"gather_f\(image \+ 6, out, \w+, 2, 0x0p\+0f\);", lines[-1])
