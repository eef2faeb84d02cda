"""Recipes without guards: which they are, and that τ, m and energies are those of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.onnx.coordinates import is_direct
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from onnx_support import error, node_kinds
from recipe_cases import FORMULAS, RECIPE_CASES
from support import samples

NARROW, WIDE = np.dtype(np.float32), np.dtype(np.float64)
CASES = {case.name: case.build for case in RECIPE_CASES}


def staged(rules: list[str], *, offset: float = 1.5, between: type[Any] | None = None) -> Recipe:
    """Embed, and for each rule: run an activation, take the point, add a bias; divide."""
    builder = RecipeBuilder((2, 4, 3))
    names = "unit", "m", "tau"
    z, m, tau = builder.add_many(point.Normalize, INPUT, names=names, offset=offset)
    for index, rule in enumerate(rules):
        torch.manual_seed(index)
        n = builder.add(point.SumSquares, z, weight=0.3)
        tau = builder.add(point.Advance, tau, m, n, formula=FORMULAS[rule])
        if between is not None:
            z = builder.add(between, z, size=(2, 3))
        names = "z", "m", "tau"
        options = {"scale": 0.6, "coordinate": 1.4}
        z, m, tau = builder.add_many(point.Rebase, z, m, tau, names=names, **options)
        bias = builder.constant("bias", torch.randn(2, 1, 3, dtype=torch.float64))
        z = builder.add(layer.AddConstant, z, value=bias)
    n = builder.add(point.SumSquares, z, weight=0.2)
    for rule in rules:  # the same energy again, without taking the point
        tau = builder.add(point.Advance, tau, m, n, formula=FORMULAS[rule])
    return builder.recipe(builder.add(point.Divide, z, tau, m, scale=0.7))


def test_which_recipes_need_no_guards() -> None:
    direct = CASES["points published"]()
    assert is_direct(direct, NARROW)
    assert not is_direct(direct, WIDE)
    assert is_direct(CASES["points projective offset"](), NARROW)
    for name in ("rescale published", "points gnomonic"):
        assert not is_direct(CASES[name](), NARROW)


def test_biases_need_an_offset_and_maps_that_keep_nan() -> None:
    assert is_direct(staged(["projective"]), NARROW)
    assert is_direct(staged(["projective"], between=layer.AdaptiveAvgPool), NARROW)
    assert not is_direct(staged(["projective"], offset=0.0), NARROW)
    assert not is_direct(staged(["projective"], between=layer.AdaptiveMaxPool), NARROW)


def test_scalars_that_are_read_otherwise_are_kept() -> None:
    builder = RecipeBuilder((3,))
    names = "unit", "m", "tau"
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=names)
    n = builder.add(point.Advance, tau, m, tau, formula=FORMULAS["published"])  # τ as an energy
    assert not is_direct(builder.recipe(builder.add(point.Divide, unit, n, m, scale=1.0)), NARROW)
    assert not is_direct(builder.recipe(tau), NARROW)


@pytest.mark.parametrize("first", ["published", "projective"])
@pytest.mark.parametrize("second", ["published", "projective"])
def test_rules_in_any_order(first: str, second: str) -> None:
    recipe = staged([first, second, first])
    x = samples((2, 4, 3), torch.float32, 6)
    for index, size in enumerate((1e-12, 1e-6, 1e6, 1e11, 0.0), 1):
        x[index] *= size
    assert is_direct(recipe, NARROW)
    assert error(recipe, x) <= 5e-6
    assert not {"Where", "Equal", "Sign"} & set(node_kinds(recipe))


def test_scalars_stay_in_float32_unless_coordinates_could_overflow() -> None:
    assert node_kinds(staged(["projective"])).count("Cast") == 2  # of the input, and of 1/t
    assert node_kinds(staged(["published"])).count("Cast") > 2
