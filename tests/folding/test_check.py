"""An automatic choice must pass the library's own check, if another strategy does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import conformallayers as cl
from oracle import oracle

SHAPE = (2, 20, 20)


def cancelling(kernel: int = 1) -> cl.ConformalLayers:
    """Return layers whose second convolution cancels most of what the first one gives.

    In float32 the map between them has lost the digits that are left; M in float64 has not.
    """
    torch.manual_seed(0)
    first = cl.Conv2d(2, 16, kernel, padding=kernel // 2)
    second = cl.Conv2d(16, 2, 3, padding=1, padding_mode="reflect")
    with torch.no_grad():
        a = first.weight[:, :, kernel // 2, kernel // 2].double()
        first.weight.zero_()
        first.weight[:, :, kernel // 2, kernel // 2] = a.float()
        inverse = torch.linalg.pinv(a)
        null = torch.eye(16).double() - a @ inverse
        centre = torch.randn(2, 16).double() @ null * 1e3 + torch.randn(2, 2).double() @ inverse
        second.weight.zero_()
        second.weight[:, :, 1, 1] = centre.float()
    return cl.ConformalLayers(first, cl.ReSPro(), second, cl.ReSPro())


def test_auto_leaves_out_what_is_not_accurate() -> None:
    model, x = cancelling(), torch.rand(4, *SHAPE)
    assert cl.fold_error(model, cl.fold(model, SHAPE, strategy="layers"), x) > 1e-4
    folded = cl.fold(model, SHAPE)
    assert folded.explain()[""].reason == "layers is not accurate enough"
    assert cl.fold_error(model, folded, x) < 5e-6
    cl.testing.assert_folds(model, SHAPE)


def test_without_an_accurate_strategy_the_first_choice_stays() -> None:
    model = cancelling(kernel=3)
    shape = (2, 100, 100)  # nothing else can be composed or written out
    assert cl.fold(model, shape).strategy == "layers"


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["auto", "layers", "conv", "dense"])
@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("bias", [False, True])
def test_tiny_points_behind_a_published_activation_keep_their_squares(
    bias: bool, size: float, strategy: str
) -> None:
    # t of the first activation is of the size of ‖x‖², so the points are of the size of 1/‖x‖.
    torch.manual_seed(0)
    block = cl.Parallel(
        nn.Sequential(cl.Conv2d(2, 2, 1), cl.ReSPro(1.0), cl.Abs()), cl.Conv2d(2, 2, 1)
    )
    layers = cl.Conv2d(2, 3, 1, bias=True) if bias else block
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 2, 1), cl.ReSPro(1.0), cl.Abs()),
        *(layers, cl.Abs(), cl.Conv2d(3 if bias else 2, 2, 1), cl.ReSPro(1.0)),
    )
    if bias:
        nn.init.zeros_(model[3].bias)
    model[-2].weight.mul_(size)
    x = torch.rand(3, 2, 4, 4) * torch.tensor([1.0, 1e6, 1e12]).view(-1, 1, 1, 1)
    expected = oracle(copy.deepcopy(model).double(), x.double())
    result = cl.fold(model, (2, 4, 4), strategy=strategy)(x)
    error = (result - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(error.max()) < 5e-6
