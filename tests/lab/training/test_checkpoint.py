"""Checkpoints: damage of any byte is refused by every command that reads one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training import checkpoint
from conformallayers.lab.training.train import train
from conformallayers.recipe import archive
from support import run_command
from training import QUIET

NAME = "checkpoint.safetensors"
OPTIONS: dict[str, Any] = {"epochs": 1, "alpha": "spectral", "console": QUIET, "batch_size": 64}


@pytest.fixture(scope="module")
def run(small: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("LeNetCL", small, out=tmp_path_factory.mktemp("run") / "run", **OPTIONS).folder


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999], ids=["header", "early", "late", "end"])
def test_a_flipped_bit_is_refused_everywhere(
    share: float,
    run: Path,
    small: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = shutil.copytree(run, tmp_path / "run")
    data = bytearray((broken / NAME).read_bytes())
    length = int.from_bytes(data[:8], "little")
    place = 200 if not share else 8 + length + int(share * (len(data) - 8 - length))
    data[place] ^= 1
    (broken / NAME).write_bytes(data)
    message = "expected a whole file of cl.save or conformallayers train"
    for command in (
        ("evaluate", broken),
        ("fold", broken, "--out", tmp_path / "fold.safetensors"),
        ("predict", broken, "a.png"),
        ("inspect", broken),
    ):
        assert run_command(*command) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(cl.ConformalError, match=message):
        train("LeNetCL", small, out=broken, resume=True, **OPTIONS)
    assert (broken / NAME).read_bytes() == data


def test_other_files_and_checkpoints_are_told_apart(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    cl.save(cl.networks.LeNetCL(), path)
    with pytest.raises(cl.ConformalError, match=r"a training checkpoint, got a file of cl\.save"):
        checkpoint.load(path)
    with pytest.raises(cl.ConformalError, match=r"a file of cl\.save, got a training checkpoint"):
        cl.load(run / NAME)
    with pytest.raises(cl.ConformalError, match="a folded network, got a training checkpoint"):
        cln.load(run / NAME)


@pytest.mark.parametrize(
    "change",
    [
        {"history": 3},
        {"history": [3]},
        {"config": []},
        {"more": 1},
        {"config": {"network": "LeNetCL"}},
        {"config": {"network": "LeNetCL", "dataset": "digits", "hidden": 7}},
    ],
    ids=str,
)
def test_forged_states_are_refused(change: dict[str, Any], run: Path, tmp_path: Path) -> None:
    """Their checksum is right: whoever forges a file can compute it."""
    found = archive.open_archive(run / NAME)
    arrays = {}
    for name, entry in found.entries.items():
        data = bytearray(entry.stop - entry.start)
        found.fill(name, memoryview(data))
        arrays[name] = entry.dtype, entry.shape, data
    document = {**found.document, "state": {**found.document["state"], **change}}
    archive.write_archive(tmp_path / NAME, json.loads(json.dumps(document)), arrays)
    with pytest.raises(cl.ConformalError):
        checkpoint.trained(checkpoint.load(tmp_path / NAME))


def test_a_checkpoint_holds_what_it_was_given(tmp_path: Path) -> None:
    model = cl.networks.LeNetCL(alpha="spectral")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    state = checkpoint.TrainState(config={"a": 1}, history=[{"loss": 0.1}], data="md5")
    checkpoint.save(tmp_path / NAME, model, optimizer, state)
    found = checkpoint.load(tmp_path / NAME)
    assert found.state == state
    other = cl.networks.LeNetCL(alpha="spectral")
    again = torch.optim.Adam(other.parameters())
    checkpoint.restore(found, other, again)
    for (name, one), (_, two) in zip(
        [*model.state_dict().items(), *model.named_buffers()],
        [*other.state_dict().items(), *other.named_buffers()],
        strict=True,
    ):
        assert torch.equal(one, two), name
    one, two = (found.state_dict()["state"] for found in (again, optimizer))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    with pytest.raises(cl.ConformalError, match="expected weights of D3ModNetCL"):
        checkpoint.restore(found, cl.networks.D3ModNetCL(alpha="spectral"))
