"""Scales of integers: ranges measured on images, multipliers and shifts between scales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..functional import norm, scale_samples
from ..recipe.integer_operations import (
    EXACT,
    EXACT_SINGLE,
    LEVELS,
    MULTIPLIERS,
    SHIFTS,
    SINGLE_SHIFT,
)
from ..recipe.places import Array
from ..recipe.point_operations import Normalize
from ..recipe.recipe import INPUT, Recipe
from ..recipe.torch.module import RecipeModule
from ..recipe.torch.operations import RUN

_SHARES = np.linspace(0.3, 1.0, 36)  # of the largest entry, tried as the entry that becomes 127
_MEASURED = 2**18  # entries of a value that are measured


class Calibration:
    """All values of a recipe for calibration images, (N, *input_shape).

    Every sample is divided by its peak, as in integers.
    """

    def __init__(self, recipe: Recipe, dtype: torch.dtype, images: Tensor) -> None:
        module = RecipeModule(recipe, dtype)
        self._values: dict[str, Any] = {INPUT: images}
        with torch.inference_mode():
            for operation in recipe.operations:
                if isinstance(operation, Normalize):
                    x, offset = self._values[operation.inputs[0]], operation.offset
                    peak = x.flatten(1).abs().amax(1).double().clamp_min(offset)
                    m = torch.where(peak == 0, 1.0, peak)
                    unit = scale_samples(x, 1 / m)
                    found = unit, m, torch.hypot(norm(unit), offset / m)
                    self._values.update(zip(operation.outputs, found, strict=True))
                else:
                    RUN.step(operation, module, self._values)

    def scale(self, name: str, tau: str | None = None) -> float:
        """Return the scale of least squared error of a value, times its coordinate if there is one."""
        value: Tensor = self._values[name]
        if tau is not None:
            value = value * self._values[tau].view(-1, *[1] * (value.dim() - 1))
        largest = float(value.abs().max()) if value.numel() else 0.0
        if not math.isfinite(largest):
            raise OverflowError(f"{name} with values that {value.dtype} does not hold")
        return least_error_scale(subsample(value).abs().double().numpy(), largest)


def subsample(value: Tensor) -> Tensor:
    """Return a subsample of a large value that covers all rows, columns and channels.

    Examples:
        >>> subsample(torch.arange(2**20).view(2**10, 2**10)).remainder(2**10).unique().numel()
        1024
    """
    step = max(1, value.numel() // _MEASURED)
    while math.gcd(step, value.numel()) > 1:
        step += 1
    return value.reshape(-1)[::step]


def least_error_scale(x: Array, largest: float) -> float:
    """Return the scale of least squared error for rounding and clipping numbers >= 0.

    Examples:
        >>> least_error_scale(np.array([0.0, 127.0]), 127.0)
        1.0
        >>> least_error_scale(np.zeros(3), 0.0)
        1.0
    """
    if largest == 0:
        return 1.0
    scales = largest / LEVELS * _SHARES

    def error(scale: float) -> float:
        rounded = np.minimum(np.rint(x / scale), LEVELS) * scale
        return float(np.square(rounded - x).sum())

    errors = [error(scale) for scale in scales]
    # Of equal errors take the largest scale, which clips least.
    return float(scales[len(errors) - 1 - int(np.argmin(errors[::-1]))])


def single_shift(factors: Array) -> int:
    """Return the shift that gives multipliers 17 bits at most: float32 is exact with them."""
    return min(SINGLE_SHIFT, SINGLE_SHIFT - 1 - math.floor(math.log2(factors.max())))


def multipliers(factors: Array, most: Array, parts: bool) -> tuple[Array, int]:
    """Return integers M and a shift with ``M/2^shift ≈ factors``, of parts to 24 bits of the largest factor.

    Args:
        factors: above 0, one for each channel.
        most: the largest sum of each channel.
        parts: whether products count parts of a feature.
    """
    shift = single_shift(factors)
    if parts:  # 24 bits, which the largest factor fills
        shift = min(SHIFTS - 1, 23 - math.floor(math.log2(factors.max())))
    while shift >= 0:
        found = np.rint(factors * 2.0**shift)
        products = found * most
        fits = found.max() < MULTIPLIERS and products.max() < EXACT
        if fits and (not parts or products.max() / 2.0**shift < EXACT // MULTIPLIERS):
            return found.astype(np.int32), shift
        shift -= 1
    raise OverflowError(
        f"sums of up to {most.max():.3g}, times {factors.max():.3g}, of too many bits"
    )


def weight_scales(weight: Array, bias: Array) -> Array:
    """Return the scale of each channel with which weights become integers from -127 to 127.

    Beside a bias of another size, and in a channel of zeros, the scale is larger: the bias has at most 24 bits, and no
    channel takes bits from the multipliers of the others.
    """
    largest = np.abs(weight.reshape(len(weight), -1)).max(1, initial=0)
    unit = np.maximum(largest / LEVELS, np.abs(bias) / EXACT_SINGLE)
    return np.asarray(np.where(largest > 0, unit, unit.max() or 1.0))
