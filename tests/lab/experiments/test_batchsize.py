"""Experiment 4: batch sizes fill the table and the memory budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from hypothesis import given
from hypothesis import strategies as st

import conformallayers as cl
from conformallayers.lab.experiments import batchsize
from conformallayers.lab.experiments.batchsize import run_batches


def grows(path: str, batch: int, **options: Any) -> dict[str, Any]:
    """A machine that needs a megabyte for each image and 100 for those of the ReLU network."""
    each = 100 if path == batchsize.RELU else 1
    if each * batch > 20_000:
        return {"path": path, "batch": batch, "failed": "MemoryError"}
    times = {"median": float(batch), "low": float(batch), "high": float(batch)}
    row = {"path": path, "batch": batch, "milliseconds": times}
    return {**row, "peak_bytes": each * batch * 10**6}


def test_batches_fill_the_table_and_the_budget(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batches": (1, 256), "out": tmp_path, "say": lambda line: None}
    record = run_batches(memory="1GB", measure=grows, **options)
    assert [(row["path"], row["batch"]) for row in record["rows"]] == [
        (path, batch) for path in batchsize.PATHS for batch in (1, 256)
    ]
    assert [row["batch"] for row in record["rows"] if "failed" in row] == [256]
    limits = json.loads((tmp_path / "limits.json").read_text())["rows"]
    assert [row["largest_batch"] for row in limits] == [10, 1000, 1000]
    names = {"batches.json", "batches.md", "limits.json", "limits.md", "figure.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "batches.json").read_text()) == record

    def never(path: str, batch: int, **options: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    again = run_batches(memory="1GB", measure=never, **options)
    assert again["rows"] == record["rows"]
    with pytest.raises(KeyboardInterrupt, match=r"rows kept. To go on, repeat the command"):
        run_batches(measure=never, **{**options, "batches": [3]})
    with pytest.raises(cl.ConformalError, match="--batches: expected a value greater than 0"):
        run_batches(**{**options, "batches": [0]})


@given(st.integers(0, 5000), st.integers(1, 300))
def test_bisection_ends_beside_the_budget(limit: int, first: int) -> None:
    found = batchsize.largest_within(limit, lambda batch: batch, first, most=4000)
    assert found <= min(limit, 4000) <= found + max(1, found // 64)


@pytest.mark.parametrize("text", ["", "GiB", "4 apples", "-1GiB", "0", "4GiBB", "1e3"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(cl.ConformalError, match="--memory: expected a size such as 4GiB"):
        run_batches(memory=text)


@pytest.mark.slow
def test_process_of_its_own_weighs_the_batch_alone() -> None:
    row = batchsize.measure_alone(batchsize.LAYERS, 200, executions=2, threads=1)
    # The batch has 2.3 MiB, the output of the first convolution 22 MiB; torch itself 200 and more.
    assert 20 * 2**20 < row["peak_bytes"] < 100 * 2**20
    failed = batchsize.measure_alone(batchsize.RELU, -1, executions=1)
    assert "Error" in failed["failed"]
