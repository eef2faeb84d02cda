"""Add runs to the zoo: folds as accurate as the run, with their records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.data.datasets import load
from conformallayers.lab.training.train import train
from conformallayers.lab.zoo import build_zoo
from conformallayers.zoo.catalogue import read_record
from training import QUIET


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train("LeNetCL", "digits", out=folder, console=QUIET, epochs=1, centre=True, alpha="spectral")
    return folder


def test_file_is_as_accurate_as_its_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (record,) = build_zoo([run], tmp_path / "zoo")
    row = json.loads((run / "result.json").read_text())
    path = tmp_path / "zoo" / "digits-lenetcl.safetensors"
    assert record == read_record(path)
    assert (record.accuracy, record.parameters, record.commit) == tuple(
        row[name] for name in ("accuracy", "parameters", "commit")
    )
    assert record.command.startswith("conformallayers train LeNetCL digits ")
    assert "--out" not in record.command
    said = f"Wrote {path}: {100 * record.accuracy:.2f} %, {record.bytes:,} bytes\n"
    assert capsys.readouterr().out == said
    data = load("digits")
    with torch.no_grad():
        classes = cl.load(path)(data.test_images.float() / 255).argmax(1)
    assert int((classes == data.test_labels).sum()) / 450 == row["accuracy"]


def test_wrong_runs_are_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    result, out = run / "result.json", tmp_path / "zoo"
    before = result.read_text()
    row = json.loads(before)
    result.write_text(json.dumps({**row, "accuracy": row["accuracy"] + 1 / 450}))
    with pytest.raises(cl.ConformalError, match=r"^zoo build: digits-lenetcl: expected the acc"):
        build_zoo([run], out)
    result.write_text(before)
    with pytest.raises(cl.ConformalError, match=r"finished run, got no result\.json in it"):
        build_zoo([tmp_path], out)
    assert not out.exists()
