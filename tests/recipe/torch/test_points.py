"""Operations on points in torch: every sample keeps its own range."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl

pytestmark = pytest.mark.usefixtures("seeded")


def positive(depth: int, channels: int, kernel: int, gain: float = 1.0) -> cl.ConformalLayers:
    layers: list[nn.Module] = []
    for index in range(depth):
        conv = cl.Conv2d(channels if index else 3, channels, kernel, padding=kernel // 2)
        with torch.no_grad():
            conv.weight.abs_().mul_(gain)
        layers += [conv, cl.ReSPro()]
    return cl.ConformalLayers(*layers).eval()


@pytest.mark.parametrize("norm", [1e-2, 1.0, 1e4, 1e8, 3e11])
@pytest.mark.parametrize("strategy", ["conv", "layers", "dense"])
@pytest.mark.parametrize(
    ("depth", "channels", "kernel", "gain"), [(20, 8, 3, 1.0), (6, 8, 1, 1e3), (60, 4, 1, 1.0)]
)
@pytest.mark.sampled(4)
def test_no_sample_is_helped_by_its_neighbour(
    depth: int, channels: int, kernel: int, gain: float, strategy: str, norm: float
) -> None:
    model = positive(depth, channels, kernel, gain)
    folded = cl.fold(model, (3, 6, 6), strategy=strategy)
    x = torch.rand(2, 3, 6, 6)
    x = x / x.flatten(1).norm(dim=1).view(-1, 1, 1, 1) * norm
    beside = torch.cat([x, torch.full_like(x[:1], float("nan"))])  # forces the division
    with torch.no_grad():
        torch.testing.assert_close(folded(x), folded(beside)[:2], rtol=2e-5, atol=0)
