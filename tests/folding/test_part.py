"""An automatic choice must pass the library's own check, if another strategy does."""

from __future__ import annotations

import pytest
import torch

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES

SHAPE = (2, 20, 20)


def cancelling() -> cl.ConformalLayers:
    """Return layers whose second convolution cancels most of what the first one gives.

    In float32 the map between them has lost the digits that are left; M in float64 has not.
    """
    torch.manual_seed(0)
    first = cl.Conv2d(2, 16, 1)
    second = cl.Conv2d(16, 2, 3, padding=1, padding_mode="reflect")
    with torch.no_grad():
        a = first.weight.view(16, 2).double()
        inverse = torch.linalg.pinv(a)
        null = torch.eye(16).double() - a @ inverse
        centre = torch.randn(2, 16).double() @ null * 1e3 + torch.randn(2, 2).double() @ inverse
        second.weight.zero_()
        second.weight[:, :, 1, 1] = centre.float()
    return cl.ConformalLayers(first, cl.ReSPro(), second, cl.ReSPro())


def test_auto_leaves_out_what_is_not_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STRATEGIES, "sparse")  # it is faster than the layers here, and accurate
    model, x = cancelling(), torch.rand(4, *SHAPE)
    assert cl.fold_error(model, cl.fold(model, SHAPE, strategy="layers"), x) > 1e-4
    folded = cl.fold(model, SHAPE)
    assert folded.explain()[""].reason == "layers is not accurate enough"
    assert cl.fold_error(model, folded, x) < 5e-6
    assert cl.verify(folded, model)
    cl.testing.assert_folds(model, SHAPE)


def test_without_an_accurate_strategy_the_first_choice_stays() -> None:
    model = cancelling()
    shape = (2, 100, 100)  # nothing else can be written out
    assert cl.fold(model, shape).strategy == "layers"
