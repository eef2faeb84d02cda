"""Run folders: created, resumed, and refused if they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training.config import DEFAULTS
from conformallayers.lab.training.train import train
from training import QUIET, assert_same_weights


def test_resume_refuses_what_does_not_belong_together(small: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"epochs": 1, "out": out, "console": QUIET}
    train("LeNetCL", small, **options)
    with pytest.raises(cl.ConformalError, match=r"an empty folder.*--resume"):
        train("LeNetCL", small, **options)
    with pytest.raises(cl.ConformalError, match=r"--seed: expected 0 as before, got 1"):
        train("LeNetCL", small, resume=True, seed=1, **options)
    with pytest.raises(cl.ConformalError, match=r"--alpha: expected 'young' as before, got 2.0"):
        train("LeNetCL", small, resume=True, alpha="2", **options)
    with pytest.raises(cl.ConformalError, match="the training images of the run, got others"):
        train("LeNetCL", small.split(10)[0], resume=True, **options)
    again = train("LeNetCL", small, resume=True, **options)
    assert len(again.history) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(cl.ConformalError, match=r"a run with .*config.json, got none"):
        train("LeNetCL", small, resume=True, **{**options, "out": tmp_path / "other"})
    with pytest.raises(cl.ConformalError, match="a folder, got the file"):
        train("LeNetCL", small, **{**options, "out": tmp_path / "other" / "letter.txt"})
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".config.json.0123456789abcdef.tmp").write_text(
        "{"
    )  # what a killed process leaves
    begun = train("LeNetCL", small, resume=True, **{**options, "out": tmp_path / "new"})
    assert_same_weights(begun.folder, out)


def test_run_of_before_the_options_goes_on(small: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "epochs": 1, "console": QUIET}
    train("LeNet", small, **options)
    path = tmp_path / "run" / "config.json"
    old = json.loads(path.read_text())
    for name in ("training_preset", "gain", "flips", "shift", "centre", "dropout", "classes"):
        assert old.pop(name) == DEFAULTS[name]
    path.write_text(json.dumps(old))
    assert len(train("LeNet", small, resume=True, **options).history) == 1
    with pytest.raises(cl.ConformalError, match=r"--shift: expected 0 as before, got 1"):
        train("LeNet", small, resume=True, shift=1, **options)
