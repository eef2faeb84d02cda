"""Values of a recipe while it is rewritten in whole numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..recipe.integer_operations import LEVELS
from ..recipe.layer_operations import Conv, Matmul
from ..recipe.places import Array


@dataclass(frozen=True)
class Number:
    """A value of floats; ``addend``, a constant of the recipe of floats, is still to be added to it."""

    name: str
    addend: str | None = None


@dataclass(frozen=True)
class Features:
    """Whole numbers q of the value ``scale·q``, or ``scale·q/τ``; τ by its name in the recipe of floats."""

    name: str
    scale: float
    tau: str | None = None


@dataclass(frozen=True)
class Sums:
    """A product that is held back: ``(W x + bias)/τ + addend``, at least 0 if ``low`` is 0.

    x is ``scale`` times features; bias and addend have one number for each channel.
    """

    op: Matmul | Conv
    x: str
    scale: float
    weight: Array
    bias: Array
    addend: Array
    tau: str | None
    low: int = -LEVELS

    def times(self, factor: Array | float) -> Sums:
        """Multiply by a number above 0, or by one for each channel."""
        column = np.reshape(factor, (-1, *[1] * (self.weight.ndim - 1)))
        bias, addend = self.bias * factor, self.addend * factor
        return replace(self, weight=self.weight * column, bias=bias, addend=addend)

    def channels(self, value: Array) -> Array | None:
        """Return a constant that broadcasts to the product as one number for each channel, or None."""
        count, ones = len(self.weight), [1] * (self.weight.ndim - 2)
        if value.size == 1:
            return np.full(count, value.item())
        fits = value.size == count and value.shape[value.ndim - 1 - len(ones) :] == (count, *ones)
        return value.reshape(-1) if fits else None


Held = Number | Features | Sums
