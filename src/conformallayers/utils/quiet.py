"""Ignore warnings, in one thread at a time: warning filters are global to the process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


@contextmanager
def ignored_warnings(*errors: type[Warning]) -> Iterator[None]:
    """Ignore warnings, except that those of the given types are raised."""
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in errors:
            warnings.simplefilter("error", kind)
        yield
