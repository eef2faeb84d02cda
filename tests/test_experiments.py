"""The paper's experiments: its numbers as printed, cells that resume, times and memory that add up."""

from __future__ import annotations

import functools
import json
import shlex
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import conformallayers as cl
from conformallayers.cli import app as cli
from conformallayers.lab.data import catalogue
from conformallayers.lab.data.datasets import load
from conformallayers.lab.experiments import batchsize, depth, inference, paper, records
from conformallayers.lab.experiments.accuracy import accuracy_table, chosen, config_of, run_accuracy
from conformallayers.lab.experiments.batchsize import run_batches
from conformallayers.lab.experiments.depth import run_depth
from conformallayers.lab.experiments.paper import Variant
from conformallayers.lab.training import checkpoint, evaluate
from conformallayers.lab.training.train import Stopped
from conformallayers.utils import memory

QUIET = Console(quiet=True)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        cli.main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)


# -- what the paper says ----------------------------------------------------------------------------

# Copied from the source of the paper and of its supplement.
PRINTED = {
    "BaseLinearNet": r"""92.12\% & 82.19\% & 40.50\%
        Batch size & 2868 & 3111 & 2198 \\
        Epochs & 44 & 15 & 41 \\
        Learning rate & 0.02039 & 0.05305 & 0.09827 \\
        Optimizer & Adam & Adam & Adam \\""",
    "BaseReLUNet": r"""97.24\% & 85.90\% & 49.47\%
        Batch size & 2838 & 3277 & 3677 \\
        Epochs & 50 & 48 & 21 \\
        Learning rate & 0.090331 & 0.08607 & 0.01 \\
        Optimizer & Adam & Adam & RMSprop \\""",
    "BaseReSProNet": r"""94.29\% & 84.01\% & 41.86\%
        Batch size & 2429 & 2339 & 3056\\
        Epochs & 50 & 45 & 19\\
        Learning rate & 0.7699 & 0.5601 & 0.4542 \\
        Optimizer & Adam & Adam & Adam \\""",
    "LeNet": r"""98.87\% & 90.13\% & 59.05\%
        Batch size & 2979 & 2444 & 2317 \\
        Epochs$^\dagger$ & 200 & 200 & 200 \\
        Learning rate & 0.004722 & 0.012 & 0.00159 \\
        Optimizer & RMSprop & Adam & RMSprop \\""",
    "LeNetCL": r"""97.33\% & 89.12\% & 53.27\%
        Batch size & 2088 & 2763 & 3595 \\
        Epochs$^\dagger$ & 200 & 200 & 200 \\
        Learning rate & 0.02 & 0.02302 & 0.01991\\
        Optimizer & Adam & Adam & Adam \\""",
}


def test_cells_are_those_of_the_paper() -> None:
    assert len(paper.CELLS) == 15
    for name, text in PRINTED.items():
        first, *others = text.replace("\\", "").replace("%", "").splitlines()
        columns = [[float(cell) / 100 for cell in first.split("&")]]
        columns += [[cell.strip().lower() for cell in line.split("&")[1:]] for line in others]
        cells = [cell for cell in paper.CELLS if cell.network == name]
        assert tuple(cell.dataset for cell in cells) == paper.DATASETS
        for cell, (accuracy, *setting) in zip(cells, zip(*columns, strict=True), strict=True):
            assert cell.accuracy == pytest.approx(accuracy, abs=1e-12)
            assert [str(value) for value in cell.setting.values()] == setting
            config_of(cell, None, 0)


@pytest.mark.parametrize("name", paper.VARIANTS)
def test_every_variant_is_a_setting_that_train_takes(name: str) -> None:
    meant = [c for number in (1, 2) for c in paper.CELLS if c.experiment == number]
    networks = paper.VARIANTS[name].networks
    for cell in meant:
        if networks is None or cell.network in networks:
            assert config_of(cell, name, 1) != config_of(cell, None, 1)


def test_variant_puts_the_options_of_a_cell_last() -> None:
    variant = Variant({"epochs": 3}, {"alpha": "spectral"}, {"LeNetCL-mnist": {"epochs": 4}})
    settings = {cell.name: variant.setting(cell) for cell in paper.CELLS}
    assert settings["LeNetCL-mnist"]["epochs"] == 4
    assert settings["LeNetCL-cifar10"]["epochs"] == 3
    with_alpha = {name for name, setting in settings.items() if "alpha" in setting}
    assert with_alpha == {c.name for c in paper.CELLS if c.network in ("BaseReSProNet", "LeNetCL")}


# -- experiments 1 and 2 ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some digits under the names of MNIST's files."""
    root = tmp_path_factory.mktemp("data")
    (root / "mnist").mkdir()
    full = load("digits")
    pictures = full.train_images[:180, 0].repeat_interleave(3, 1).repeat_interleave(3, 2)
    pictures = np.pad(pictures.numpy(), ((0, 0), (2, 2), (2, 2)))
    parts = {"train": slice(0, 120), "t10k": slice(120, 180)}
    for name in catalogue.LAYOUTS["mnist"][0].checksums:
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
    (row,) = run_accuracy(2, cells=["LeNetCL-mnist"], seed=2, **tiny)
    words = shlex.split(row["command"])
    assert words[:4] == ["conformallayers", "train", "LeNetCL", "mnist"]
    assert str(data_root) not in words
    monkeypatch.setenv("CONFORMALLAYERS_DATA", str(data_root))
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: False)
    assert run(*words[1:], "--out", "other") == 0
    other = json.loads(Path("other/result.json").read_text())
    assert (other["accuracy"], other["loss"]) == (row["accuracy"], row["loss"])
    assert Path("results/accuracy/LeNetCL-mnist-tiny-seed2.json").exists()


