"""Times of functions in turn, and memory that glibc keeps for the next step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from conformallayers.lab import measure


def test_memory_is_kept_unless_the_environment_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(name: int, value: int) -> int:
            calls.append((name, value))
            return 1

    monkeypatch.setattr(measure.ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(measure.sys, "platform", "linux")
    for name in measure._SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert measure.keep_freed_memory()
    assert calls == [(-1, 2**31 - 1), (-3, 2**30)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert not measure.keep_freed_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setattr(measure.ctypes, "CDLL", lambda name: object())
    assert not measure.keep_freed_memory()


def test_engines_take_turns_and_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 1 ms by a clock of the test: five untimed ones, then the timed ones."""
    now, called = [0.0], []

    def engine(name: str, seconds: float) -> None:
        now[0] += seconds
        called.append(name)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    engines = {"short": lambda: engine("short", 1e-3), "long": lambda: engine("long", 1.0)}
    found = measure.interleave(engines, 6, pause=0.0)
    assert [found[name]["median"] for name in engines] == pytest.approx([1.0, 1000.0])
    turns = [first for first, second in pairwise([*called, ""]) if first != second]
    assert turns == ["short", "long"] * 2
    assert called.count("long") == 2 * (1 + 3)
    assert called.count("short") == 2 * (5 + 3)


def test_a_budget_ends_the_rounds_after_three(monkeypatch: pytest.MonkeyPatch) -> None:
    now, called = [0.0], []

    def engine() -> None:
        now[0] += 1.0
        called.append(1)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    measure.interleave({"a": engine}, 300, pause=0.0, budget=0.5)
    assert len(called) == 3 * (1 + 3)
