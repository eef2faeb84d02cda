"""Time several functions alternately in one process, so that a busy machine slows all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


def interleaved(
    functions: Mapping[str, Callable[[], object]], *, rounds: int = 41, block: float = 0.005
) -> dict[str, float]:
    """Return the median seconds of one call of each function.

    Every round times each function once, so that a slow moment of the machine meets them all.

    Args:
        functions: by name.
        rounds: how many times each function has its turn.
        block: least seconds of a turn; a fast function is called many times in it.

    Examples:
        >>> times = interleaved({"few": lambda: sum(range(9)), "many": lambda: sum(range(9999))})
        >>> times["few"] < times["many"]
        True
    """
    calls = {name: _calls_for(function, block) for name, function in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(_turn(function, calls[name]) / calls[name])
    return {name: statistics.median(values) for name, values in seconds.items()}


def _calls_for(function: Callable[[], object], block: float) -> int:
    function()  # the first call may prepare something
    calls = 1
    while (elapsed := _turn(function, calls)) < block / 2 and calls < 10**6:
        calls = min(4 * calls, max(calls + 1, int(calls * block / max(elapsed, 1e-9))))
    return calls


def _turn(function: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - started


_FEWEST = 3  # rounds, however long they take


@dataclass(frozen=True)
class Timing:
    """Seconds of one engine: the median and the quartiles of its calls."""

    median: float
    low: float
    high: float


def interleave(
    engines: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 3,
    pause: float = 0.03,
    budget: float = math.inf,
) -> dict[str, Timing]:
    """Time engines in turn: a pause, one untimed call, then a few timed ones, in every round.

    The pause lets the spinning threads of one engine go to sleep before the next one runs. After
    ``budget`` seconds no further round begins, but there are three at least.

    Examples:
        >>> times = interleave({"a": lambda: sum(range(9))}, rounds=2, pause=0.0)
        >>> times["a"].low <= times["a"].median <= times["a"].high
        True
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    started = time.perf_counter()
    for done in range(rounds):
        if done >= _FEWEST and time.perf_counter() - started > budget:
            break
        for name, run in engines.items():
            time.sleep(pause)
            run()
            seconds[name] += [_turn(run, 1) for _ in range(calls)]
    return {name: Timing(*quartiles(values)) for name, values in seconds.items()}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the lower and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high
