"""Batches of images: their order, their shares for several processes, flips and shifts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.data.batches import Batches, as_input, flip_and_shift, mean_image
from conformallayers.lab.data.datasets import load
from datafiles import random_images


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


def numbered(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.arange(count)
    return order.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 28, 28), order


def test_order_hangs_on_seed_and_epoch_alone() -> None:
    batches = Batches(*numbered(50), batch_size=8, shuffle=True, seed=3)
    state = torch.get_rng_state()
    orders = [torch.cat([y for _, y in batches.at(epoch)]).tolist() for epoch in (0, 1, 0)]
    assert torch.equal(torch.get_rng_state(), state)
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(50))
    other = Batches(*numbered(50), batch_size=8, shuffle=True, seed=1)
    assert torch.cat([y for _, y in other]).tolist() not in orders
    for x, y in batches:
        assert torch.equal((255 * x[:, 0, 5, 5]).round().long(), y)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_every_batch(world: int) -> None:
    whole = Batches(*numbered(17), batch_size=8, shuffle=True)
    parts = [
        Batches(*numbered(17), batch_size=8, shuffle=True, rank=rank, world_size=world)
        for rank in range(world)
    ]
    for index, (full, *shares) in enumerate(zip(whole, *parts, strict=True)):
        assert torch.equal(torch.cat([y for _, y in shares]), full[1])
        assert torch.equal(torch.cat([x for x, _ in shares]), full[0])
        sizes = [len(y) for _, y in shares]
        assert max(sizes) - min(sizes) <= 1
        assert whole.size(index) == len(full[1])
    assert index + 1 == len(whole) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"images": torch.zeros(2, 28, 28, dtype=torch.uint8)},
        {"images": torch.zeros(2, 1, 33, 8, dtype=torch.uint8)},
        {"images": torch.zeros(2, 1, 8, 8)},
        {"labels": torch.zeros(3)},
        {"batch_size": 0},
        {"rank": 1},
    ],
)
def test_batches_refuse_what_does_not_fit(change: dict[str, object]) -> None:
    good = {"images": torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "labels": torch.zeros(2)}
    with pytest.raises(cl.ConformalError, match="Batches: expected"):
        Batches(**{**good, "batch_size": 2, **change})  # type: ignore[arg-type]


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


def test_moves_hang_on_seed_and_epoch_alone_and_ranks_share_them() -> None:
    digits = load("digits")
    images, labels = digits.train_images[:17], digits.train_labels[:17]
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "flips": True, "shift": 2}
    whole = Batches(images, labels, **options)
    state = torch.get_rng_state()
    first, second, again = (torch.cat([x for x, _ in whole.at(e)]) for e in (0, 1, 0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    shares = [Batches(images, labels, **options, rank=rank, world_size=2) for rank in range(2)]
    for (x, _), *parts in zip(whole, *shares, strict=True):  # of the last batch one rank has none
        assert torch.equal(torch.cat([share for share, _ in parts]), x)
    still = {**options, "flips": False, "shift": 0}
    plain = torch.cat([x for x, _ in Batches(images, labels, **still)])
    assert torch.equal(plain, as_input(images[whole._order()]))
    assert not torch.equal(first, plain)
    assert not torch.equal(second, first)
    only_flips = torch.cat([x for x, _ in Batches(images, labels, **{**options, "shift": 0})])
    kinds = [
        (torch.equal(a, b), torch.equal(a, b.flip(2)))
        for a, b in zip(only_flips, plain, strict=True)
    ]
    assert {(True, False), (False, True)} == set(kinds)


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