def test_interrupted_cell_goes_on(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**tiny, "cells": ["LeNet-mnist"]}
    (whole,) = run_accuracy(2, **options, runs=Path("a"), out=Path("b"))
    save, saved = checkpoint.save, []

    def stopping(path: Path, model: Any, optimizer: Any, state: dict[str, Any]) -> None:
        save(path, model, optimizer, state)
        saved.append(state["epoch"])
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
    cells = {"LeNet-mnist": {"optimizer": "sgd", "learning_rate": 1e30}}
    monkeypatch.setitem(
        paper.VARIANTS, "tiny", Variant({"epochs": 1, "batch_size": 40}, cells=cells)
    )
    message = (
        "every cell trained, got the errors above in LeNet-mnist-tiny, LeNet-cifar10-tiny, "
        "LeNetCL-cifar10-tiny. Do what they say, then repeat the command"
    )
    with pytest.raises(cl.ConformalError, match=message):
        run_accuracy(2, dataset=["mnist", "cifar10"], **tiny)
    assert [path.stem for path in Path("results/accuracy").iterdir()] == ["LeNetCL-mnist-tiny"]


def test_finished_cell_of_another_setting_is_refused(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**tiny, "cells": ["LeNet-mnist"]}
    run_accuracy(2, **options)
    path = Path("results/accuracy/LeNet-mnist-tiny.json")
    monkeypatch.setitem(paper.VARIANTS, "tiny", Variant({"epochs": 1}))
    with pytest.raises(cl.ConformalError, match="--again"):
        run_accuracy(2, **options)
    path.write_text("[]")
    with pytest.raises(cl.ConformalError, match="the row of a cell, got another file"):
        run_accuracy(2, **options)


