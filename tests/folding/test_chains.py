"""Chains and sums of affine layers: what merges, changes places, or stays apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blocks
import conformallayers as cl
from conformallayers.folding.merge import merge
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.recipe import INPUT, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from models import Join, Scale
from support import error_of_all


def conv(before: int, after: int, kernel: int = 1, **options: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, **options)


norm, half = nn.BatchNorm2d, nn.AvgPool2d(2)


def without_first(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 0
    return x


# Layers for (4, 8, 8), and the operations that are left of them.
RULES: dict[str, tuple[list[nn.Module], list[str]]] = {
    "pixels after a pool cost less": ([conv(4, 8), half], ["avg_pool", "conv"]),
    "factors pass a pool to a product": (
        [nn.ReLU(), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)],
        ["elementwise", "adaptive_avg_pool", "reshape", "matmul"],
    ),
    "pixels before an interpolation": ([nn.Upsample(None, 2), conv(4, 4)], ["conv", "upsample"]),
    "a pool of single pixels before an interpolation": (
        [nn.Upsample(None, 2), nn.AdaptiveAvgPool2d(16)],
        ["reshape", "upsample"],
    ),
    "a map of zeros is not added behind a pool": (
        [nn.ReLU(), blocks.Written(without_first), half],
        ["elementwise", "multiply", "avg_pool"],
    ),
    "a window takes an average": ([conv(4, 4, 3), half], ["conv"]),
    "padding moves into a window": ([nn.ZeroPad2d(1), conv(4, 4, 3)], ["conv"]),
    "a shift before a padded window": (
        [norm(4), conv(4, 4, 3, padding=1)],
        ["add_constant", "conv"],
    ),
    "an unpadded window takes it": ([norm(4), conv(4, 4, 3)], ["conv"]),
    "expanded": ([conv(4, 16), norm(16), conv(16, 4, 3), norm(4), conv(4, 4)], ["conv"]),
    "factors of a sum": (
        [Join([conv(4, 4, 3, padding=1), nn.Sequential(nn.ReLU(), conv(4, 4))]), norm(4)],
        ["elementwise", "conv", "conv", "add"],
    ),
    "layer scale": ([conv(4, 4), Scale(4, 2, shift=True), nn.ReLU()], ["conv", "elementwise"]),
    "identities beside a branch": (
        [
            nn.ReLU(),
            Join(
                [
                    nn.Identity(),
                    nn.Sequential(conv(4, 4), nn.AvgPool2d(3, 1, 1)),
                    *[nn.Identity()] * 2,
                ]
            ),
        ],
        ["elementwise", "conv", "avg_pool", "add"],
    ),
    "a residual block": (
        [cl.Residual(conv(4, 4), nn.ReLU())],
        ["conv", "elementwise", "add"],
    ),
    "twice the identity": ([Join([nn.Identity(), nn.Identity()])], ["add"]),
    "nothing": ([nn.Identity(), nn.Dropout()], []),
    "transposed": (
        [conv(4, 6), nn.ConvTranspose2d(6, 2, 2, 2), norm(2), conv(2, 2)],
        ["conv_transpose", "add_constant"],
    ),
    "dense beside depthwise": ([Join([conv(4, 4, 3, groups=4), conv(4, 4, 3)])], ["conv"]),
    "products of one number": (
        [conv(4, 1), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(1, 1), nn.Linear(1, 8, bias=False)],
        ["conv", "max_pool", "reshape", "matmul", "matmul"],
    ),
    "a product after a pool and a flattening": (
        [nn.Flatten(1, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 1)],
        ["reshape", "reshape", "adaptive_avg_pool", "matmul"],
    ),
    "a pool": ([half, norm(4), nn.ReLU()], ["avg_pool", "multiply", "add_constant", "elementwise"]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    layers, kinds = RULES[name]
    torch.manual_seed(0)
    model = blocks.randomised(nn.Sequential(*layers)).double()
    folded = cl.fold(model, (4, 8, 8), dtype=torch.float64)
    assert sorted(op.kind for op in folded.recipe.operations) == sorted(kinds)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        assert error_of_all(folded(x), model(x)) < 1e-12


def test_zero_factors_keep_their_shift() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)).double().eval()
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        assert error_of_all(cl.fold(model, (4, 8, 8))(x), model(x)) < 1e-12


def test_layer_scales_pass_permutations() -> None:
    """As in ConvNeXt: a linear layer on channels last, the permutation back, then a scale of channels first."""
    builder = RecipeBuilder((8, 8, 4))
    arrays = torch.randn(6, 4).double(), torch.rand(6, 1, 1).double(), torch.tensor(0.5).double()
    weight, gamma, half = (builder.constant("c", array) for array in arrays)
    value = builder.add(layer.Matmul, INPUT, weight=weight)
    value = builder.add(layer.Multiply, value, factor=half)
    value = builder.add(layer.Permute, value, order=(2, 0, 1))
    recipe = builder.recipe(builder.add(layer.Multiply, value, factor=gamma))
    merged, _ = merge(recipe)
    assert [op.kind for op in merged.operations] == ["matmul", "permute"]
    x = torch.randn(2, 8, 8, 4, dtype=torch.float64)
    found, expected = (RecipeModule(r, torch.float64)(x) for r in (merged, recipe))
    assert error_of_all(found, expected) < 1e-12


def test_explain_has_a_line_for_each_region() -> None:
    layers = blocks.RepVGG(4, 4), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    folded = cl.fold(blocks.randomised(nn.Sequential(*layers)), (4, 12, 12))
    first, second = folded.explain().regions
    assert sorted(set(first.before)) == ["add", "add_constant", "conv", "multiply"]
    assert (first.after, second.after) == (("conv",), ("conv", "conv"))
    assert first.cost_before.work == (4 * 4 * 10 + 4 * 2 * 3 + 4 * 2) * 144
    assert first.cost_after == (4 * 4 * 9 * 144, 4 * 4 * 9 + 4, 0)
    assert second.cost_before == second.cost_after
    lines = str(folded.explain()).splitlines()
    assert lines[2].startswith("3 multiply, 3 add_constant, 2 conv, 2 add → conv")
    assert lines[3].endswith("a padded window after another window: the border would differ")
    assert lines[4].startswith("2 regions: ")
    assert lines[5] == "Takes other spatial sizes as well, if the model does."
    assert (len(lines), folded.strategy) == (6, "merged")
    alone = cl.fold(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), (4, 12, 12))
    assert str(alone.explain()).startswith("No affine layers are adjacent: nothing merges. Takes ")
