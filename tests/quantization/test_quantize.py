"""cl.quantize: random staged networks in four runtimes, edge cases, reports and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe import layer_operations as layer
from integer_numbers import assert_same_everywhere, torch_numbers
from models import EMBEDDINGS, Generator
from programs import hard
from support import assert_says


class Draw(Generator):
    """Random networks without what int8 refuses: windows that are cut off."""

    def activation(self) -> nn.Module:
        kind, alpha = self.rng.choice((cl.ReSPro, cl.Gnomonic)), self.rng.choice((None, 1.5))
        return kind(alpha)

    def pool(self, n: int) -> nn.Module:
        pools = getattr(nn, f"MaxPool{n}d")(2, ceil_mode=True), getattr(nn, f"LPPool{n}d")(2, 2)
        return self.rng.choice(pools)


def images(shape: tuple[int, ...], count: int = 64) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(3)) - 0.3


VANISHING = 13  # many published ReSPros with biases: branches differ by a factor of 2^24


@pytest.mark.parametrize("seed", [seed for seed in range(12, 20) if seed != VANISHING])
@pytest.mark.sampled(2)
def test_random_staged_networks_are_equal_in_four_runtimes(seed: int, tmp_path: Path) -> None:
    model, shape = Draw(seed).staged(**EMBEDDINGS[seed % 4])
    strategy = ("layers", "conv")[seed % 2]
    folded = cl.fold(model.float().eval(), shape, strategy=strategy)
    quantized = cl.quantize(folded, images(shape))
    assert quantized.quantization is not None
    assert quantized.quantization.mean_error < 0.1
    assert_same_everywhere(quantized, torch.cat([images(shape), hard(shape)]), tmp_path)


def test_branches_that_vanish_beside_others_are_refused() -> None:
    model, shape = Draw(VANISHING).staged(**EMBEDDINGS[VANISHING % 4])
    folded = cl.fold(model.float().eval(), shape, strategy="conv")
    with pytest.raises(cl.ConformalError, match="expected scales that 24 bits can hold"):
        cl.quantize(folded, images(shape))


@pytest.mark.parametrize("offset", [None, 2.0])
def test_edge_cases_of_images_and_networks(offset: float | None, tmp_path: Path) -> None:
    torch.manual_seed(1)
    options = {} if offset is None else {"offset": offset}
    layers = [cl.Conv2d(1, 4, 3, bias=True), cl.ReSPro(projective=True), nn.LPPool2d(2, 2)]
    model = cl.ConformalLayers(*layers, cl.Conv2d(4, 3, 3, bias=True), cl.Flatten(), **options)
    with torch.no_grad():
        model[0].weight[1] = 0  # a constant map
    folded = cl.fold(model, (1, 10, 10))
    x = hard((1, 10, 10))
    usual = images((1, 10, 10))
    for name, calibration in {"usual": usual, "huge": 1e6 * usual}.items():
        folder = tmp_path / name
        folder.mkdir()
        assert_same_everywhere(cl.quantize(folded, calibration), x, folder)


def test_networks_of_the_zoo_hold() -> None:
    folded = cl.zoo.load("digits-micro")
    x = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    quantized = cl.quantize(folded, x[:100])
    same = torch_numbers(quantized, x).argmax(1) == torch_numbers(folded, x).argmax(1)
    assert same.float().mean() > 0.9
    report = quantized.quantization
    assert report is not None
    assert report.images == 100
    assert 3.5 < report.float_bytes / report.int8_bytes < 4
    assert "same class" in str(report)
    assert quantized.labels == folded.labels
    assert folded.quantization is None
    assert not quantized(x[:1].requires_grad_()).requires_grad  # rounding has no gradient
    assert_says(lambda: cl.quantize(quantized, x), "one in int8")
    operations = quantized.recipe.operations
    assert any(isinstance(op, layer.Concatenate) for op in operations)  # of maps of one scale
    assert not any(isinstance(op, integer.Requantize) for op in operations)


def test_grouped_kernels_of_one_column(tmp_path: Path) -> None:
    """Kernels whose strides (9, 1, 3, 1) torch's grouped convolution reads wrongly."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, (3, 1), groups=2), nn.ReLU()
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten())
    folded, x = cl.fold(model, (3, 10, 10)), images((3, 10, 10))
    quantized = cl.quantize(folded, x)
    assert relative_error(quantized, folded, x) < 0.05
    assert_same_everywhere(quantized, x, tmp_path)


