"""Experiments 3 and 4, and the records of all experiments: rows are written one by one and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.experiments import records, speed
from conformallayers.lab.experiments.speed import run_batchsize, run_depth
from conformallayers.lab.options import BatchOptions, DepthOptions


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
    original = speed.measure_depth

    def counting(k: int, options: DepthOptions) -> dict[str, Any]:
        measured.append(k)
        if k == 3:
            raise KeyboardInterrupt
        return original(k, options)

    monkeypatch.setattr(speed, "measure_depth", counting)
    with pytest.raises(KeyboardInterrupt, match=r"2 rows kept. To go on, repeat the command"):
        run(tmp_path, 1, 2, 3, **options)
    assert measured == [1, 3]
    names = {"times.json", "times.md", "times.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    record = json.loads((tmp_path / "times.json").read_text())
    assert [row["depth"] for row in record["rows"]] == [2, 1]
    for row in record["rows"]:
        assert set(row["milliseconds"]) == set(speed.paths("DkNet"))
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
        with pytest.raises(
            cl.ConformalError, match=r"expected a file of conformallayers, got a damaged one"
        ):
            run(tmp_path)
    path.write_text(json.dumps({"rows": [], "options": {"batch": 2}}))
    message = "experiment 3, --batch: expected 2 as before, got 3"
    with pytest.raises(cl.ConformalError, match=message):
        run(tmp_path, batch=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        run(tmp_path / "file", 1)


def test_batches_fill_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grows(path: str, batch: int, *rest: Any, **options: Any) -> dict[str, Any]:
        """Need a megabyte for each image, and 100 for those of the ReLU network."""
        each = 100 if path == "D3ModNet" else 1
        if each * batch > 20_000:
            return {"path": path, "batch": batch, "failed": "MemoryError"}
        row = {"path": path, "batch": batch, "milliseconds": {"median": float(batch)}}
        return {**row, "peak_bytes": each * batch * 2**20}

    monkeypatch.setattr(speed, "measure_alone", grows)
    record = run_batchsize(BatchOptions(batches=(1, 256), out=tmp_path))
    assert [(row["path"], row["batch"]) for row in record["rows"]] == [
        (path, batch) for path in speed.paths("D3ModNet") for batch in (1, 256)
    ]
    assert [row["batch"] for row in record["rows"] if "failed" in row] == [256]
    header, lines = speed.batch_cells(record["rows"])
    assert [line[header.index("images in 4 GiB")] for line in lines] == ["41", *4 * ["4.1 k"]]
    names = {"batches.json", "batches.md", "batches.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "batches.json").read_text()) == record


@pytest.mark.slow
def test_process_of_its_own_weighs_the_batch_alone() -> None:
    row = speed.measure_alone("D3ModNetCL, layer by layer", 200, executions=2, threads=1)
    # The batch has 2.3 MiB, the output of the first convolution 22 MiB; torch itself 200 and more.
    assert 20 * 2**20 < row["peak_bytes"] < 100 * 2**20
    failed = speed.measure_alone("D3ModNet", -1, executions=1)
    assert "negative" in failed["failed"]
