"""Presets: one table of options, which given options override."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import conformallayers as cl
from conformallayers.cli import app as cli
from conformallayers.lab.data.batches import as_input
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training import evaluate
from conformallayers.lab.training.config import (
    FAMILIES,
    NAMES,
    PICTURES,
    PRESETS,
    TrainConfig,
    make_config,
    preset_options,
    resolved,
)
from conformallayers.lab.training.saved_models import CHECKPOINT
from conformallayers.lab.training.train import train
from training import QUIET

TRAINING = sys.modules[train.__module__]  # by a path, a test that imports anew would hide it


ROWS = [(network, dataset) for family, dataset in PRESETS for network in FAMILIES[family]]


def modern(network: str = "LeNetCL", dataset: str = "digits", **options: Any) -> TrainConfig:
    given = {"network": network, "dataset": dataset, "training_preset": "modern", **options}
    return make_config(**resolved(given))


@pytest.mark.parametrize(("network", "dataset"), ROWS)
def test_every_row_is_a_setting_that_train_takes(network: str, dataset: str) -> None:
    config = modern(network, dataset)
    words = ["conformallayers", "train", network, dataset, "--training-preset", "modern"]
    assert shlex.split(config.command({})) == words
    assert make_config(**resolved(config.model_dump())) == config
    twin = {"LeNet": "LeNetCL", "BaseReLUNet": "BaseReSProNet"}.get(network)
    if twin:  # both get the same budget, and differ in the activation alone
        other = modern(twin, dataset).model_dump()
        differing = {key for key, value in config.model_dump().items() if value != other[key]}
        assert differing == {"network", "projective", "alpha", "gain"}


def test_expanded_networks_train_at_a_lower_rate_or_with_more_decay() -> None:
    plain, expanded = modern("LeNetCL", "cifar10"), modern("LeNetCL", "cifar10", expand=True)
    assert expanded.learning_rate == plain.learning_rate / 2
    words = ["conformallayers", "train", "LeNetCL", "cifar10", "--training-preset", "modern"]
    assert shlex.split(expanded.command({})) == [*words, "--expand"]
    assert modern("LeNetCL", "cifar10", expand=True, learning_rate=0.01) == plain.model_copy(
        update={"expand": True}
    )
    plain, expanded = modern("LeNet", "cifar10"), modern("LeNet", "cifar10", expand=True)
    assert expanded == plain.model_copy(update={"expand": True})
    kinds = {type(module).__name__ for module in expanded.build().modules()}
    assert {"NormalizedConv2d", "Linear"} < kinds
    plain, expanded = modern("ResNet8", "cifar10"), modern("ResNet8", "cifar10", expand=True)
    more = plain.model_copy(update={"weight_decay": 3 * plain.weight_decay, "expand": True})
    assert expanded == more
    kinds = {type(module).__name__ for module in expanded.build().modules()}
    assert "NormalizedConv2d" not in kinds  # it has a BatchNorm
    large = modern("StageReLUNet", "cifar10", preset="large", expand=True)
    assert (large.learning_rate, large.weight_decay) == (3e-3, 0.1)


def test_given_options_beat_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert modern().projective
    for name, value in (("projective", False), ("gain", 0.0), ("epochs", 3), ("alpha", "young")):
        config = modern(**{name: value})
        assert getattr(config, name) == value
        differing = {k for k, v in modern().model_dump().items() if v != getattr(config, k)}
        assert differing == {name}
        words = shlex.split(config.command({}))
        options: dict[str, Any] = {}
        with monkeypatch.context() as patch:
            patch.setattr(TRAINING, "train", options_of(options))
            with pytest.raises(KeyboardInterrupt):
                cli.build_app()(words[1:], result_action="return_value")
        fields = {key: value for key, value in options.items() if key in TrainConfig.model_fields}
        assert make_config(**resolved(fields)) == config
    assert modern(gain=None) == modern()


def options_of(found: dict[str, Any]) -> Any:
    def stopping(**options: Any) -> None:
        found.update(options)
        raise KeyboardInterrupt

    return stopping


def test_zero_has_no_hidden_layer_and_no_gain() -> None:
    with torch.device("meta"):
        plain, full = (modern("BaseReSProNet", hidden=n, gain=n).build().network for n in (0, 5))
    assert isinstance(plain.head, torch.nn.Linear)
    assert not any(isinstance(module, cl.Scale) for module in plain.modules())
    assert full.head[0].out_features == 5
    assert full.features[-1].initial == 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "D3ModNetCL"}, "a data set of docs/training.md, got D3ModNetCL on digits"),
        ({"dataset": "svhn"}, "got LeNetCL on svhn"),
        (
            {"network": "LeNet", "gain": 2.0},
            "--gain: expected a network with this option, got LeNet",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        modern(**options)


def test_own_networks_have_the_preset_of_stagenet() -> None:
    for dataset in (*NAMES, PICTURES):
        own, stage = (preset_options(name, dataset) for name in ("nets.py:Net", "StageNet"))
        assert own == stage


def test_run_with_a_preset_records_its_options(small: Dataset, tmp_path: Path) -> None:
    options = {"training_preset": "modern", "epochs": 2, "flips": True, "console": QUIET}
    run = train("LeNetCL", small, out=tmp_path / "run", **options)
    row = json.loads((run.folder / "result.json").read_text())
    assert "--training-preset modern --flips --epochs 2 --out" in row["command"]
    assert (row["training_preset"], row["epochs"], row["optimizer"]) == ("modern", 2, "adamw")
    assert row["accuracy_folded"] == row["accuracy_layers"]  # the gain folds as well
    assert json.loads((run.folder / "config.json").read_text())["shift"] == row["shift"]
    assert evaluate.evaluate(run.folder, small)["layers"] == row["accuracy_layers"]
    mean = load_file(run.folder / CHECKPOINT)["model.centre.mean"]
    torch.testing.assert_close(mean, as_input(small.train_images).mean(0))
