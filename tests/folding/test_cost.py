"""The rates of a machine: measured once, and kept."""

from __future__ import annotations

import time
from dataclasses import astuple
from pathlib import Path

import pytest

from conformallayers.folding import cost


def test_rates_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONFORMALLAYERS_CALIBRATE", raising=False)
    monkeypatch.setenv("CONFORMALLAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "thread_time", time.perf_counter)  # as if no other program ran
    measured = cost.machine.__wrapped__()
    assert all(rate > 0 for rate in astuple(measured))
    monkeypatch.setattr(cost, "calibrate", None)  # the second call reads the file
    assert cost.machine.__wrapped__() == measured


def test_rates_of_a_busy_machine_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONFORMALLAYERS_CALIBRATE", raising=False)
    monkeypatch.setenv("CONFORMALLAYERS_CACHE", str(tmp_path))
    clock = time.perf_counter
    monkeypatch.setattr(time, "thread_time", lambda: clock() / 2)  # half of the time on a core
    assert cost.machine.__wrapped__() == cost.TYPICAL
    assert not list(tmp_path.rglob("*.json"))
