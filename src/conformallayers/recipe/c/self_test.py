"""The self-test of a C program: an image of 256 levels, and its expected outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .constants import Array, Constant, number

_LIMIT = 1e-3  # error of an output, relative to the largest: rounding stays far below
_LARGEST = 1e37  # number of an image: 255 steps of it stay in the range of float32
_LEVELS = 254  # steps, one fewer than a byte has: the lowest level is below the lowest number


@dataclass(frozen=True, eq=False)
class Levels:
    """An image whose numbers are ``lowest + step * level``, exactly: the step is a power of two."""

    lowest: np.float32
    step: np.float32
    whole: Array

    @property
    def image(self) -> Array:
        """The numbers, in float32."""
        return np.asarray(self.lowest + self.step * self.whole.astype(np.float32))


def whole_levels(image: Array) -> Levels:
    """Round an image to 256 levels.

    Examples:
        >>> levels = whole_levels(np.array([0.0, 0.5, 1.0], np.float32))
        >>> levels.whole.tolist(), levels.image.tolist()
        ([0, 64, 128], [0.0, 0.5, 1.0])
    """
    exact = np.clip(image.astype(np.float64), -_LARGEST, _LARGEST)
    room = (exact.max() - exact.min()) / _LEVELS
    step = 2.0 ** max(-126, math.ceil(math.log2(room))) if room > 0 else 1.0
    lowest = np.floor(exact.min() / step) * step
    whole = np.clip(np.rint((exact - lowest) / step), 0, 255).astype(np.uint8)
    return Levels(np.float32(lowest), np.float32(step), whole)


def self_test_words(levels: Levels, outputs: Array) -> dict[str, Any]:
    """Return the words of ``templates/self_test.c``: an image, and its expected outputs."""
    finite = bool(np.isfinite(outputs).all())
    expected = outputs if finite else np.zeros_like(outputs)
    limit = float(np.float32(_LIMIT * np.abs(expected.astype(np.float64)).max()))
    arrays = (
        Constant("self_test_image", "uint8_t", levels.whole.reshape(-1)),
        Constant("self_test_out", "float", expected),
    )
    return {
        "arrays": "\n".join(array.text() for array in arrays),
        "limit": number(limit, "float"),
        "lowest": number(float(levels.lowest), "float"),
        "step": number(float(levels.step), "float"),
        "finite": int(finite),
        "valid": int(not np.isnan(outputs).any()),
    }
