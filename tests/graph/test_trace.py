"""Trace: steps, bounds and radii of networks with maps, branches, an offset and a unit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import conformallayers as cl


def test_the_offset_is_a_number() -> None:
    model = cl.ConformalLayers(cl.ReSPro(), offset="learned", unit="rms")
    with torch.no_grad():
        model.log_offset.fill_(1.0)
    for found in (cl.trace(model, (3,)), cl.trace(nn.Sequential(model), (3,))):
        assert isinstance(found.offset, float)
        assert found.offset == pytest.approx(math.e)
        assert found.unit == "rms"


@pytest.mark.parametrize("ask", [cl.trace, cl.inspect])
def test_models_without_a_conformal_part_are_refused(ask: Callable[..., object]) -> None:
    message = (
        rf"{ask.__name__}\(model\): expected a model that runs a cl.Conf.*, got Linear\. cl\.conv"
    )
    with pytest.raises(cl.ConformalError, match=message):
        ask(nn.Linear(3, 2), (3,))


def test_an_empty_interpolation_is_refused() -> None:
    model = cl.ConformalLayers(nn.Upsample(scale_factor=(2.7, 0.4), mode="bilinear"), cl.ReSPro())
    for attempt in (lambda: cl.trace(model, (2, 5, 2)), lambda: model(torch.rand(1, 2, 5, 2))):
        with pytest.raises(cl.ConformalError, match=r"Upsample at position 0.*\(2, 13, 0\)"):
            attempt()
