"""The search for hyperparameters: the paper's space, pruning, studies that go on, and the figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")
pytest.importorskip("sklearn")

import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

import conformallayers as cl
from conformallayers.lab import measure as memory
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.experiments import paper, sweep
from conformallayers.lab.experiments.sweep import fitting_space, parse_space, run_sweep
from conformallayers.lab.training.config import make_config
from support import run_command

PARAMETERS = ("batch_size", "epochs", "learning_rate", "optimizer")


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def small() -> Dataset:
    """A few digits; whoever looks at the test images finds none."""
    few = load("digits").subset(200)
    return replace(few, test_images=torch.empty(0), test_labels=torch.empty(0))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A search whose accuracy grows with the epoch, and falls with the learning rate."""
    labels = torch.arange(5000) % 10
    images, none = torch.zeros(5000, 1, 2, 2, dtype=torch.uint8), torch.empty(0)
    large = Dataset("mnist", images, labels, none, none)

    def rows(config: Any, train_set: Dataset, held: Dataset) -> Iterator[dict[str, Any]]:
        for epoch in range(1, config.epochs + 1):
            share = epoch / (epoch + 5) * (1 - config.learning_rate / 2)
            yield {"epoch": epoch, "validation_accuracy": share}

    monkeypatch.setattr(sweep, "epoch_rows", rows)
    return {"network": "LeNet", "dataset": large, "out": tmp_path / "study", "say": silent}


def test_search_trains_networks_and_never_sees_test_images(small: Dataset, tmp_path: Path) -> None:
    lines: list[str] = []
    record = run_sweep(
        "LeNetCL", small, trials=3, max_epochs=2, subset=90, validation=20, space=("alpha=spectral",),
        out=tmp_path, say=lines.append,
    )  # fmt: skip
    assert record["images"] == {"train": 90, "validation": 20}
    assert len(record["trials"]) == len([line for line in lines if line.startswith("trial")]) == 3
    assert all(row["epochs_run"] >= 1 for row in record["trials"])
    assert lines[0].startswith("trial 0: complete, ")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"study.json", "journal.log", "figure.png"} <= names
    assert json.loads((tmp_path / "study.json").read_text()) == record
    assert record["command"].startswith("conformallayers sweep LeNetCL digits --trials 3")
    assert "--space alpha=spectral" in record["command"]


def test_search_space_is_the_papers_and_bad_trials_end_early(quick: dict[str, Any]) -> None:
    record = run_sweep(**quick, trials=25)
    rows = record["trials"]
    assert len(rows) == 25
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


def test_small_data_set_has_a_space_that_fits(quick: dict[str, Any], small: Dataset) -> None:
    record = run_sweep(**{**quick, "dataset": small}, trials=8, max_epochs=12)
    for row in record["trials"]:
        assert 8 <= row["batch_size"] <= record["images"]["train"] == 180
        assert 1e-4 <= row["learning_rate"] <= 0.1
    assert min(row["learning_rate"] for row in record["trials"]) < 5e-3  # logarithmic


def test_own_space_is_searched_and_kept(quick: dict[str, Any]) -> None:
    space = ("learning_rate=1e-5:1e-3:log", "optimizer=sgd", "weight-decay=0,0.1", "epochs=2:3")
    record = run_sweep(**quick, trials=6, space=space)
    for row in record["trials"]:
        assert 1e-5 <= row["learning_rate"] <= 1e-3
        assert row["optimizer"] == "sgd"
        assert row["weight_decay"] in (0.0, 0.1)
        assert row["epochs"] in (2, 3)
        assert paper.BATCH_SIZES[0] <= row["batch_size"] <= paper.BATCH_SIZES[1]
    assert "--space learning_rate=1e-5:1e-3:log optimizer=sgd" in record["command"]
    assert (quick["out"] / "figure.png").exists()
    with pytest.raises(cl.ConformalError, match=r"sweep --space: expected \['learning_rate"):
        run_sweep(**quick, trials=6)


def test_study_goes_on_with_new_numbers(quick: dict[str, Any], tmp_path: Path) -> None:
    first = run_sweep(**quick, trials=5)
    assert run_sweep(**quick, trials=5)["trials"] == first["trials"]
    rows = run_sweep(**quick, trials=34)["trials"]
    assert sorted(row["trial"] for row in rows) == list(range(34))
    assert len({tuple(row[name] for name in PARAMETERS) for row in rows}) == 34
    other = run_sweep(**{**quick, "out": tmp_path / "other"}, trials=34)
    keys = ("trial", *PARAMETERS, "validation_accuracy", "state")
    assert [[row[k] for k in keys] for row in other["trials"]] == [
        [row[k] for k in keys] for row in rows
    ]
    with pytest.raises(cl.ConformalError, match="sweep --seed: expected 0 as before, got 1"):
        run_sweep(**quick, seed=1)
    with pytest.raises(cl.ConformalError, match="sweep --max-epochs: expected 50 as before"):
        run_sweep(**quick, max_epochs=20)


def test_processes_that_start_together_draw_different_trials(tmp_path: Path) -> None:
    options = {"max_epochs": 50, "seed": 2**40}
    studies = [sweep._open_study("together", None, tmp_path, options) for _ in range(2)]
    space = fitting_space("mnist", 54000, 50)
    drawn = [study.ask(space).params for study in studies]
    assert drawn[0] != drawn[1]


