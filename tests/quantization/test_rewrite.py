"""Recipes in integers: which operations they have, and how close they stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe import integer_operations as integer
from integer_numbers import assert_same_everywhere, torch_numbers
from programs import hard
from support import assert_says


def images(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(64, *shape, generator=torch.Generator().manual_seed(3)) - 0.3


def plain_cnn() -> cl.ConformalLayers:
    return cl.ConformalLayers(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        cl.Residual(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, groups=2, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def test_a_plain_network_has_no_floats_between_its_ends(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folded = cl.fold(plain_cnn().eval(), (2, 12, 12))
    quantized = cl.quantize(folded, images((2, 12, 12)))
    assert quantized.quantization is not None
    assert quantized.quantization.mean_error < 0.05
    whole = integer.integer_values(quantized.recipe.operations)
    for op in quantized.recipe.operations:
        assert isinstance(op, integer.KINDS) or op.outputs[0] in whole
    assert_same_everywhere(quantized, hard((2, 12, 12)), tmp_path)


def test_a_rectifier_that_saturates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    clip, last = nn.Hardtanh(0, 0.25), nn.ReLU6()
    shared = cl.Residual(nn.Identity(), clip)  # read twice: not the end of a scale
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), clip, nn.Conv2d(6, 4, 3), shared, nn.Conv2d(4, 3, 1), last
    )
    folded, x = cl.fold(model, (2, 8, 8)), 4 * images((2, 8, 8))
    quantized = cl.quantize(folded, x)
    assert quantized.quantization is not None
    assert quantized.quantization.mean_error < 0.05
    assert_same_everywhere(quantized, hard((2, 8, 8)), tmp_path)


def test_functions_of_floats_run_at_the_end() -> None:
    torch.manual_seed(0)
    body = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
    model = nn.Sequential(body, nn.Linear(64, 8), nn.Tanh(), nn.Softmax(1))
    folded, x = cl.fold(model, (1, 6, 6), strategy="layers"), images((1, 6, 6))
    y = torch_numbers(cl.quantize(folded, x), x)
    torch.testing.assert_close(y, torch_numbers(folded, x), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("layers", "got"),
    [
        ([nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 3)], "elementwise tanh"),
        ([nn.GELU(), nn.Conv2d(1, 2, 3)], "elementwise gelu"),
        (
            [nn.GELU(), nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 3)],
            "elementwise gelu, elementwise tanh",
        ),
    ],
)
def test_functions_that_round_by_the_runtime_are_refused_between_layers(
    layers: list[nn.Module], got: str
) -> None:
    folded = cl.fold(nn.Sequential(*layers), (1, 8, 8))
    words = f"got {got} before other layers", "it may stay at the end"
    assert_says(lambda: cl.quantize(folded, torch.rand(4, 1, 8, 8)), *words)


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x - 1


def test_a_shift_of_all_pixels_and_windows_beside_the_image(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1, stride=2, padding=2)
    folded = cl.fold(nn.Sequential(Shifted(), *layers), (3, 5, 3))
    quantized = cl.quantize(folded, images((3, 5, 3)))
    assert_same_everywhere(quantized, images((3, 5, 3)), tmp_path)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5])
def test_a_dead_channel_takes_no_digits_from_the_others(size: float) -> None:
    torch.manual_seed(0)
    features = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), nn.Flatten())
    first, second = nn.Linear(144, 16, bias=False), nn.Linear(16, 10, bias=False)
    with torch.no_grad():
        first.weight.mul_(size)[0] = 0
        second.weight.div_(size)
    model = nn.Sequential(features, first, nn.ReLU(), second)
    folded, x = cl.fold(model, (1, 8, 8)), torch.rand(64, 1, 8, 8)
    quantized = cl.quantize(folded, x).quantization
    assert quantized is not None
    assert quantized.mean_error < 0.05
