"""The layers strategy: heads and radii."""

from __future__ import annotations

import torch
from torch import nn

import conformallayers as cl


def test_layers_with_branches_keep_the_whole_head() -> None:
    torch.manual_seed(0)
    block = cl.Residual(cl.Conv2d(8, 8, 3, padding=1), cl.Gnomonic())
    part = cl.ConformalLayers(cl.Conv2d(2, 8, 3, padding=1), cl.Gnomonic(), block)
    head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 1, 7, padding=3)
    model = nn.Sequential(part, *head)
    x = torch.rand(2, 2, 8, 8)
    for strategy in ("auto", "layers", "dense"):
        folded = cl.fold(model, (2, 8, 8), strategy=strategy)
        assert cl.fold_error(model, folded, x) <= 5e-6, strategy
