"""Ignored warnings leave the filters of the process as they were, whatever other threads do."""

from __future__ import annotations

import threading
import time
import warnings

import pytest

from conformallayers.utils.quiet import ignored_warnings


def test_threads_leave_the_filters_as_they_were() -> None:
    before = list(warnings.filters)
    inside, leave, entered = threading.Event(), threading.Event(), []

    def stay() -> None:
        with ignored_warnings():
            entered.append(threading.current_thread())
            inside.set()
            leave.wait(10)

    first = threading.Thread(target=stay)
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=stay)
    second.start()
    time.sleep(0.05)
    assert entered == [first]  # the second waits until the first has left
    leave.set()
    first.join()
    second.join()
    assert warnings.filters == before


def test_some_warnings_are_raised() -> None:
    with ignored_warnings(ResourceWarning):
        warnings.warn("nothing", UserWarning, stacklevel=1)
        with pytest.raises(ResourceWarning):
            warnings.warn("raised", ResourceWarning, stacklevel=1)
