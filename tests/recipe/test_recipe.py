"""Recipes and their builder: names, shapes, lifetimes and print."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformallayers.errors import ConformalError
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.recipe import (
    INPUT,
    Operation,
    Recipe,
    RecipeBuilder,
    Runtime,
)
from recipe_cases import RECIPE_CASES

RECIPES = [case.build() for case in RECIPE_CASES]  # a recipe prints itself where a test fails


def product(builder: RecipeBuilder, value: str, outputs: int, name: str = "y") -> str:
    weight = builder.constant("weight", np.ones((outputs, builder.shape(value)[-1])))
    return builder.add(layer.Matmul, value, name=name, weight=weight)


def two_products() -> Recipe:
    builder = RecipeBuilder((3,))
    return builder.recipe(product(builder, product(builder, INPUT, 5), 2))


def test_names_are_never_taken_twice() -> None:
    builder = RecipeBuilder((3,))
    assert [builder.constant("weight", np.ones(1)) for _ in range(3)] == [
        "weight",
        "weight_2",
        "weight_3",
    ]
    assert builder.module("module", None) == "module"
    assert builder.module("module", None) != "module"
    relu = {"function": "relu"}
    values = [builder.add(layer.Elementwise, INPUT, name="y", **relu) for _ in range(3)]
    assert values[0] == "y"
    assert len({*values, INPUT}) == 4
    assert builder.add(layer.Elementwise, INPUT, name=INPUT, **relu) not in {*values, INPUT}


def test_a_builder_knows_shapes_and_constants() -> None:
    builder = RecipeBuilder((3,))
    moved = builder.add(layer.AddConstant, INPUT, value=builder.constant("shift", np.ones(3)))
    y = product(builder, moved, 2)
    assert (builder.shape(INPUT), builder.shape(moved), builder.shape(y)) == ((3,), (3,), (2,))
    recipe = builder.recipe(y)
    assert (recipe.input_shape, recipe.output_shape, recipe.output) == ((3,), (2,), y)
    assert recipe.constant_shape("weight") == (2, 3)
    assert builder.recipe(moved).output_shape == (3,)
    product(builder, y, 4)
    assert len(recipe.operations) == 2, "a recipe does not follow its builder"


def test_a_builder_refuses_what_does_not_fit() -> None:
    builder = RecipeBuilder((3,))
    weight = builder.constant("weight", np.ones((2, 4)))
    with pytest.raises(ValueError, match=r"matmul of \(3,\) with \(2, 4\)"):
        builder.add(layer.Matmul, INPUT, weight=weight)
    assert not builder.recipe(INPUT).operations


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, operations=r.operations[::-1]), "reads 'y', which is not there yet"),
        (lambda r: replace(r, operations=r.operations * 2), "'y' is written twice"),
        (lambda r: replace(r, constants={}), "matmul has no constant 'weight'"),
        (lambda r: replace(r, output_shape=(3,)), r"the output is \(2,\), not \(3,\)"),
        (lambda r: replace(r, output="other"), r"the output is None, not \(2,\)"),
        (lambda r: replace(r, input_shape=(4,)), r"matmul of \(4,\) with \(5, 3\)"),
        (
            lambda r: replace(r, operations=(replace(r.operations[0], inputs=()),)),
            "not enough values",
        ),
        (
            lambda r: replace(r, operations=(replace(r.operations[0], outputs=("y", "z")),)),
            "matmul writes 1 values",
        ),
        (lambda r: replace(r, constants={n: np.ones(2) for n in r.constants}), "matmul"),
    ],
)
def test_shapes_refuse_a_recipe_that_does_not_fit(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(two_products()).shapes()


def test_values_live_until_they_are_read_last() -> None:
    for recipe in RECIPES:
        dropped = recipe.last_uses()
        assert len(dropped) == len(recipe.operations)
        gone = [name for names in dropped for name in names]
        assert len(set(gone)) == len(gone)
        assert set(gone) == set(recipe.shapes()) - {recipe.output}
        for index, names in enumerate(dropped):
            later = recipe.operations[index + 1 :]
            assert not any(name in operation.inputs for operation in later for name in names)


def test_the_peak_counts_what_is_alive() -> None:
    recipe = two_products()
    assert recipe.last_uses() == [("x",), ("y",)]
    assert recipe.peak_elements() == 3 + 5  # then x is gone: 5 + 2
    builder = RecipeBuilder((3,))
    y = product(builder, INPUT, 3)
    held = builder.recipe(builder.add(layer.Concatenate, product(builder, y, 4), INPUT, axis=0))
    assert held.peak_elements() == 4 + 3 + 7  # x is kept to the end
    assert RecipeBuilder((3,)).recipe(INPUT).peak_elements() == 3


def test_a_call_says_whether_it_takes_samples_one_by_one() -> None:
    for by_sample in (False, True):
        builder = RecipeBuilder((3,))
        call = {"module": "m", "what": "Own", "result": (3,), "by_sample": by_sample}
        assert builder.recipe(builder.add(layer.Call, INPUT, **call)).by_sample is by_sample
    assert two_products().by_sample


def test_a_recipe_prints_as_a_list() -> None:
    assert str(two_products()) == PRINTED
    assert repr(two_products()) == PRINTED
    assert str(RecipeBuilder((3,)).recipe(INPUT)) == "x: (3,) → (3,)\nreturn x"


PRINTED = """\
x: (3,) → (2,)
  y   = matmul(x; weight (5, 3))  (5,)
  y_2 = matmul(y; weight (2, 5))  (2,)
return y_2"""


def test_a_runtime_refuses_operations_that_it_lacks() -> None:
    run = Runtime("lists")
    run.runs(point.Divide)(lambda op, holder, v, tau, m: v)
    run.check(point.Divide(("v", "tau", "m"), ("y",), scale=1.0), "run")
    with pytest.raises(
        ConformalError, match=r"operations supported by lists, got slice\. Fold only the layers"
    ):
        run.check(layer.Slice(("x",), ("y",), axis=0, start=0, stop=1), "run")


@pytest.mark.parametrize(
    ("kind", "count", "settings"),
    [(point.Normalize, 1, {}), (point.Rebase, 3, {"scale": 1.0, "coordinate": 1.0})],
)
def test_other_numbers_of_inputs_are_refused(
    kind: type[Operation], count: int, settings: dict[str, float]
) -> None:
    names = tuple("zmτu")
    kind(names[:count], (), **settings).shapes([(4,), *[()] * (count - 1)], {}.__getitem__)
    with pytest.raises(ValueError, match=r"expected 1|not z, m and τ"):
        kind(names[: count + 1], (), **settings).shapes([(4,), *[()] * count], {}.__getitem__)


def test_copied_pixels_pad_every_spatial_axis() -> None:
    for mode in ("reflect", "replicate", "circular"):
        pad = layer.Pad(("x",), ("y",), pads=((1, 1),), mode=mode)
        with pytest.raises(ValueError, match=rf"{mode} pads \(\(1, 1\),\) of \(2, 4, 4\)"):
            pad.shapes([(2, 4, 4)], {}.__getitem__)
