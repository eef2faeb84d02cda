"""What MODEL may be on the command line, its labels and its notes."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformallayers as cl
from conformallayers.lab.data.catalogue import LABELS
from conformallayers.lab.training.saved_models import CHECKPOINT, load_model, locate
from runs import train_few_digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_few_digits(tmp_path_factory.mktemp("runs") / "run")


def test_runs_checkpoints_models_and_folds_are_found(folder: Path, tmp_path: Path) -> None:
    assert locate(folder, "test") == folder / CHECKPOINT
    found = load_model(folder / CHECKPOINT, "test")
    assert not found.module.training
    assert (found.labels, found.shape) == (LABELS["digits"], (1, 8, 8))
    assert (found.about["network"], found.about["dataset"]) == ("LeNetCL", "digits")
    cl.save(found.fold("test"), path := tmp_path / "fold.safetensors")
    assert load_model(path, "test").shape == (1, 8, 8)


def test_what_is_no_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        cl.ConformalError, match=r"^fold .*nothing: expected a file of cl\.save, .*got no such"
    ):
        locate(tmp_path / "nothing", "fold")
    with pytest.raises(cl.ConformalError, match=r"got a folder without checkpoint\.safetensors"):
        locate(tmp_path, "fold")
    path = tmp_path / "file"
    for content in (b"", b"PK\3\4 a zip"):
        path.write_bytes(content)
        with pytest.raises(cl.ConformalError, match=r"expected a whole file of cl\.save"):
            load_model(path, "fold")
