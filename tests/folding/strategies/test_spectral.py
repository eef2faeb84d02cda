"""The spectral strategy: circular convolutions, and the torus minus its border."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.folding.strategies import spectral
from conformallayers.recipe.layer_operations import Slice
from support import operations

pytestmark = pytest.mark.usefixtures("seeded")

NETWORKS = {
    "first layer padded": (
        [cl.Conv2d(2, 5, 3, padding=1), cl.ReSPro(), cl.Conv2d(5, 4, 3), cl.ReSPro()],
        (2, 9, 8),
    ),
    "same": ([cl.Conv2d(2, 5, 3, padding="same"), cl.ReSPro()], (2, 9, 8)),
    "line": ([cl.Conv1d(2, 3, 4), cl.ReSPro(), cl.Conv1d(3, 3, 3), cl.ReSPro()], (2, 11)),
    "volume": ([cl.Conv3d(1, 2, (2, 3, 1)), cl.ReSPro(), cl.Conv3d(2, 2, 2)], (1, 5, 6, 7)),
    "whole image": ([cl.Conv2d(2, 3, (6, 5)), cl.ReSPro()], (2, 6, 5)),
    "dilated": ([cl.Conv2d(2, 3, 3, dilation=2), cl.ReSPro(), cl.ReSPro()], (2, 9, 9)),
    "pooled": ([cl.Conv2d(2, 3, 3), cl.AvgPool2d(2, 1), cl.ReSPro(), cl.Flatten()], (2, 9, 9)),
    "projective": (
        [cl.Conv2d(2, 5, 3), cl.ReSPro(projective=True), cl.Conv2d(5, 4, 3), cl.ReSPro()],
        (2, 9, 8),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_folds(name: str) -> None:
    layers, shape = NETWORKS[name]
    model = cl.ConformalLayers(*layers)
    cl.testing.assert_folds(model, shape, strategy="spectral")
    folded = cl.fold(model, shape, strategy="spectral")
    assert operations(folded, Slice), "no border is taken off"


@pytest.mark.parametrize("norm", [1e-20, 1.0, 55.0, 1e5])
def test_energy_at_the_border_is_not_lost(norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(3, 8, 3, bias=False), cl.ReSPro()),
        nn.Flatten(),
        nn.Linear(8 * 18 * 18, 4, bias=False),
    )
    layers = model[0]
    folded = cl.fold(model, (3, 20, 20), strategy="spectral")
    # A corner pixel along the direction that its single output sees least: nearly all the energy
    # on the torus is in the border, so the difference is much smaller than its parts.
    taps = layers[0].weight.detach().double()[:, :, -1, -1]
    direction = torch.linalg.svd(taps).Vh[-1]
    x = torch.zeros(1, 3, 20, 20)
    x[0, :, -1, -1] = direction.float()
    x = x * (norm / x.norm())
    assert cl.fold_error(model, folded, x) < 5e-6


def test_strides_are_refused_by_name() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 4, 3, stride=2), cl.ReSPro())
    with pytest.raises(cl.ConformalError, match="spectral"):
        cl.fold(model, (3, 9, 9), strategy="spectral")


@pytest.mark.slow
def test_a_large_image_takes_it() -> None:
    layers = [layer for i in range(3) for layer in (cl.Conv2d(32 if i else 3, 32, 3), cl.ReSPro())]
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    folded = cl.fold(model, (3, 128, 128))
    assert folded.strategy == "spectral"
    assert cl.fold_error(model, folded, torch.rand(2, 3, 128, 128)) < 5e-6


def test_float64_keeps_away_from_differences() -> None:
    layers = [layer for i in range(3) for layer in (cl.Conv2d(32 if i else 3, 32, 3), cl.ReSPro())]
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert cl.fold(model, (3, 128, 128)).strategy == "spectral"
    assert cl.fold(model.double(), (3, 128, 128)).strategy != "spectral"


def test_a_matrix_that_cannot_be_built_is_refused() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 32, 3), cl.ReSPro(), cl.AvgPool2d(2))
    with pytest.raises(cl.ConformalError, match="M would have"):
        cl.fold(model, (3, 224, 224), strategy="spectral")


def test_spectral_says_what_stands_in_its_way() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 4, 3, padding=1), cl.ReSPro())
    deeper = cl.ConformalLayers(*model, cl.Conv2d(4, 4, 3, padding=1), cl.ReSPro())
    cl.testing.assert_folds(model, (3, 9, 9), strategy="spectral")
    with pytest.raises(cl.ConformalError, match="pads behind the first layer"):
        cl.fold(deeper, (3, 9, 9), strategy="spectral")


def circular(channels: int, *, negative: bool = False) -> cl.ConformalLayers:
    layers: list[nn.Module] = []
    for before in (1, channels, channels):
        layers += [cl.Conv2d(before, channels, 3, padding=1, padding_mode="circular"), cl.ReSPro()]
    if negative:
        for layer in layers[::2]:  # three negative factors: no output is above 0
            layer.weight.data.abs_().neg_()
    return cl.ConformalLayers(*layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_stay_zeros_where_a_layer_could_amplify_them(dtype: torch.dtype) -> None:
    """What no pixel reaches is exactly 0 in the layers, and a second part would scale up any noise."""
    shape = (1, 64, 64)
    second = cl.ConformalLayers(cl.Conv2d(16, 4, 3), cl.ReSPro(projective=True))
    model = nn.Sequential(circular(16, negative=True), nn.ReLU(), second).to(dtype).eval()
    x = torch.zeros(2, *shape, dtype=dtype)
    x[:, :, 30:34, 30:34] = torch.rand(2, 1, 4, 4, dtype=dtype)
    assert not model[1](model[0](x)).any()
    assert not cl.fold(model, shape)(x).any()
    assert not model(x).any()  # folded by eval


def test_a_last_part_may_be_transformed_back() -> None:
    alone = circular(16)
    folded = cl.fold(alone, (1, 64, 64))
    behind = cl.fold(nn.Sequential(alone, nn.ReLU()), (1, 64, 64))
    assert folded.strategy == "spectral"
    assert behind.strategy != "spectral"
    assert "layers follow" in str(behind.explain())


def test_a_matrix_has_the_zeros_of_the_layers() -> None:
    model = nn.Sequential(circular(2), nn.AvgPool2d(4))
    folded = cl.fold(model, (1, 16, 16), strategy="spectral")
    x = torch.zeros(1, 1, 16, 16)
    x[..., 7, 7] = 1
    assert torch.equal(folded(x) == 0, model(x) == 0)


def test_circular_stacks_with_layers_behind_run_in_the_dtype_of_the_fold() -> None:
    model = nn.Sequential(circular(4), nn.AvgPool2d(4))
    folded = cl.fold(model, (1, 16, 16), strategy="spectral")
    assert all(array.dtype == torch.float32 for array in folded.buffers())
    deep = cl.networks.DkNetCL(13, padding_mode="circular").eval()
    certificate = cl.fold(deep, (3, 32, 32), tolerance=1e-3, max_norm=55.0).certificate
    assert certificate is not None
    assert certificate.margin > 0.5


IMAGES = {
    "checkers": lambda i, j: (-1.0) ** (i + j),
    "smooth": lambda i, j: 1 + 0.01 * torch.cos(2 * torch.pi * i / len(i)) + 0 * j,
    "noise": lambda i, j: 1 + 1e-3 * torch.randn(len(i), len(i)),
}


@pytest.mark.parametrize("behind", [[], [nn.AvgPool2d(3)]], ids=["image", "matrix"])
@pytest.mark.parametrize("kind", ["positive", "differences"])
@pytest.mark.parametrize("size", [28, 30, 31])
def test_what_a_stack_suppresses_adds_no_error(
    size: int, kind: str, behind: list[nn.Module]
) -> None:
    """A transform spreads rounding errors over all frequencies, and a stack may leave only the smallest ones."""
    stack = circular(2)
    with torch.no_grad():
        for layer in stack[::2]:
            if kind == "positive":
                layer.weight.abs_()
            else:
                layer.weight.sub_(layer.weight.mean((2, 3), keepdim=True))
    model, place = nn.Sequential(stack, *behind), torch.arange(float(size))
    shape = (1, size, size)
    folds = [cl.fold(model, shape, strategy=s) for s in ("spectral", "layers", "dense")]
    for image in IMAGES.values():
        x = image(place[:, None], place).expand(1, *shape)
        errors = [cl.fold_error(model, folded, x) for folded in folds]
        assert errors[0] < 3 * max(errors[1:]) + 5e-6


def test_rows_of_the_matrix_are_built_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cl.ConformalLayers(*circular(2), cl.AvgPool2d(4))
    whole = cl.fold(model, (1, 16, 16), strategy="spectral").matrix()
    monkeypatch.setattr(spectral, "COLUMN_BYTES", 8 * 12 * 2 * 16 * 16 * 5)  # five rows
    assert torch.equal(cl.fold(model, (1, 16, 16), strategy="spectral").matrix(), whole)
