"""Images and arrays for the tests of predictions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

import conformallayers as cl
from oracle import randomise

GREY, COLOUR = (1, 8, 8), (3, 6, 9)


def classifier(shape: tuple[int, ...], classes: int = 4) -> nn.Module:
    """Return a small conformal network with random weights."""
    stages = cl.Conv2d(shape[0], 3, 3), cl.ReSPro(projective=True), cl.Flatten()
    width = 3 * (shape[1] - 2) * (shape[2] - 2)
    model = nn.Sequential(cl.ConformalLayers(*stages), nn.Linear(width, classes))
    return randomise(model, seed=3)


def pixels(*shape: int, seed: int = 0) -> Any:
    """Return random bytes."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def image_bytes(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return the file of an image."""
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def save_grey(path: Path, seed: int = 0) -> Path:
    """Write a random grey image of 8×8 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(8, 8, seed=seed)).save(path)
    return path
