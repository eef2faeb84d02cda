"""Affine runs of plain networks merge into single operations, with the numbers of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import blocks
import conformallayers as cl

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
