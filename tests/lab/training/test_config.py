"""Options of a run: wrong ones are refused in one line, misspelt ones get a suggestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training.config import make_config
from conformallayers.lab.training.train import train
from conformallayers.nn.expanded import Expanded

WRONG = [
    ({"network": "Lenet"}, "network: expected one of MLP, BaseLinearNet, .*, got 'Lenet'"),
    ({"network": "DkNetCL"}, "--depth: expected the number of convolutions of DkNetCL, got none"),
    ({"depth": 3}, "--depth: expected a network with this option, got LeNetCL"),
    ({"network": "StageNet", "offset": "-1"}, "offset.*: expected .*, got -1.0"),
    ({"network": "StageNet", "rectifier": "gelu"}, "rectifier: expected one of norm, relu"),
    ({"alpha": "jung"}, r"ReSPro\(alpha=...\): expected .*, got \'jung\'"),
    ({"epochs": 0}, "--epochs: expected a value greater than 0, got 0"),
    ({"learning_rate": float("nan")}, "--learning-rate: expected a finite number, got nan"),
    ({"optimizer": "sgd"}, "--optimizer: expected 'adam', 'adamw' or 'rmsprop', got 'sgd'"),
    ({"training_preset": "old", "network": "LeNet"}, "--training-preset: expected 'modern'"),
    ({"validation": 500}, "validation: expected a share below 1 or an integer below 200"),
    ({"device": "toaster"}, "--device: expected a device of this machine, got 'toaster'"),
    ({"colour": 1}, "--colour: expected an option of train, got another"),
    ({"lr": 0.1}, '--lr: expected an option of train.* Did you mean "learning_rate"'),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(row[0]) for row in WRONG])
def test_wrong_options_are_one_line_and_leave_no_folder(
    options: dict[str, Any], message: str, small: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message) as caught:
        train(options.pop("network", "LeNetCL"), small, out=tmp_path / "run", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"respro": False}, "--no-respro"),
        ({"respro": True}, "--respro"),
        ({"offset": None}, "--offset none"),
        ({"offset": 0.5, "rectifier": "abs"}, "--rectifier abs --offset 0.5"),
    ],
)
def test_options_of_stages_reach_the_network(options: dict[str, Any], words: str) -> None:
    given = {key: "none" if value is None else value for key, value in options.items()}
    config = make_config(network="StageNet", dataset="digits", **given)
    network: Any = config.build()
    assert {key: network.arguments[key] for key in options} == options
    assert config.command({}) == f"conformallayers train StageNet digits {words}"


def test_expanded_networks_are_built_anew_and_keep_their_command() -> None:
    config = make_config(network="LeNet", dataset="digits", expand=True)
    layers = [m for m in config.build().modules() if isinstance(m, Expanded)]
    assert len(layers) == 2
    assert config.command({}) == "conformallayers train LeNet digits --expand"
    assert config.folder.name == "LeNet-expanded-digits-seed0"
    # Drawn anew, the kernel does not make up for the other terms as it does after cl.expand.
    bound = 4 * (3 * 25) ** -0.5
    assert layers[0].kernel.std() < bound
