"""Training runs: what they write, how they end early and go on, and several processes as one."""

from __future__ import annotations

import csv
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

import torch
from conformallayers.lab.experiments.writing import write_whole
from rich.console import Console
from safetensors.torch import load_file, save_file

import conformallayers as cl
from conformallayers.cli import app as cli
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.training import checkpoint, evaluate, runs
from conformallayers.lab.training.config import NETWORKS, make_config
from conformallayers.lab.training.train import Stopped, learning_rate, train
from support import stops_after

SOURCE = Path(cl.__file__).parents[1]
QUIET = Console(quiet=True)
SPECTRAL = {"alpha": "spectral", "learning_rate": 3e-3, "batch_size": 300, "threads": 1}


@pytest.fixture(scope="module")
def small() -> Dataset:
    """The first few digits, under the name that finds all of them."""
    full = load("digits")
    return Dataset(
        "digits",
        full.train_images[:200],
        full.train_labels[:200],
        full.test_images[:50],
        full.test_labels[:50],
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / evaluate.CHECKPOINT)


def assert_same(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        cli.main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)


# -- a run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs") / "run"
    options = {"epochs": 15, "schedule": "one-cycle", "validation": 0.1, "batch_size": 64}
    options |= {"alpha": "spectral", "learning_rate": 0.01}
    return train("LeNetCL", "digits", out=out, console=QUIET, **options)


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
    assert (config.epochs, config.alpha) == (15, "spectral")
    with (finished.folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(r["epoch"]) for r in rows] == list(range(1, 16))
    assert float(rows[-1]["validation_accuracy"]) == row["accuracy_validation"]
    assert float(rows[3]["loss"]) == finished.history[3]["loss"]


def test_command_of_the_row_names_the_same_run(finished: Any) -> None:
    words = shlex.split(finished.row["command"])
    assert words[:4] == ["conformallayers", "train", "LeNetCL", "digits"]
    for flag, value in (("--learning-rate", "0.01"), ("--out", str(finished.folder))):
        assert words[words.index(flag) + 1] == value


def test_evaluate_gives_the_accuracy_of_the_run(
    finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate.evaluate(finished.folder)
    assert found["folded"] == found["layers"] == finished.accuracy
    assert (found["epoch"], found["images"]) == (15, 450)
    path = finished.folder / evaluate.CHECKPOINT
    assert run("evaluate", path, "--dataset", "digits") == 0
    assert f"folded         {100 * finished.accuracy:.2f} %" in capsys.readouterr().out


def test_torch_is_left_as_it_was(small: Dataset, tmp_path: Path) -> None:
    before = torch.get_rng_state(), torch.get_num_threads()
    train("LeNet", small, out=tmp_path / "a", console=QUIET, epochs=1, threads=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_trained_by_its_name(
    name: str, small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Matrices take seconds to build: test_networks_fold_after_training has them.
    monkeypatch.setattr(evaluate, "fold", functools.partial(cl.fold, strategy="layers"))
    few = small.split(184)[0]
    depth = 2 if name.startswith("Dk") else None
    result = train(name, few, out=tmp_path / "run", console=QUIET, epochs=1, depth=depth)
    assert (result.row["accuracy_folded"] is None) == (not name.endswith(("CL", "ReSProNet")))
    assert result.row["pool_stride"] == (2 if name.startswith("Base") else None)
    assert evaluate.evaluate(tmp_path / "run", few)["layers"] == result.row["accuracy_layers"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BaseReSProNet", "D3ModNetCL", "DkNetCL"])
def test_networks_fold_after_training(name: str, small: Dataset, tmp_path: Path) -> None:
    depth = 2 if name.startswith("Dk") else None
    result = train(name, small, out=tmp_path / "run", console=QUIET, epochs=1, depth=depth)
    assert result.row["accuracy_folded"] == result.row["accuracy_layers"]


# -- the schedule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4, 37])
def test_one_cycle_is_that_of_torch(steps: int) -> None:
    options = {"network": "LeNet", "dataset": "digits", "learning_rate": 0.3}
    config = make_config(**options, schedule="one-cycle")
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], 0.3)
    torch_schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=steps, cycle_momentum=False
    )
    for step in range(steps):
        assert learning_rate(config, step, steps) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-9
        )
        optimizer.step()
        if step + 1 < steps:
            torch_schedule.step()
    assert learning_rate(make_config(**options), 5, 9) == 0.3


