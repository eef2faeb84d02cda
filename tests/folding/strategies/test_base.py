"""Strategies: whichever is taken, and whichever route, the numbers are those of the layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.nn import bounds
from nets import conv_stack, with_linear_head

pytestmark = pytest.mark.usefixtures("seeded")


STACKS = {
    "padded": {"padding": 1},
    "unpadded": {},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "dilated": {"padding": 2, "dilation": 2},
}


@pytest.mark.parametrize("projective", [False, True])
@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.sampled(3)
def test_all_strategies_agree(kind: str, projective: bool) -> None:
    shape = (3, 11, 9)
    expected = {"dense", "banded", "layers"}
    expected |= {"conv"} if kind != "circular" else set()
    for model in (
        conv_stack(3, projective=projective, **STACKS[kind]),
        with_linear_head(conv_stack(3, projective=projective, **STACKS[kind]), shape),
    ):
        for name in STRATEGIES:
            if name in expected:
                cl.testing.assert_folds(model, shape, strategy=name)
            else:
                with pytest.raises(cl.ConformalError, match=f'fold.strategy="{name}"'):
                    cl.fold(model, shape, strategy=name)


def test_empty_batches_pass_every_strategy() -> None:
    circular = cl.ConformalLayers(
        cl.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), cl.ReSPro()
    )
    for strategy in ("dense", "banded", "layers"):
        assert cl.fold(circular, (1, 6, 6), strategy=strategy)(torch.rand(0, 1, 6, 6)).shape == (
            0,
            2,
            6,
            6,
        )


def test_an_activation_may_come_first() -> None:
    model = cl.ConformalLayers(cl.ReSPro(), cl.Conv2d(2, 3, 3), cl.Flatten(), cl.Linear(108, 4))
    for strategy in ("auto", "conv", "dense"):
        cl.testing.assert_folds(model, (2, 8, 8), strategy=strategy)


def test_a_module_that_computes_something_else_is_no_plain_convolution() -> None:
    class Shifted(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            ramp = torch.linspace(0, 1, input.shape[-1] - 2, dtype=input.dtype)
            return super().forward(input) * ramp

    cl.register_linear(Shifted, bound=bounds.conv_bound)
    model = cl.ConformalLayers(
        Shifted(1, 8, 3, bias=False), cl.ReSPro(), cl.AvgPool2d(2), cl.ReSPro()
    )
    cl.testing.assert_folds(model, (1, 12, 12))
    with pytest.raises(cl.ConformalError, match="conv"):
        cl.fold(model, (1, 12, 12), strategy="conv")


def test_layers_with_branches_keep_the_whole_head() -> None:
    torch.manual_seed(0)
    block = cl.Residual(cl.Conv2d(8, 8, 3, padding=1), cl.Gnomonic())
    part = cl.ConformalLayers(cl.Conv2d(2, 8, 3, padding=1), cl.Gnomonic(), block)
    head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 1, 7, padding=3)
    model = nn.Sequential(part, *head)
    x = torch.rand(2, 2, 8, 8)
    for strategy in ("auto", "layers", "dense"):
        folded = cl.fold(model, (2, 8, 8), strategy=strategy)
        assert cl.fold_error(model, folded, x) <= 5e-6, strategy
