"""What is known of a data set before it is read, and which pictures a network may be tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

import torch

from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.data.sources import TrainingData, find_source, load_test
from picture_folders import make_folder
from support import assert_says

SIZE = (3, 8, 8)


def test_folder_tells_classes_and_shape(tmp_path: Path) -> None:
    source = find_source(str(make_folder(tmp_path, {"cat": 4, "dog": 4})), "8x10")
    assert source.name == str(tmp_path)
    assert source.options["classes"] == 2
    assert source.options["labels"] == ["cat", "dog"]
    assert source.options["in_shape"] == [3, 8, 10]
    assert source.read().train_images.shape[1:] == (3, 8, 10)


@pytest.mark.parametrize("size", ["8x10", (8, 10), [8, 10]])
def test_size_may_be_text_or_numbers(size: Any, tmp_path: Path) -> None:
    options = find_source(str(make_folder(tmp_path, {"cat": 4, "dog": 4})), size).options
    assert (options["size"], options["in_shape"]) == ("8x10", [3, 8, 10])


@pytest.mark.parametrize("size", [0, 8.5, True, (8, 9, 10), ()])
def test_wrong_size_is_refused(size: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"cat": 4, "dog": 4})
    assert_says(lambda: find_source(str(folder), size), "train --size: expected N or HEIGHTxWIDTH")


def test_known_set_has_no_size_and_large_images_keep_their_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_source("shapes").options == {"classes": 3}
    assert_says(lambda: find_source("shapes", "8"), "train --size: expected it for a folder")
    (tmp_path / "shapes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert_says(lambda: find_source("shapes", "8"), "in that folder write ./shapes; shapes is a")
    images, labels = torch.zeros(2, 1, 40, 33, dtype=torch.uint8), torch.tensor([0, 1])
    data = Dataset("own", images, labels, images, labels, 2, ("a", "b"))
    expected = {"classes": 2, "labels": ["a", "b"], "in_shape": [1, 40, 33]}
    assert find_source(data).options == expected


def read(folder: Path, trained: TrainingData) -> Dataset:
    return load_test(str(folder), trained, None, verify=True, where="evaluate")


def test_network_is_tested_on_pictures_that_were_set_aside(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a", {"cat": 10, "dog": 10})
    source = find_source(str(folder))
    trained = TrainingData(source.name, ("cat", "dog"), source.options["pictures"], SIZE)
    assert len(read(folder, trained).test_labels) == 4
    moved = make_folder(tmp_path / "b", {"cat": 10, "dog": 10})
    assert len(read(moved, trained).test_labels) == 4  # the same files elsewhere
    make_folder(folder, {"dog": 11})
    assert_says(lambda: read(folder, trained), "the folder as it was for the training")


def test_all_pictures_of_another_folder_are_tested(tmp_path: Path) -> None:
    trained = TrainingData("elsewhere", ("ant", "cat", "dog"), "0", SIZE)
    folder = make_folder(tmp_path / "a", {"dog": 4, "cat": 6})
    assert read(folder, trained).test_labels.bincount().tolist() == [0, 6, 4]
    make_folder(tmp_path / "b" / "train", {"dog": 4, "cat": 6})
    make_folder(tmp_path / "b" / "test", {"dog": 1, "cat": 2})
    assert read(tmp_path / "b", trained).test_labels.bincount().tolist() == [0, 2, 1]
    make_folder(folder, {"fox": 2})
    assert_says(lambda: read(folder, trained), "classes among ant, cat, dog, got fox")


def test_classes_of_a_known_set_are_found_by_name() -> None:
    trained = TrainingData("folder", (*"9876543210", "x"), "0", SIZE)
    found = load_test("digits", trained, None, verify=True, where="evaluate")
    assert found.labels == trained.labels
    assert torch.equal(found.test_labels, 9 - load("digits").test_labels)
    other = TrainingData("folder", tuple("98765x3210"), "0", SIZE)
    assert_says(
        lambda: load_test("digits", other, None, verify=True, where="evaluate"),
        "evaluate digits: expected classes among 9, 8, 7, 6, 5, x, 3, 2, 1, 0, got 4",
    )


def test_changed_folder_is_known_by_every_path(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a", {"cat": 10, "dog": 10})
    source = find_source(str(folder))
    trained = TrainingData(source.name, ("cat", "dog"), source.options["pictures"], SIZE)
    make_folder(folder, {"dog": 11})
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(folder)
    for path in (tmp_path / "b" / ".." / "a", tmp_path / "link"):
        assert_says(lambda p=path: read(p, trained), "the folder as it was for the training")
