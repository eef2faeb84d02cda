"""Values of a recipe while it is rewritten in integers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..recipe.integer_operations import LEVELS
from ..recipe.layer_operations import Conv, Matmul
from ..recipe.places import Array


@dataclass(frozen=True)
class Number:
    """A value in floats; ``addend`` is a constant of the float recipe that is still to be added."""

    name: str
    addend: str | None = None


@dataclass(frozen=True)
class Features:
    """Integers q that stand for ``scale·q``, or ``scale·q/τ``; ``tau`` is a name in the float recipe."""

    name: str
    scale: float
    tau: str | None = None


@dataclass(frozen=True)
class Sums:
    """A pending product: ``(W x + bias)/τ + addend``, at least 0 if ``low`` is 0.

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
        """Multiply by a positive number, or by one for each channel."""
        column = np.reshape(factor, (-1, *[1] * (self.weight.ndim - 1)))
        bias, addend = self.bias * factor, self.addend * factor
        return replace(self, weight=self.weight * column, bias=bias, addend=addend)

    def channels(self, value: Array) -> Array | None:
        """Return a constant as (channels,) if it is constant in each channel of the product, else None."""
        count, ones = len(self.weight), [1] * (self.weight.ndim - 2)
        if value.size == 1:
            return np.full(count, value.item())
        fits = value.size == count and value.shape[value.ndim - 1 - len(ones) :] == (count, *ones)
        return value.reshape(-1) if fits else None


Held = Number | Features | Sums
