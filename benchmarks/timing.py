"""Fair timing on a noisy machine: one process, interleaved rounds, medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PAUSE = 0.03  # seconds between engines: spinning threads of one slow the next


@dataclass(frozen=True)
class Timing:
    """Seconds of one engine: the median and the quartiles of its rounds."""

    median: float
    low: float
    high: float


def interleave(
    engines: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    pause: float = PAUSE,
) -> dict[str, Timing]:
    """Time engines in turn: pause, one untimed call, then ``calls`` timed ones, per round."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, run in engines.items():
            time.sleep(pause)
            run()
            for _ in range(calls):
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    return {name: _summary(values) for name, values in seconds.items()}


def _summary(values: list[float]) -> Timing:
    if len(values) < 2:
        return Timing(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high)
