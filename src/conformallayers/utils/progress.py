"""A progress line on a terminal for work that takes longer than two seconds; silent elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_PATIENCE = 2.0  # seconds before the line appears
_WIDTH = 30


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield the items; after two seconds draw a bar with the time left on stderr."""
    started = time.monotonic()
    drawn = False
    try:
        for done, item in enumerate(items):
            elapsed = time.monotonic() - started
            if done and elapsed > _PATIENCE and sys.stderr.isatty():
                filled = _WIDTH * done // total
                left = elapsed / done * (total - done)
                bar = "█" * filled + "·" * (_WIDTH - filled)
                print(f"\r{label} {bar} {left:5.1f} s left", end="", file=sys.stderr, flush=True)
                drawn = True
            yield item
    finally:
        if drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
