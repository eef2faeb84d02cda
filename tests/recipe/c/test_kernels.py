"""Convolutions, products and windows of random shapes: C computes what torch computes, in bounds of its memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import conformallayers as cl
from blocks import Written
from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from programs import Fold, needs_compiler
from random_recipes import recipes as random_recipes
from runtimes import wrong
from support import samples


def check_programs(*recipes: Recipe) -> None:
    """Compare programs of both kinds with torch; sanitizers watch memory."""
    folds = [Fold(recipe) for recipe in recipes]
    xs = [samples(fold.input_shape, torch.float32, 2) for fold in folds]
    for name in ("C for speed", "C for size"):
        with tempfile.TemporaryDirectory() as folder:
            assert wrong(folds, Path(folder), xs, (name,)) == {}, recipes


# A failure is not made smaller: each attempt compiles programs.
FEW = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}


@needs_compiler
@pytest.mark.parametrize("whole", [False, True])
def test_random_networks(whole: bool) -> None:
    @settings(max_examples=3, deadline=None, **FEW)
    @given(st.lists(random_recipes(whole), min_size=4, max_size=4))
    def compare(drawn: list[Recipe]) -> None:
        check_programs(*drawn)

    compare()


@needs_compiler
def test_a_map_times_a_matrix_is_added_to_a_convolution() -> None:
    torch.manual_seed(0)
    parts = {"conv": torch.nn.Conv2d(3, 3, 3, padding=1), "rows": torch.nn.Linear(4, 4)}
    both = Written(lambda m, x: m.conv(x) + m.rows(x), **parts)
    first = torch.nn.Conv2d(3, 3, 3, padding=1)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), both, torch.nn.BatchNorm2d(3)).eval()
    check_programs(cl.fold(model, (3, 4, 4)).recipe)


@needs_compiler
def test_a_flattened_map_between_layers_is_quantised_in_order() -> None:
    torch.manual_seed(0)
    layers = cl.ConformalLayers(
        *(cl.Gnomonic(1.0), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveMaxPool2d(3)),
        *(cl.Conv2d(4, 6, 2, bias=False), cl.ReSPro(1.0, projective=True)),
        offset=0.5,
    )
    folded = cl.fold(layers.eval(), (4, 6, 9), strategy="dense")
    recipe = cl.quantize(folded, torch.rand(16, 4, 6, 9)).recipe
    shapes = recipe.shapes()
    quantised = [op for op in recipe.operations if isinstance(op, integer.Quantize)]
    assert [len(shapes[op.inputs[0]]) for op in quantised] == [1]
    check_programs(recipe)


@needs_compiler
def test_one_channel_of_the_image_is_convolved() -> None:
    builder = RecipeBuilder((3, 6, 5))
    y = builder.add(layer.Slice, INPUT, axis=0, start=1, stop=2)
    weight = builder.constant("weight", torch.randn(2, 1, 3, 3, dtype=torch.float64))
    ones, zeros = (1, 1), (0, 0)
    y = builder.add(layer.Conv, y, weight=weight, stride=ones, padding=zeros, dilation=ones)
    check_programs(builder.recipe(y))


@needs_compiler
def test_rows_of_the_last_channel_are_copied() -> None:
    torch.manual_seed(0)
    first = torch.nn.Conv1d(6, 9, 5, padding=1, dilation=2, groups=3)
    last = torch.nn.Conv1d(1, 1, 3, padding=1)
    model = Written(lambda m, x: m.last(m.first(x)[:, 8:]), first=first, last=last).eval()
    check_programs(cl.fold(model, (6, 17)).recipe)


@needs_compiler
@pytest.mark.parametrize("kernel", [(3, 2), (9, 9)])
def test_every_channel_has_a_kernel_of_its_own(kernel: tuple[int, int]) -> None:
    torch.manual_seed(0)
    each = torch.nn.Conv2d(6, 6, kernel, stride=(1, 2), padding=kernel, groups=6)
    model = torch.nn.Sequential(each, torch.nn.ReLU(), torch.nn.Conv2d(6, 3, 1)).eval()
    folded = cl.fold(model, (6, 7, 5))
    check_programs(folded.recipe, cl.quantize(folded, torch.rand(20, 6, 7, 5)).recipe)


class _Apart(torch.nn.Module):
    """Two convolutions of a map, each channel on its own; the last one after a pointwise layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, count, 1)
        self.point = torch.nn.Conv2d(count, count, 1)
        self.tall = torch.nn.Conv2d(count, count, (3, 1), padding=(1, 0), groups=count)
        self.wide = torch.nn.Conv2d(count, count, 3, padding=2, dilation=2, groups=count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return (self.tall(self.point(x).relu()) + self.wide(x)).relu()


@needs_compiler
def test_zeros_beside_any_number_of_channels_have_room() -> None:
    torch.manual_seed(0)
    recipes = []
    for count, *size in (2, 1, 2), (3, 1, 3), (3, 2, 3), (6, 1, 1), (6, 5, 1), (7, 1, 1):
        folded = cl.fold(_Apart(count).eval(), (1, *size))
        recipes.append(cl.quantize(folded, torch.rand(20, 1, *size)).recipe)
    check_programs(*recipes)
