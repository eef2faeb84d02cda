"""The demo: a tiny run and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import torch

import conformallayers as cl
from conformallayers.lab.experiments.demo import SHAPE, build_model, run_demo
from conformallayers.lab.report import figures


def global_state() -> Any:
    return torch.get_rng_state().tolist(), torch.get_num_threads()


def test_a_tiny_run(tmp_path: Path) -> None:
    before, out = global_state(), tmp_path / "demo"
    metrics = run_demo(out, epochs=1, depth=2)
    assert global_state() == before
    files = {f"{name}.png" for name in ("respro", "training", "folded")}
    assert {path.name for path in out.iterdir()} == {*files, "metrics.json"}
    assert json.loads((out / "metrics.json").read_text("utf-8")) == metrics
    assert metrics["accuracy"]["folded"] == metrics["accuracy"]["layers"]
    assert metrics["accuracy"]["layers"] == metrics["history"][-1]["test_accuracy"]
    assert metrics["largest_relative_difference"] < cl.testing.TOLERANCES[torch.float32]
    for times in metrics["seconds_per_image"].values():
        assert times["ratio"] == pytest.approx(times["layers"] / times["folded"])
    again = run_demo(out, epochs=1, depth=2)  # equal seeds give equal training
    assert again["history"] == metrics["history"]


def test_equal_figures_give_equal_files(tmp_path: Path) -> None:
    paths = [figures.save(figures.respro_curve(), tmp_path, name) for name in ("a", "b")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_model_of_the_demo_folds() -> None:
    cl.testing.assert_folds(build_model(), SHAPE)


@pytest.mark.slow
def test_demo_reaches_97_percent(tmp_path: Path) -> None:
    assert run_demo(tmp_path / "demo")["accuracy"]["folded"] >= 0.97
