"""Experiments 1 and 2: cells that resume, rows, and the table."""

from __future__ import annotations

import functools
import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import conformallayers as cl
from conformallayers.lab.data.datasets import load
from conformallayers.lab.experiments import paper
from conformallayers.lab.experiments.accuracy import cells, run_accuracy
from conformallayers.lab.experiments.records import Row
from conformallayers.lab.options import AccuracyOptions
from conformallayers.lab.training import evaluate, run_folder
from conformallayers.lab.training.config import make_config, resolved
from datafiles import NAMES, idx
from support import run_command, stops_after


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some digits under the names of MNIST's files."""
    root = tmp_path_factory.mktemp("data")
    (root / "mnist").mkdir()
    full = load("digits")
    pictures = full.train_images[:180, 0].repeat_interleave(3, 1).repeat_interleave(3, 2)
    pictures = np.pad(pictures.numpy(), ((0, 0), (2, 2), (2, 2)))
    parts = {"train": slice(0, 120), "t10k": slice(120, 180)}
    for name in NAMES:
        part = parts[name.partition("-")[0]]
        array = pictures[part] if "images" in name else full.train_labels[part].numpy()
        (root / "mnist" / name).write_bytes(idx(array))
    return root


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A quick variant in a folder of its own."""
    options = {"epochs": 3, "batch_size": 40, "learning_rate": 0.01, "optimizer": "adam"}
    monkeypatch.setitem(paper.VARIANTS, "tiny", options)
    monkeypatch.chdir(tmp_path)
    # Matrices take seconds to build.
    monkeypatch.setattr(evaluate, "fold", functools.partial(cl.fold, strategy="layers"))


def run(number: int, data_root: Path, *dataset: str, **options: Any) -> list[Row]:
    places: Any = {"data_root": data_root, "verify": False, "dataset": dataset or ("mnist",)}
    chosen = AccuracyOptions(variant=("tiny",), **places, **options)
    return run_accuracy(number, chosen, console=Console(quiet=True))


def test_experiment_keeps_a_row_for_each_cell(data_root: Path) -> None:
    rows = run(1, data_root)
    assert [row["network"] for row in rows] == list(paper.NETWORKS[1])
    record = json.loads(Path("results/accuracy/accuracy.json").read_text())
    assert record["rows"] == rows
    assert [(row["variant"], row["seed"], row["epochs"]) for row in rows] == [("tiny", 0, 3)] * 3
    names = {f"{name}-mnist-tiny-seed0" for name in paper.NETWORKS[1]}
    assert {path.name for path in Path("runs").iterdir()} == names
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.*")}
    assert run(1, data_root) == rows
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.*")} == before


def test_command_of_a_row_gives_the_same_cell(
    data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(paper.NETWORKS, 2, ("LeNetCL",))
    rows = run(2, data_root, seed=(2, 3))
    row, a, b = rows[0], *(100 * row["accuracy"] for row in rows)
    assert cells(rows)[1][0][-3] == "97.33 %"
    assert cells(rows)[1][0][-1] == f"{(a + b) / 2 - 97.33:+.2f}"
    assert cells(rows)[1][0][-2] == f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f} %"
    words = shlex.split(row["command"])
    assert words[:4] == ["conformallayers", "train", "LeNetCL", "mnist"]
    assert str(data_root) not in words
    monkeypatch.setenv("CONFORMALLAYERS_DATA", str(data_root))
    assert run_command(*words[1:], "--out", "other") == 0
    assert json.loads(Path("other/result.json").read_text())["accuracy"] == row["accuracy"]


def test_interrupted_cell_goes_on(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paper.NETWORKS, 2, ("LeNet",))
    stopping = stops_after(2, run_folder.save_checkpoint)
    monkeypatch.setattr(run_folder, "save_checkpoint", stopping)
    with pytest.raises(KeyboardInterrupt, match=r"0 rows kept\. To go on, repeat the command\.$"):
        run(2, data_root)
    run(2, data_root)  # begun anew, it would stop again


def test_cell_that_fails_does_not_stop_the_others(
    data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "every row measured, got the errors above in 2 rows"
    with pytest.raises(cl.ConformalError, match=message):
        run(2, data_root, "mnist", "cifar10")
    told = capsys.readouterr().out
    assert all(f"{name}, cifar10, tiny, 0: dataset" in told for name in ("LeNet", "LeNetCL"))
    rows = json.loads(Path("results/accuracy/accuracy.json").read_text())["rows"]
    assert [row["network"] for row in rows] == ["LeNet", "LeNetCL"]


@pytest.mark.parametrize("name", paper.VARIANTS)
def test_every_variant_is_a_setting_that_train_takes(name: str) -> None:
    for network, dataset in product(["BaseReLUNet", "BaseReSProNet"], paper.DATASETS):
        names = {"network": network, "dataset": dataset}
        make_config(**resolved({**names, **paper.VARIANTS[name]}))
