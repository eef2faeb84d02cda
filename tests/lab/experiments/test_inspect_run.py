"""The inspection of a run: its tables and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

import conformallayers as cl
from conformallayers.lab.experiments.inspect_run import inspection_figures
from conformallayers.lab.training.train import train
from oracle import randomise
from support import run_command

FIGURES = {"spectrum", "eigenimages", "templates"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    options = {"epochs": 1, "batch_size": 64, "learning_rate": 0.01}
    return train("LeNetCL", "digits", out=out, console=Console(quiet=True), **options).folder


@pytest.mark.slow  # the eigenvalues of a form of 3072 rows
def test_command_writes_tables_and_figures(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "seen"
    assert run_command("inspect", run_folder, "--out", out) == 0
    files = {f"{name}.png" for name in FIGURES}
    assert {path.name for path in out.iterdir()} == files | {"inspect.txt"}
    text = (out / "inspect.txt").read_text("utf-8")
    assert "2.features.1, 2.features.4" in text
    assert text in capsys.readouterr().out


def test_wrong_arguments_are_refused_in_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fold = tmp_path / "fold.safetensors"
    cl.save(cl.fold(cl.ConformalLayers(cl.Linear(3, 2), cl.ReSPro()), (3,)), fold)
    for arguments, message in (
        ((tmp_path / "none",), "no such file"),
        ((fold,), "got Folded. Name a run of conformallayers train"),
        ((run_folder, "--out", fold), "File exists"),
    ):
        assert run_command("inspect", *arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_stages_have_figures_of_their_own() -> None:
    features = cl.ConformalLayers(
        *(cl.Conv2d(3, 4, 3), cl.ReSPro(), nn.LPPool2d(2, 2), cl.Flatten(), cl.Linear(36, 8)),
        *(cl.ReSPro(), nn.ReLU()),
    )
    model = randomise(nn.Sequential(features, nn.Linear(8, 5)))
    drawn = inspection_figures(cl.inspect(model, (3, 8, 8)), "net")
    assert {*FIGURES, "spectrum-2"} <= set(drawn)
