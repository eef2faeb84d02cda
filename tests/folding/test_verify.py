"""cl.verify: what it proves, and what it finds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import conformallayers as cl
from nets import conv_stack, with_linear_head
from oracle import randomise

pytestmark = pytest.mark.usefixtures("seeded")


def test_verify_finds_a_tampered_fold_and_another_model() -> None:
    shape = (3, 12, 10)
    model = with_linear_head(conv_stack(3, padding=1), shape)
    folded = cl.fold(model, shape, strategy="banded")
    assert cl.verify(folded, model)
    assert "proven" in str(cl.verify(folded, model))
    tampered = copy.deepcopy(folded)
    tampered.constants.band[1] *= 1.01
    assert not cl.verify(tampered, model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0][0].weight[0] *= 1.01
    assert not cl.verify(folded, changed)
    assert not cl.verify(folded, with_linear_head(conv_stack(3), shape))
    with pytest.raises(cl.ConformalError, match="Pass the model that was folded"):
        cl.verify(folded, nn.Sequential(conv_stack(3, padding=1), nn.Flatten()))


def test_verify_looks_at_bias_form_and_tail() -> None:
    model = nn.Sequential(
        conv_stack(2, channels=8, padding=1),
        nn.Flatten(),
        nn.Linear(512, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    folded = cl.fold(model, (3, 8, 8), strategy="dense")
    assert cl.verify(folded, model)
    for change in (
        lambda m: m[2].bias.data.add_(1.0),
        lambda m: setattr(m[0][1], "projective", True),
        lambda m: m[4].weight.data.mul_(1.1),
    ):
        other = copy.deepcopy(model)
        change(other)
        assert not cl.verify(folded, other)


def test_verify_knows_where_a_prefix_belongs() -> None:
    first = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro())
    second = cl.ConformalLayers(cl.Linear(32, 8), cl.ReSPro())
    model = randomise(nn.Sequential(first, nn.Flatten(), second))
    for strategy in ("dense", "layers"):
        assert cl.verify(cl.fold(model, (1, 6, 6), strategy=strategy), model)


@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse", "conv", "auto"])
def test_verify_knows_what_was_absorbed(strategy: str) -> None:
    features = cl.ConformalLayers(cl.Conv2d(1, 1, 3, padding=1), cl.ReSPro())
    model = nn.Sequential(features, nn.Flatten(), nn.Linear(100, 100))
    assert cl.verify(cl.fold(model, (1, 10, 10), strategy=strategy), model)
