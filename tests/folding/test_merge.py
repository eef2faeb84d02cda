"""Affine runs of plain networks merge into single operations, with the numbers of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blocks
import conformallayers as cl
from conformallayers.folding.merge import merge
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.recipe import INPUT, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from models import Generator, Join, Scale

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
# The network, and how many convolutions and additions of its fold are left.
CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "repvgg": (lambda: nn.Sequential(blocks.RepVGG(4, 8, 2), blocks.RepVGG(8, 8)), 2, 0),
    "repvgg grouped": (lambda: blocks.RepVGG(4, 4, groups=2), 1, 0),
    "mobileone": (
        lambda: nn.Sequential(blocks.MobileOne(4, 4, 3, 1, 4), blocks.MobileOne(4, 8, 1)),
        2,
        0,
    ),
    "acnet": (lambda: blocks.ACNet(4, 8), 1, 0),
    "dbb": (lambda: blocks.DBB(4, 8), 1, 0),
    "residual": (lambda: blocks.Residual(4), 2, 1),
    "inverted residual": (lambda: blocks.InvertedResidual(4), 3, 1),
    "sesr": (lambda: blocks.SESR(4), 1, 0),
    "dense": (lambda: nn.Sequential(blocks.Dense(4), blocks.Dense(8)), 2, 0),
    "inception": (lambda: blocks.Inception(4), 3, 0),
    "unet": (lambda: blocks.UNet(4), 2, 0),
    "expanded": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        ),
        1,
        0,
    ),
    "padded chain": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)),
        2,
        0,
    ),
    "norm before conv": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)),
        1,
        0,
    ),
    "reflect": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        ),
        1,
        0,
    ),
}


def count(folded: cl.Folded, kind: str) -> int:
    return sum(op.kind == kind for op in folded.recipe.operations)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_blocks_fold_to_the_fewest_convolutions(name: str, dtype: torch.dtype) -> None:
    build, convolutions, additions = CASES[name]
    torch.manual_seed(0)
    model = blocks.randomised(build()).to(dtype)
    folded = cl.fold(model, (4, 12, 12))
    x = torch.randn(3, 4, 12, 12, dtype=dtype)
    with torch.no_grad():
        expected, found = model(x), folded(x)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE[dtype]
    assert count(folded, "conv") == convolutions
    assert count(folded, "add") == additions
    assert count(folded, "multiply") == 0 or name == "dense"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_merge_across_flattening(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = (
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 32)),
        *(nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.Linear(64, 10)),
    )
    model = blocks.randomised(nn.Sequential(*layers)).to(dtype)
    folded = cl.fold(model, (3, 8, 8))
    kinds = [op.kind for op in folded.recipe.operations]
    assert kinds == ["conv", "elementwise", "reshape", "matmul", "elementwise", "matmul"]
    x = torch.randn(3, 3, 8, 8, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)


def test_never_more_multiply_adds() -> None:
    """A 1×1 convolution to many channels behind a depthwise one stays apart: together they are dense."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 64, 1))
    assert count(cl.fold(model, (8, 12, 12)), "conv") == 2


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


def test_a_padded_convolution_before_a_product_is_one_product() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 3)
    model = nn.Sequential(*layers).double()
    folded = cl.fold(model, (4, 6, 6))
    assert [op.kind for op in folded.recipe.operations] == ["reshape", "matmul"]
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_random_graphs_keep_their_numbers_and_cost_no_more(seed: int) -> None:
    model, shape = Generator(seed).plain()
    x = torch.randn(2, *shape, dtype=torch.float64)
    folded, single = cl.fold(model, shape), cl.fold(model, shape, dtype=torch.float32)
    with torch.no_grad():
        expected = model(x)
        assume(bool(expected.isfinite().all()))  # a window of a max pool may see padding alone
        assert relative_error(folded(x), expected) < 1e-10
        assert relative_error(single(x.float()).double(), expected) < 1e-5
    calls: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    model(x)
    assert sum(count(folded, kind) for kind in ("conv", "conv_transpose", "matmul")) <= len(calls)
    for region in folded.explain().regions:
        assert region.cost_after.work <= region.cost_before.work
        assert len(region.after) <= len(region.before)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_other_sizes_give_the_numbers_of_the_model_or_are_refused(seed: int) -> None:
    model, shape = Generator(seed).plain()
    folded = cl.fold(model, shape)
    x = torch.randn(2, shape[0], *(n + 3 for n in shape[1:]), dtype=torch.float64)
    takes, expected = "other spatial sizes" in str(folded.explain()), None
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # a linear layer of another size
        expected = model(x)
    assume(expected is None or bool(expected.isfinite().all()))
    message, found = "", x
    try:
        found = folded(x)
    except cl.ConformalError as error:
        message = str(error)
    if message:
        assert "Fold again for this shape" in message
        called = count(folded, "call") > 0  # what it gives for another size is not known before
        assert expected is None or called or not takes
    else:  # strides may give maps of the same size
        assert expected is not None
        assert relative_error(found, expected) < 1e-10


class ReadsSize(nn.Module):
    """Cut a value at a place that is computed from a size which a layer has made."""

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.interpolate(x, scale_factor=1.3, mode="bilinear")
        return z + torch.arange(z.shape[-1] - 1 + 1, dtype=z.dtype)


@pytest.mark.parametrize("layer", [nn.AdaptiveMaxPool2d((4, None)), ReadsSize()])
def test_layers_that_follow_the_size_are_right_or_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), layer).eval()
    folded, x = cl.fold(model, (2, 7, 7)), torch.randn(1, 2, 9, 9)
    with contextlib.suppress(cl.ConformalError):
        assert relative_error(folded(x), model(x)) < 1e-6


def conv(before: int, after: int, kernel: int = 1, **options: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, **options)


norm, half = nn.BatchNorm2d, nn.AvgPool2d(2)
# Layers for (4, 8, 8), and the operations that are left of them.
RULES: dict[str, tuple[list[nn.Module], list[str]]] = {
    "pixels behind a pool cost less": ([conv(4, 8), half], ["avg_pool", "conv"]),
    "factors pass a pool to a product": (
        [nn.ReLU(), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)],
        ["elementwise", "adaptive_avg_pool", "reshape", "matmul"],
    ),
    "pixels before an interpolation": ([nn.Upsample(None, 2), conv(4, 4)], ["conv", "upsample"]),
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
    "a product behind a pool and a flattening": (
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
        assert relative_error(folded(x), model(x)) < 1e-12


def test_zero_factors_keep_their_shift() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)).double().eval()
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(cl.fold(model, (4, 8, 8))(x), model(x)) < 1e-12


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
    assert relative_error(found, expected) < 1e-12


def test_the_error_for_channels_last_says_so() -> None:
    folded = cl.fold(nn.Conv2d(3, 4, 3), (3, 8, 8))
    with pytest.raises(cl.ConformalError, match=r"channels last .*x\.permute\(0, 3, 1, 2\)"):
        folded(torch.zeros(2, 8, 8, 3))
    with pytest.raises(cl.ConformalError, match=r"unbatched.*unsqueeze"):
        folded(torch.zeros(3, 8, 8))
