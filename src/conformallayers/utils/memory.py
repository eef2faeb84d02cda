"""Memory of this process: peak, glibc's settings, sizes such as 4GiB."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
from pathlib import Path

from ..errors import refusal

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SWITCHES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next step; return whether it does.

    Otherwise a large tensor is returned to the system when it is freed, and every page of the next
    one is cleared again: with batches of thousands of images, up to half of the time of an epoch.
    The setting holds until the process ends. Nothing is changed if the environment has the same
    settings, or with another C library.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _SWITCHES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and bool(mallopt(_MMAP_THRESHOLD, 2**30))


def parse_size(text: str, where: str = "size") -> int:
    """Return a number of bytes from text such as ``"4GiB"`` or ``"512 MB"``.

    Examples:
        >>> parse_size("1.5KiB"), parse_size("2 MB"), parse_size("64")
        (1536, 2000000, 64)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    size = 0
    if found:
        unit = (found[2] or "").lower()
        base = 1024 if unit.endswith("i") else 1000
        size = int(float(found[1]) * base ** " kmgt".index(unit[:1] or " "))
    if size < 1:
        remedy = "KiB, MiB and GiB count in 1024, KB, MB and GB in 1000."
        raise refusal(where, "a size such as 4GiB or 512MiB", repr(text), remedy)
    return size


def available() -> int | None:
    """Return the available memory of this machine in bytes; None if the system does not tell."""
    return _proc("/proc/meminfo", "MemAvailable")


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
    found = _proc("/proc/self/status", "VmHWM")
    if found is not None:
        return found
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _proc(path: str, name: str) -> int | None:
    """Return the bytes of a line such as ``VmHWM:  8792 kB``."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(found[0]) if found else None