def test_nan_is_read_as_0_everywhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for index, body in enumerate((nn.Sequential, cl.ConformalLayers)):
        layers = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        model = nn.Sequential(body(*layers, nn.Conv2d(3, 2, 3, padding=1)), nn.Flatten())
        quantized = cl.quantize(cl.fold(model, (1, 6, 6)), images((1, 6, 6)))
        x = torch.rand(4, 1, 6, 6)
        x[1, 0, 0, 0], x[2, 0, 3] = float("nan"), float("nan")
        assert torch.equal(quantized(x), quantized(x.nan_to_num(0.0)))
        folder = tmp_path / str(index)
        folder.mkdir()
        assert_same_everywhere(quantized, x, folder)


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda net: cl.fold(net(), (1, 8, 8), strategy="banded"), ("got banded_form", '"conv"')),
        (
            lambda net: cl.fold(nn.Sequential(net(), Own()), (1, 8, 8)),
            ("sin()", "Fold only the layers before it"),
        ),
        (lambda net: cl.fold(net(), (1, 8, 8), dtype=torch.float16), ("float32 or float64",)),
        (lambda net: net(), ("a Folded", "Fold it first")),
        (
            lambda net: cl.fold(nn.Sequential(net(), nn.LPPool2d(2, 3, ceil_mode=True)), (1, 8, 8)),
            ("windows of different sizes", "Use another pooling"),
        ),
    ],
)
def test_refusals_name_the_operation(
    make: Callable[..., cl.Folded], words: tuple[str, ...]
) -> None:
    def net(**options: bool) -> cl.ConformalLayers:
        pair = [cl.Conv2d(1, 3, 3, **options), cl.ReSPro()]
        return cl.ConformalLayers(*pair, cl.Conv2d(3, 3, 3, **options), cl.ReSPro())

    folded = make(net)
    assert_says(lambda: cl.quantize(folded, torch.rand(4, 1, 8, 8)), "quantize(folded", *words)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.rand(3, 2, 8, 8), "got torch.float32 (3, 2, 8, 8). Give a few hundred training"),
        (torch.rand(0, 1, 8, 8), "images (N, 1, 8, 8), floats as the network was trained on, got"),
        (torch.tensor(0.5), "got torch.float32 ()"),
        (torch.full((1, 1, 8, 8), 1e300, dtype=torch.float64), "not finite in torch.float32"),
        (torch.rand(3, 1, 8, 8).numpy(), "got ndarray. Convert it with torch.from_numpy(x)."),
        ([[0.0]], "got list. Give a few hundred training images"),
        (torch.zeros(3, 1, 8, 8), "zeros alone"),
        (torch.rand(3, 1, 8, 8).to_sparse(), "as the network was trained on, got"),
        (iter([]), "from a loader, torch.cat([x for x, _ in batches])."),
        (torch.ones(3, 1, 8, 8, dtype=torch.uint8), "got torch.uint8 (3, 1, 8, 8). Give a few"),
    ],
)
def test_images_that_do_not_fit(x: torch.Tensor, words: str) -> None:
    folded = cl.fold(cl.ConformalLayers(cl.Conv2d(1, 3, 3), cl.ReSPro()), (1, 8, 8))
    assert_says(lambda: cl.quantize(folded, x), words)


@pytest.mark.parametrize(("low", "high"), [(0, 255), (-1, 1)])
def test_pixels_beyond_those_of_the_notes_are_refused(low: float, high: float) -> None:
    folded = cl.fold(cl.ConformalLayers(cl.Conv2d(1, 3, 3), cl.ReSPro()), (1, 8, 8))
    x = torch.linspace(low, high, 128).view(2, 1, 8, 8)
    cl.quantize(folded, x)
    folded.about = {"white": 1.0}
    words = f"images): expected pixels from 0 to 1, got {low} to {high}. Give"
    assert_says(lambda: cl.quantize(folded, x), words)
    folded.about = {"white": 255}
    if low == 0:
        cl.quantize(folded, x)


def relative_error(quantized: cl.Folded, folded: cl.Folded, x: torch.Tensor) -> float:
    difference = (quantized(x) - folded(x)).flatten(1).norm(dim=1)
    return float((difference / folded(x).flatten(1).norm(dim=1)).mean())


def test_scales_see_every_column() -> None:
    torch.manual_seed(0)
    layers = (
        cl.Conv2d(1, 32, 3, padding=1),
        cl.ReSPro(),
        cl.Conv2d(32, 4, 3, padding=1),
        cl.ReSPro(),
    )
    folded = cl.fold(cl.ConformalLayers(*layers, nn.Flatten()), (1, 32, 32), strategy="layers")
    x = torch.rand(256, 1, 32, 32)
    x[..., :3] *= 0.1
    assert relative_error(cl.quantize(folded, x), folded, x) < 0.05


def test_scales_beyond_24_bits_are_refused() -> None:
    model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), nn.Flatten(), cl.Linear(144, 3))
    folded = cl.fold(nn.Sequential(model, nn.Linear(3, 3)), (1, 8, 8), strategy="layers")
    with pytest.raises(cl.ConformalError, match=r"expected scales that 24 bits can hold.*x / 255"):
        cl.quantize(folded, 1e9 * torch.rand(8, 1, 8, 8))


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.conv(x), x], 1)


def test_images_smaller_than_a_level_beside_a_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Widened(), nn.ReLU(), nn.Conv2d(4, 3, 1)), 1e-8 * images((2, 6, 6))
    quantized = cl.quantize(cl.fold(model, (2, 6, 6)), x)
    rebased = [op for op in quantized.recipe.operations if isinstance(op, integer.Requantize)]
    assert [op.multipliers for op in rebased] == [(0,)]
    assert_same_everywhere(quantized, x, tmp_path)
