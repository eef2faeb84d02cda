"""predict --ray: the same rows in the same order, by two processes of an embedded cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import conformallayers as cl
from conformallayers.lab.options import PredictOptions
from conformallayers.lab.predict.predict import run_predict
from pictures import GREY, classifier
from training import source_environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fold, and a folder with images, some of them broken."""
    root = tmp_path_factory.mktemp("ray")
    cl.save(cl.fold(classifier(GREY), GREY), root / "net.safetensors", labels=list("abcd"))
    generator = np.random.default_rng(0)
    images = root / "images"
    (images / "sub").mkdir(parents=True)
    for index in range(30):
        path = images / ("sub" if index % 3 else ".") / f"{index:02d}.png"
        Image.fromarray(generator.integers(0, 256, (8, 8), np.uint8)).save(path)
    (images / "10.jpg").write_bytes(b"no image")
    (images / "sub" / "zz.png").symlink_to("nowhere")
    return root


def predict(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "conformallayers", "predict", "net.safetensors"]
    return subprocess.run(
        [*words, *map(str, options)],
        cwd=folder, env=source_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_two_processes_give_the_rows_of_one(format: str, folder: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    options = ("images", "--format", format, "--batch", 4, "--threads", 1)
    alone = predict(folder, *options)
    both = predict(folder, *options, "--ray", "--workers", 2)
    assert both.returncode == alone.returncode == 1, both.stderr
    assert both.stdout == alone.stdout
    assert len(both.stdout.splitlines()) == 30 + (format == "csv")
    assert both.stderr == alone.stderr
    assert both.stderr.endswith("30 predicted, 2 broken\n")


def test_missing_ray_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    model, paths = folder / "net.safetensors", [str(folder / "images")]
    with pytest.raises(cl.MissingExtra, match=r"pip install 'conformallayers\[ray\]'"):
        run_predict(model, paths, PredictOptions(ray=True))
