"""Branches become composites: which ones, and that graphs of any form compute the same."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from cnns import Dense, UNet, embedded
from oracle import randomise, relative_error
from support import samples


def test_disjoint_branches_nest() -> None:
    features = cl.convert(UNet(), (3, 8, 8)).features
    assert [type(module).__name__ for module in features] == [
        *("Conv2d", "ReLU", "Parallel", "Conv2d"),
    ]
    skip, body = features[2].branches
    assert isinstance(skip, nn.Identity)
    assert [type(module).__name__ for module in body] == [
        *("Conv2d", "Conv2d", "ReLU", "ConvTranspose2d"),
    ]


def test_branches_that_share_values_are_a_graph() -> None:
    features = cl.convert(Dense(), (3, 6, 6)).features
    assert [type(module).__name__ for module in features] == ["Traced", "AdaptiveMaxPool2d"]


class Random(nn.Module):
    """A random graph: every step reads one or two values from before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps: list[tuple[str, list[int]]] = []
        layers, unread = [], {0}
        while len(self.steps) < 7 or len(unread) > 1:
            near = list(range(max(0, len(self.steps) - 3), len(self.steps) + 1))
            joins = len(self.steps) > 1 and (len(self.steps) >= 7 or draw.random() < 0.5)
            if joins:
                reads = [max(unread), draw.choice(near[:-1])]
                if len(self.steps) >= 7:
                    reads = sorted(unread)[-2:]
            else:
                reads = [draw.choice(near)]
            kind = "sum" if joins else draw.choice(["conv", "relu"])
            layers.append(nn.Conv1d(2, 2, 3, padding=1) if kind == "conv" else nn.ReLU())
            unread = (unread - {*reads}) | {len(self.steps) + 1}
            self.steps.append((kind, reads))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (kind, reads) in zip(self.layers, self.steps, strict=True):
            first = values[reads[0]]
            values.append(first + values[reads[1]] if kind == "sum" else layer(first))
        return values[-1]


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs(seed: int) -> None:
    model = randomise(Random(seed), seed).double().eval()
    twin, x = cl.convert(model, (2, 5), keep="all"), samples((2, 5), torch.float64)
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(twin(x), model(embedded(twin, x))) <= 1e-12


def test_a_value_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            x = self.conv(x + x)  # the same weights again
            return torch.cat([x, x], 1)

    model = Twice().double()
    twin, x = cl.convert(model, (2, 5)), samples((2, 5), torch.float64)
    assert len(list(twin.features.parameters())) == 3  # and the offset
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(twin(x), model(embedded(twin, x))) <= 1e-12
