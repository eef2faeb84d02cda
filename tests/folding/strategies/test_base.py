"""What holds for every strategy."""

from __future__ import annotations

import pytest
import torch

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES
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
def test_all_strategies_agree(kind: str, projective: bool) -> None:
    shape = (3, 11, 9)
    expected = {"dense", "banded", "sparse", "layers"}
    expected |= {"spectral"} if kind in ("circular", "unpadded") else set()
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
    for strategy in ("spectral", "dense", "banded", "sparse", "layers"):
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
