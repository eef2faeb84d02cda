"""Programs while they are written: places of values, names of arrays."""

from __future__ import annotations

import re

import torch

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.c.export import write
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder


def written(recipe: Recipe) -> tuple[list[str], int]:
    program = write(recipe)
    return program.lines, program.work_size


def weight(builder: RecipeBuilder, name: str, *shape: int) -> str:
    return builder.constant(name, torch.ones(shape, dtype=torch.float64))


def test_values_share_memory() -> None:
    builder = RecipeBuilder((8,))
    value = INPUT
    for _ in range(4):
        value = builder.add(layer.Matmul, value, weight=weight(builder, "w", 8, 8))
        value = builder.add(layer.Elementwise, value, function="relu")
    lines, work = written(builder.recipe(value))
    assert work == 16  # two buffers take turns; the last value is the output
    assert lines[-1] == "relu_f(out, out, 8);"


def test_values_that_are_needed_later_are_not_overwritten() -> None:
    builder = RecipeBuilder((2, 4))
    x = builder.add(layer.Matmul, INPUT, weight=weight(builder, "w", 4, 4))
    first = builder.add(layer.Slice, x, axis=0, start=0, stop=1)
    second = builder.add(layer.Slice, x, axis=0, start=1, stop=2)
    second = builder.add(layer.Elementwise, second, function="relu")
    lines, _ = written(builder.recipe(builder.add(layer.Add, first, second)))
    relu = next(re.fullmatch(r"relu_f\((.*), (.*), 4\);", line) for line in lines if "relu" in line)
    assert relu is not None
    assert relu[1] == "work + 4"
    assert relu[2] not in ("work", "work + 4")


def test_reshapes_and_slices_of_leading_axes_are_free() -> None:
    builder = RecipeBuilder((4, 3))
    half = builder.add(layer.Slice, INPUT, axis=0, start=2, stop=4)
    flat = builder.add(layer.Reshape, half, shape=(6,))
    y = builder.add(layer.Matmul, flat, weight=weight(builder, "w", 2, 6))
    lines, work = written(builder.recipe(y))
    assert lines == ["(void)work;", "times_f(k_w, image + 6, out, 2, 6, 1);"]
    assert work == 0


def test_results_that_are_no_value_of_their_own_are_copied() -> None:
    builder = RecipeBuilder((4, 3))
    y = builder.add(layer.Slice, INPUT, axis=0, start=2, stop=4)
    lines, _ = written(builder.recipe(y))
    assert lines[-1] == "copy_f(image + 6, 0, out, 0, 1, 6);"


def test_names_are_identifiers_of_their_own() -> None:
    builder = RecipeBuilder((3,))
    names = ["a.b", "a_b", "form_scale", "form", "double", "form", "w", "w_scale"]
    y = INPUT
    for name in names:
        y = builder.add(layer.Matmul, y, weight=weight(builder, name, 3, 3))
    program = write(builder.recipe(y), "k")
    found = [constant.name for constant in program.constants]
    assert len(set(found)) == len(found) == len(names)
    assert all(re.fullmatch("k_[a-z_0-9]+", name) for name in found)
