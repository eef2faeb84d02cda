"""Follow CONTRIBUTING literally: add a runtime, here one on lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import conformallayers as cl
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.operation import Operation, Runtime
from conformallayers.recipe.recipe import INPUT, Recipe
from conformallayers.recipe.torch.module import RecipeModule
from oracle import relative_error
from recipe_cases import RECIPE_CASES
from support import assert_says, samples

Numbers = list[float]
RUN = Runtime("lists")
RUN.rules = {"published"}


def rows_of(matrix: Numbers, size: int) -> Iterator[Numbers]:
    return (matrix[start : start + size] for start in range(0, len(matrix), size))


def dot(a: Numbers, b: Numbers) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))


@RUN.runs(layer.Matmul)
def list_matmul(op: layer.Matmul, net: ListRuntime, x: Numbers) -> Numbers:
    size = net.recipe.constant_shape(op.weight)[1]
    weight = list(rows_of(net.constants[op.weight], size))
    bias = net.constants[op.bias] if op.bias else [0.0] * len(weight)
    return [
        dot(row, part) + b for part in rows_of(x, size) for row, b in zip(weight, bias, strict=True)
    ]


@RUN.runs(layer.Reshape)
def list_reshape(op: layer.Reshape, net: ListRuntime, x: Numbers) -> Numbers:
    return x  # a sample is one row of numbers


@RUN.runs(layer.Add)
def list_add(op: layer.Add, net: ListRuntime, *values: Numbers) -> Numbers:
    return [sum(terms) for terms in zip(*values, strict=True)]


@RUN.runs(point.Normalize)
def list_normalize(op: point.Normalize, net: ListRuntime, x: Numbers) -> tuple[Any, ...]:
    peak = max(map(abs, x)) or 1.0
    unit = [value / peak for value in x]
    return unit, [peak], [math.sqrt(dot(unit, unit))]


@RUN.runs(point.SumSquares)
def list_squares(op: point.SumSquares, net: ListRuntime, z: Numbers) -> Numbers:
    return [op.weight * dot(z, z)]


@RUN.runs(point.QuadraticForm)
def list_form(op: point.QuadraticForm, net: ListRuntime, x: Numbers) -> Numbers:
    image = [dot(row, x) for row in rows_of(net.constants[op.form], len(x))]
    return [op.weight * dot(x, image)]


@RUN.runs(point.Advance)
def list_advance(
    op: point.Advance, net: ListRuntime, tau: Numbers, peak: Numbers, *energies: Numbers
) -> Numbers:
    return [tau[0] + peak[0] * sum(n for (n,) in energies)]


@RUN.runs(point.Divide)
def list_divide(op: point.Divide, net: ListRuntime, v: Numbers, tau: Numbers, m: Any) -> Numbers:
    return [op.scale * value / tau[0] if tau[0] else 0.0 for value in v]


class ListRuntime:
    """Run a recipe on lists of numbers, one sample at a time."""

    def __init__(self, recipe: Recipe) -> None:
        for op in recipe.operations:
            RUN.check(op, "ListRuntime", 'Fold with strategy="dense".')
        self.recipe = recipe
        self.constants = {k: array.flatten().tolist() for k, array in recipe.constants.items()}

    def __call__(self, x: Numbers) -> Numbers:
        values: dict[str, Any] = {INPUT: x}
        for op in self.recipe.operations:
            RUN.step(op, self, values)
        found: Numbers = values[self.recipe.output]
        return found


def run_lists(recipe: Recipe, x: Tensor) -> Tensor:
    run = ListRuntime(recipe)
    rows = [run(sample.flatten().tolist()) for sample in x]
    return torch.tensor(rows, dtype=x.dtype).view(-1, *recipe.output_shape)


def lacks(op: Operation) -> list[str]:
    """Return what the runtime lacks for an operation, as the refusal names it."""
    if type(op) not in RUN:
        return [f"operations supported by lists, got {op.kind}"]
    rule = getattr(op, "rule", "published")
    return [f"activations supported by lists, got the rule {rule}"] * (rule != "published")


def test_a_runtime_gives_the_numbers_of_torch_for_the_operations_it_has() -> None:
    """Over every conformance case; what is missing is refused by name."""
    ran = set()
    for case in RECIPE_CASES:
        recipe = case.build()
        missing = [lacking for op in recipe.operations for lacking in lacks(op)]
        x = samples(recipe.input_shape, torch.float64)
        x[1] = 0
        if missing:
            assert_says(lambda run=recipe, x=x: run_lists(run, x), missing[0])
        else:
            expected = RecipeModule(recipe, torch.float64)(x)
            assert relative_error(run_lists(recipe, x), expected) < 1e-12
            ran |= {type(op) for op in recipe.operations}
    assert {layer.Matmul, layer.Reshape} <= ran


def test_a_runtime_runs_a_fold_and_refuses_another_by_name() -> None:
    torch.manual_seed(0)
    layers = cl.Conv2d(2, 3, 3), cl.ReSPro(), cl.Conv2d(3, 2, 3), cl.ReSPro()
    model = cl.ConformalLayers(*layers).double()
    folded, x = cl.fold(model, (2, 6, 6), strategy="dense"), samples((2, 6, 6), torch.float64)
    x[1] = 0
    assert relative_error(run_lists(folded.recipe, x), folded(x)) < 1e-12
    other = cl.fold(model, (2, 6, 6), strategy="conv")
    assert_says(lambda: ListRuntime(other.recipe), "got conv", 'strategy="dense"')
