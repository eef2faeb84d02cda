"""Trained networks are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.lab.data.datasets import load
from conformallayers.lab.training import evaluate
from support import assert_says, run_command


def test_evaluate_gives_the_accuracy_of_the_run(finished: Any) -> None:
    found = evaluate.evaluate(finished.folder)
    assert found["folded"] == found["layers"] == finished.accuracy
    assert (found["epoch"], found["images"]) == (8, 450)


def test_grey_network_is_measured_on_a_folder_of_pictures(tmp_path: Path) -> None:
    data = load("digits")
    for index in range(60):
        folder = tmp_path / "pictures" / str(data.test_labels[index].item())
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.test_images[index, 0].numpy()).save(folder / f"{index}.png")
    found = evaluate.evaluate("digits-micro", str(tmp_path / "pictures"))
    assert found["images"] == 60
    assert found["folded"] > 0.9


def test_images_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = cl.ConformalLayers(cl.Conv2d(1, 3, 8), cl.ReSPro(), cl.Flatten())
    cl.save(cl.fold(model, (1, 12, 12)), path := tmp_path / "net.safetensors")
    assert_says(
        lambda: evaluate.evaluate(path, "digits"),
        "expected images of (1, 12, 12), got (1, 8, 8). Name a set of such images",
    )


def test_the_command_prints_accuracy_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "int8.safetensors"
    words = "quantize", "digits-lenetcl", "--out", path
    assert run_command(*words) == 0
    shown = capsys.readouterr().out
    assert "relative errors of the outputs of the 512 images that set the scales" in shown
    assert "accuracy on 450 test images of digits, pixels from 0 to 1\nfloat 98." in shown
    quantized = cl.load(path)
    assert quantized.quantization is not None
    assert quantized.quantization.images == 512
    assert run_command("evaluate", path) == 0
    (line,) = (line for line in shown.splitlines() if line.startswith("float 98."))
    accuracy = line.split("int8 ")[1]
    assert f"test accuracy folded         {accuracy}" in capsys.readouterr().out


def test_calibration_takes_the_same_training_images_at_each_call() -> None:
    data, folded = load("digits"), cl.zoo.load("digits-lenetcl")
    x = evaluate.calibration_images(data, folded)
    assert x.shape == (512, 1, 8, 8)
    assert torch.equal(x, evaluate.calibration_images(data, folded))
    stored = {tuple(image.flatten().tolist()) for image in data.train_images}
    assert {tuple((255 * i).round().int().flatten().tolist()) for i in x} <= stored


def test_a_model_of_no_known_images_needs_a_name() -> None:
    model = cl.ConformalLayers(cl.Conv2d(1, 3, 3), cl.ReSPro(), cl.Flatten())
    folded = cl.fold(model, (1, 8, 8))
    assert_says(lambda: evaluate.quantize_fold(folded), "images to calibrate with", "--images")


def test_a_network_that_torch_fx_cannot_trace_has_no_fold() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1) if x.sum() > 0 else -x.flatten(1))

    found, scores = evaluate.accuracy_by_path(Branching(64, 10), load("digits"), (1, 8, 8))
    assert (found["folded"], found["strategy"], len(scores)) == (None, None, 450)
    assert 0 <= found["layers"] <= 1
