"""A single sample gives the numbers of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import conformallayers as cl
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from conformallayers.recipe.torch.single import OutsideLimits, runs_single
from conformallayers.testing.recipes import RECIPE_CASES, RecipeCase
from oracle import relative_error
from support import samples

DTYPES = {torch.float32: 5e-6, torch.float64: 1e-12}
LIMITS = 1e-3, 1e5
pytestmark = pytest.mark.usefixtures("seeded")


def limited(recipe: Recipe) -> Recipe:
    """Return a recipe that does not normalise samples of ordinary norms."""
    operations = tuple(
        replace(op, limits=LIMITS) if isinstance(op, point.Normalize) else op
        for op in recipe.operations
    )
    return replace(recipe, operations=operations)


CASES = [case for case in RECIPE_CASES if runs_single(limited(case.build()))]


def module_of(recipe: Recipe, dtype: torch.dtype) -> RecipeModule:
    constants = recipe.with_constants(
        lambda name, array: array if name in recipe.wide else array.to(dtype)
    )
    return RecipeModule(constants, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recipes_agree(case: RecipeCase, dtype: torch.dtype) -> None:
    recipe = limited(case.build())
    module = module_of(recipe, dtype)
    x = samples(recipe.input_shape, dtype, 1)
    with torch.no_grad():
        expected = module.evaluate({INPUT: x})[recipe.output]
        assert relative_error(module._run_single(x), expected) <= DTYPES[dtype]


def test_most_recipes_are_among_them() -> None:
    names = {case.name for case in CASES}
    kinds = {type(op) for case in CASES for op in case.build().operations}
    assert len(names) > 0.7 * len(RECIPE_CASES)
    assert {point.Normalize, point.Advance, point.Rebase, point.SpectralForm} <= kinds
    assert not {point.Rescale, point.Grow, point.Combine} & kinds


def test_scalars_that_a_layer_reads_stay_tensors() -> None:
    builder = RecipeBuilder((4,))
    names = "unit", "m", "tau"
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=names, limits=LIMITS)
    tau = builder.add(layer.Elementwise, tau, function="abs")
    assert not runs_single(builder.recipe(builder.add(point.Divide, unit, tau, m, scale=1.0)))
    assert not runs_single(builder.recipe(tau))


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": (2, 2)},
    "dilation": {"dilation": (2, 1)},
    "bias": {"bias": True, "stride": (1, 3)},
    "padding": {"padding": (1, 0)},
    "groups": {"groups": 3},
}


@pytest.mark.parametrize("size", [9, 90])  # 90: more windows than are copied
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("order", ["rows", "channels last", "part of a map"])
def test_convolutions(name: str, size: int, order: str) -> None:
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), **CONVOLUTIONS[name]}
    biased, groups = options.pop("bias", False), options.get("groups", 1)
    weight, bias = torch.randn(9, 6 // groups, 3, 2).double(), torch.randn(9).double()
    builder = RecipeBuilder((6, size, size))
    constants = {"weight": builder.constant("weight", weight)}
    if biased:
        constants["bias"] = builder.constant("bias", bias)
    module = module_of(
        builder.recipe(builder.add(layer.Conv, INPUT, **constants, **options)), torch.float64
    )
    x = torch.randn(1, 8, size, size, dtype=torch.float64)[:, 1:7]
    if order != "part of a map":
        formats = {"rows": torch.contiguous_format, "channels last": torch.channels_last}
        x = x.contiguous(memory_format=formats[order])
    expected = torch.nn.functional.conv2d(x, weight, bias if biased else None, **options)
    assert relative_error(module(x), expected) <= 1e-12
    assert module(x).is_contiguous()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1.0, 1e6, 1e30, float("nan")])
@pytest.mark.parametrize("offset", [None, 2.0])
def test_samples_of_every_size(size: float, offset: float | None) -> None:
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 4, 3), cl.ReSPro(), torch.nn.ReLU(), cl.Conv2d(4, 3, 2), cl.ReSPro()),
        offset=offset,
    )
    folded = cl.fold(model.eval(), (2, 7, 7), strategy="conv")
    x = size * samples((2, 7, 7), torch.float32, 1)
    with torch.no_grad():
        y, expected = folded(x), folded(torch.cat([x, x]))[:1]
    bound = 5e-6 * expected.double().norm()
    torch.testing.assert_close(y, expected, rtol=0, atol=float(bound.nan_to_num()), equal_nan=True)
    if not 1e-3 < x.norm() < 1e5:
        with pytest.raises(OutsideLimits):
            folded._run_single(x)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.1])
@pytest.mark.parametrize("count", [2048, 3072, 4704, 5003])
def test_equal_numbers_do_not_add_up_their_rounding(value: float, count: int) -> None:
    model = cl.ConformalLayers(cl.Identity(), cl.ReSPro(1.0), cl.Identity(), cl.ReSPro(1.0))
    x = torch.full((1, count), value)
    with cl.layer_by_layer():
        expected = model.double()(x.double())
    folded = cl.fold(model.float(), (count,), strategy="layers")
    assert relative_error(folded(x), expected) <= 2e-6


def gradient(run: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(run(x).square().sum(), x)
    return found


def test_gradients_and_transforms_take_the_path_of_batches() -> None:
    model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), cl.ReSPro(), cl.Flatten()).double().eval()
    folded = cl.fold(model, (2, 7, 7), strategy="conv")
    x = torch.rand(1, 2, 7, 7, dtype=torch.float64)
    batch = torch.cat([x, 2 * x])
    expected = gradient(folded, batch)[:1]
    torch.testing.assert_close(gradient(folded, x), expected, rtol=1e-9, atol=1e-12)
    by_sample = torch.func.vmap(lambda one: folded(one[None])[0])(batch)
    torch.testing.assert_close(by_sample, folded(batch), rtol=1e-12, atol=0)
    compiled = torch.export.export(folded, (x,)).module()
    torch.testing.assert_close(compiled(3e6 * x), folded(3e6 * x), rtol=1e-12, atol=0)
