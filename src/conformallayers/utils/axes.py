"""Sizes per spatial axis; imports no torch, so that the numpy runtime can use it."""

from __future__ import annotations

from typing import Any


def per_axis(value: Any, axes: int) -> tuple[Any, ...]:
    """Return one value per axis; a single value, or a sequence of one, counts for every axis.

    Examples:
        >>> per_axis(3, 2), per_axis((3,), 2), per_axis((3, 1), 2)
        ((3, 3), (3, 3), (3, 1))
    """
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * axes if len(values) == 1 else values


def windows(n: int, span: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Count the windows along an axis; with ``ceil_mode`` the last one must start inside."""
    count = (n + 2 * padding - span + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= n + padding else count
