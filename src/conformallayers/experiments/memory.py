"""Memory of this process: how glibc keeps it, for training with large batches."""

from __future__ import annotations

import ctypes
import os
import sys

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SWITCHES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next step, and say whether it does.

    A large tensor is otherwise given back to the system when it is freed, and every page of the
    next one is cleared again: with batches of thousands of images, up to half of the time of an
    epoch. For programs that train; it holds until the process ends. Where the environment has the
    same switches, or the C library is another, nothing is changed.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _SWITCHES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and bool(mallopt(_MMAP_THRESHOLD, 2**30))
