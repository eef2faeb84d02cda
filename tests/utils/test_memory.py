"""Memory that glibc keeps for the next step."""

from __future__ import annotations

import pytest

from conformallayers.utils import memory


def test_memory_is_kept_unless_the_environment_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(name: int, value: int) -> int:
            calls.append((name, value))
            return 1

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(memory.sys, "platform", "linux")
    for name in memory._SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert memory.keep_freed_memory()
    assert calls == [(-1, 2**31 - 1), (-3, 2**30)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert not memory.keep_freed_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.keep_freed_memory()
