"""Tables of indices and weights of windows, pads and interpolations; sizes are static in a recipe.

A table of one axis is (taps, positions): the entries of the input that each position of the output reads.
-1 stands for an entry outside of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, Any]
_CUBIC = -0.75  # torch's coefficient of bicubic interpolation


def sliding(n: int, taps: int, positions: int, stride: int, padding: int, dilation: int) -> Table:
    """Return the table of windows along an axis of n entries."""
    places = np.arange(taps)[:, None] * dilation + np.arange(positions) * stride - padding
    return np.where((places >= 0) & (places < n), places, -1)


def spreading(n: int, taps: int, positions: int, stride: int, padding: int, dilation: int) -> Table:
    """Return the table of a transposed convolution along an axis of n entries."""
    steps = np.arange(positions) + padding - np.arange(taps)[:, None] * dilation
    places = steps // stride
    return np.where((steps % stride == 0) & (places >= 0) & (places < n), places, -1)


def flattened(tables: Sequence[Table], spatial: Sequence[int]) -> Table:
    """Return the table of several axes as one, of indices into the flattened axes."""
    whole = np.zeros((1, 1), np.int64)
    for table, n in zip(tables, spatial, strict=True):
        a, b = whole[:, None, :, None], table[None, :, None, :]
        both = np.where((a < 0) | (b < 0), -1, a * n + b)
        whole = both.reshape(len(whole) * len(table), -1)
    return whole


def window_sizes(
    n: int, taps: int, positions: int, stride: int, padding: int, counted: int
) -> Table:
    """Count the entries of each window of an average, with ``counted`` entries of the pads."""
    start = np.arange(positions) * stride - padding
    return np.minimum(start + taps, n + counted) - np.maximum(start, -counted)


def padded(n: int, before: int, after: int, mode: str) -> Table:
    """Return the entry that each position of a padded axis shows; a negative number crops."""
    ends, crop = (max(before, 0), max(after, 0)), (max(-before, 0), max(-after, 0))
    places = np.arange(n)
    if mode == "circular":  # torch repeats what is left, and mirrors what was there
        return np.pad(places[crop[0] : n - crop[1]], ends, mode="wrap")
    places = np.pad(places, ends, mode="edge" if mode == "replicate" else "reflect")
    return places[crop[0] : len(places) - crop[1]]


def adaptive(n: int, m: int) -> tuple[Table, Array]:
    """Return the table and the weights of m averages that cover n entries."""
    start = np.arange(m) * n // m
    stop = -(-(np.arange(m) + 1) * n // m)
    taps = np.arange((stop - start).max())[:, None]
    inside = taps < stop - start
    return np.where(inside, start + taps, stop - 1), inside / (stop - start)


def interpolated(
    n: int, m: int, mode: str, align_corners: bool, scale: float | None, dtype: Any
) -> tuple[Table, Array]:
    """Return the table and the weights of a linear or cubic interpolation, as torch has them.

    Args:
        n, m: sizes of the axis before and after.
        mode: of the operation ``upsample``.
        align_corners: whether the first and the last entry keep their place.
        scale: the factor that places are computed with; None: m / n.
        dtype: that torch computes places in.
    """
    if n == m and mode != "bicubic":  # torch copies such an axis, whatever the scale
        return np.arange(n)[None], np.ones((1, m))
    number = np.dtype(dtype).type
    ratio = number(n) / number(m) if scale is None else number(1 / scale)
    index = np.arange(m).astype(dtype)
    if align_corners:
        source = index * (number(n - 1) / number(m - 1) if m > 1 else number(0))
    else:
        source = (index + number(0.5)) * ratio - number(0.5)
    if mode == "bicubic":
        first = np.floor(source)
        places = first.astype(np.int64) + np.arange(-1, 3)[:, None]
        return np.clip(places, 0, n - 1), _cubic_weights((source - first).astype(np.float64))
    source = np.maximum(source, 0)
    low = np.minimum(source.astype(np.int64), n - 1)
    share = np.clip(source - low, 0, 1).astype(np.float64)
    return np.stack([low, np.minimum(low + 1, n - 1)]), np.stack([1 - share, share])


def _cubic_weights(t: Array) -> Array:
    """Return the weights of the four entries around a place, t behind the second of them."""

    def near(d: Array) -> Array:
        return ((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1

    def far(d: Array) -> Array:
        return ((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC

    return np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)])
