"""Functions in traced modules; graph/test_capture.py has every function and method as a module."""

from __future__ import annotations

import torch
from torch import nn

import conformallayers as cl


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = cl.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        y = nn.functional.relu(self.conv(x)) + abs(x) + x.relu() + torch.abs(torch.relu(x))
        return nn.functional.max_pool2d(0 + y * 2 - x, 2)


def test_functions_that_are_homogeneous_maps():
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    block = Rectified().double()
    model = cl.ConformalLayers(cl.Traced(block))
    y = block(x) / x.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    for mode in (True, False):
        assert torch.allclose(model.train(mode)(x), y, rtol=1e-12)


class Alpha(nn.Module):
    def forward(self, x):
        return torch.add(x, torch.sub(x, torch.relu(x), alpha=1.4), alpha=0.3)


def test_alpha_of_a_sum_keeps_its_digits():
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    folded = cl.fold(Alpha(), (2, 6, 6), dtype=torch.float64)
    assert cl.fold_error(Alpha(), folded, x) < 1e-12


class Empty(nn.Module):
    def forward(self, x):
        first, second = x.split([2, 0], dim=1)
        return torch.cat([first.relu(), second.abs(), x[:, 2:]], dim=1)


def test_parts_without_channels_are_kept():
    x = torch.randn(3, 2, 6, 6)
    assert torch.equal(cl.fold(Empty(), (2, 6, 6))(x), x.relu())
