"""Time and memory of this process: alternating timings, the peak, and glibc's settings."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_FEWEST = 3  # rounds, however long they take
_WARM = 0.005  # seconds of untimed calls: a pause lets caches and clocks go cold
# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def interleave(
    engines: Mapping[str, Callable[[], object]],
    executions: int,
    *,
    calls: int = 3,
    pause: float = 0.03,
    budget: float = math.inf,
) -> dict[str, dict[str, float]]:
    """Return median and quartiles of the milliseconds of each engine; in every round a pause, untimed and timed ``calls``.

    The pause lets the spinning threads of one engine go to sleep before the next one runs. The untimed
    calls, one or as many as take 5 ms, make up for it. After ``budget`` seconds no further round begins,
    but there are three at least.
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
            for _ in range(calls):
                begun = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begun)
    return {name: _quartiles(values) for name, values in seconds.items()}


def _quartiles(seconds: list[float]) -> dict[str, float]:
    several = seconds if len(seconds) > 1 else 2 * seconds
    low, median, high = (round(1e3 * value, 4) for value in statistics.quantiles(several, n=4))
    return {"median": median, "low": low, "high": high}


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, until the process ends.

    Otherwise a large tensor is returned to the system when it is freed, and every page of the next
    one is cleared again: with batches of thousands of images, up to half of the time of an epoch.
    A threshold in the environment takes precedence.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**30)


def settle() -> int:
    """Return freed memory to the system, reset the peak if the system can, and return the peak.

    Building or folding a network may have needed more memory than it keeps.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    return peak()


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    # Linux hands the peak of getrusage down to a child; VmHWM is that of the process alone.
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
