"""Index tables and weights of windows, pads and repetitions, for every runtime but torch.

A table of one axis is (taps, positions): the entries of the input that each position of the output reads.
-1 is an entry outside of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from . import layer_operations as layer
from .recipe import Shape

Table = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, Any]
Resampling = (
    layer.AdaptiveAvgPool | layer.AdaptiveMaxPool | layer.AvgPool | layer.Pad | layer.Upsample
)


def resampled(op: Resampling, shape: Shape) -> Iterator[tuple[int, Table, Array]]:
    """Yield each axis that an operation changes, with its table and weights.

    Position j of the axis becomes the sum of ``weights[:, j]`` times the entries ``table[:, j]``, or the largest
    of these entries.

    Args:
        op: averages, maxima, pads, or repetitions.
        shape: of the sample before it.
    """
    found: list[tuple[Table, Array]]
    if isinstance(op, (layer.AdaptiveAvgPool, layer.AdaptiveMaxPool, layer.AvgPool)):
        found = [_averages(*windows) for windows in _counted(op, shape)]
    elif isinstance(op, layer.Pad):
        every = zip(shape[len(shape) - len(op.pads) :], op.pads, strict=True)
        found = [_copies(padded(n, *ends, op.mode)) for n, ends in every]
    else:
        repeated = zip(shape[1:], op.scales, strict=True)
        found = [_copies(np.arange(n * scale) // scale) for n, scale in repeated]
    for axis, (table, weights) in enumerate(found, len(shape) - len(found)):
        same = len(table) == 1 and np.array_equal(table[0], np.arange(shape[axis]))
        if not (same and np.all(weights == 1)):
            yield axis, table, weights


def _copies(places: Table) -> tuple[Table, Array]:
    return places[None], np.ones((1, len(places)))


def copies_entries(weights: Array) -> bool:
    """Tell whether every position copies one entry."""
    return len(weights) == 1 and bool((weights == 1).all())


def sliding(n: int, taps: int, positions: int, stride: int, padding: int, dilation: int) -> Table:
    """Return the table of windows along an axis of n entries."""
    places = np.arange(taps)[:, None] * dilation + np.arange(positions) * stride - padding
    return np.where((places >= 0) & (places < n), places, -1)


def margins(op: layer.Pool, shape: Shape) -> list[tuple[int, int]]:
    """Return how far windows reach beyond both ends of each axis; negative if the last entries are unused."""
    return [(p, (m - 1) * s + d * (k - 1) + 1 - n - p) for n, m, k, s, p, d in op.axes(shape)]


def divisors(op: layer.AvgPool | layer.AdaptiveAvgPool, shape: Shape) -> Array:
    """Return the number of entries of each window that counts, one for each position."""
    sizes = np.ones(())
    for _, _, counted in _counted(op, shape):
        sizes = sizes[..., None] * counted
    return sizes


def _counted(
    op: layer.AvgPool | layer.AdaptiveAvgPool | layer.AdaptiveMaxPool, shape: Shape
) -> list[tuple[Table, Table, Table]]:
    """Return for each axis the first entry of every window, its end, and how many entries count."""
    ends = window_ends(op, shape)
    if not isinstance(op, layer.AvgPool):
        return [(first, stop, stop - first) for first, stop in ends]
    found = []
    for (n, m, k, s, p, _), (first, stop) in zip(op.axes(shape), ends, strict=True):
        start, pad = np.arange(m) * s - p, p if op.count_include_pad else 0
        sizes = np.minimum(start + k, n + pad) - np.maximum(start, -pad)
        found.append((first, stop, sizes))
    return found


def padded(n: int, before: int, after: int, mode: str) -> Table:
    """Return the entry that each position of a padded axis copies; with zeros a negative number crops."""
    modes: dict[str, Any] = {"circular": "wrap", "replicate": "edge", "reflect": "reflect"}
    found: Table = sliding(n, 1, n + before + after, 1, before, 1)[0]
    return found if mode == "zeros" else np.pad(np.arange(n), (before, after), mode=modes[mode])


def window_ends(
    op: layer.AdaptiveAvgPool | layer.AdaptiveMaxPool | layer.Pool, shape: Shape
) -> list[tuple[Table, Table]]:
    """Return for each axis the first entry of every window that is inside the map, and its end."""
    if isinstance(op, (layer.AdaptiveAvgPool, layer.AdaptiveMaxPool)):
        sizes = zip(shape[1:], op.size, strict=True)
        return [(np.arange(m) * n // m, -(-(np.arange(m) + 1) * n // m)) for n, m in sizes]
    ends = []
    for n, m, k, s, p, d in op.axes(shape):
        start = np.arange(m) * s - p
        first = np.where(start < 0, start % d, start)  # taps before the map are skipped d by d
        ends.append((first, np.minimum(start + d * (k - 1) + 1, n)))
    return ends


def _averages(first: Table, stop: Table, divisors: Array) -> tuple[Table, Array]:
    """Return the table and the weights of sums from ``first`` to before ``stop``, each divided."""
    table = np.minimum(first + np.arange((stop - first).max())[:, None], stop - 1)
    last = table == stop - 1  # shorter sums repeat it, and share its weight: 0·∞ would be NaN
    return table, np.where(last, 1 / last.sum(0), 1) / divisors
