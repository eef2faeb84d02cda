"""Moving shapes: what is drawn, that it is the same every time, and that places and areas do not tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformallayers.lab.data import moving_shapes
from conformallayers.lab.data.catalogue import LABELS
from conformallayers.lab.data.datasets import load
from conformallayers.lab.data.moving_shapes import draw, draw_shapes

KINDS = LABELS["shapes"]


def test_the_set_is_the_same_every_time() -> None:
    first, second = load("shapes"), load("shapes")
    assert first.classes == 3
    assert first.train_images.shape == (6000, 1, 32, 32)
    assert first.test_images.shape == (2000, 1, 32, 32)
    for part in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(first, part), getattr(second, part))
    assert not torch.equal(first.train_images[:2000], first.test_images)
    counts = torch.bincount(first.test_labels)
    assert counts.min() > 600


def test_another_seed_draws_other_images() -> None:
    assert not np.array_equal(draw_shapes(5, seed=0)[0], draw_shapes(5, seed=1)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_whole_and_differ_from_the_background(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving_shapes, "_NOISE", 0.0)
    monkeypatch.setattr(moving_shapes, "_SLOPE", 0.0)
    random = np.random.default_rng(1)
    brighter = 0
    for _ in range(40):
        difference = draw(kind, random).astype(float) / 255 - 0.5
        inside = abs(difference) > 0.1
        rows, columns = np.nonzero(inside)
        side = max(np.ptp(rows), np.ptp(columns)) + 1
        assert 7 <= side <= 16
        brighter += bool(difference[inside].mean() > 0)
    assert 5 < brighter < 35


def test_neither_pixels_nor_their_sum_tell_the_class() -> None:
    images, labels = draw_shapes(3000)
    pixels = images.reshape(len(images), -1) / 255 - 0.5
    for label in range(3):
        means = pixels[labels == label].mean(0)
        assert abs(means).max() < 0.05  # of a step of 0.2 to 0.4
