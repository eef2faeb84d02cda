"""What MODEL may be on the command line, its labels and its notes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from torch import nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.lab.data.catalogue import LABELS
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training import evaluate
from conformallayers.lab.training.saved_models import CHECKPOINT, load_model, locate
from nets import SHAPE, net
from oracle import randomise
from runs import few_digits, train_few_digits


@pytest.fixture(scope="module")
def small() -> Dataset:
    return few_digits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_few_digits(tmp_path_factory.mktemp("runs") / "run")


def test_labels_and_notes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    model = nn.Sequential(net("chain"), nn.Flatten(), nn.Linear(36, 2))
    folded = cl.fold(model, SHAPE)
    cl.save(folded, path)
    assert (cl.load(path).labels, cl.load(path).about) == (None, None)
    labels, about = ("ä", "b"), {"white": 255, "who": ["me", None]}
    cl.save(folded, path, labels=labels, about=about)
    for loaded in (cl.load(path), cln.load(path)):
        assert (loaded.labels, loaded.about) == (labels, about)
    first = path.read_bytes()
    cl.save(cl.load(path), path)
    assert path.read_bytes() == first
    found = load_model(path, "test")
    assert (found.labels, found.about) == (labels, about)


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


def test_white_of_a_file_counts(small: Dataset, tmp_path: Path) -> None:
    """A network for pixels from 0 to 255 is measured on those."""
    path = tmp_path / "net.safetensors"
    model = nn.Sequential(net("chain"), nn.Flatten(), nn.Linear(36, 10))
    stages = cl.Conv2d(1, 4, 3), cl.ReSPro(alpha=2.0), cl.Flatten(), cl.Linear(144, 10)
    model = randomise(cl.ConformalLayers(*stages))
    folded = cl.fold(model, (1, 8, 8))
    cl.save(folded, path, about={"white": 255})
    expected = (folded(small.test_images.float()).argmax(1) == small.test_labels).sum() / 50
    assert evaluate.evaluate(path, small)["folded"] == pytest.approx(float(expected))
    cl.save(folded, path, about={"white": "much"})
    with pytest.raises(cl.ConformalError, match="expected a number for white, got 'much'"):
        evaluate.evaluate(path, small)
