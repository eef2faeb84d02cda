"""Batches: order, shares of several processes, flips and shifts; networks for stored images, and their folds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.lab.data.batches import (
    Batches,
    as_input,
    flip_and_shift,
    from_images,
    mean_image,
)
from conformallayers.lab.data.catalogue import SHAPES
from conformallayers.lab.data.datasets import load
from conformallayers.recipe.layer_operations import AddConstant
from datafiles import random_images
from oracle import randomise, relative_error


def test_inputs_are_padded_enlarged_and_repeated() -> None:
    grey = torch.from_numpy(random_images(2, 1, 28, 28))
    x = as_input(grey)
    assert x.shape == (2, 3, 32, 32)
    assert x.untyped_storage().nbytes() == 4 * 2 * 32 * 32
    for channel in range(3):
        assert torch.equal(x[:, channel, 2:30, 2:30], grey[:, 0] / 255)
    assert x.sum() == pytest.approx(3 * float(x[:, 0, 2:30, 2:30].sum()))
    small = torch.from_numpy(random_images(2, 1, 8, 8))
    assert torch.equal(as_input(small)[:, :, 1::4, 2::4], (small / 255).expand(-1, 3, -1, -1))
    colour = torch.from_numpy(random_images(2, 3, 32, 32))
    assert torch.equal(as_input(colour), colour / 255)
    assert as_input(torch.ones(1, 1, 15, 9, dtype=torch.uint8)).shape == (1, 3, 32, 32)


MOVES: dict[str, Any] = {"flips": True, "shift": 2}
with_moves = pytest.mark.parametrize("moves", [{}, MOVES], ids=["still", "moved"])


@with_moves
def test_order_and_moves_hang_on_seed_and_epoch_alone(moves: dict[str, Any]) -> None:
    digits = load("digits")
    whole = digits.train_images[:50], torch.arange(50)
    batches = Batches(*whole, batch_size=8, shuffle=True, seed=3, **moves)
    state = torch.get_rng_state()
    epochs = [
        [torch.cat(part) for part in zip(*replace(batches, epoch=e), strict=True)]
        for e in (0, 1, 0)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    (x, y), (_, other), (again, order) = epochs
    assert torch.equal(x, again)
    assert torch.equal(y, order)
    assert not torch.equal(y, other)
    assert sorted(y.tolist()) == list(range(50))
    seed = torch.cat([y for _, y in Batches(*whole, batch_size=8, shuffle=True, seed=1)])
    assert not any(torch.equal(seed, found) for found in (y, other))
    assert torch.equal(x, as_input(whole[0])[y]) is (not moves)


@with_moves
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_every_batch(world: int, moves: dict[str, Any]) -> None:
    """Of the last batch some ranks have no image."""
    images = load("digits").train_images[:17]
    options = {"batch_size": 8, "shuffle": True, **moves}
    whole, *parts = (
        Batches(images, torch.arange(17), **options, rank=rank, world_size=ranks)
        for rank, ranks in ((0, 1), *((rank, world) for rank in range(world)))
    )
    for index, (full, *shares) in enumerate(zip(whole, *parts, strict=True)):
        assert torch.equal(torch.cat([y for _, y in shares]), full[1])
        assert torch.equal(torch.cat([x for x, _ in shares]), full[0])
        sizes = [len(y) for _, y in shares]
        assert max(sizes) - min(sizes) <= 1
        assert whole.size(index) == len(full[1])
    assert index + 1 == len(whole) == 3


def test_flips_alone_mirror_some_images() -> None:
    images, labels = load("digits").train_images[:17], torch.arange(17)
    flipped, plain = (
        torch.cat([x for x, _ in Batches(images, labels, 16, shuffle=True, flips=flips)])
        for flips in (True, False)
    )
    pairs = zip(flipped, plain, strict=True)
    kinds = {(torch.equal(a, b), torch.equal(a, b.flip(2))) for a, b in pairs}
    assert kinds == {(True, False), (False, True)}


def test_moved_images_are_those_of_rolled_and_mirrored_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 32, 32), generator=generator, dtype=torch.uint8)
    flipped = torch.randint(0, 2, (40,), generator=generator) > 0
    down, right = torch.randint(-3, 4, (2, 40), generator=generator)
    result = flip_and_shift(images, flipped, down, right)
    for k, image in enumerate(images):
        mirrored = image.flip(2) if flipped[k] else image
        y, x = int(down[k]), int(right[k])
        expected = torch.zeros_like(image)
        inside = [slice(max(0, n), 32 + min(0, n)) for n in (y, x)]
        source = [slice(max(0, -n), 32 + min(0, -n)) for n in (y, x)]
        expected[:, inside[0], inside[1]] = mirrored[:, source[0], source[1]]
        assert torch.equal(result[k], expected)


@pytest.mark.parametrize("dataset", ["digits", "cifar"])
def test_centre_is_the_mean_of_what_the_network_would_see(dataset: str) -> None:
    images = load("digits").train_images[:150]
    if dataset == "cifar":
        generator = torch.Generator().manual_seed(1)
        images = torch.randint(0, 256, (9, 3, 32, 32), generator=generator, dtype=torch.uint8)
    before = images.clone()
    centre = cl.Centre((3, 32, 32))
    centre.fit(mean_image(images))
    assert torch.equal(images, before)
    torch.testing.assert_close(centre.mean, as_input(images, torch.float64).mean(0).float())
    assert float(centre(as_input(images)).mean(0).abs().max()) < 1e-6


# -- networks for stored images --


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
    assert folded.constants.shift.shape == shape
    assert folded.constants.matrix.shape[1] == shape[1] * shape[2]
    cl.save(folded, tmp_path / "net.safetensors")
    x = pictures(shape).float() / 255
    y = cln.load(tmp_path / "net.safetensors")(x.numpy())
    assert relative_error(torch.from_numpy(y), folded(x)) < 1e-6


def test_shapes_that_no_image_has_are_refused() -> None:
    model = cl.networks.LeNetCL()
    for shape in ((1, 33, 32), (2, 28, 28)):
        with pytest.raises(cl.ConformalError, match=r"images \(1 or 3, H, W\)"):
            from_images(model, shape)
    grey = cl.networks.StageNet(in_shape=(1, 28, 28))
    assert from_images(grey, (1, 28, 28), (1, 28, 28)) is grey
    with pytest.raises(cl.ConformalError, match=r"samples of shape \(1, 28, 28\), got"):
        from_images(grey, (1, 8, 8), (1, 28, 28))
