"""Programs while they are written: places of values, names of arrays."""

from __future__ import annotations

import re

import torch

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.c.export import write
from conformallayers.recipe.c.program import SLACK
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder


def written(recipe: Recipe) -> tuple[list[str], int]:
    program = write(recipe)
    return program.lines, program.work_size


def weight(builder: RecipeBuilder, name: str, *shape: int) -> str:
    return builder.constant(name, torch.ones(shape, dtype=torch.float64))


def test_values_share_memory_and_functions_of_one_number_join_the_product() -> None:
    builder = RecipeBuilder((8,))
    value = INPUT
    for _ in range(4):
        value = builder.add(layer.Matmul, value, weight=weight(builder, "w", 8, 8))
        value = builder.add(layer.Elementwise, value, function="relu")
    lines, work = written(builder.recipe(value))
    assert work == 16 + SLACK  # two buffers take turns; the last value is the output
    assert len(lines) == 4
    assert lines[-1].startswith("conv(work")
    assert lines[-1].endswith("out);")


def test_names_are_identifiers_of_their_own() -> None:
    builder = RecipeBuilder((3,))
    names = ["a.b", "a_b", "form_scale", "form", "double", "form", "w", "w_scale"]
    y = INPUT
    for name in names:
        y = builder.add(layer.Matmul, y, weight=weight(builder, name, 3, 3))
    program = write(builder.recipe(y), "k")
    found = [constant.name for constant in program.constants if "bias" not in constant.name]
    assert len(set(found)) == len(found) == len(names)
    assert all(re.fullmatch("k_[a-z_0-9]+", name) for name in found)
