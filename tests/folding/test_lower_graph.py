"""Models as recipes: which layers treat every sample by itself, and which are called."""

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


class Enlarged(nn.Module):
    """A layer with an argument beside its input, behind a folded part."""

    def __init__(self) -> None:
        super().__init__()
        self.features = cl.ConformalLayers(cl.Conv2d(1, 16, 3), cl.ReSPro())
        self.enlarge = nn.ConvTranspose2d(16, 1, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.enlarge(self.features(x), output_size=[12, 12])
        return y.relu()


@pytest.mark.parametrize("strategy", ["layers", "dense"])
def test_a_layer_with_another_argument_is_called(strategy: str) -> None:
    model = Enlarged().eval()
    folded, x = cl.fold(model, (1, 8, 8), strategy=strategy), torch.rand(3, 1, 8, 8)
    assert folded(x).shape == model(x).shape == (3, 1, 12, 12)
    assert cl.fold_error(model, folded, x) < 5e-6
