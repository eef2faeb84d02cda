"""Trace: steps, bounds and radii of networks with maps, branches, an offset and a unit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import conformallayers as cl
from support import samples


def test_radii_count_maps() -> None:
    model = cl.ConformalLayers(
        cl.Scale(3.0),
        nn.LeakyReLU(-2.0),
        cl.Scale(0.5),
        cl.ReSPro(),
        cl.Abs(),
        cl.ReSPro("learned"),
    )
    assert cl.trace(model, (4,)).alphas == (3.0, 1.0)


def test_power_iteration_covers_the_layers_behind_the_last_map() -> None:
    torch.manual_seed(0)
    spectral = cl.ReSPro("spectral")
    last = cl.Linear(6, 5)
    model = cl.ConformalLayers(cl.Linear(6, 6), cl.Scale(2.0), nn.LeakyReLU(-3.0), last, spectral)
    x = samples((6,), torch.float32)
    for _ in range(60):
        model(x)
    norm = float(torch.linalg.matrix_norm(last.weight.detach(), 2))
    assert spectral.norm.item() == pytest.approx(norm, rel=1e-3)
    trace = cl.trace(model, (6,))
    before = trace.steps[0].bound * 2 * 3
    assert trace.alphas[0] == pytest.approx(spectral.norm.item() * before, rel=1e-6)


@pytest.mark.parametrize("unit", ["norm", "rms"])
def test_radii_are_those_of_the_unit(unit: str) -> None:
    layers = cl.AvgPool2d(2), cl.ReSPro(), nn.Flatten(), cl.Linear(8, 2), cl.ReSPro()
    model = cl.ConformalLayers(*layers, unit=unit)
    with torch.no_grad():
        layers[3].weight.fill_(0.25)
    trace = cl.trace(model, (2, 4, 4))
    # 32 coefficients become 8, and 8 become 2.
    expected = (1.0, 1.0) if unit == "norm" else (math.sqrt(32 / 8), math.sqrt(8 / 2))
    assert trace.alphas == pytest.approx(expected)
    assert [trace.steps[i].bound for i in (1, 4)] == pytest.approx(expected)
    assert (trace.unit, trace.offset) == (unit, 0.0)


def test_the_offset_is_a_number() -> None:
    model = cl.ConformalLayers(cl.ReSPro(), offset="learned", unit="rms")
    with torch.no_grad():
        model.log_offset.fill_(1.0)
    for found in (cl.trace(model, (3,)), cl.trace(nn.Sequential(model), (3,))):
        assert isinstance(found.offset, float)
        assert found.offset == pytest.approx(math.e)
        assert found.unit == "rms"


def test_an_empty_interpolation_is_refused() -> None:
    model = cl.ConformalLayers(nn.Upsample(scale_factor=(2.7, 0.4), mode="bilinear"), cl.ReSPro())
    for attempt in (lambda: cl.trace(model, (2, 5, 2)), lambda: model(torch.rand(1, 2, 5, 2))):
        with pytest.raises(cl.ConformalError, match=r"Upsample at position 0.*\(2, 13, 0\)"):
            attempt()
