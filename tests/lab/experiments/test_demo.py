"""The demo: a tiny run and its files."""

import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import torch

import conformallayers as cl
from conformallayers.lab.data.datasets import digits
from conformallayers.lab.experiments.demo import (
    SHAPE,
    SHIPPED,
    DemoConfig,
    build_model,
    classify,
    drawn,
    run_demo,
    train,
)
from conformallayers.lab.report import figures
from support import run_command

PICTURES = {
    f"{n}.{s}" for n in ("respro", "respro-curve", "training", "folded") for s in ("png", "svg")
}


def global_state():
    return torch.get_rng_state().tolist(), torch.get_num_threads()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder and metrics of a tiny run, and the state of torch before and after it."""
    out = tmp_path_factory.mktemp("run") / "demo"
    before = global_state()
    metrics = run_demo(out, DemoConfig(epochs=1, depth=2, channels=4))
    return out, metrics, (before, global_state())


def test_folder_holds_every_file_and_nothing_else(finished):
    out = finished[0]
    assert {path.name for path in out.iterdir()} == {*PICTURES, "metrics.json"}
    assert all(path.stat().st_size > 500 for path in out.iterdir())
    assert [path.name for path in out.parent.iterdir()] == ["demo"]


def test_metrics_are_those_returned_and_both_paths_agree(finished):
    out, metrics, _ = finished
    assert json.loads((out / "metrics.json").read_text("utf-8")) == metrics
    assert DemoConfig(**metrics["config"]) == DemoConfig(epochs=1, depth=2, channels=4)
    assert metrics["accuracy"]["folded"] == metrics["accuracy"]["layers"]
    assert metrics["accuracy"]["layers"] == metrics["history"]["accuracies"][-1]
    assert len(metrics["history"]["losses"]) == 1
    assert metrics["largest_relative_difference"] < cl.testing.TOLERANCES[torch.float32]
    for times in metrics["seconds_per_image"].values():
        assert times["ratio"] == pytest.approx(times["layers"] / times["folded"])


def test_shipped_network_classifies_digits():
    assert classify(digits()) == {"name": SHIPPED, "classes": [2, 0, 4, 9], "labels": [2, 0, 4, 9]}
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 0, 0], image[0, 0, 7, 7] = 1.0, 0.5
    lines = drawn(image, [3]).split("\n")
    assert (lines[0], lines[1], lines[7], lines[8].strip()) == ("@@", "", 14 * " " + "==", "3")


def test_pictures_carry_no_date(finished):
    out = finished[0]
    for path in out.glob("*.svg"):
        assert "dc:date" not in path.read_text("utf-8")


def test_equal_figures_give_equal_files(tmp_path):
    contents = []
    for _ in range(2):
        paths = figures.save(figures.respro_curve(), tmp_path, "curve")
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]


def test_run_leaves_seed_and_threads_alone(finished):
    before, after = finished[2]
    assert after == before


def test_equal_seeds_give_equal_training():
    data, config = digits(), DemoConfig(epochs=1, depth=2, channels=4)
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        (row,) = train(build_model(config), data, config)
        losses.append(row["loss"])
    assert losses[0] == losses[1]


def test_model_of_the_demo_folds():
    cl.testing.assert_folds(build_model(DemoConfig()), SHAPE)


@pytest.mark.slow
def test_demo_reaches_97_percent(tmp_path):
    metrics = run_demo(tmp_path / "demo", DemoConfig())
    assert metrics["accuracy"]["folded"] >= 0.97


def test_existing_file_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "demo").write_text("mine")
    assert run_command("demo", "--out", tmp_path / "demo") == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "expected a folder" in captured.err
    assert (tmp_path / "demo").read_text() == "mine"
