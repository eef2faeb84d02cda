"""The demo: a tiny run, its files and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.experiments.demo import SHAPE, networks, run_demo
from support import run_command


def global_state() -> Any:
    return torch.get_rng_state().tolist(), torch.get_num_threads()


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, out = global_state(), tmp_path / "demo"
    assert run_command("demo", "--epochs", 1, "--out", out) == 0
    assert global_state() == before
    shown = capsys.readouterr().out
    for word in ("plain", "expanded", "conformal", "torch", "numpy", "C99", "Next:"):
        assert f"\n{word}" in shown
    files = {"training.png", "metrics.json", "digits.safetensors", "c"}
    assert {path.name for path in out.iterdir()} == files
    metrics = json.loads((out / "metrics.json").read_text("utf-8"))
    for name, found in metrics["networks"].items():
        assert found["accuracy"]["folded"] == found["accuracy"]["trained"]
        assert found["accuracy"]["trained"] == metrics["history"][name][-1]["test_accuracy"]
        assert found["difference"] < cl.testing.TOLERANCES[torch.float32]
    again = run_demo(tmp_path / "again", epochs=1)  # equal seeds give equal training
    assert again["history"] == metrics["history"]
    assert (out / "training.png").read_bytes() == (tmp_path / "again" / "training.png").read_bytes()


def test_networks_of_the_demo_fold_and_deploy_the_same_layers() -> None:
    found = networks()
    for model in found.values():
        cl.testing.assert_folds(model, SHAPE)
    plain, expanded = (cl.fold(found[name], SHAPE).recipe for name in ("plain", "expanded"))
    assert [type(one) for one in plain.operations] == [type(one) for one in expanded.operations]


@pytest.mark.slow
def test_expanded_beats_plain_and_the_conformal_network_reaches_97_percent(tmp_path: Path) -> None:
    found = run_demo(tmp_path / "demo")["networks"]
    shares = {name: row["accuracy"]["folded"] for name, row in found.items()}
    assert shares["expanded"] > shares["plain"]
    assert shares["conformal"] >= 0.97
