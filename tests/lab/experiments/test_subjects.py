"""Subjects of the benchmark: networks by name, files, and the accuracies that belong to them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("sklearn")

import torch
from torch import nn

import conformallayers as cl
from conformallayers.lab.experiments.contestants import CONTESTANTS
from conformallayers.lab.experiments.subjects import Subject, chosen_subjects
from conformallayers.networks import LeNet, LeNetCL, StageNet, StageReLUNet
from runs import train_few_digits
from support import assert_says

RESULTS = Path(__file__).parents[3] / "results"


def chosen(name: str | Path, results: Path = RESULTS) -> Subject:
    (subject,) = chosen_subjects([str(name)], (3,), results)
    return subject


def share(network: str, experiment: int = 5) -> float:
    """Return the accuracy of a committed record."""
    if experiment == 5:
        rows = json.loads((RESULTS / "experiment5" / "cifar10.json").read_text())["rows"]
        shares = [row["accuracy"] for row in rows if row["name"] == network]
        return fmean(shares)
    found = json.loads((RESULTS / "accuracy" / f"{network}-cifar10-modern.json").read_text())
    return float(found["accuracy"])


def test_all_networks_are_chosen_without_names() -> None:
    names = [one.name for one in chosen_subjects([], (1, 9), RESULTS)]
    assert names == [
        *("Base", "LeNet", "D3ModNet", "DkNet 1", "DkNet 9", "DkNet 1 circular"),
        *("DkNet 9 circular", "StageNet-nano", "StageNet-micro", "StageNet-small"),
        *("StageNet-base", "StageNet-compact", "StageNet-large", "ResNet8"),
    ]
    assert {name for name in names if "Stage" in name or "Res" in name} <= set(CONTESTANTS)


def test_networks_of_stages_are_beside_their_merged_twin() -> None:
    subject = chosen("StageNet-small")
    assert subject.conformal is not None
    assert subject.relu is not None
    model, twin = subject.conformal(), subject.relu()
    assert isinstance(model, StageNet)
    assert isinstance(twin, StageReLUNet)
    assert model.arguments["preset"] == twin.arguments["preset"] == "small"
    convolutions = [one for one in twin.modules() if isinstance(one, nn.Conv2d)]
    assert len(convolutions) == 2
    assert not any(isinstance(one, nn.BatchNorm2d) for one in twin.modules())


def test_accuracies_are_those_of_the_experiments(tmp_path: Path) -> None:
    twins = ("StageNet-micro", "StageReLUNet-micro-average")
    fold, relu = (share(name) for name in twins)
    assert chosen("StageNet-micro").accuracy == {"fold": fold, "relu": relu}
    assert chosen("ResNet8").accuracy == {"relu": share("ResNet8")}
    assert chosen("LeNet").accuracy == {"fold": share("LeNetCL"), "relu": share("LeNet")}
    base = {"fold": share("BaseReSProNet", 2), "relu": share("BaseReLUNet", 2)}
    assert chosen("Base").accuracy == base
    assert chosen("DkNet 3").accuracy == {}
    assert chosen("LeNet", tmp_path).accuracy == {}


def test_folds_of_experiment_5_have_the_accuracy_of_the_first_seed(tmp_path: Path) -> None:
    fold = RESULTS / "experiment5" / "StageNet-micro-cifar10.safetensors"
    rows = [
        {"name": "StageNet-micro", "seed": seed, "accuracy": 0.7 + seed / 100} for seed in (1, 0)
    ]
    for folder, accuracy in ((tmp_path / "a", {"fold": 0.7}), (tmp_path / "b", None)):
        folder.mkdir()
        (folder / fold.name).write_bytes(fold.read_bytes())
        if accuracy:
            (folder / "cifar10.json").write_text(json.dumps({"rows": rows}))
        subject = chosen(folder / fold.name)
        assert subject.accuracy == accuracy
        assert subject.folded is not None
        assert (subject.conformal, subject.relu, subject.shape) == (None, None, (3, 32, 32))


def test_models_and_runs_are_folded(tmp_path: Path) -> None:
    cl.save(LeNetCL(), tmp_path / "net.safetensors", about={"accuracy": 0.5})
    subject = chosen(tmp_path / "net.safetensors")
    assert subject.conformal is not None
    assert isinstance(subject.conformal(), LeNetCL)
    assert (subject.accuracy, subject.relu) == ({"fold": 0.5}, None)
    run = train_few_digits(tmp_path / "run")
    subject = chosen(run)
    assert subject.conformal is not None
    assert subject.shape == (1, 8, 8)
    assert subject.conformal()(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    result = json.loads((run / "result.json").read_text())
    assert subject.accuracy == {"fold": result["accuracy"]}


def test_a_plain_model_is_measured_on_its_own(tmp_path: Path) -> None:
    cl.save(LeNet(), tmp_path / "net.safetensors")
    subject = chosen(tmp_path / "net.safetensors")
    assert subject.relu is not None
    assert subject.relu()(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert (subject.conformal, subject.folded, subject.accuracy) == (None, None, None)


def test_files_that_cannot_be_measured_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    cl.save(cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro()), path)
    assert_says(lambda: chosen(path), f"bench {path}: expected a model with an input shape")
    assert_says(lambda: chosen(tmp_path), "got a folder without checkpoint.safetensors")
    assert_says(lambda: chosen("StageNet-mikro"), 'Did you mean "StageNet-micro"?')
