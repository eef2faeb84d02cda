"""Experiment 5: runs that are taken over, rows that are kept, times, table and figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import conformallayers as cl
from conformallayers.lab.data import datasets
from conformallayers.lab.experiments import cost
from conformallayers.lab.experiments.cost import (
    NETWORKS,
    cells,
    config_of,
    front_figure,
    named,
    run_cost,
)
from conformallayers.lab.training.evaluate import accuracy
from conformallayers.lab.training.saved_models import load_model
from conformallayers.networks.stages import PRESETS
from runs import few_digits
from support import run_command
from training import QUIET

NAMES = ("LeNet", "StageNet-micro", "StageReLUNet-micro-average")
OPTIONS: dict[str, Any] = {"dataset": "digits", "epochs": 1, "only": NAMES, "console": QUIET}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and few images under the name of digits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load", lambda *names, **options: few_digits())
    return tmp_path


def test_rows_are_trained_measured_and_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    lines: list[str] = []
    record = run_cost(**OPTIONS, seeds=(0,), say=lines.append)
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == list(NAMES)
    for name, row in rows.items():
        result = json.loads((here / "runs" / f"{name}-digits-seed0" / "result.json").read_text())
        assert row["accuracy"] == result["accuracy"]
        assert row["error"] < 5e-6
        assert row["command"].startswith(f"conformallayers train {name.partition('-')[0]} digits")
    twin, stage = rows["StageReLUNet-micro-average"], rows["StageNet-micro"]
    assert twin["multiply_adds"] == stage["multiply_adds"] == 424_968
    assert rows["LeNet"]["weights"] == 62_006
    assert len(lines) == 3

    # The runs are there: only the second seed of one network is trained.
    names: list[str] = []
    original = cost.train
    monkeypatch.setattr(cost, "train", lambda **o: (names.append(o["network"]), original(**o)))
    again = run_cost(**OPTIONS, seeds=(0,), resume=False, say=lines.append)
    assert again["rows"] == record["rows"]
    more = run_cost(**{**OPTIONS, "only": ("LeNet",)}, seeds=(0, 1), say=lines.append)
    assert names == ["LeNet"]
    assert [(row["name"], row["seed"]) for row in more["rows"]][-1] == ("LeNet", 1)

    times = run_cost(**OPTIONS, measure=True, executions=3, say=lines.append)
    ratios = {(row["name"], row["batch"]): row["ratio"] for row in times["rows"]}
    assert set(ratios) == {(name, batch) for name in NAMES for batch in (1, 64)}
    assert ratios["LeNet", 1] == ratios["LeNet", 64] == 1.0
    assert names == ["LeNet"]
    folder = here / "results/experiment5"

    # Times are written together: a stop between two batch sizes leaves the earlier ones.
    before, original = (folder / "digits-times.json").read_bytes(), cost.interleave
    calls = iter([original])
    monkeypatch.setattr(cost, "interleave", lambda *values: next(calls)(*values))
    with pytest.raises(StopIteration):
        run_cost(**OPTIONS, measure=True, executions=3, resume=False, say=lines.append)
    assert (folder / "digits-times.json").read_bytes() == before
    table = (folder / "digits.md").read_text()
    assert all(table.count(f"\n| {name} |") == 1 for name in NAMES)
    assert "425 k" in table
    assert f"| {ratios['StageNet-micro', 64]} |" in (folder / "digits-times.md").read_text()
    assert [path.name for path in folder.glob("*.safetensors")] == [
        "StageNet-micro-digits.safetensors"
    ]
    shipped = cl.load(folder / "StageNet-micro-digits.safetensors")
    images, labels = few_digits().test_images, few_digits().test_labels
    assert accuracy(shipped, images, labels) == rows["StageNet-micro"]["accuracy"]
    found = load_model(folder / "StageNet-micro-digits.safetensors", "test")
    assert found.about["dataset"] == "digits"
    assert found.labels is not None


def test_what_is_not_trained_is_not_timed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("experiment", "5", "--dataset", "digits", "--measure", "--only", "MLP")
    assert run_command(*words) == 1
    assert "a finished run in runs/LeNet-digits-seed0, got none" in capsys.readouterr().err


def test_a_failed_run_does_not_stop_the_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: Any) -> None:
        raise cl.ConformalError("no data")

    monkeypatch.setattr(cost, "train", broken)
    lines: list[str] = []
    with pytest.raises(cl.ConformalError, match="in LeNet, 0; StageNet-micro, 0"):
        run_cost(**{**OPTIONS, "only": NAMES[:2]}, seeds=(0,), say=lines.append)
    assert lines == [f"{name}, 0: no data" for name in NAMES[:2]]


def row(name: str, accuracy: float, **others: Any) -> dict[str, Any]:
    basic = {"name": name, "seed": 0, "accuracy": accuracy, "multiply_adds": 10_000}
    return {**basic, "weights": 2000, "error": 1e-7, "seconds": 10.0, "ablation": False, **others}


def test_seeds_are_one_line_of_the_table() -> None:
    rows = [row("LeNet", 0.7), row("LeNet", 0.72, seed=1, error=3e-7), row("MLP", 0.5)]
    header, lines = cells(rows, [{"name": "MLP", "batch": 64, "ratio": 0.512}])
    assert len(header) == 8
    assert lines == [
        ["LeNet", "71.00 ± 1.41 %", "70.00, 72.00", "10 k", "2 k", "3.0e-07", "", ""],
        ["MLP", "50.00 %", "50.00", "10 k", "2 k", "1.0e-07", "", "0.51"],
    ]


def test_long_runs_have_one_seed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(one: Any, seed: int, *rest: Any) -> dict[str, Any]:
        return row(one.name, 0.5, seed=seed, seconds=3600.0 if one.name == "LeNet" else 60.0)

    monkeypatch.setattr(cost, "train_and_measure", quick)
    done = run_cost(**{**OPTIONS, "only": ("LeNet", "MLP")}, say=lambda line: None)["rows"]
    seeds = [(found["name"], found["seed"]) for found in done]
    assert seeds == [("LeNet", 0), ("MLP", 0), ("MLP", 1), ("MLP", 2)]


def test_figure_shows_every_network() -> None:
    rows = [row("LeNet", 0.7), row("StageNet-micro", 0.8, multiply_adds=5000)]
    rows.append(row("StageReLUNet-micro-max", 0.75))
    figure = front_figure(rows)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert {text.get_text() for text in axes.texts} == {"LeNet", "micro", "micro-max"}
    (legend,) = figure.legends  # names what is there, below the points
    kinds = ["StageNet", "ReLU twin", "others"]
    assert [text.get_text() for text in legend.get_texts()] == kinds
    assert axes.get_ylim()[1] <= 100
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0


def test_all_have_one_budget_and_can_be_built() -> None:
    assert len(NETWORKS) == 4 + 3 * len(PRESETS) + 2 * (2 + 4 + 2) + 1
    configs = [config_of(one, "cifar10", seed=2) for one in NETWORKS.values()]
    budgets = {(c.epochs, c.batch_size, c.flips, c.shift, c.optimizer, c.centre) for c in configs}
    assert len(budgets) == 1
    assert {config.seed for config in configs} == {2}
    for config in configs:
        config.build()


def test_conformal_options_of_a_preset_are_kept() -> None:
    config = config_of(NETWORKS["LeNetCL"], "cifar10", 0, epochs=3)
    assert (config.projective, config.epochs) == (True, 3)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match='Did you mean "StageNet-micro"'):
        named("experiment 5 --only", ["StageNet-mikro"])
