"""The inspection of a run: its tables and its figures."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import conformallayers as cl
from conformallayers.lab.experiments import inspect_run
from conformallayers.lab.experiments.inspect_run import inspection_figures
from oracle import randomise
from support import run_command

FIGURES = {"spectrum", "eigenimages", "templates"}


def test_wrong_arguments_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fold = tmp_path / "fold.safetensors"
    cl.save(cl.fold(cl.ConformalLayers(cl.Linear(3, 2), cl.ReSPro()), (3,)), fold)
    for path, message in (
        (tmp_path / "none", "no such file"),
        (fold, "got Folded. Name a run of conformallayers train"),
    ):
        assert run_command("inspect", path) == 1
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


def test_large_images_are_announced_and_sigterm_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, seen = (3, 48, 48), []

    def inspect(*_: object) -> None:
        seen.append((signal.getsignal(signal.SIGTERM), capsys.readouterr().err))
        raise cl.ConformalError("stop")

    run = {"module": cl.networks.StageNet(in_shape=shape), "shape": shape, "about": {}}
    config = SimpleNamespace(input_shape=shape)
    loaded = SimpleNamespace(**run, config=config, path=tmp_path / "run" / "file")
    monkeypatch.setattr(inspect_run, "load_model", lambda *_: loaded)
    monkeypatch.setattr(inspect_run, "inspect", inspect)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_command("inspect", "run", "--out", tmp_path) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    ((handler, announced),) = seen
    assert handler == signal.SIG_DFL
    assert "The eigenvectors of Q, 6912 × 6912, take minutes" in announced
