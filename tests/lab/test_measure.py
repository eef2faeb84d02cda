"""Times of functions in turn, and memory that glibc keeps for the next step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from conformallayers.lab import measure


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