# -- ending early and going on ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    train("LeNetCL", "digits", out=out, console=QUIET, epochs=12, **SPECTRAL)
    return out


# Waits for the blow in the middle of the fourth epoch, or after a checkpoint and before the metrics.
WAITING = """
import time
from pathlib import Path
from conformallayers.cli.app import main
from conformallayers.lab.training import runs, train
rate, write = train.learning_rate, runs.write_metrics
def wait():
    Path("ready").touch()
    time.sleep(600)
def slow_rate(config, step, steps):
    return wait() if step == 17 else rate(config, step, steps)
def slow_write(folder, history):
    wait() if len(history) == 3 else write(folder, history)
if MIDDLE:
    train.learning_rate = slow_rate
else:
    runs.write_metrics = slow_write
main()
"""


@pytest.mark.parametrize(
    ("blow", "middle"),
    [
        (signal.SIGKILL, True),
        (signal.SIGKILL, False),
        (signal.SIGINT, True),
        (signal.SIGTERM, True),
    ],
    ids=["killed in an epoch", "killed between files", "interrupted", "terminated"],
)
def test_stopped_and_resumed_run_ends_in_the_same_bits(
    blow: signal.Signals,
    middle: bool,
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = [f"--{key.replace('_', '-')}={value}" for key, value in SPECTRAL.items()]
    words = ["train", "LeNetCL", "digits", "--out", "run", "--epochs", "12", *options]
    code = WAITING.replace("MIDDLE", str(middle))
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        # As a script starts its background commands.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
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
    done = checkpoint.load(tmp_path / "run" / evaluate.CHECKPOINT).state["epoch"]
    assert done == 3
    monkeypatch.chdir(tmp_path)
    if blow != signal.SIGKILL:
        assert process.returncode == 130
        start, _, resuming = message.strip().partition("To go on: ")
        assert start == "Interrupted after epoch 3 of 12. "
        assert resuming.endswith(" --resume")
        assert run(*shlex.split(resuming)[1:]) == 0
    else:
        assert process.returncode == -signal.SIGKILL
        result = train(
            "LeNetCL", "digits", out="run", resume=True, console=QUIET, epochs=12, **SPECTRAL
        )
        assert [row["epoch"] for row in result.history] == list(range(1, 13))
    assert_same(tmp_path / "run", unbroken)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 13


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "schedule": "one-cycle", "alpha": "learned"},
        {"optimizer": "rmsprop", "momentum": 0.5, "weight_decay": 1e-3, "projective": True},
        {"optimizer": "adamw", "weight_decay": 0.1, "gain": 3.0, "flips": True, "shift": 2},
        {"optimizer": "sgd", "momentum": 0.9, "alpha": 2.0, "dropout": 0.5},
        {"optimizer": "sgd"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_optimiser_resumes(
    options: dict[str, Any], small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "epochs": 4, "batch_size": 64, "console": QUIET}
    train("LeNetCL", small, out=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", stops_after(2, checkpoint.save))
        with pytest.raises(Stopped, match=r"To go on: .* --resume"):
            train("LeNetCL", small, out=tmp_path / "broken", **options)
    train("LeNetCL", small, out=tmp_path / "broken", resume=True, **options)
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def failing(partial: Path) -> None:
        partial.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, failing)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]


def test_processes_that_write_the_same_file_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(partial: Path) -> None:
        partial.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        write_whole(tmp_path / "file", lambda other: other.write_text("second"))
        monkeypatch.undo()

    write_whole(tmp_path / "file", interrupted)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "first")]


