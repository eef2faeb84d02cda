"""Networks in files: found again, called with what they take, and refused before they are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from torch import nn

from conformallayers.lab.training.config import make_config
from conformallayers.lab.training.evaluate import check_outputs
from conformallayers.lab.training.own_networks import (
    absolute,
    find_network,
    is_own,
    plain_network,
    source_hash,
)
from conformallayers.lab.training.train import train
from picture_folders import NETWORK, make_network
from support import assert_says

SHAPE = (3, 9, 12)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_network(tmp_path / "net.py")


def config(network: str, **options: Any) -> Any:
    found = {"dataset": "own", "classes": 4, "in_shape": list(SHAPE), **options}
    return make_config(network=network, **found)


def test_network_is_called_with_what_it_takes(file: Path) -> None:
    x = torch.rand(2, *SHAPE)
    assert config(f"{file}:Tiny").build()(x).shape == (2, 4)
    assert config(f"{file}:plain").build()(x).shape == (2, 4)
    assert config(f"{file}:Tiny", hidden=5).build().body[0].out_channels == 5
    assert type(config(f"{file}:Tiny").build()) is type(config(f"{file}:Tiny").build())
    message = "train --hidden: expected a network with this option, got"
    assert_says(lambda: config(f"{file}:plain", hidden=5), message)


def test_names_of_the_package_and_of_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert absolute("net.py:Tiny") == f"{file}:Tiny"
    assert absolute("LeNetCL") == "LeNetCL"
    assert source_hash("LeNetCL") is None
    assert (is_own("net.py"), is_own("LeNet")) == (True, False)
    assert_says(
        lambda: find_network("LeNte"), "network: expected one of MLP", 'Did you mean "LeNet"?'
    )


def test_files_beside_it_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "own_part.py").write_text("WIDTH = 3\n")
    text = "from own_part import WIDTH\nfrom torch import nn\ndef net():\n    return nn.Linear(WIDTH, 4)\n"
    network = f"{make_network(tmp_path / 'net.py', text)}:net"
    assert config(network).build().in_features == 3


def test_changed_or_lost_code_is_refused(file: Path) -> None:
    network, before = f"{file}:Tiny", source_hash(f"{file}:Tiny")
    assert find_network(network, before) is find_network(network)
    make_network(file, NETWORK + "\n# changed\n")
    assert_says(lambda: find_network(network, before), "The code has changed since the training")
    file.unlink()
    assert_says(lambda: find_network(network, before), "the code of Tiny in", "Check the path")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (NETWORK, "", "network: expected FILE.py:NAME or PACKAGE:NAME, got"),
        (NETWORK, "Tny", 'Did you mean "Tiny"?'),
        ("x = 1", "x", "Name a class or function that returns an nn.Module"),
        ("def f(): return 3", "f", "expected an nn.Module, got int"),
        (
            "def f(width): return 3",
            "f",
            "expected a network that takes no arguments, got TypeError: missing a required argument: 'width'",
        ),
        ("def f(): raise KeyError('hm')", "f", "KeyError: 'hm'. Correct the code."),
        ("import no_such_thing", "f", "Install no_such_thing, or correct the name."),
        ("def f(:", "f", "SyntaxError"),
        ("import sys\nsys.exit('enough')", "f", "got SystemExit: enough"),
    ],
)
def test_wrong_file_is_refused(text: str, name: str, message: str, tmp_path: Path) -> None:
    file = make_network(tmp_path / "net.py", text)
    assert_says(lambda: config(f"{file}:{name}"), message)


def test_wrong_outputs_are_refused_before_training() -> None:
    def check(*layers: nn.Module) -> None:
        model = nn.Sequential(*layers)
        check_outputs(model, SHAPE, 4)
        assert model.training

    check(nn.Flatten(), nn.LazyLinear(4))
    expected = "expected scores of shape (2, 4) for images of (2, 3, 9, 12)"
    assert_says(lambda: check(nn.Flatten(), nn.Linear(324, 3)), expected, "got (2, 3)")
    assert_says(lambda: check(nn.Linear(5, 4)), expected, "RuntimeError")


def test_network_without_parameters_is_refused(tmp_path: Path) -> None:
    file = make_network(tmp_path / "net.py", "from torch import nn\nMyNet = nn.Flatten\n")
    message = "network: expected parameters to train, got none."
    assert_says(lambda: train(f"{file}:MyNet", "digits", out=tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_weights_that_unpack_to_more_than_their_file_are_refused(tmp_path: Path) -> None:
    text = "from torch import nn\ndef net():\n    return nn.Linear(3000, 9)\n"
    network = f"{make_network(tmp_path / 'net.py', text)}:net"
    stored, packed = tmp_path / "stored.pt", tmp_path / "packed.pt"
    state = {"weight": torch.zeros(9, 3000), "bias": torch.zeros(9)}
    torch.save(state, stored)
    assert not plain_network(network, stored).weight.any()
    with ZipFile(stored) as source, ZipFile(packed, "w", ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    message = "a state_dict of ", "members that unpack to more than the file"
    assert_says(lambda: plain_network(network, packed), *message)
