"""Trained networks are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import conformallayers as cl
from conformallayers.lab.data.datasets import load
from conformallayers.lab.training import evaluate
from support import assert_says, run_command


def test_evaluate_gives_the_accuracy_of_the_run(
    finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate.evaluate(finished.folder)
    assert found["folded"] == found["layers"] == finished.accuracy
    assert (found["epoch"], found["images"]) == (8, 450)
    path = finished.folder / evaluate.CHECKPOINT
    assert run_command("evaluate", path, "--dataset", "digits") == 0
    assert f"folded         {100 * finished.accuracy:.2f} %" in capsys.readouterr().out


def test_grey_network_is_measured_on_a_folder_of_pictures(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    data = load("digits")
    for index in range(60):
        folder = tmp_path / "pictures" / str(data.test_labels[index].item())
        folder.mkdir(parents=True, exist_ok=True)
        images.fromarray(data.test_images[index, 0].numpy()).save(folder / f"{index}.png")
    found = evaluate.evaluate("digits-micro", str(tmp_path / "pictures"))
    assert found["images"] == 60
    assert found["folded"] > 0.9


def test_images_of_another_shape_are_refused() -> None:
    assert_says(
        lambda: evaluate.evaluate("digits-micro", "shapes"),
        "expected images of (1, 8, 8), got (1, 32, 32). Name a set of such images",
    )


def test_device_that_is_not_there_is_refused() -> None:
    assert_says(
        lambda: evaluate.evaluate("digits-micro", device="cuda:99"),
        "evaluate --device: expected a device of this machine, got 'cuda:99' (",
        "Try cpu.",
    )


def test_network_for_vectors_cannot_take_pictures(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    for name in "01":
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(2):
            images.new("L", (4, 4)).save(tmp_path / "pictures" / name / f"{index}.png")
    folded = cl.fold(cl.ConformalLayers(cl.Linear(6, 2)), (6,))
    cl.save(folded, tmp_path / "a.safetensors")
    assert_says(
        lambda: evaluate.evaluate(tmp_path / "a.safetensors", str(tmp_path / "pictures")),
        "expected a network for pictures, (1 or 3, H, W), got (6,)",
    )