def test_constant_rate_goes_on_for_more_epochs(small: Dataset, tmp_path: Path) -> None:
    options = {"batch_size": 64, "console": QUIET}
    whole = train("LeNetCL", small, epochs=4, out=tmp_path / "whole", **options)
    train("LeNetCL", small, epochs=2, out=tmp_path / "longer", **options)
    longer = train("LeNetCL", small, epochs=4, out=tmp_path / "longer", resume=True, **options)
    assert_same(tmp_path / "whole", tmp_path / "longer")
    assert longer.row["loss"] == whole.row["loss"]
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["epochs"] == 4
    with pytest.raises(cl.ConformalError, match="--epochs: expected 4 as before, got 3"):
        train("LeNetCL", small, epochs=3, out=tmp_path / "longer", resume=True, **options)
    options |= {"out": tmp_path / "cycle", "schedule": "one-cycle"}
    train("LeNetCL", small, epochs=1, **options)
    with pytest.raises(cl.ConformalError, match="--epochs: expected 1 as before, got 2"):
        train("LeNetCL", small, epochs=2, resume=True, **options)


def test_resume_refuses_what_does_not_belong_together(small: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"epochs": 1, "out": out, "console": QUIET}
    train("LeNetCL", small, **options)
    with pytest.raises(cl.ConformalError, match=r"an empty folder.*--resume"):
        train("LeNetCL", small, **options)
    with pytest.raises(cl.ConformalError, match=r"--seed: expected 0 as before, got 1"):
        train("LeNetCL", small, resume=True, seed=1, **options)
    with pytest.raises(cl.ConformalError, match=r"--alpha: expected 'young' as before, got 2.0"):
        train("LeNetCL", small, resume=True, alpha="2", **options)
    with pytest.raises(cl.ConformalError, match="the training images of the run, got others"):
        train("LeNetCL", small.split(10)[0], resume=True, **options)
    again = train("LeNetCL", small, resume=True, **options)
    assert len(again.history) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(cl.ConformalError, match=r"a run with .*config.json, got none"):
        train("LeNetCL", small, resume=True, **{**options, "out": tmp_path / "other"})
    with pytest.raises(cl.ConformalError, match="a folder, got the file"):
        train("LeNetCL", small, **{**options, "out": tmp_path / "other" / "letter.txt"})
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".part-1-config.json").write_text("{")  # what a killed process leaves
    begun = train("LeNetCL", small, resume=True, **{**options, "out": tmp_path / "new"})
    assert_same(begun.folder, out)


# -- refusals ---------------------------------------------------------------------------------------


def test_loss_that_is_not_a_number_ends_the_run(small: Dataset, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"epoch \d, batch \d: expected a finite loss"):
        train(
            "LeNet", small, out=tmp_path / "run", console=QUIET,
            optimizer="sgd", learning_rate=1e30, batch_size=50,
        )  # fmt: skip


