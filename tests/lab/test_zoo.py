"""Add runs to the zoo: as accurate as the run, for stored images, all or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

import torch

import conformallayers as cl
from conformallayers.lab import zoo
from conformallayers.lab.data.datasets import load
from conformallayers.lab.training.train import train
from conformallayers.lab.zoo import build_zoo
from conformallayers.recipe.archive import open_archive
from conformallayers.zoo.catalogue import FOLDER, read_record
from training import QUIET

OPTIONS: dict[str, Any] = {"projective": True, "gain": 20.0, "alpha": "spectral"}


def train_digits(folder: Path, **options: Any) -> Path:
    settings = {"epochs": 1, "learning_rate": 0.01, **options}
    return train("LeNetCL", "digits", out=folder, console=QUIET, **settings).folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits."""
    return train_digits(tmp_path_factory.mktemp("runs") / "run", centre=True, **OPTIONS)


@pytest.fixture
def result(run: Path) -> Any:
    """The result of the run; changes are written back afterwards."""
    path = run / "result.json"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_file_is_as_accurate_as_its_run(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (record,) = build_zoo([run], tmp_path / "zoo", say=said.append)
    row = json.loads((run / "result.json").read_text())
    assert record == read_record(tmp_path / "zoo" / "digits-lenetcl.safetensors")
    assert (record.accuracy, record.parameters, record.commit) == tuple(
        row[name] for name in ("accuracy", "parameters", "commit")
    )
    assert record.command.startswith("conformallayers train LeNetCL digits ")
    assert "--out" not in record.command
    assert said == [f"digits-lenetcl: {100 * record.accuracy:.2f} %, {record.bytes:,} bytes"]
    model = cl.load(tmp_path / "zoo" / "digits-lenetcl.safetensors")
    data = load("digits")
    with torch.no_grad(), cl.layer_by_layer():
        classes = model(data.test_images.float() / 255).argmax(1)
    assert int((classes == data.test_labels).sum()) / 450 == row["accuracy"]


def test_a_network_of_the_zoo_is_written_again_as_it_was(tmp_path: Path) -> None:
    build_zoo(["digits-micro"], tmp_path, say=str)
    (path,) = tmp_path.iterdir()
    new, old = open_archive(path), open_archive(FOLDER / path.name)
    assert {**new.document, "library": ""} == {**old.document, "library": ""}
    for name, value in cl.load(path).state_dict().items():
        assert torch.equal(value, cl.load(FOLDER / path.name).state_dict()[name])


def test_another_accuracy_is_refused(run: Path, result: Path, tmp_path: Path) -> None:
    row = json.loads(result.read_text())
    result.write_text(json.dumps({**row, "accuracy": row["accuracy"] + 1 / 450}))
    with pytest.raises(cl.ConformalError, match=r"^zoo build: digits-lenetcl: expected the acc"):
        build_zoo([run], tmp_path)
    assert not list(tmp_path.iterdir())


def test_too_many_bytes_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_zoo(["digits-micro"], tmp_path, say=str)
    (other,) = tmp_path.iterdir()
    monkeypatch.setattr(zoo, "LARGEST_ZOO", other.stat().st_size + 10_000)
    with pytest.raises(cl.ConformalError, match=r"expected at most [\d,]+ bytes in all, got"):
        build_zoo([run], tmp_path)
    assert list(tmp_path.iterdir()) == [other]
    build_zoo(["digits-micro"], tmp_path, say=str)  # which replaces its own file


def test_runs_that_do_not_fit_are_refused(run: Path, tmp_path: Path) -> None:
    def refused(runs: list[Path], message: str) -> None:
        with pytest.raises(cl.ConformalError, match=message):
            build_zoo(runs, tmp_path / "zoo")
        assert not (tmp_path / "zoo").exists()

    refused([], "expected runs of different networks or data sets, got none")
    refused([run, run], "got digits-lenetcl, digits-lenetcl")
    refused([tmp_path], r"expected the folder of a finished run, got .* without result\.json")
    plain = train_digits(tmp_path / "bare", **OPTIONS)
    refused([plain], r"expected a network that centres its images")
    settings: Any = {"epochs": 1, "centre": True, "console": QUIET}
    relu = train("MLP", "digits", out=tmp_path / "mlp", **settings).folder
    refused([relu], r"expected a network with ConformalLayers, .* got MLP on digits")
