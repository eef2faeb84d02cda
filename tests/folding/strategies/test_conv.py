"""The conv strategy: convolutions it takes, and the search for a route."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.strategies import conv
from conformallayers.nn import bounds

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


def test_a_route_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    search = conv.best_route
    monkeypatch.setattr(conv, "best_route", lambda *a: calls.append(a) or search(*a))
    cl.fold(cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro()), (3, 9, 9), strategy="conv")
    assert len(calls) == 1
