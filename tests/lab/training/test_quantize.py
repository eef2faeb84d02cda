"""conformallayers quantize: training images calibrate, test images measure."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import torch

import conformallayers as cl
from conformallayers.lab.data.datasets import load
from conformallayers.lab.training.evaluate import calibration_images, quantize_fold
from support import assert_says, run_command


def test_the_command_prints_accuracy_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "int8.safetensors"
    words = "quantize", "digits-lenetcl", "--out", path
    assert run_command(*words, "--calibration", "100") == 0
    shown = capsys.readouterr().out
    assert "relative errors of the outputs of the 100 images that set the scales" in shown
    assert "accuracy on 450 test images of digits\nfloat 98." in shown
    quantized = cl.load(path)
    assert quantized.quantization is not None
    assert quantized.quantization.images == 100
    assert run_command("evaluate", path) == 0
    (line,) = (line for line in shown.splitlines() if line.startswith("float 98."))
    accuracy = line.split("int8 ")[1]
    assert f"accuracy folded         {accuracy}" in capsys.readouterr().out


def test_calibration_takes_the_same_training_images_at_each_call() -> None:
    data, folded = load("digits"), cl.zoo.load("digits-lenetcl")
    x = calibration_images(data, folded, 1.0, 50)
    assert x.shape == (50, 1, 8, 8)
    assert torch.equal(x, calibration_images(data, folded, 1.0, 50))
    stored = {tuple(image.flatten().tolist()) for image in data.train_images}
    assert {tuple((255 * i).round().int().flatten().tolist()) for i in x} <= stored


def test_a_model_of_no_known_images_needs_a_name() -> None:
    model = cl.ConformalLayers(cl.Conv2d(1, 3, 3), cl.ReSPro(), cl.Flatten())
    folded = cl.fold(model, (1, 8, 8))
    assert_says(lambda: quantize_fold(folded), "images to calibrate with", "--images")
