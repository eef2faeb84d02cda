"""Strategies: whichever is taken, and whichever route, the numbers are those of the layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES, conv
from conformallayers.folding.strategies.base import RATES
from conformallayers.folding.strategies.conv import best_route
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


pytestmark = pytest.mark.usefixtures("seeded")


pytestmark = pytest.mark.usefixtures("seeded")


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


# Machines that make one kind of work look free, so that every kind of step is taken somewhere.
ALL_RATES = {
    "fixed": RATES,
    "free products": replace(RATES, gemm=1e18),
    "free convolutions": replace(RATES, conv=1e18),
    "free passes": replace(RATES, stream=1e18, call=0.0),
    "dear calls": replace(RATES, call=1.0),
    "dear passes": replace(RATES, stream=1e5),
}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_stacks(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    layers: list[nn.Module] = []
    channels = inputs = data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 4))):
        out = data.draw(st.integers(1, 6))
        kernel = data.draw(st.integers(1, 3))
        padding, stride = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 2))
        layers.append(cl.Conv2d(channels, out, kernel, padding=padding, stride=stride))
        layers.append(cl.ReSPro(projective=data.draw(st.booleans())))
        if data.draw(st.booleans()):
            layers.append(cl.AvgPool2d(2, ceil_mode=data.draw(st.booleans())))
        channels = out
    model = cl.ConformalLayers(*layers)
    shape = (inputs, data.draw(st.integers(12, 20)), data.draw(st.integers(12, 20)))
    try:
        cl.trace(model, shape)
    except cl.ConformalError:
        return  # the image became too small
    rates = ALL_RATES[data.draw(st.sampled_from(sorted(ALL_RATES)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "best_route", partial(best_route, rates=rates))
        cl.testing.assert_folds(model, shape, strategy="conv", dtypes=(torch.float64,))
        x = torch.rand(5, *shape)
        folds = [cl.fold(model, shape, strategy=name) for name in ("conv", "layers")]
    composed, layered = (cl.fold_error(model, folded, x) for folded in folds)
    # Sums that nearly cancel lose digits in float32, in the layers as well.
    assert composed <= max(cl.testing.TOLERANCES[torch.float32], 4 * layered)
