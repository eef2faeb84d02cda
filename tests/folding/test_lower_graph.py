"""Models as recipes: which layers treat every sample by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl

pytestmark = pytest.mark.usefixtures("seeded")


def test_statistics_of_a_batch_inside_a_composite_are_not_cut() -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    part = cl.ConformalLayers(cl.Linear(30, 8), cl.Gnomonic())
    model = nn.Sequential(part, nn.Tanh(), cl.Residual(nn.Linear(8, 8), norm)).eval()
    assert cl.fold(model, (30,), strategy="layers").chunk_size is None


def test_pieces_leave_the_statistics_of_a_batch_alone() -> None:
    features = cl.ConformalLayers(cl.Conv2d(3, 6, 5), cl.ReSPro())
    model = nn.Sequential(features, nn.BatchNorm2d(6, track_running_stats=False)).eval()
    folded = cl.fold(model, (3, 32, 32))
    assert folded.chunk_size is None
    x = torch.rand(3 * cl.fold(features, (3, 32, 32)).chunk_size, 3, 32, 32)
    x[len(x) // 2 :] *= -1
    assert cl.fold_error(model, folded, x) < 5e-6


def test_pieces_leave_the_batch_axis_alone() -> None:
    features = cl.ConformalLayers(cl.Conv2d(3, 6, 5), cl.ReSPro())
    model = nn.Sequential(features, nn.Flatten(0, 1), nn.ReLU()).eval()
    folded = cl.fold(model, (3, 32, 32))
    assert folded(torch.rand(750, 3, 32, 32)).shape == (750 * 6, 28, 28)
