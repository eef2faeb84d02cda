"""Corrupted images: every corruption runs, repeats, and grows with its strength."""

from __future__ import annotations

import sys

import pytest
import torch

from conformallayers.errors import MissingExtra
from conformallayers.lab.data.moving_shapes import draw_shapes
from conformallayers.lab.experiments import corruptions
from conformallayers.lab.experiments.corruptions import CONTRASTS, CORRUPTIONS, corrupted, scaled

IMAGES = torch.from_numpy(draw_shapes(4)[0])


@pytest.fixture
def package() -> None:
    try:
        corruptions._package()
    except MissingExtra as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_repeat_and_depend_on_nothing_but_the_image(name: str) -> None:
    found = corrupted(IMAGES, name, 5)
    assert (found.shape, found.dtype) == ((4, 3, 32, 32), torch.uint8)
    clean = IMAGES.expand(-1, 3, -1, -1)
    assert not torch.equal(found, clean)
    torch.rand(3)
    assert torch.equal(corrupted(IMAGES[:2], name, 5), found[:2])
    weak = corrupted(IMAGES, name, 1).float() - clean
    if name not in ("elastic_transform", "jpeg_compression", "frost"):  # not ordered by energy
        assert weak.norm() < (found.float() - clean).norm()


@pytest.mark.usefixtures("package")
def test_another_seed_draws_other_noise() -> None:
    one, other = (corrupted(IMAGES, "gaussian_noise", 3, seed) for seed in (0, 1))
    assert not torch.equal(one, other)
    assert not torch.equal(one[0] - one[1], torch.zeros(3, 32, 32))


@pytest.mark.usefixtures("package")
def test_contrast_moves_an_image_towards_its_own_mean_colour() -> None:
    images = torch.from_numpy(draw_shapes(2)[0]).expand(-1, 3, -1, -1)
    for strength, contrast in enumerate(CONTRASTS, start=1):
        means = images.double().mean((2, 3), keepdim=True)
        expected = means + contrast * (images - means)
        found = corrupted(images, "contrast", strength).double()
        assert (found - expected).abs().max() <= 1  # the package rounds down to bytes


def test_scaling_moves_an_image_towards_the_mean_image() -> None:
    mean, x = torch.rand(3, 4, 4), torch.rand(2, 3, 4, 4)
    assert torch.allclose(scaled(x, mean, 1) - mean, 0.4 * (x - mean), atol=1e-6)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    corruptions._package.cache_clear()
    with pytest.raises(MissingExtra, match=r"pip install 'conformallayers\[robustness\]'"):
        corrupted(IMAGES, "fog", 1)
    corruptions._package.cache_clear()
