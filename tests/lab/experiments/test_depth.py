"""Experiment 3, and the records of all experiments: rows are written one by one and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.experiments import depth, records
from conformallayers.lab.experiments.depth import run_depth
from conformallayers.lab.options import DepthOptions


def run(out: Path, *depths: int, **options: Any) -> dict[str, Any]:
    return run_depth(DepthOptions(depths=depths, out=out, **options))


def test_depths_are_written_one_by_one_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch": 2, "executions": 5}
    with monkeypatch.context() as patch:
        patch.setattr(records, "commit", lambda: "a" * 40)
        run(tmp_path, 2, **options)
    monkeypatch.setattr(records, "commit", lambda: "b" * 40)
    measured = []
    original = depth.measure

    def counting(k: int, options: DepthOptions) -> dict[str, Any]:
        measured.append(k)
        if k == 3:
            raise KeyboardInterrupt
        return original(k, options)

    monkeypatch.setattr(depth, "measure", counting)
    with pytest.raises(KeyboardInterrupt, match=r"2 rows kept. To go on, repeat the command"):
        run(tmp_path, 1, 2, 3, **options)
    assert measured == [1, 3]
    names = {"times.json", "times.md", "times.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    record = json.loads((tmp_path / "times.json").read_text())
    assert [row["depth"] for row in record["rows"]] == [2, 1]
    for row in record["rows"]:
        assert set(row["milliseconds"]) == set(depth.PATHS)
        assert row["fold_error"] < cl.testing.TOLERANCES[torch.float32]
        for times in row["milliseconds"].values():
            assert 0 < times["low"] <= times["median"] <= times["high"]
    first, _, second = record["command"].partition(" && ")  # together they give these rows
    words = "conformallayers experiment 3"
    assert first == f"{words} --depths 2 --batch 2 --executions 5"
    assert second == f"{words} --depths 1 2 3 --batch 2 --executions 5"
    assert record["commit"] == f"{'a' * 40}, {'b' * 40}"
    assert run(tmp_path, 1, 2, **options)["rows"] == record["rows"]


def test_records_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    for content in (b"[]", b"{", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(cl.ConformalError, match=r"expected a record.*, got another file"):
            run(tmp_path)
    path.write_text(json.dumps({"rows": [], "options": {"batch": 2}}))
    message = "experiment 3, --batch: expected 2 as before, got 3"
    with pytest.raises(cl.ConformalError, match=message):
        run(tmp_path, batch=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        run(tmp_path / "file", 1)
