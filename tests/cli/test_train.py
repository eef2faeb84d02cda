"""conformallayers train on pictures and networks of one's own, and the commands that take the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import conformallayers as cl
from picture_folders import NETWORK, make_folder, make_network
from support import run_command

OPTIONS = ("--size", "9x12", "--batch-size", "4", "--learning-rate", "0.02")
CLASSES = {"cat": 10, "dog é": 10, "emu": 10}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures, a network in a file, and its run."""
    root = tmp_path_factory.mktemp("own")
    make_folder(root / "pets", CLASSES)
    make_network(root / "net.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert (
            run_command("train", "net.py:Tiny", "pets", *OPTIONS, "--epochs", "2", "--centre") == 0
        )
    return root


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(place)
    return "runs/Tiny-pets-seed0"


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert run_command(*words) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


def test_run_has_its_classes_figures_and_code(run: str, place: Path) -> None:
    names = {path.name for path in Path(run).iterdir()}
    files = {"config.json", "metrics.csv", "result.json", "checkpoint.safetensors"}
    assert names - {"report.html"} == {*files, "training.png", "confusion.csv"}
    config = json.loads((Path(run) / "config.json").read_text())
    assert config["labels"] == ["cat", "dog é", "emu"]
    assert config["in_shape"] == [3, 9, 12]
    assert config["network"] == f"{place}/net.py:Tiny"
    assert config["dataset"] == f"{place}/pets"
    result = json.loads((Path(run) / "result.json").read_text())
    assert result["accuracy_folded"] == result["accuracy_layers"]
    assert result["samples"] == {"train": 24, "test": 6}


def test_run_is_evaluated_folded_and_predicts_labels(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads((Path(run) / "result.json").read_text())
    share = f"test accuracy folded         {100 * result['accuracy_folded']:.2f} % of 6 images"
    assert run_command("evaluate", f"{run}/checkpoint.safetensors") == 0
    assert share in capsys.readouterr().out
    fold = tmp_path / "fold.safetensors"
    assert run_command("fold", run, "--out", fold) == 0
    assert cl.load(fold).labels == ("cat", "dog é", "emu")
    capsys.readouterr()
    assert run_command("evaluate", fold) == 0
    assert share in capsys.readouterr().out
    lines = []
    for model, engine in ((run, "torch"), (fold, "torch"), (fold, "numpy")):
        options = ("--engine", engine, "--format", "csv", "--top", "1")
        assert run_command("predict", model, "pets/emu", *options) == 0
        lines.append(capsys.readouterr().out.splitlines())
    assert len(lines[0]) == 11
    labels = [[line.split(",")[1] for line in part] for part in lines]
    assert labels[0] == labels[1] == labels[2]
    assert set(labels[0][1:]) <= {"cat", "dog é", "emu"}


def test_run_is_resumed_unless_something_has_changed(
    run: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "net.py:Tiny", "pets", *OPTIONS, "--centre", "--no-figures")
    folder = ("--out", tmp_path / "run")
    assert run_command(*words, "--epochs", "2", *folder) == 0
    again = (*words, "--epochs", "2", *folder, "--resume")
    extra = place / "pets" / "cat" / "extra.png"
    Image.new("L", (8, 8), 7).save(extra)
    assert "the folder of pictures as before" in error_of(capsys, *again)
    assert "the folder as it was for the training" in error_of(capsys, "evaluate", run)
    extra.unlink()
    make_network(place / "net.py", NETWORK + "# changed\n")
    assert "the file of the network as before" in error_of(capsys, *again)
    assert "The code has changed since the training" in error_of(capsys, "evaluate", run)
    make_network(place / "net.py")
    other = ["9x13" if word == "9x12" else word for word in again]
    assert "--size: expected '9x12' as before" in error_of(capsys, *other)
    assert run_command(*again) == 0


def test_run_is_inspected_timed_and_reported(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("inspect", run, "--out", tmp_path / "inspect") == 0
    assert list((tmp_path / "inspect").glob("*.png"))
    assert "stage 1" in (tmp_path / "inspect" / "inspect.txt").read_text("utf-8")
    words = ("--batch", "2", "--executions", "3", "--out", tmp_path / "bench")
    assert run_command("bench", run, *words) == 0
    assert run_command("playground", run, "--out", tmp_path / "draw.html") == 0
    assert '"name":"Tiny-pets-seed0"' in (tmp_path / "draw.html").read_text("utf-8")
    assert run_command("report", run, "--out", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Tiny, pets</h1>" in page
    assert page.count("data:image/png;base64,") == len(list(Path(run).glob("*.png")))
    assert "dog é" in page


def test_stage_net_follows_size_and_classes(run: str, tmp_path: Path) -> None:
    words = ("--preset", "micro", "--size", "40x36", "--epochs", "1", "--batch-size", "12")
    options = ("--flips", "--validation", "0.25", "--no-figures", "--out")
    preset = ("--training-preset", "modern", *options)
    assert run_command("train", "StageNet", "pets", *words, *preset, tmp_path / "run") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "--training-preset modern --flips --batch-size 12 --epochs 1" in result["command"]
    assert (result["optimizer"], result["shift"], result["centre"]) == ("adamw", 2, True)
    assert result["samples"] == {"train": 18, "test": 6}
    assert result["classes"] == 3
    assert run_command("evaluate", tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("net.py:Tiny", "none/there"), "got no such folder"),
        (("net.py:Tiny", "pest"), "Or name a folder of pictures"),
        (("net.py:Tiny", "pets", "--size", "big"), "train --size: expected N or HEIGHTxWIDTH"),
        (("LeNetCL", "pets", "--size", "64"), "train --size: expected images of (3, 32, 32)"),
        (("gone.py:Tiny", "pets"), "expected the code of Tiny in"),
        (("MLP", "gone", "--size", "64"), "Or name a folder of pictures."),
    ],
)
def test_wrong_input_leaves_nothing_behind(
    words: tuple[str, ...], message: str, run: str, tmp_path: Path, capsys: Any
) -> None:
    assert message in error_of(capsys, "train", *words, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_broken_picture_leaves_nothing_behind(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path / "pets", {"cat": 3, "dog": 3})
    broken = tmp_path / "pets" / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    words = ("train", "net.py:Tiny", tmp_path / "pets", "--out", tmp_path / "run")
    assert "0.png (a damaged image" in error_of(capsys, *words)
    assert not (tmp_path / "run").exists()


def test_sweep_searches_pictures(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--size", "9x12", "--validation", "0.25", "--trials", "2", "--max-epochs", "1")
    assert run_command("sweep", "net.py:Tiny", "pets", *words, "--out", tmp_path) == 0
    record = json.loads((tmp_path / "study.json").read_text())
    assert record["images"] == {"train": 18, "validation": 6}
    assert all(row["batch_size"] <= 18 for row in record["trials"])
