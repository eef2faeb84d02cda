"""Images as they are stored: adapted to a network, and folded away."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import torch
from torch import Tensor, nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.lab.data.batches import as_input, mean_image
from conformallayers.lab.data.catalogue import LABELS, NAMES, SHAPES
from conformallayers.lab.data.datasets import load
from conformallayers.lab.data.image_adapter import from_images, native_shape
from conformallayers.recipe.layer_operations import AddConstant, Upsample
from oracle import randomise, relative_error
from support import operations


def pictures(shape: tuple[int, ...], count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)


def centred(images: Tensor) -> nn.Sequential:
    """Return a network of the paper behind the mean of some images."""
    torch.manual_seed(0)
    centre = cl.Centre((3, 32, 32))
    centre.fit(mean_image(images))
    network = randomise(cl.networks.LeNetCL(projective=True, gain=3.0))
    return nn.Sequential(centre, network).eval()


@pytest.mark.parametrize(
    "shape",
    [*sorted(set(SHAPES.values())), (1, 32, 32), (3, 28, 28), (1, 9, 20), (3, 5, 7)],
    ids=str,
)
@pytest.mark.parametrize("with_centre", [True, False])
def test_folds_of_stored_images_equal_the_evaluation(
    shape: tuple[int, ...], with_centre: bool
) -> None:
    images = pictures(shape)
    model = centred(images).double()
    model = model if with_centre else model[1]
    adapted = from_images(model, shape)
    folded = cl.fold(adapted, shape, dtype=torch.float64)
    with torch.no_grad(), cl.layer_by_layer():
        expected = model(as_input(images, torch.float64))
        x = images.double() / 255
        assert torch.equal(adapted(x), expected)
    assert relative_error(folded(x), expected) < 1e-12


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8)], ids=str)
def test_margins_grey_and_enlarging_fold_away_behind_the_mean(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = from_images(centred(pictures(shape)), shape)
    folded = cl.fold(model, shape, strategy="dense")
    assert isinstance(folded.recipe.operations[0], AddConstant)
    assert folded.constants.mean.shape == shape
    assert folded.constants.matrix.shape[1] == shape[1] * shape[2]
    cl.save(folded, tmp_path / "net.safetensors")
    x = pictures(shape).float() / 255
    y = cln.load(tmp_path / "net.safetensors")(x.numpy())
    assert relative_error(torch.from_numpy(y), folded(x)) < 1e-6


def test_a_mean_of_coloured_images_stays_behind_the_channels() -> None:
    model = centred(pictures((3, 32, 32)))
    grey = from_images(model, (1, 32, 32))
    images = pictures((1, 32, 32))
    with torch.no_grad(), cl.layer_by_layer():
        assert torch.equal(grey(images / 255), model(as_input(images)))
    assert [type(module).__name__ for module in grey] == ["RepeatChannels", "Sequential"]
    folded = cl.fold(grey, (1, 32, 32), strategy="layers")
    assert cl.fold_error(grey, folded, images / 255) < 1e-5


@pytest.mark.parametrize(
    ("upsample", "folds"),
    [
        (nn.Upsample(scale_factor=(2, 3), mode="nearest"), True),
        (nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact"), True),
        (nn.Upsample(scale_factor=2, mode="nearest"), False),
        (nn.Upsample(scale_factor=(1.5, 2), mode="nearest"), False),
        (nn.Upsample(size=(8, 8), mode="nearest"), False),
        (nn.Upsample(scale_factor=(2, 2), mode="bilinear"), False),
    ],
    ids=str,
)
def test_repeated_pixels_fold_away(upsample: nn.Module, folds: bool) -> None:
    stages = cl.Conv2d(1, 3, 3), cl.ReSPro(), cl.Conv2d(3, 2, 3), cl.ReSPro()
    model = randomise(nn.Sequential(upsample, cl.ConformalLayers(*stages)))
    folded = cl.fold(model.double(), (1, 4, 4), strategy="dense")
    x = torch.rand(5, 1, 4, 4, dtype=torch.float64)
    assert cl.fold_error(model, folded, x) < 1e-12
    assert bool(operations(folded, Upsample)) == (not folds)


def test_centre_is_refused_inside_and_where_shapes_differ() -> None:
    with pytest.raises(cl.ConformalError, match=r"got Centre\. Put it before the ConformalLayers"):
        cl.ConformalLayers(cl.Centre((2,)), cl.ReSPro())
    with pytest.raises(cl.ConformalError, match=r"samples \(N, 2,\), N > 0, got \(3, 4\)"):
        cl.Centre((2,)).fit(torch.zeros(3, 4))
    with pytest.raises(cl.ConformalError, match=r"N > 0, got \(0, 2\)"):
        cl.Centre((2,)).fit(torch.zeros(0, 2))
    assert repr(cl.Centre((1, 28, 28))) == "Centre((1, 28, 28))"


def test_shapes_that_no_image_has_are_refused() -> None:
    model = cl.networks.LeNetCL()
    for shape in ((1, 33, 32), (2, 28, 28), (1, 28), (1, 0, 4)):
        with pytest.raises(cl.ConformalError, match=r"images \(1 or 3, H, W\)"):
            from_images(model, shape)
    with pytest.raises(cl.ConformalError, match=r"samples of shape \(2,\)"):
        from_images(cl.Centre((2,)), (3,))
    own = cl.ConformalLayers(cl.Linear(3, 2))
    assert from_images(own, (3,)) is own
    assert native_shape(own) is None
    grey = cl.networks.StageNet(in_shape=(1, 28, 28))
    assert native_shape(grey) == (1, 28, 28)
    assert from_images(grey, (1, 28, 28)) is grey


def test_every_set_has_labels_and_a_shape() -> None:
    assert set(LABELS) == set(SHAPES) == set(NAMES)
    assert all(len(set(labels)) == len(labels) for labels in LABELS.values())
    assert {len(labels) for name, labels in LABELS.items() if name != "shapes"} == {10}
    assert LABELS["fashion-mnist"][9] == "Ankle boot"
    assert LABELS["cifar10"][3] == "cat"
    assert tuple(load("digits").test_images.shape[1:]) == SHAPES["digits"]
