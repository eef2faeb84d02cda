"""What holds for every strategy."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES
from nets import conv_stack, with_linear_head
from oracle import exact, matrix_of, oracle, randomise, relative_error

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


NEARLY_SINGULAR: dict[str, list[nn.Module]] = {
    "few rows": [cl.Flatten(), cl.Linear(45, 2), cl.ReSPro(1e-8)],
    "many rows of few": [
        *(cl.Flatten(), cl.Linear(45, 2), cl.ReSPro(1e-8)),
        *(cl.Linear(2, 60), cl.ReSPro(1.0)),
    ],
    "a stride": [cl.Conv2d(1, 1, 3, stride=2), cl.ReSPro(1e-8)],
}


@pytest.mark.parametrize("strategy", ["dense", "banded"])
@pytest.mark.parametrize("name", NEARLY_SINGULAR)
def test_no_digits_are_lost_near_a_null_space(name: str, strategy: str) -> None:
    model = exact(randomise(cl.ConformalLayers(*copy.deepcopy(NEARLY_SINGULAR[name]))))
    first = nn.Sequential(*itertools.takewhile(lambda m: not isinstance(m, cl.ReSPro), model))
    with torch.no_grad():
        _, _, basis = torch.linalg.svd(matrix_of(first, (1, 9, 5)))
        x = (basis[-1] + 1e-3 * basis[0]).view(1, 1, 9, 5)
        folded = cl.fold(model, (1, 9, 5), strategy=strategy)
        assert relative_error(folded(x), oracle(model, x)) < 1e-12
