"""Experiment 5: runs that are taken over, rows that are kept, times, table and figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformallayers.lab.data import datasets
from conformallayers.lab.experiments import cost
from conformallayers.lab.experiments.cost import NETWORKS, config_of, run_cost
from conformallayers.lab.options import CostOptions
from training import QUIET, few_digits

NAMES = ("LeNet", "StageNet-micro", "StageReLUNet-micro-expanded")


def run(only: tuple[str, ...] = NAMES, **options: Any) -> dict[str, Any]:
    chosen = CostOptions(dataset="digits", epochs=1, only=only, **options)
    return run_cost(chosen, console=QUIET)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and few images under the name of digits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load", lambda *names, **options: few_digits())
    return tmp_path


def test_rows_are_trained_measured_and_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run()
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == list(NAMES)
    for name, row in rows.items():
        result = json.loads((here / "runs" / f"{name}-digits-seed0" / "result.json").read_text())
        assert row["accuracy"] == result["accuracy"]
        assert row["error"] < 5e-6
        assert row["command"].startswith(f"conformallayers train {name.partition('-')[0]} digits")
    twin, stage = rows["StageReLUNet-micro-expanded"], rows["StageNet-micro"]
    assert twin["multiply_adds"] == stage["multiply_adds"] == 424_968
    assert rows["LeNet"]["weights"] == 62_006

    # The runs are there: only the second seed of one network is trained.
    folder = here / "results/experiment5"
    (folder / "digits.json").unlink()
    names: list[str] = []
    original = cost.train
    monkeypatch.setattr(cost, "train", lambda **o: (names.append(o["network"]), original(**o)))
    assert run()["rows"] == record["rows"]
    more = run(("LeNet",), seeds=(0, 1))
    assert [(row["name"], row["seed"]) for row in more["rows"]][-1] == ("LeNet", 1)

    monkeypatch.setattr(cost, "_EXECUTIONS", 3)
    times = run(measure=True)
    ratios = {(row["name"], row["batch"]): row["ratio"] for row in times["rows"]}
    plain = [name.removesuffix("-expanded") for name in NAMES]
    assert set(ratios) == {(name, batch) for name in plain for batch in (1, 64)}
    assert ratios["LeNet", 1] == ratios["LeNet", 64] == 1.0
    assert names == ["LeNet"]
    table = (folder / "digits.md").read_text()
    assert all(table.count(f"\n| {name} |") == 1 for name in NAMES)
    assert "425 k" in table
    assert f"| {ratios['StageNet-micro', 64]} |" in (folder / "digits-times.md").read_text()
    assert (folder / "digits-times.png").exists()


def test_all_have_one_budget_and_can_be_built() -> None:
    configs = [config_of(name, "cifar10", seed=2) for name in NETWORKS]
    budgets = {(c.epochs, c.batch_size, c.flips, c.shift, c.optimizer, c.centre) for c in configs}
    assert len(budgets) == 1
    assert {config.seed for config in configs} == {2}
    for config in configs:
        config.build()
    config = config_of("LeNetCL", "cifar10", 0, epochs=3)
    assert (config.projective, config.epochs) == (True, 3)
