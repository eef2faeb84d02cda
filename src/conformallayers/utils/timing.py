"""Time several functions alternately in one process, so that a busy machine slows all of them equally."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_FEWEST = 3  # rounds, however long they take
_WARM = 0.005  # seconds of untimed calls: a pause lets caches and clocks go cold


@dataclass(frozen=True)
class Timing:
    """Seconds of one engine: the median and the quartiles of its calls."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise the seconds of several calls."""
        if len(seconds) < 2:
            return cls(seconds[0], seconds[0], seconds[0])
        low, median, high = statistics.quantiles(seconds, n=4)
        return cls(median, low, high)

    @property
    def milliseconds(self) -> dict[str, float]:
        """The median and the quartiles in milliseconds, by name."""
        return {name: round(1e3 * value, 4) for name, value in vars(self).items()}


def interleave(
    engines: Mapping[str, Callable[[], object]],
    executions: int,
    *,
    calls: int = 3,
    pause: float = 0.03,
    budget: float = math.inf,
) -> dict[str, Timing]:
    """Time executions of each engine in turn: in every round a pause, untimed calls, and some timed ``calls``.

    The pause lets the spinning threads of one engine go to sleep before the next one runs. The untimed
    calls, one or as many as take 5 ms, make up for it. After ``budget`` seconds no further round begins,
    but there are three at least.

    Examples:
        >>> times = interleave({"a": lambda: sum(range(9))}, 6, pause=0.0)
        >>> times["a"].low <= times["a"].median <= times["a"].high
        True
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    started = time.perf_counter()
    for done in range(math.ceil(executions / calls)):
        if done >= _FEWEST and time.perf_counter() - started > budget:
            break
        for name, run in engines.items():
            time.sleep(pause)
            warmed = time.perf_counter() + _WARM
            run()
            while time.perf_counter() < warmed:
                run()
            seconds[name] += [call_seconds(run) for _ in range(calls)]
    return {name: Timing.of(values) for name, values in seconds.items()}


def call_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