def test_table_has_the_paper_beside_the_measured() -> None:
    row = {"network": "LeNet", "dataset": "mnist", "variant": None, "epochs": 200}
    text = accuracy_table([{**row, "accuracy": 0.99, "paper_accuracy": 0.9887}])
    assert text.splitlines()[-1].split()[-5:] == ["98.87", "%", "99.00", "%", "+0.13"]


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (1, {"network": ["LeNet"]}, "experiment 1 --network: expected one of BaseLinearNet, .*"),
        (2, {"dataset": ["svhn"]}, "--dataset: expected one of mnist, .*, got 'svhn'"),
        (2, {"cells": ["LeNet"]}, "--cells: expected one of LeNet-mnist, .*, got 'LeNet'"),
        (2, {"variant": "best"}, "--variant: expected one of better, .*, got 'best'"),
        (2, {"variant": "stride1"}, "expected at least one cell"),
        (2, {"cells": ["LeNet-mnist"], "dataset": ["cifar10"]}, "expected at least one cell"),
    ],
)
def test_names_that_an_experiment_has_not_are_refused(
    number: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        chosen(number, **options)


def test_experiment_on_the_command_line(
    tiny: dict[str, Any],
    data_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: False)
    words = ["--cells", "LeNet-mnist", "LeNetCL-mnist", "--variant", "tiny", "--no-check"]
    assert run("experiment", 2, *words, "--data-root", data_root, "--out", "rows") == 0
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
    assert run("experiment", 1, "--cells", "LeNet-mnist") == 1
    assert "experiment 1 --cells: expected one of" in capsys.readouterr().err


def test_memory_is_kept_unless_the_environment_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(name: int, value: int) -> int:
            calls.append((name, value))
            return 1

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(memory.sys, "platform", "linux")
    for name in memory._SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert memory.keep_freed_memory()
    assert calls == [(-1, 2**31 - 1), (-3, 2**30)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert not memory.keep_freed_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.keep_freed_memory()


# -- experiments 3 and 4 ----------------------------------------------------------------------------


def test_depths_are_written_one_by_one_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch": 2, "executions": 5, "strategy": "layers", "out": tmp_path}
    options["say"] = lambda line: None
    with monkeypatch.context() as patch:
        patch.setattr(records, "commit", lambda: "a" * 40)
        run_depth(depths=[2], **options)
    monkeypatch.setattr(records, "commit", lambda: "b" * 40)
    measured = []
    original = depth.measured

    def counting(k: int, *arguments: Any) -> dict[str, Any]:
        measured.append(k)
        if k == 3:
            raise KeyboardInterrupt
        return original(k, *arguments)

    monkeypatch.setattr(depth, "measured", counting)
    with pytest.raises(KeyboardInterrupt, match=r"2 depths kept. To go on: .* --resume$"):
        run_depth(depths=[1, 2, 3], resume=True, **options)
    assert measured == [1, 3]
    names = {"times.json", "times.csv", "figure.png", "figure.svg"}
    assert {path.name for path in tmp_path.iterdir()} == names
    record = json.loads((tmp_path / "times.json").read_text())
    assert [row["depth"] for row in record["rows"]] == [1, 2]
    assert set(record["rows"][0]["milliseconds"]) == {depth.RELU, depth.LAYERS, depth.FOLDED}
    for row in record["rows"]:
        assert row["fold_error"] < cl.testing.TOLERANCES[torch.float32]
        for times in row["milliseconds"].values():
            assert 0 < times["low"] <= times["median"] <= times["high"]
    first, _, second = record["command"].partition(" && ")  # together they give these rows
    assert (
        first
        == "conformallayers experiment 3 --batch 2 --executions 5 --seed 0 --strategy layers --depths 2"
    )
    assert second == first.removesuffix("2") + "1 2 3 --resume"
    assert record["commit"] == f"{'a' * 40}, {'b' * 40}"
    kept = run_depth(depths=[1, 2], resume=True, **options)
    again = run_depth(depths=[1, 2], resume=True, **options)
    assert kept == again
    header, *lines = (tmp_path / "times.csv").read_text().splitlines()
    assert "milliseconds DkNet median" in header
    assert len(lines) == 2
    with pytest.raises(cl.ConformalError, match="--resume, --batch: expected 2 as before, got 3"):
        run_depth(resume=True, **{**options, "batch": 3})
    with pytest.raises(cl.ConformalError, match="--resume, --threads: expected None as before"):
        run_depth(resume=True, threads=1, **options)
    with pytest.raises(cl.ConformalError, match="experiment 3 --depths: expected whole numbers"):
        run_depth(depths=[0], **options)


def grows(path: str, batch: int, **options: Any) -> dict[str, Any]:
    """A machine that needs a megabyte for each image and 100 for those of the ReLU network."""
    each = 100 if path == inference.RELU else 1
    if each * batch > 20_000:
        return {"path": path, "batch": batch, "failed": "MemoryError"}
    times = {"median": float(batch), "low": float(batch), "high": float(batch)}
    row = {"path": path, "batch": batch, "milliseconds": times, "executions": 1}
    return {**row, "peak_bytes": each * batch * 10**6}


def test_batches_fill_the_table_and_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchsize, "available", lambda: 10**10)
    options: dict[str, Any] = {"strategies": ["layers"], "out": tmp_path, "say": lambda line: None}
    record = run_batches(memory="1GB", measure=grows, **options)
    sizes: dict[str, list[int]] = {}
    for row in record["rows"]:
        sizes.setdefault(row["path"], []).append(row["batch"])
    assert list(sizes) == [inference.RELU, inference.LAYERS, inference.FOLDED + "layers"]
    assert sizes[inference.RELU] == [1, 2, 4, 8, 16, 32]  # 64 images would be over 6 of 10 GB
    assert sizes[inference.LAYERS][-1] == 4096
    assert [row["largest_batch"] for row in record["limits"]] == [10, 1000, 1000]
    names = {"batches.json", "batches.csv", "figure.png", "figure.svg"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "batches.json").read_text()) == record

    def never(path: str, batch: int, **options: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    again = run_batches(batches=[2, 8], memory="1GB", measure=never, resume=True, **options)
    assert again["rows"] == record["rows"]
    with pytest.raises(KeyboardInterrupt, match=r"rows kept. To go on: .* --resume$"):
        run_batches(batches=[3], measure=never, resume=True, **options)
    with pytest.raises(cl.ConformalError, match="expected batches, executions and seconds > 0"):
        run_batches(batches=[0], **options)
    with pytest.raises(cl.ConformalError, match=r"--strategies: expected one of auto, .*'magic'"):
        run_batches(measure=never, **{**options, "strategies": ["magic"]})


@given(st.integers(0, 5000), st.integers(1, 300))
def test_bisection_ends_beside_the_budget(limit: int, first: int) -> None:
    found = batchsize.largest_within(limit, lambda batch: batch, first, most=4000)
    assert found <= min(limit, 4000) <= found + max(1, found // 64)


def test_process_of_its_own_weighs_the_batch_alone() -> None:
    row = inference.measure_alone(inference.LAYERS, 200, executions=2, seconds=9.0, threads=1)
    assert row["executions"] == 2
    # The batch has 2.3 MiB, the output of the first convolution 22 MiB; torch itself 200 and more.
    assert 20 * 2**20 < row["peak_bytes"] < 100 * 2**20
    failed = inference.measure_alone(inference.FOLDED + "magic", 1, executions=1, seconds=1.0)
    assert "magic" in failed["failed"]


@pytest.mark.parametrize("text", ["", "GiB", "4 apples", "-1GiB", "0", "4GiBB", "1e3"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(cl.ConformalError, match="--memory: expected a size such as 4GiB"):
        run_batches(memory=text)


def test_record_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text("[]")
    with pytest.raises(cl.ConformalError, match="expected a record, got another file"):
        run_depth(resume=True, out=tmp_path)
