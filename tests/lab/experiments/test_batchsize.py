"""Experiment 4: batch sizes fill the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformallayers.lab.experiments import batchsize
from conformallayers.lab.experiments.batchsize import run_batchsize
from conformallayers.lab.options import BatchOptions


def test_batches_fill_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grows(path: str, batch: int, *rest: Any, **options: Any) -> dict[str, Any]:
        """Need a megabyte for each image, and 100 for those of the ReLU network."""
        each = 100 if path == batchsize.RELU else 1
        if each * batch > 20_000:
            return {"path": path, "batch": batch, "failed": "MemoryError"}
        row = {"path": path, "batch": batch, "milliseconds": {"median": float(batch)}}
        return {**row, "peak_bytes": each * batch * 2**20}

    monkeypatch.setattr(batchsize, "measure_alone", grows)
    record = run_batchsize(BatchOptions(batches=(1, 256), out=tmp_path))
    assert [(row["path"], row["batch"]) for row in record["rows"]] == [
        (path, batch) for path in batchsize.PATHS for batch in (1, 256)
    ]
    assert [row["batch"] for row in record["rows"] if "failed" in row] == [256]
    header, lines = batchsize.cells(record["rows"])
    assert [line[header.index("images in 4 GiB")] for line in lines] == ["41", *4 * ["4.1 k"]]
    names = {"batches.json", "batches.md", "batches.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "batches.json").read_text()) == record


@pytest.mark.slow
def test_process_of_its_own_weighs_the_batch_alone() -> None:
    row = batchsize.measure_alone(batchsize.LAYERS, 200, executions=2, threads=1)
    # The batch has 2.3 MiB, the output of the first convolution 22 MiB; torch itself 200 and more.
    assert 20 * 2**20 < row["peak_bytes"] < 100 * 2**20
    failed = batchsize.measure_alone(batchsize.RELU, -1, executions=1)
    assert "negative" in failed["failed"]
