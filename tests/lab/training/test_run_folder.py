"""Run folders: checkpoints hold a run, other files are refused, and only equal options resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training.run_folder import load_checkpoint, save_checkpoint
from conformallayers.lab.training.train import train
from training import QUIET, assert_same_weights

NAME = "checkpoint.safetensors"


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    save_file({"weight": torch.ones(2)}, path, {"state": "{}"})
    for content in (b"", b"PK\3\4 a zip", b"\xff" * 100, path.read_bytes()[:-5]):
        path.write_bytes(content)
        with pytest.raises(cl.ConformalError, match="expected a training checkpoint"):
            load_checkpoint(path)
    for state in (None, '{"config": {}}', "no JSON"):
        save_file({"weight": torch.ones(2)}, path, None if state is None else {"state": state})
        with pytest.raises(cl.ConformalError, match="expected a training checkpoint"):
            load_checkpoint(path)


def test_a_checkpoint_holds_what_it_was_given(tmp_path: Path) -> None:
    model = cl.networks.LeNetCL(alpha="spectral")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / NAME, model, optimizer, {"a": 1}, [{"loss": 0.1}])
    found = load_checkpoint(tmp_path / NAME)
    assert (found.config, found.history) == ({"a": 1}, [{"loss": 0.1}])
    other = cl.networks.LeNetCL(alpha="spectral")
    again = torch.optim.Adam(other.parameters())
    found.restore(other, again)
    for (name, one), (_, two) in zip(
        [*model.state_dict().items(), *model.named_buffers()],
        [*other.state_dict().items(), *other.named_buffers()],
        strict=True,
    ):
        assert torch.equal(one, two), name
    one, two = (found.state_dict()["state"] for found in (again, optimizer))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    with pytest.raises(cl.ConformalError, match="expected weights of D3ModNetCL"):
        found.restore(cl.networks.D3ModNetCL(alpha="spectral"))


def test_resume_refuses_what_does_not_belong_together(small: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {"epochs": 1, "out": out, "console": QUIET}
    train("LeNetCL", small, **options)
    with pytest.raises(cl.ConformalError, match=r"an empty folder.*--resume"):
        train("LeNetCL", small, **options)
    with pytest.raises(cl.ConformalError, match=r"--seed: expected 0 as before, got 1"):
        train("LeNetCL", small, resume=True, seed=1, **options)
    with pytest.raises(cl.ConformalError, match=r"--alpha: expected None as before, got 2.0"):
        train("LeNetCL", small, resume=True, alpha="2", **options)
    again = train("LeNetCL", small, resume=True, **options)
    assert len(again.history) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(cl.ConformalError, match=r"a run with .*config.json, got none"):
        train("LeNetCL", small, resume=True, **{**options, "out": tmp_path / "other"})
    with pytest.raises(FileExistsError, match=r"letter\.txt"):
        train("LeNetCL", small, **{**options, "out": tmp_path / "other" / "letter.txt"})
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".config.json.01.tmp").write_text("{")  # what a killed process leaves
    begun = train("LeNetCL", small, resume=True, **{**options, "out": tmp_path / "new"})
    assert_same_weights(begun.folder, out)