WRONG = [
    ({"network": "Lenet"}, "a network of BaseLinearNet, .*, got 'Lenet'"),
    ({"network": "DkNetCL"}, "--depth: expected the number of convolutions of DkNetCL, got none"),
    ({"depth": 3}, "--depth: expected no such option for LeNetCL, got 3"),
    ({"network": "LeNet", "alpha": "young"}, "--alpha: expected no such option for LeNet"),
    ({"network": "LeNet", "alpha": 0.0}, "--alpha: expected no such option for LeNet"),
    ({"network": "LeNet", "projective": True}, "--projective: expected no such option"),
    ({"pool_stride": 1}, "--pool-stride: expected no such option for LeNetCL, got 1"),
    ({"alpha": "jung"}, r"ReSPro\(alpha=...\): expected .*, got \'jung\'"),
    ({"alpha": "-1"}, r"ReSPro\(alpha=...\): expected .*, got -1.0"),
    ({"epochs": 0}, "--epochs: expected a value greater than 0, got 0"),
    ({"epochs": 1.5}, "--epochs: expected a valid integer, got 1.5"),
    ({"alpha": "nan"}, r"ReSPro\(alpha=...\): expected .*, got \'nan\'"),
    ({"alpha": float("inf")}, r"ReSPro\(alpha=...\): expected .*, got \'inf\'"),
    ({"seed": 2**63}, "--seed: expected a value less than 9223372036854775808, got 9223372036854"),
    ({"batch_size": -1}, "--batch-size: expected a value greater than 0, got -1"),
    ({"learning_rate": float("nan")}, "--learning-rate: expected a finite number, got nan"),
    (
        {"optimizer": "adagrad"},
        "--optimizer: expected 'adam', 'adamw', 'rmsprop' or 'sgd', got 'ad",
    ),
    ({"schedule": "cosine"}, "--schedule: expected 'constant' or 'one-cycle', got 'cosine'"),
    ({"momentum": 0.9}, "--momentum: expected none for adam"),
    ({"momentum": 1.0, "optimizer": "sgd"}, "--momentum: expected a value less than 1"),
    ({"validation": 500}, "validation: expected a share below 1 or a whole number below 200"),
    ({"device": "toaster"}, "--device: expected a device of this machine, got 'toaster'"),
    ({"colour": 1}, "--colour: expected an option of train, got another"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(row[0]) for row in WRONG])
def test_wrong_options_are_one_line_and_leave_no_folder(
    options: dict[str, Any], message: str, small: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message) as caught:
        train(options.pop("network", "LeNetCL"), small, out=tmp_path / "run", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_wrong_option_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "LeNetCL", "digits", "--epochs", "0") == 1
    message = "conformallayers: train --epochs: expected a value greater than 0, got 0."
    assert capsys.readouterr().err.startswith(message)


def test_files_that_are_no_checkpoints_are_refused(finished: Any, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"got a folder without checkpoint\.safetensors"):
        evaluate.evaluate(tmp_path)
    path = tmp_path / evaluate.CHECKPOINT
    whole = (finished.folder / evaluate.CHECKPOINT).read_bytes()
    for content in (b"", b"nothing", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(cl.ConformalError, match=r"expected .*a training checkpoint, got"):
            evaluate.evaluate(tmp_path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(cl.ConformalError, match="got another safetensors file"):
        evaluate.evaluate(tmp_path)
    found = checkpoint.load(finished.folder / evaluate.CHECKPOINT)
    with pytest.raises(cl.ConformalError, match="expected weights of D3ModNetCL"):
        checkpoint.restore(found, cl.networks.D3ModNetCL(alpha="spectral"))


# -- several processes ------------------------------------------------------------------------------

WORKER = """
import os
from safetensors.torch import save_file
from conformallayers.lab.training.train import train
result = train("LeNetCL", "digits", out="both", epochs=2, batch_size=1346, alpha="spectral",
               learning_rate=3e-3, validation=0, threads=1, flips=True, shift=2)
state = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
state |= {name: tensor.clone() for name, tensor in result.model.named_buffers()}
save_file(state, f"rank{os.environ['RANK']}.safetensors", {"accuracy": str(result.accuracy)})
"""


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Of 1347 images the last batch has one: the first process then has none."""
    (tmp_path / "worker.py").write_text(WORKER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "worker.py"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    assert "features.1.vector" in ranks[0]
    for name, tensor in ranks[0].items():
        assert torch.equal(tensor, ranks[1][name]), name
    options = {"epochs": 2, "batch_size": 1346, "alpha": "spectral", "learning_rate": 3e-3}
    options |= {"flips": True, "shift": 2}
    alone = train("LeNetCL", "digits", out=tmp_path / "one", console=QUIET, threads=1, **options)
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(tensor, ranks[0][name], rtol=1e-4, atol=1e-5)
    row = json.loads((tmp_path / "both" / runs.RESULT).read_text())
    assert row["processes"] == 2
    assert row["loss"] == pytest.approx(alone.row["loss"], rel=1e-5)
    assert row["accuracy"] == pytest.approx(alone.accuracy, abs=0.01)
