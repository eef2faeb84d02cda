"""Training runs: what they write, how they stop and resume, and the number of classes."""

from __future__ import annotations

import csv
import functools
import io
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training import evaluate, run_folder
from conformallayers.lab.training.config import make_config
from conformallayers.lab.training.saved_models import CHECKPOINT, load_model
from conformallayers.lab.training.train import train
from support import run_command, stops_after
from training import QUIET, assert_same_weights, source_environment

NETWORKS = [name for name in cl.networks.__all__ if name != "IMAGE_SHAPE"]

SPECTRAL = {"alpha": "spectral", "learning_rate": 3e-3, "batch_size": 300, "threads": 1}


def test_run_learns_and_both_paths_agree(finished: Any) -> None:
    assert finished.accuracy > 0.85
    assert finished.accuracy == finished.row["accuracy_folded"] == finished.row["accuracy_layers"]
    assert finished.history[-1]["loss"] < 0.5 < finished.history[0]["loss"]


def test_folder_holds_config_metrics_checkpoint_and_result(finished: Any) -> None:
    names = {path.name for path in finished.folder.iterdir()}
    assert names == {"config.json", "metrics.csv", "checkpoint.safetensors", "result.json"}
    row = json.loads((finished.folder / "result.json").read_text())
    assert row == finished.row
    wanted = "network dataset accuracy epochs batch_size learning_rate optimizer seed alpha"
    wanted += " projective seconds command commit torch threads pool_stride validation schedule"
    assert set((wanted + " weight_decay").split()) <= set(row)
    assert row["samples"] == {"train": 1212, "test": 450}
    config = make_config(**json.loads((finished.folder / "config.json").read_text()))
    assert (config.epochs, config.alpha) == (8, "spectral")
    with (finished.folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(r["epoch"]) for r in rows] == list(range(1, 9))
    assert float(rows[-1]["validation_accuracy"]) == row["accuracy_validation"]
    assert float(rows[3]["loss"]) == finished.history[3]["loss"]
    words = shlex.split(finished.row["command"])
    assert words[:4] == ["conformallayers", "train", "LeNetCL", "digits"]
    for flag, value in (("--learning-rate", "0.02"), ("--out", str(finished.folder))):
        assert words[words.index(flag) + 1] == value


def printed(tmp_path: Path, network: str, small: Dataset, **options: Any) -> list[str]:
    """Train without a terminal; return the lines that a health check has printed."""
    console = Console(file=io.StringIO(), width=60)
    options |= {"batch_size": 50, "warn": True}
    train(network, small, out=tmp_path / "run", console=console, **options)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    found = [index for index, line in enumerate(lines) if line.startswith("warning: ")]
    assert all(lines[0].startswith("epoch 1/") and index < 1 + len(found) for index in found)
    return [lines[index] for index in found]


def test_warnings_are_printed_once_behind_the_first_epoch(small: Dataset, tmp_path: Path) -> None:
    lines = printed(tmp_path, "LeNetCL", small, epochs=2)
    assert len(lines) == len(set(lines)) > 0
    (line,) = [line for line in lines if "no homogeneous map" in line]
    assert line.startswith("warning: features: no homogeneous map; ")
    assert line.endswith("docs/conformal-layers.md.")
    silent = train("LeNetCL", small, out=tmp_path / "b", console=QUIET, batch_size=50, epochs=2)
    assert_same_weights(tmp_path / "run", silent.folder)


