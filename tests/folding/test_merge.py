"""Affine runs of plain networks merge into single operations, with the numbers of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import blocks
import conformallayers as cl
from models import Generator
from support import count, error_of_all

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
    "padded chain": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)),
        2,
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
        assert error_of_all(folded(x), model(x)) < TOLERANCE[dtype]


def test_a_padded_convolution_before_a_product_is_one_product() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 3)
    model = nn.Sequential(*layers).double()
    folded = cl.fold(model, (4, 6, 6))
    assert [op.kind for op in folded.recipe.operations] == ["reshape", "matmul"]
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_random_graphs_keep_their_numbers_and_cost_no_more(seed: int) -> None:
    model, shape = Generator(seed).plain()
    x = torch.randn(2, *shape, dtype=torch.float64)
    folded, single = cl.fold(model, shape), cl.fold(model, shape, dtype=torch.float32)
    with torch.no_grad():
        expected = model(x)
        assume(bool(expected.isfinite().all()))  # a window of a max pool may see padding alone
        assert error_of_all(folded(x), expected) < 1e-10
        assert error_of_all(single(x.float()).double(), expected) < 1e-5
    calls: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    model(x)
    assert sum(count(folded, kind) for kind in ("conv", "conv_transpose", "matmul")) <= len(calls)
    for region in folded.explain().regions:
        assert region.cost_after.work <= region.cost_before.work
        assert len(region.after) <= len(region.before)
