"""Experiments 1 and 2: cells that resume, rows, and the table."""

from __future__ import annotations

import functools
import io
import json
import shlex
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from rich.console import Console

import conformallayers as cl
from conformallayers.lab.data import catalogue
from conformallayers.lab.data.datasets import load
from conformallayers.lab.experiments import paper
from conformallayers.lab.experiments.accuracy import accuracy_table, run_accuracy, select_cells
from conformallayers.lab.experiments.paper import Variant
from conformallayers.lab.training import checkpoint, evaluate
from conformallayers.lab.training.train import Stopped
from conformallayers.utils import memory
from support import run_command

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some digits under the names of MNIST's files."""
    root = tmp_path_factory.mktemp("data")
    (root / "mnist").mkdir()
    full = load("digits")
    pictures = full.train_images[:180, 0].repeat_interleave(3, 1).repeat_interleave(3, 2)
    pictures = np.pad(pictures.numpy(), ((0, 0), (2, 2), (2, 2)))
    parts = {"train": slice(0, 120), "t10k": slice(120, 180)}
    for name in catalogue.LAYOUTS["mnist"].checksums:
        part = parts[name.partition("-")[0]]
        array = pictures[part] if "images" in name else full.train_labels[part].numpy()
        header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (root / "mnist" / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return root


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data_root: Path) -> dict[str, Any]:
    """The options of a quick experiment in a folder of its own."""
    options = {"epochs": 3, "batch_size": 40, "learning_rate": 0.01, "optimizer": "adam"}
    monkeypatch.setitem(paper.VARIANTS, "tiny", Variant(options))
    monkeypatch.chdir(tmp_path)
    # Matrices take seconds to build: tests/test_train.py has them.
    monkeypatch.setattr(evaluate, "fold", functools.partial(cl.fold, strategy="layers"))
    return {"variant": "tiny", "data_root": data_root, "verify": False, "console": QUIET}


FIELDS = "network dataset accuracy epochs batch_size learning_rate optimizer seed alpha projective"
FIELDS += " seconds command commit paper_accuracy pool_stride variant experiment"


def test_experiment_writes_a_row_for_each_cell_and_then_skips_it(tiny: dict[str, Any]) -> None:
    rows = run_accuracy(1, dataset=["mnist"], **tiny)
    names = [f"{name}-mnist-tiny" for name in paper.NETWORKS[1]]
    assert sorted(path.stem for path in Path("results/accuracy").iterdir()) == sorted(names)
    assert sorted(path.name for path in Path("runs").iterdir()) == sorted(names)
    for name, row in zip(names, rows, strict=True):
        assert row == json.loads(Path(f"results/accuracy/{name}.json").read_text())
        assert set(FIELDS.split()) <= set(row)
        assert (row["pool_stride"], row["epochs"]) == (2, 3)
    assert [row["paper_accuracy"] for row in rows] == [0.9212, 0.9724, 0.9429]
    assert [row["alpha"] for row in rows] == [None, None, "young"]
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*.*")}
    assert run_accuracy(1, dataset=["mnist"], **tiny) == rows
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*.*")} == before


def test_command_of_a_row_gives_the_same_cell(
    tiny: dict[str, Any], data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run_accuracy(2, network=["LeNetCL"], dataset=["mnist"], seed=(2, 3), **tiny)
    row, a, b = rows[0], *(100 * row["accuracy"] for row in rows)
    assert f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f} %" in accuracy_table(rows)
    words = shlex.split(row["command"])
    assert words[:4] == ["conformallayers", "train", "LeNetCL", "mnist"]
    assert str(data_root) not in words
    monkeypatch.setenv("CONFORMALLAYERS_DATA", str(data_root))
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: False)
    assert run_command(*words[1:], "--out", "other") == 0
    other = json.loads(Path("other/result.json").read_text())
    assert (other["accuracy"], other["loss"]) == (row["accuracy"], row["loss"])
    assert Path("results/accuracy/LeNetCL-mnist-tiny-seed2.json").exists()


