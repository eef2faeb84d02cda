"""The arena of a C program: values that are needed at the same time get disjoint memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Buffer:
    """Memory of one value, or of several that share it; starts and sizes count floats.

    Args:
        base: the array in C that holds it: an argument of the function.
        size: of all of its values.
        first, last: the operations that write it first and read it last.
        start: its offset in the base; ``arrange`` sets it for buffers of the arena.
        values: the names of its values.
    """

    base: str
    size: int
    first: int = 0
    last: int = 0
    start: int = 0
    values: list[str] = field(default_factory=list)


# Greedy placement depends on its order; none of these is always the best.
_ORDERS: tuple[Callable[[Buffer], Any], ...] = (
    lambda buffer: (-buffer.size, buffer.first),
    lambda buffer: (buffer.first, -buffer.size),
    lambda buffer: (buffer.first - buffer.last, -buffer.size),
)


def arrange(buffers: Sequence[Buffer]) -> int:
    """Place buffers in an arena by greedy best fit, in the best of three orders; return its size.

    Examples:
        >>> first, second, third = Buffer("", 4, 0, 1), Buffer("", 2, 1, 2), Buffer("", 3, 2, 3)
        >>> arrange([first, second, third]), first.start, second.start, third.start
        (6, 0, 4, 0)
    """
    found = [_placed(sorted(buffers, key=order)) for order in _ORDERS]
    total, starts = min(found, key=lambda one: one[0])
    for buffer in buffers:
        buffer.start = starts[buffer]
    return total


def _placed(buffers: Sequence[Buffer]) -> tuple[int, dict[Buffer, int]]:
    """Put each buffer into the smallest gap that holds it, or behind all; return the size and the starts."""
    starts: dict[Buffer, int] = {}
    for buffer in buffers:
        others = sorted(
            (start, other.size)
            for other, start in starts.items()
            if buffer.first <= other.last and other.first <= buffer.last
        )
        free, gaps = 0, []  # the end of all others so far; (length, start) of gaps
        for start, size in others:
            if start - free >= buffer.size:
                gaps.append((start - free, free))
            free = max(free, start + size)
        starts[buffer] = min(gaps)[1] if gaps else free
    return max((start + buffer.size for buffer, start in starts.items()), default=0), starts
