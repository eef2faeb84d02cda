"""Data sets in memory: loaded, split, checked file by file."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset, load, load_test
from conformallayers.lab.options import DataOptions
from conformallayers.lab.training.saved_models import Loaded
from datafiles import NAMES
from picture_folders import make_folder
from support import assert_says, run_command


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
    other = load("cifar10", archived, verify=False)
    assert torch.equal(other.train_images, binary.train_images)


def test_digits_need_no_files(tmp_path: Path) -> None:
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


def test_labels_beyond_the_classes_are_refused() -> None:
    images, labels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 2])
    Dataset("own", images, labels, images, labels, classes=3)
    with pytest.raises(cl.ConformalError, match="own: expected labels from 0 to 2, got 3"):
        Dataset("own", images, labels, images, torch.tensor([1, 3]), classes=3)


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
    assert capsys.readouterr().out.split() == ["ok", "mnist", "ok", "digits"]
    assert run_command("data", "check", "cifar10") == 1
    assert "no such file" in capsys.readouterr().out
    (pretended / NAMES[1]).write_bytes(b"?")
    assert run_command("data", "check", "--data-root", root) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"BAD mnist: {pretended / NAMES[1]}: expected")
    assert lines[1] == "ok  digits"  # the bad set stops no other


def test_options_of_a_run_follow_from_the_data(tmp_path: Path) -> None:
    found = load(str(make_folder(tmp_path, {"cat": 4, "dog": 4})), size="8x10")
    assert found.name == str(tmp_path)
    expected = {"classes": 2, "labels": ["cat", "dog"], "in_shape": [3, 8, 10]}
    assert found.options == {**expected, "pictures": found.pictures}
    assert_says(lambda: load("digits", size="8"), "train --size: expected a folder of pictures")
    images, labels = torch.zeros(2, 1, 40, 33, dtype=torch.uint8), torch.tensor([0, 1])
    data = Dataset("own", images, labels, images, labels, 2, ("a", "b"))
    assert data.options["in_shape"] == [1, 40, 33]


def read(name: Path | str, trained: str, digest: str | None, *labels: str) -> Dataset:
    network = Loaded(nn.Identity(), Path(), labels, {"dataset": trained, "pictures": digest}, None)
    return load_test(str(name), network, (3, 32, 32), DataOptions(), "evaluate")


def test_network_is_tested_on_held_out_pictures(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a", {"cat": 10, "dog": 10})
    source = load(str(folder))
    trained = source.name, source.pictures, "cat", "dog"
    assert len(read(folder, *trained).test_labels) == 4
    moved = make_folder(tmp_path / "b", {"cat": 10, "dog": 10})
    assert len(read(moved, *trained).test_labels) == 4  # the same files elsewhere
    make_folder(folder, {"dog": 11})
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        assert_says(lambda p=path: read(p, *trained), "the folder as it was for the training")


def test_all_pictures_of_another_folder_are_tested(tmp_path: Path) -> None:
    trained = "elsewhere", "0", "ant", "cat", "dog"
    folder = make_folder(tmp_path / "a", {"dog": 4, "cat": 6})
    assert read(folder, *trained).test_labels.bincount().tolist() == [0, 6, 4]
    make_folder(tmp_path / "b" / "train", {"dog": 4, "cat": 6})
    make_folder(tmp_path / "b" / "test", {"dog": 1, "cat": 2})
    assert read(tmp_path / "b", *trained).test_labels.bincount().tolist() == [0, 2, 1]
    make_folder(folder, {"fox": 2})
    assert_says(lambda: read(folder, *trained), "classes among ant, cat, dog, got fox")
    network = Loaded(nn.Identity(), Path(), tuple("0123456789"), {}, None)
    assert_says(
        lambda: load_test("digits", network, (1, 28, 28), DataOptions(), "evaluate"),
        "expected images of (1, 28, 28), got (1, 8, 8)",
    )


def test_classes_of_a_known_set_are_found_by_name() -> None:
    found = read("digits", "folder", "0", *"9876543210", "x")
    assert found.labels == (*"9876543210", "x")
    assert torch.equal(found.test_labels, 9 - load("digits").test_labels)
    assert_says(
        lambda: read("digits", "folder", "0", *"98765x3210"),
        "expected classes among 9, 8, 7, 6, 5, x, 3, 2, 1, 0, got 4",
    )
