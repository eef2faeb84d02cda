"""The search for hyperparameters: the paper's space, pruning, studies that go on, and the figure."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.experiments import paper, sweep
from conformallayers.lab.experiments.records import Row
from conformallayers.lab.experiments.sweep import run_sweep
from conformallayers.lab.options import SweepOptions

Run = Callable[..., Row]


@pytest.fixture(scope="module")
def small() -> Dataset:
    """A few digits; whoever looks at the test images finds none."""
    few, _ = load("digits").split(1147)
    return replace(few, test_images=torch.empty(0), test_labels=torch.empty(0))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A search whose accuracy grows with the epoch, and falls with the learning rate."""
    labels = torch.arange(5000) % 10
    images, none = torch.zeros(5000, 1, 2, 2, dtype=torch.uint8), torch.empty(0)
    large = Dataset("mnist", images, labels, none, none)

    def rows(config: Any, train_set: Dataset, held: Dataset) -> Iterator[dict[str, Any]]:
        for epoch in range(1, config.epochs + 1):
            share = epoch / (epoch + 5) * (1 - config.learning_rate / 2)
            yield {"epoch": epoch, "validation_accuracy": share}

    monkeypatch.setattr(sweep, "epoch_rows", rows)

    def run(dataset: Dataset = large, **options: Any) -> Row:
        return run_sweep("LeNet", dataset, SweepOptions(out=tmp_path, **options))

    return run


def test_search_trains_networks_and_never_sees_test_images(
    small: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"trials": 3, "max_epochs": 2, "validation": 110}
    options = SweepOptions(**sizes, out=tmp_path)
    record = run_sweep("LeNetCL", small, options)
    lines = capsys.readouterr().out.splitlines()
    assert record["images"] == {"train": 90, "validation": 110}
    assert len(record["trials"]) == len(lines) == 3
    assert all(row["epochs_run"] >= 1 for row in record["trials"])
    assert lines[0].startswith("trial 0: trial 0, state COMPLETE, ")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"study.json", "journal.log", "study.png"} <= names
    assert json.loads((tmp_path / "study.json").read_text()) == record
    assert record["command"].startswith("conformallayers sweep LeNetCL digits --trials 3")


def test_search_space_is_the_papers_and_bad_trials_end_early(
    quick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "TPESampler", functools.partial(sweep.TPESampler, seed=0))
    record = quick(trials=25)
    rows = record["trials"]
    for row in rows:
        assert paper.BATCH_SIZES[0] <= row["batch_size"] <= paper.BATCH_SIZES[1]
        assert paper.EPOCHS[0] <= row["epochs"] <= paper.EPOCHS[1]
        assert paper.LEARNING_RATES[0] <= row["learning_rate"] <= paper.LEARNING_RATES[1]
        assert row["optimizer"] in ("adam", "rmsprop")
        assert (row["epochs_run"] == row["epochs"]) == (row["state"] == "COMPLETE")
    complete = [row for row in rows if row["state"] == "COMPLETE"]
    assert rows[: len(complete)] == complete
    accuracies = [row["validation_accuracy"] for row in complete]
    assert accuracies == sorted(accuracies, reverse=True)
    assert record["best"] == rows[0]
    pruned = [row for row in rows if row["state"] == "PRUNED"]
    assert len(pruned) > 3
    assert all(row["validation_accuracy"] is None for row in pruned)
    assert rows[0]["learning_rate"] < 0.3  # found what is good
    assert min(row["epochs_run"] for row in pruned) == 50 // 3**2  # the paper's first level


def test_study_goes_on_with_new_numbers(quick: Run) -> None:
    first = quick(trials=5)
    assert quick(trials=5)["trials"] == first["trials"]
    rows = quick(trials=12)["trials"]
    assert sorted(row["trial"] for row in rows) == list(range(12))
    assert len({row["learning_rate"] for row in rows}) == 12
    with pytest.raises(cl.ConformalError, match="sweep --seed: expected 0 as before, got 1"):
        quick(seed=1)


def test_interrupted_study_keeps_its_trials(
    quick: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, begun = sweep.epoch_rows, []

    def stopping(*arguments: Any) -> Iterator[dict[str, Any]]:
        begun.append(1)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return rows(*arguments)

    monkeypatch.setattr(sweep, "epoch_rows", stopping)
    with pytest.raises(KeyboardInterrupt, match="Interrupted: 2 trials kept"):
        quick(trials=4)
    kept = json.loads((tmp_path / "study.json").read_text())
    assert [row["state"] for row in kept["trials"]].count("FAIL") == 1
    assert (tmp_path / "study.png").exists()
    done = [row for row in quick(trials=4)["trials"] if row["state"] != "FAIL"]
    assert len(done) == 4


def test_loss_that_is_no_number_prunes_the_trial(
    quick: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(*arguments: Any) -> Iterator[dict[str, Any]]:
        raise cl.ConformalError("train, epoch 1: expected a finite loss, got nan. Lower it.")

    monkeypatch.setattr(sweep, "epoch_rows", diverging)
    record = quick(trials=2)
    assert record["best"] is None
    assert {row["state"] for row in record["trials"]} == {"PRUNED"}
    assert record["trials"][0]["reason"].endswith("got nan.")
    assert not (tmp_path / "study.png").exists()
