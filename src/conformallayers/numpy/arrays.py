"""What layers and strategies share in numpy: convolutions, margins, sums over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, Any]
_MODES: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def each(value: Any, axes: int) -> tuple[Any, ...]:
    """Return one value for each axis."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * axes if len(values) == 1 else values


def flat(x: Array) -> Array:
    """Return each sample as one row, also where there is none."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def convolve(
    x: Array, kernel: Array, stride: Any = 1, dilation: Any = 1, groups: int = 1, padding: Any = 0
) -> Array:
    """Convolve (B, C, ...) with (C_out, C / groups, ...): all windows times one matrix."""
    axes = x.ndim - 2
    x = pad(x, [(p, p) for p in each(padding, axes)])
    spans = [d * (k - 1) + 1 for d, k in zip(each(dilation, axes), kernel.shape[2:], strict=True)]
    windows = sliding_window_view(x, spans, axis=tuple(range(2, x.ndim)))
    steps = [slice(None, None, s) for s in (*each(stride, axes), *each(dilation, axes))]
    windows = windows[(slice(None), slice(None), *steps)]  # (B, C, *positions, *kernel)
    inner = (1, *range(2 + axes, 2 + 2 * axes)), tuple(range(1, 2 + axes))
    parts = zip(np.split(windows, groups, 1), np.split(kernel, groups), strict=True)
    images = [np.tensordot(part, weight, inner) for part, weight in parts]
    return np.moveaxis(np.concatenate(images, -1), -1, 1)


def pad(x: Array, pads: Sequence[tuple[int, int]], mode: str = "zeros", value: float = 0) -> Array:
    """Pad the last axes by (before, after); a negative number crops."""
    if not any(n for both in pads for n in both):
        return x
    pads = [(0, 0)] * (x.ndim - len(pads)) + list(pads)
    ends = zip(pads, x.shape, strict=True)
    x = x[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in ends)]
    widths = [(max(a, 0), max(b, 0)) for a, b in pads]
    if mode == "zeros":
        return np.pad(x, widths, constant_values=value)
    return np.pad(x, widths, mode=_MODES[mode])


def reshaped(x: Array, *shape: int) -> Array:
    """Give each sample another shape; numpy itself takes any shape for an empty batch."""
    if math.prod(x.shape[1:]) != math.prod(shape):
        raise ValueError(f"{x.shape[1:]} is no {shape}")
    return x.reshape(len(x), *shape)


def sums(x: Array, axis: int, first: Array, last: Array) -> Array:
    """Return the sums of x over the ranges ``first ≤ i < last`` of an axis, in float64."""
    if np.any(first >= last):
        raise ValueError("a window without places")
    one_more = [(0, 0)] * axis + [(0, 1)] + [(0, 0)] * (x.ndim - axis - 1)
    ends = np.stack([first, last], 1).reshape(-1)
    totals = np.add.reduceat(np.pad(x, one_more), ends, axis, dtype=np.float64)
    return np.asarray(totals[(slice(None),) * axis + (slice(None, None, 2),)])


def with_bias(y: Array, bias: Array | None) -> Array:
    """Add one number to each channel."""
    return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))
