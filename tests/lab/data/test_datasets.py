"""Data sets in memory: loaded, split, checked file by file."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset, check, load
from datafiles import NAMES
from support import run_command


def test_idx_files_are_read_as_they_were_written(mnist: Path) -> None:
    found = load("mnist", mnist.parent, verify=False)
    assert found.train_images.shape == (7, 1, 28, 28)
    assert found.train_images.dtype == torch.uint8
    assert found.test_labels.dtype == torch.int64
    assert found.test_images.numpy().tobytes() == (mnist / NAMES[2]).read_bytes()[16:]
    assert bytes(found.train_labels.tolist()) == (mnist / NAMES[1]).read_bytes()[8:]
    assert (found.name, found.classes) == ("mnist", 10)


def test_files_and_archive_of_cifar_hold_the_same(cifar: Path, tmp_path: Path) -> None:
    binary = load("cifar10", tmp_path, verify=False)
    assert binary.train_images.shape == (10, 3, 32, 32)
    assert binary.test_labels.shape == (2,)
    rows = np.frombuffer((cifar / "data_batch_2.bin").read_bytes(), np.uint8).reshape(2, 3073)
    assert torch.equal(binary.train_labels[2:4], torch.from_numpy(rows[:, 0].copy()).long())
    assert binary.train_images[2:4].numpy().tobytes() == rows[:, 1:].tobytes()

    archived = tmp_path / "archive"
    archived.mkdir()
    with tarfile.open(archived / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for path in sorted(cifar.iterdir(), reverse=True):
            archive.add(path, f"{cifar.name}/{path.name}")
    for root in (tmp_path, archived):
        other = load("cifar10", root, verify=False)
        assert torch.equal(other.train_images, binary.train_images)
        assert torch.equal(other.train_labels, binary.train_labels)
        assert torch.equal(other.test_images, binary.test_images)
        assert [fault for _, fault in check("cifar10", root, verify=False)] == [None] * 6


def test_digits_need_no_files(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    found = load("digits", tmp_path / "nowhere")
    assert found.train_images.shape == (1347, 1, 8, 8)
    assert found.train_images.max() == 255
    train, held = found.split(100)
    assert torch.equal(train.test_images, found.test_images)
    assert (len(train.train_labels), len(held.test_labels)) == (1247, 100)
    again = found.split(100)[1]
    assert torch.equal(held.test_images, again.test_images)
    both = torch.cat([train.train_images, held.test_images]).flatten(1).long().sum(0)
    assert torch.equal(both, found.train_images.flatten(1).long().sum(0))
    for wrong in (-0.1, 1.5, 1347, float("nan")):
        with pytest.raises(cl.ConformalError, match="validation: expected"):
            found.split(wrong)


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(cl.MissingExtra, match="the dataset digits needs scikit-learn: pip install"):
        load("digits")


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_beyond_the_classes_are_refused(label: int) -> None:
    images, labels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 2])
    Dataset("own", images, labels, images, labels, classes=3)
    with pytest.raises(
        cl.ConformalError, match=f"dataset own: expected labels from 0 to 2, got {label}"
    ):
        Dataset("own", images, labels, images, torch.tensor([1, label]), classes=3)


def test_list_and_check_tell_what_is_there(
    pretended: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pretended.parent
    monkeypatch.setenv("CONFORMALLAYERS_DATA", str(root))
    assert run_command("data", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mnist", str(pretended)]
    assert lines[2].split() == ["cifar10", "not", "found"]
    assert run_command("data", "check") == 0
    assert [line[:3] for line in capsys.readouterr().out.splitlines()] == ["ok "] * 6
    assert run_command("data", "check", "cifar10") == 1
    assert "no such file" in capsys.readouterr().out
    (pretended / NAMES[1]).write_bytes(b"?")
    assert run_command("data", "check", "mnist", "--data-root", root) == 1
    assert [line[:3] for line in capsys.readouterr().out.splitlines()].count("BAD") == 1
    (pretended / NAMES[1]).unlink()
    assert run_command("data", "check") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BAD mnist: ")
    assert (
        lines[1] == "ok  digits, which comes with scikit-learn"
    )  # one that is missing stops no other
    assert run_command("data", "check", "--data-root", root / "nowhere") != 0
    assert "data check --data-root: expected a folder" in capsys.readouterr().err


def test_data_commands_do_not_need_torchvision_or_figures(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom conformallayers.lab.data import datasets, batches, files\n"
        "assert not {'matplotlib', 'torchvision', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
