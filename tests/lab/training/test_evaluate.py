"""Trained networks are measured."""

from __future__ import annotations

from typing import Any

import pytest

from conformallayers.lab.training import evaluate
from support import run_command


def test_evaluate_gives_the_accuracy_of_the_run(
    finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate.evaluate(finished.folder)
    assert found["folded"] == found["layers"] == finished.accuracy
    assert (found["epoch"], found["images"]) == (8, 450)
    path = finished.folder / evaluate.CHECKPOINT
    assert run_command("evaluate", path, "--dataset", "digits") == 0
    assert f"folded         {100 * finished.accuracy:.2f} %" in capsys.readouterr().out
