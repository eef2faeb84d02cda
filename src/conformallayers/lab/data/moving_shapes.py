"""Moving shapes: generated images of circles, squares and stripes at random places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .catalogue import LABELS, MOVING_SHAPES, SHAPES
from .formats import Bytes

Labels = NDArray[np.int64]
TRAIN_SHAPES, TEST_SHAPES = 6000, 2000
_SIDES = (8, 15)  # of a square, in pixels; the upper bound is excluded
_STEP = (0.2, 0.4)  # how much brighter or darker than the background of 0.5 a shape is
# Of the background: from the middle to a border, and from pixel to pixel.
_SLOPE, _NOISE = 0.2, 0.05


def draw_shapes(count: int = TRAIN_SHAPES + TEST_SHAPES, seed: int = 0) -> tuple[Bytes, Labels]:
    """Return images, (N, 1, 32, 32), and labels; every image has one shape on a sloping, noisy background.

    Its size, place and brightness are random. Circles and squares have the same area, and shapes are brighter
    or darker than the background alike, so that neither one pixel nor a sum of pixels tells the class.

    Examples:
        >>> images, labels = draw_shapes(6)
        >>> images.shape, sorted(labels.tolist())
        ((6, 1, 32, 32), [0, 0, 1, 1, 2, 2])
    """
    random, names = np.random.default_rng(seed), LABELS[MOVING_SHAPES]
    labels = random.permutation(np.arange(count) % len(names))
    images = np.stack([draw(names[label], random) for label in labels])
    return images[:, None], labels


def draw(kind: str, random: np.random.Generator) -> Bytes:
    """Return one image, (32, 32), of a class by its name."""
    height, width = SHAPES[MOVING_SHAPES][1:]
    side = int(random.integers(*_SIDES))
    radius = side / np.sqrt(np.pi)
    reach = int(np.ceil(radius if kind == "circle" else side / 2))
    top, left = random.integers(reach, (height - reach + 1, width - reach + 1))
    rows, columns = np.arange(height)[:, None] + 0.5 - top, np.arange(width) + 0.5 - left
    inside = np.maximum(abs(rows), abs(columns)) < side / 2
    if kind == "circle":
        inside = rows**2 + columns**2 < radius**2
    elif kind == "stripes":
        across = rows if random.integers(2) else columns
        inside &= across // 2 % 2 == random.integers(2)
    step = random.uniform(*_STEP) * random.choice((-1, 1))
    down, right = random.uniform(-_SLOPE, _SLOPE, 2)
    slope = down * np.linspace(-1, 1, height)[:, None] + right * np.linspace(-1, 1, width)
    image = 0.5 + slope + step * inside + random.normal(0, _NOISE, inside.shape)
    pixels: Bytes = (255 * image.clip(0, 1)).round().astype(np.uint8)
    return pixels