@pytest.mark.parametrize("name", ["StageNet", "LeNet"])
def test_healthy_and_plain_networks_get_a_warning_of_few_steps_alone(
    name: str, small: Dataset, tmp_path: Path
) -> None:
    (line,) = printed(tmp_path, name, small, epochs=1)
    steps = -(-len(small.train_labels) // 50)
    assert (
        line
        == f"warning: only {steps} steps of the optimizer: lower --batch-size or raise --epochs"
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_trained_by_its_name_for_the_classes_of_the_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Matrices take seconds to build: tests/networks/test_paper.py has them.
    monkeypatch.setattr(evaluate, "fold", functools.partial(cl.fold, strategy="layers"))
    data, out = random_set(12), tmp_path / "run"
    depth = 2 if name.startswith("Dk") else None
    result = train(name, data, out=out, console=QUIET, epochs=1, depth=depth)
    assert result.model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 12)
    assert "classes" not in result.row["command"]
    assert result.row["accuracy_folded"] == result.row["accuracy_layers"]
    assert evaluate.evaluate(out, data)["layers"] == result.row["accuracy_layers"]
    with pytest.raises(cl.ConformalError, match="12 as before, got 10"):
        train(name, random_set(10), out=out, console=QUIET, epochs=1, depth=depth, resume=True)


def random_set(classes: int) -> Dataset:
    """Every class once, under the name of a set with other classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (classes, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.arange(classes)
    return Dataset("digits", images, labels, images, labels, classes)


def test_run_with_other_classes_folds(tmp_path: Path) -> None:
    result = train("LeNetCL", random_set(3), out=tmp_path / "run", console=QUIET, epochs=1)
    model = load_model(tmp_path / "run", "fold")
    assert model.labels is None  # those of digits are ten
    x = torch.rand(2, 1, 8, 8)
    folded = model.fold("fold")
    assert folded(x).shape == (2, 3)
    cl.save(folded, tmp_path / "fold.safetensors")
    found = evaluate.evaluate(tmp_path / "fold.safetensors", random_set(3))
    assert found["folded"] == result.accuracy
    with pytest.raises(cl.ConformalError, match=r"expected labels below 3, .*, got 9"):
        evaluate.evaluate(tmp_path / "run", random_set(10))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    train("LeNetCL", "digits", out=out, console=QUIET, epochs=6, **SPECTRAL)
    return out


# Waits for the blow in the middle of the fourth epoch.
WAITING = """
import time
from pathlib import Path
import torch
from conformallayers.cli.app import main
step, steps = torch.optim.Adam.step, 0
def slow_step(*arguments, **options):
    global steps
    steps += 1
    if steps == 18:
        Path("ready").touch()
        time.sleep(600)
    return step(*arguments, **options)
torch.optim.Adam.step = slow_step
main()
"""


@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_stopped_and_resumed_run_ends_in_the_same_bits(
    blow: signal.Signals, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [f"--{key.replace('_', '-')}={value}" for key, value in SPECTRAL.items()]
    words = ["train", "LeNetCL", "digits", "--out", "run", "--epochs", "6", *options]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *words], cwd=tmp_path, env=source_environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "ready").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(blow)
        _, message = process.communicate(timeout=300)
    finally:
        process.kill()
    assert len(run_folder.load_checkpoint(tmp_path / "run" / CHECKPOINT).history) == 3
    monkeypatch.chdir(tmp_path)
    if blow != signal.SIGKILL:
        assert process.returncode == 130
        start, _, resuming = message.strip().partition("To go on: ")
        assert start == "Interrupted after epoch 3 of 6. "
        assert resuming.endswith(" --resume")
        assert run_command(*shlex.split(resuming)[1:]) == 0
    else:
        assert process.returncode == -signal.SIGKILL
        result = train(
            "LeNetCL", "digits", out="run", resume=True, console=QUIET, epochs=6, **SPECTRAL
        )
        assert [row["epoch"] for row in result.history] == list(range(1, 7))
    assert_same_weights(tmp_path / "run", unbroken)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 7


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "schedule": "one-cycle", "alpha": "learned"},
        {"optimizer": "rmsprop", "weight_decay": 1e-3, "projective": True, "dropout": 0.5},
        {"training_preset": "modern", "flips": True, "shift": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_optimiser_resumes(
    options: dict[str, Any], small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "epochs": 4, "batch_size": 64, "console": QUIET}
    train("LeNetCL", small, out=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "save_checkpoint", stops_after(2, run_folder.save_checkpoint))
        with pytest.raises(KeyboardInterrupt, match=r"To go on: .* --resume"):
            train("LeNetCL", small, out=tmp_path / "broken", **options)
    train("LeNetCL", small, out=tmp_path / "broken", resume=True, **options)
    assert_same_weights(tmp_path / "whole", tmp_path / "broken")


def test_adamw_decays_matrices_and_kernels_alone(small: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-12, "epochs": 1}
    options |= {"alpha": "learned", "gain": 2.0, "console": QUIET, "batch_size": 200}
    free, held = (
        train("LeNetCL", small, out=tmp_path / str(decay), weight_decay=decay, **options).model
        for decay in (0.0, 1e11)
    )
    for (name, weight), other in zip(free.named_parameters(), held.parameters(), strict=True):
        # One step of torch's AdamW: w ← w − rate · decay · w, and a gradient too small to see.
        left = 0.9 if weight.dim() > 1 else 1.0
        torch.testing.assert_close(other, left * weight, rtol=1e-5, atol=1e-7, msg=name)
    assert free.features[-1].gain.item() == pytest.approx(2.0)


def test_loss_that_is_not_a_number_ends_the_run(small: Dataset, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"epoch \d, batch \d: expected a finite loss"):
        train(
            "LeNet", small, out=tmp_path / "run", console=QUIET,
            learning_rate=1e30, batch_size=50,
        )  # fmt: skip
