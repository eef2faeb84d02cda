"""Layers that fold into a ConformalLayers: a prefix and a head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe.layer_operations import Concatenate, Pad
from nets import conv_stack
from oracle import randomise
from support import TOLERANCES, both_forms, operations, samples

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_tail_that_is_not_linear_is_not_absorbed() -> None:
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro()),
        nn.ConstantPad2d(1, 5.0),
        nn.Flatten(),
        nn.Linear(128, 100),
    )
    for name in ("auto", "dense", "banded", "conv", "layers"):
        cl.testing.assert_folds(model, (1, 8, 8), strategy=name)


@pytest.mark.parametrize("name", ["2.weight", "2.bias"])
def test_a_layer_with_nan_is_not_absorbed(name: str) -> None:
    part = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro())
    model = nn.Sequential(part, nn.Flatten(), nn.Linear(144, 3)).eval()
    model.get_parameter(name).data[1] = torch.nan
    x = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        y, expected = cl.fold(model, (1, 8, 8))(x), model(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_container_with_its_own_forward_is_refused() -> None:
    class Doubled(cl.ConformalLayers):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    with pytest.raises(cl.ConformalError, match="Doubled, which overrides it"):
        cl.fold(Doubled(cl.Linear(4, 3), cl.ReSPro()), (4,))


def test_a_call_by_keyword_folds() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = conv_stack(2, channels=8, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(input=x).flatten(1, -1)

    model = Keyword()
    assert cl.fold_error(model, cl.fold(model, (3, 8, 8)), torch.rand(2, 3, 8, 8)) < 5e-6


def test_a_composite_that_is_not_linear_stays_in_the_head() -> None:
    part = cl.ConformalLayers(cl.Conv2d(1, 3, 3), cl.ReSPro())
    model = nn.Sequential(part, cl.Residual(nn.Conv2d(3, 3, 1), nn.ReLU())).eval()
    folded = cl.fold(model, (1, 6, 6))
    assert folded.explain()["0"].absorbed == 0
    assert cl.fold_error(model, folded, torch.rand(4, 1, 6, 6)) <= 5e-6


@pytest.mark.parametrize(
    ("pad", "conv", "shape"),
    [
        (nn.ZeroPad2d(1), cl.Conv3d(1, 2, 3), (1, 3, 4, 4)),
        (nn.ZeroPad1d(1), cl.Conv2d(1, 2, 3), (1, 4, 4)),
    ],
)
def test_padding_of_fewer_axes_than_the_convolution(
    pad: nn.Module, conv: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(pad, cl.ConformalLayers(conv, cl.ReSPro()))
    try:
        expected = model(torch.rand(2, *shape))
    except (RuntimeError, ValueError, NotImplementedError):
        pytest.skip("torch does not pad so many axes")
    folded = cl.fold(model, shape)
    assert folded.output_shape == tuple(expected.shape[1:])


@both_forms
def test_grey_images_fold_from_their_own_pixels(projective: bool) -> None:
    inner = cl.networks.LeNetCL(projective=projective)
    model = randomise(nn.Sequential(nn.ZeroPad2d(2), cl.RepeatChannels(3), inner), 1)
    x = samples((1, 28, 28), torch.float32).abs()
    folded = cl.fold(model, (1, 28, 28))
    assert folded.input_shape == (1, 28, 28)
    assert cl.fold_error(model, folded, x) <= TOLERANCES[torch.float32]
    assert not operations(folded, Concatenate), "channels are repeated"
    dense = cl.fold(model, (1, 28, 28), strategy="dense")
    assert dense.constants.factor.shape == (784, 784)
    assert cl.fold_error(model, dense, x) <= TOLERANCES[torch.float32]


def test_only_what_keeps_the_norm_folds_before_the_part() -> None:
    shape = (1, 6, 6)
    inner = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro())
    for before in (nn.ReflectionPad2d(1), nn.ConstantPad2d(1, 2.0)):
        model = randomise(nn.Sequential(before, inner))
        folded = cl.fold(model, shape)
        assert operations(folded, Pad), "the pad is gone"
        assert cl.fold_error(model, folded, samples(shape, torch.float32)) <= 5e-6
