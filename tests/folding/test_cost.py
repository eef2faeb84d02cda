"""The rates of a machine: measured once, and kept."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from conformallayers.folding import cost


def test_rates_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONFORMALLAYERS_CALIBRATE", raising=False)
    monkeypatch.setenv("CONFORMALLAYERS_CACHE", str(tmp_path))
    measured = cost.machine.__wrapped__()
    assert all(rate > 0 for rate in astuple(measured))
    monkeypatch.setattr(cost, "calibrate", None)  # the second call reads the file
    assert cost.machine.__wrapped__() == measured