def test_interrupted_study_keeps_its_trials(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, begun = sweep.epoch_rows, []

    def stopping(*arguments: Any) -> Iterator[dict[str, Any]]:
        begun.append(1)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return rows(*arguments)

    monkeypatch.setattr(sweep, "epoch_rows", stopping)
    with pytest.raises(KeyboardInterrupt, match="Interrupted: 2 trials kept"):
        run_sweep(**quick, trials=4)
    kept = json.loads((quick["out"] / "study.json").read_text())
    assert [row["state"] for row in kept["trials"]].count("FAIL") == 1
    assert (quick["out"] / "figure.png").exists()
    done = [row for row in run_sweep(**quick, trials=4)["trials"] if row["state"] != "FAIL"]
    assert len(done) == 4


def test_loss_that_is_no_number_prunes_the_trial(small: Dataset, tmp_path: Path) -> None:
    def diverging(*arguments: Any) -> Iterator[dict[str, Any]]:
        raise cl.ConformalError("train, epoch 1: expected a finite loss, got nan. Lower it.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "epoch_rows", diverging)
        record = run_sweep("LeNet", small, trials=2, out=tmp_path, say=silent)
    assert record["best"] is None
    assert {row["state"] for row in record["trials"]} == {"PRUNED"}
    assert record["trials"][0]["reason"].endswith("got nan.")
    assert not (tmp_path / "figure.png").exists()


def test_study_in_a_database(quick: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    address = f"sqlite:///{tmp_path / 'study.db'}"
    run_sweep(**quick, trials=2, storage=address)
    record = run_sweep(**quick, trials=3, storage=address)
    assert len(record["trials"]) == 3
    assert not (quick["out"] / "journal.log").exists()
    with pytest.raises(cl.ConformalError, match="sweep --storage: expected a storage of Optuna"):
        run_sweep(**quick, storage="nonsense")
    (quick["out"] / "journal.log").write_text("no journal\n")
    with pytest.raises(cl.ConformalError, match=r"sweep, .*journal.log: expected a storage"):
        run_sweep(**quick)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "sweep --trials: expected a value greater than 0, got 0"),
        ({"max_epochs": 51}, "sweep --max-epochs: expected at most 50, got 51"),
        ({"validation": 0.0}, "sweep --validation: expected a value greater than 0"),
        ({"subset": 9000}, "subset: expected an integer from 1 to 4500, got 9000"),
    ],
)
def test_wrong_options_are_refused(
    quick: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        run_sweep(**quick, **options)
    assert not quick["out"].exists()


def test_sweep_on_the_command_line(
    quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: False)
    words = ["sweep", "LeNet", "digits", "--trials", "2", "--out", str(quick["out"])]
    assert run_command(*words) == 0
    assert "best: trial" in capsys.readouterr().out.splitlines()[-1]


CONFIG = make_config(network="LeNetCL", dataset="digits", epochs=20)


@pytest.mark.parametrize(
    ("dataset", "images", "is_paper"),
    [("mnist", 54000, True), ("mnist", 4095, False), ("digits", 1212, False), ("digits", 3, False)],
)
def test_space_fits_the_training_images(dataset: str, images: int, is_paper: bool) -> None:
    space: Any = fitting_space(dataset, images, 20)
    sizes, rates = space["batch_size"], space["learning_rate"]
    assert sizes.low <= sizes.high <= images
    assert rates.log != is_paper
    assert ((sizes.low, sizes.high) == paper.BATCH_SIZES) == is_paper
    assert space["epochs"] == IntDistribution(10, 20)


def test_own_space_has_the_types_of_the_options() -> None:
    texts = ["batch-size=4:16:log", "learning_rate=0.1:1", "alpha=young,2", "centre=true,false"]
    assert parse_space([*texts, "momentum=0:0.9"], CONFIG) == {
        "batch_size": IntDistribution(4, 16, log=True),
        "learning_rate": FloatDistribution(0.1, 1.0),
        "alpha": CategoricalDistribution(("young", 2.0)),
        "centre": CategoricalDistribution((True, False)),
        "momentum": FloatDistribution(0.0, 0.9),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate=1:0.1", "sweep --space: expected NAME=LOW:HIGH"),
        ("weight_decay=0:1:log", "sweep --space: expected NAME=LOW:HIGH"),
        ("optimizer=adam:sgd", "sweep --space: expected NAME=LOW:HIGH"),
        ("learning_rat=0.1:1", 'Did you mean "learning_rate"'),
        ("classes=2,3", "sweep --space: expected one of"),
        ("learning_rate=-1:1", "train --learning-rate: expected a value greater than 0, got '-1'"),
        ("batch_size=1.5:4", "train --batch-size: expected a valid integer"),
        ("optimizer=adam,nadam", "train --optimizer: expected 'adam'"),
        ("epochs=5:30", "at most 20 epochs, as --max-epochs says, got 30"),
        ("preset=micro", "train --preset: expected no such option for LeNetCL"),
    ],
)
def test_wrong_space_is_refused(text: str, message: str) -> None:
    with pytest.raises(cl.ConformalError) as caught:
        parse_space([text], CONFIG)
    assert message in str(caught.value)
