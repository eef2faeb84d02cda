"""Folders of pictures for tests: the mean of a picture tells its class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

NETWORK = """
from torch import nn
import conformallayers as cl

class Tiny(nn.Module):
    def __init__(self, num_classes, in_shape, hidden=2):
        super().__init__()
        self.body = cl.ConformalLayers(
            cl.Conv2d(in_shape[0], hidden, 3, stride=2), nn.ReLU(), cl.Flatten(), offset=1.0, unit="rms"
        )
        sides = [(side - 3) // 2 + 1 for side in in_shape[1:]]
        self.head = nn.Linear(hidden * sides[0] * sides[1], num_classes)

    def forward(self, x):
        return self.head(self.body(x))

def plain(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, num_classes))
"""


def make_folder(root: Path, classes: Mapping[str, int]) -> Path:
    """Write pictures of several sizes and modes; those of the n-th class have a mean of 40n."""
    random = np.random.default_rng(0)
    for number, (name, count) in enumerate(classes.items(), 1):
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            height, width = random.integers(8, 40, 2)
            values = random.normal(40 * number, 10, (height, width, 3)).clip(0, 255)
            image = Image.fromarray(values.astype(np.uint8)).convert(
                ("RGB", "L", "RGBA")[index % 3]
            )
            image.convert("RGB" if index == 1 else image.mode).save(
                root / name / f"{index}.{'jpg' if index == 1 else 'png'}"
            )
    return root


def make_network(path: Path, text: str = NETWORK) -> Path:
    """Write a file with networks."""
    path.write_text(text, "utf-8")
    return path
