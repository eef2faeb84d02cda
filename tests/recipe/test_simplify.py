"""Recipes without scalars that are 1: fewer operations, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.numpy.network import Network
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from conformallayers.recipe.simplify import simplified
from integer_cases import FORMULAS
from recipe_cases import RECIPE_CASES, RecipeCase
from support import samples

FLOATS = [case for case in RECIPE_CASES if "integer" not in case.name]


def with_arrays(recipe: Recipe) -> Recipe:
    return recipe.with_constants(lambda _, array: np.asarray(array))


@pytest.mark.parametrize("case", FLOATS, ids=lambda case: case.name)
def test_results_stay(case: RecipeCase) -> None:
    recipe = with_arrays(case.build())
    shorter = simplified(recipe)
    assert len(shorter.operations) <= len(recipe.operations)
    x = samples(recipe.input_shape, torch.float64).numpy()
    run, run_shorter = (Network(one, np.dtype("float64")) for one in (recipe, shorter))
    np.testing.assert_allclose(run_shorter(x), run(x), rtol=1e-12, atol=1e-300)


def staged(offset: float) -> Recipe:
    """Embed; activate, rebase, multiply, activate; divide, rebase; multiply, divide by 1 and add a constant."""
    builder = RecipeBuilder((4,))
    names = "z", "peak", "tau"
    z, m, tau = builder.add_many(point.Normalize, INPUT, names=names, offset=offset)
    for name in ("published", "projective"):
        n = builder.add(point.SumSquares, z, name="n", weight=0.5)
        tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS[name])
        options = {"scale": 2.0, "coordinate": 0.5}
        z, m, tau = builder.add_many(point.Rebase, z, m, tau, names=names, **options)
    weight = builder.constant("weight", np.arange(12.0).reshape(3, 4))
    z = builder.add(layer.Matmul, z, weight=weight, bias=builder.constant("bias", np.ones(3)))
    y = builder.add(point.Divide, z, tau, m, name="y", scale=0.25)
    value = builder.constant("value", np.arange(3.0))
    return builder.recipe(builder.add(layer.AddConstant, y, name="y", value=value))


def test_scalars_that_are_one_go() -> None:
    recipe = simplified(staged(1.5))
    assert [op.kind for op in recipe.operations].count("divide") == 0
    formulas = [op.formula for op in recipe.operations if isinstance(op, point.Advance)]
    assert formulas == ["tau + n", "1 + n"]
    last = recipe.operations[-1]
    assert isinstance(last, layer.Matmul)
    assert last.bias is not None
    np.testing.assert_allclose(recipe.constants[last.weight], np.arange(12).reshape(3, 4) / 4)
    np.testing.assert_allclose(recipe.constants[last.bias], np.arange(3) + 0.25)


def test_samples_of_zeros_keep_their_division() -> None:
    recipe = simplified(staged(0.0))
    assert [op.kind for op in recipe.operations].count("divide") == 1
    formulas = [op.formula for op in recipe.operations if isinstance(op, point.Advance)]
    assert formulas == ["tau + n", "tau + n / tau"]
