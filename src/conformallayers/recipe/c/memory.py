"""The arena of a C program: where values lie, so that those needed at the same time lie apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Buffer:
    """Memory of one value, or of several that share it; places and sizes count floats.

    Args:
        base: the argument of the function in C that it lies in.
        size: of all of its values.
        first, last: the operations that write it first and need it last.
        start: where it begins; ``arrange`` places those of the arena.
        values: their names.
    """

    base: str
    size: int
    first: int = 0
    last: int = 0
    start: int = 0
    values: list[str] = field(default_factory=list)

    def meets(self, other: Buffer) -> bool:
        """Tell whether both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


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
    """Put each buffer into the smallest gap that holds it, or behind all; return size and places."""
    starts: dict[Buffer, int] = {}
    for buffer in buffers:
        others = sorted((starts[other], other.size) for other in starts if buffer.meets(other))
        free, gaps = 0, []  # the first float behind all others so far; (room, start)
        for start, size in others:
            if start - free >= buffer.size:
                gaps.append((start - free, free))
            free = max(free, start + size)
        starts[buffer] = min(gaps)[1] if gaps else free
    return max((start + buffer.size for buffer, start in starts.items()), default=0), starts