def test_interrupted_cell_goes_on(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**tiny, "network": ["LeNet"], "dataset": ["mnist"]}
    (whole,) = run_accuracy(2, **options, runs=Path("a"), out=Path("b"))
    save, saved = checkpoint.save, []

    def stopping(path: Path, model: Any, optimizer: Any, state: Any) -> None:
        save(path, model, optimizer, state)
        saved.append(state.epoch)
        if saved == [1, 2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", stopping)
    with pytest.raises(Stopped, match=r"LeNet-mnist-tiny: .* To go on, repeat the command\.$"):
        run_accuracy(2, **options)
    (row,) = run_accuracy(2, **options)
    assert saved == [1, 2, 3]
    assert row["loss"] == whole["loss"]
    assert run_accuracy(2, **options, again=True)[0]["loss"] == whole["loss"]
    assert saved == [1, 2, 3, 1, 2, 3]


def test_cell_that_fails_does_not_stop_the_others(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(paper.VARIANTS, "tiny", Variant({"epochs": 1, "batch_size": 40}))
    message = (
        "every cell trained, got the errors above in LeNet-cifar10-tiny, "
        "LeNetCL-cifar10-tiny. Do what they say, then repeat the command"
    )
    with pytest.raises(cl.ConformalError, match=message):
        run_accuracy(2, dataset=["mnist", "cifar10"], **tiny)
    names = {path.stem for path in Path("results/accuracy").iterdir()}
    assert names == {"LeNet-mnist-tiny", "LeNetCL-mnist-tiny"}


def test_finished_cell_of_another_setting_is_refused(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    options = {
        **tiny,
        "network": ["LeNet"],
        "dataset": ["mnist"],
        "console": Console(file=said, width=400),
    }
    run_accuracy(2, **options)
    monkeypatch.setitem(paper.VARIANTS, "tiny", Variant({"epochs": 1}))
    with pytest.raises(cl.ConformalError, match="every cell trained"):
        run_accuracy(2, **options)
    assert ". Train it --again, or name another --out." in said.getvalue()
    Path("results/accuracy/LeNet-mnist-tiny.json").write_text("[]")
    with pytest.raises(cl.ConformalError, match="every cell trained"):
        run_accuracy(2, **options)
    assert "a record in JSON, got another file" in said.getvalue()


def test_table_has_the_paper_beside_the_measured() -> None:
    row = {"network": "LeNet", "dataset": "mnist", "variant": None, "epochs": 200}
    text = accuracy_table([{**row, "accuracy": 0.99, "paper_accuracy": 0.9887}])
    assert text.splitlines()[-1].split()[-5:] == ["98.87", "%", "99.00", "%", "+0.13"]


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (1, {"network": ["LeNet"]}, "experiment 1 --network: expected one of BaseLinearNet, .*"),
        (2, {"dataset": ["svhn"]}, "--dataset: expected one of mnist, .*, got 'svhn'"),
        (2, {"variant": "best"}, "--variant: expected one of better, .*, got 'best'"),
        (2, {"variant": "stride1"}, "expected at least one cell"),
    ],
)
def test_names_that_an_experiment_has_not_are_refused(
    number: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        select_cells(number, **options)


def test_experiment_on_the_command_line(
    tiny: dict[str, Any],
    data_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: False)
    words = [
        "--network",
        "LeNet",
        "LeNetCL",
        "--dataset",
        "mnist",
        "--variant",
        "tiny",
        "--no-check",
    ]
    assert run_command("experiment", 2, *words, "--data-root", data_root, "--out", "rows") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].split() == [
        "network",
        "dataset",
        "setting",
        "epochs",
        "paper",
        "here",
        "difference",
    ]
    assert [line.split()[0] for line in lines[-2:]] == ["LeNet", "LeNetCL"]
    assert len(list(Path("rows").iterdir())) == 2
    assert run_command("experiment", 1, "--network", "LeNet") == 1
    assert "experiment 1 --network: expected one of" in capsys.readouterr().err
