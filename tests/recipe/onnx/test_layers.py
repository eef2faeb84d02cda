"""Layers in ONNX: windows of every size, functions at every size of numbers, NaN in its places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.onnx.layers import MixedPool, merged_pools
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from onnx_support import LIMIT, error, node_kinds, session, single
from programs import Fold
from recipe_cases import FORMULAS
from support import samples

NAN = float("nan")


def test_averages_of_large_windows_lose_no_digits() -> None:
    x = torch.full((1, 2, 512, 512), 0.3)
    x[..., 0, 0] = 1.0
    exact = x.double().mean((2, 3), keepdim=True)
    y = session(single(layer.AdaptiveAvgPool, (2, 512, 512), size=(1, 1)))(x)
    assert torch.allclose(y.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", list(layer.FUNCTIONS))
def test_functions_at_every_size_of_numbers(function: str) -> None:
    # One sample each: all numbers of a sample are about as large.
    sizes = [1e-30, 1e-9, 1e-4, 1e-2, 1.0, 3.0, 8.0, 40.0, 1e4, 1e15, NAN]
    x = torch.tensor(sizes, dtype=torch.float64)[:, None] * torch.tensor([-1.0, -0.7, 0.7, 1.0])
    parameters = (0.3,) * layer.FUNCTIONS[function]
    recipe = single(layer.Elementwise, (4,), function=function, parameters=parameters)
    assert error(recipe, x.float()) <= LIMIT


@pytest.mark.parametrize("function", ["sigmoid", "silu"])
def test_functions_of_negative_numbers_keep_their_digits(function: str) -> None:
    x = torch.tensor([-1.0, -4.0, -17.0, -30.0, -60.0], dtype=torch.float32)[:, None]
    recipe = single(layer.Elementwise, (1,), function=function)
    expected = Fold(recipe, torch.float64)(x.double())
    off = (session(recipe)(x) - expected).abs()
    assert (off <= LIMIT * expected.abs() + 1e-37).all()


def test_averages_behind_wide_margins() -> None:
    builder = RecipeBuilder((1, 5, 5))
    padded = builder.add(layer.Pad, INPUT, pads=((3, 0), (3, 1)), mode="zeros")
    options = {"kernel": (2, 2), "stride": (2, 2), "padding": (1, 1)}
    recipe = builder.recipe(builder.add(layer.AvgPool, padded, **options))
    assert error(recipe, samples((1, 5, 5), torch.float32, 3)) <= 1e-6


@pytest.mark.parametrize("kernel", [3, 2])
def test_zeros_around_negative_numbers_count_in_a_maximum(kernel: int) -> None:
    # ONNX Runtime merges a padding with zeros into a pooling, which pads with −∞.
    builder = RecipeBuilder((2, 6))
    padded = builder.add(layer.Pad, INPUT, pads=((2, 1),), mode="zeros", value=0.0)
    options = {"kernel": (kernel,), "stride": (1,), "padding": (0,), "dilation": (1,)}
    recipe = builder.recipe(builder.add(layer.MaxPool, padded, **options))
    x = -1 - torch.rand(3, 2, 6, dtype=torch.float32)
    assert error(recipe, x) == 0
    assert (session(recipe)(x)[..., 0] == 0).all()


# -- poolings of several kinds ----------------------------------------------------------------------

ONES: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
TWOS: dict[str, Any] = {"kernel": (2, 2), "stride": (2, 2)}


def mixed(sizes: tuple[int, ...], **options: Any) -> Recipe:
    """Embed, convolve, pool channels by norms and averages in turn, convolve, divide."""
    builder = RecipeBuilder((2, 6, 7))
    z, m, tau = builder.add_many(point.Normalize, INPUT, names=("unit", "m", "tau"))
    channels = sum(sizes)
    weight = builder.constant("first", torch.randn(channels, 2, 3, 3, dtype=torch.float64))
    z = builder.add(layer.Conv, z, weight=weight, **ONES)
    n = builder.add(point.SumSquares, z, weight=0.3)
    tau = builder.add(point.Advance, tau, m, n, formula=FORMULAS["projective"])
    parts, at = [], 0
    for index, size in enumerate(sizes):
        part = z
        if len(sizes) > 1:
            part = builder.add(layer.Slice, z, axis=0, start=at, stop=at + size)
        kind, more = (layer.AvgPool, {"padding": (0, 0)}) if index % 2 else (layer.NormPool, {})
        parts.append(builder.add(kind, part, **more, **TWOS | options))
        at += size
    if len(parts) > 1:
        z = builder.add(layer.Concatenate, *parts, axis=0)
    else:
        (z,) = parts
    weight = builder.constant("second", torch.randn(2, channels, 3, 3, dtype=torch.float64))
    z = builder.add(layer.Conv, z, weight=weight, **ONES)
    return builder.recipe(builder.add(point.Divide, z, tau, m, scale=0.7))


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (1, 2, 3), (3, 5)], ids=str)
def test_channels_of_several_kinds_are_pooled_at_once(sizes: tuple[int, ...]) -> None:
    recipe = mixed(sizes)
    assert [isinstance(op, MixedPool) for op in merged_pools(recipe).operations].count(True) == 1
    kinds = node_kinds(recipe)
    means = (
        len(sizes) > 1
    )  # of some channels, by a convolution like the sums of squares and the energy
    assert [kinds.count(kind) for kind in ("AveragePool", "Conv")] == [0, 4 + means]
    assert (
        kinds.count("Mul") == 2
    )  # a scale, and the squares, which are those of the energy as well
    assert error(recipe, samples((2, 6, 7), torch.float32, 4)) <= 5e-6


@pytest.mark.parametrize("sizes", [(3,), (2, 3)], ids=str)
def test_windows_that_are_cut_off_are_pooled_apart(sizes: tuple[int, ...]) -> None:
    recipe = mixed(sizes, ceil_mode=True)
    assert not any(isinstance(op, MixedPool) for op in merged_pools(recipe).operations)
    assert error(recipe, samples((2, 6, 7), torch.float32, 4)) <= 5e-6


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e11])
def test_norms_outside_of_points(size: float) -> None:
    builder = RecipeBuilder((1, 4, 4))
    recipe = builder.recipe(builder.add(layer.NormPool, INPUT, **TWOS))
    assert error(recipe, size * samples((1, 4, 4), torch.float32, 3)) <= 5e-6
