"""The demo and the command line: a tiny run, its files, and how it ends early."""

import json
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import torch

import conformallayers as cl
from conformallayers.cli import app as cli
from conformallayers.lab.data.digits import SHAPE, digits
from conformallayers.lab.experiments.demo import DemoConfig, build_model, run_demo, train
from conformallayers.lab.report import figures

PICTURES = {f"{n}.{s}" for n in ("respro", "training", "folded") for s in ("png", "svg")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "demo"
    return out, run_demo(out, DemoConfig(epochs=1, depth=2, channels=4))


def test_folder_holds_every_file_and_nothing_else(finished):
    out, _ = finished
    assert {path.name for path in out.iterdir()} == {*PICTURES, "metrics.json"}
    assert all(path.stat().st_size > 500 for path in out.iterdir())
    assert [path.name for path in out.parent.iterdir()] == ["demo"]


def test_metrics_are_those_returned_and_both_paths_agree(finished):
    out, metrics = finished
    assert json.loads((out / "metrics.json").read_text("utf-8")) == metrics
    assert DemoConfig(**metrics["config"]) == DemoConfig(epochs=1, depth=2, channels=4)
    assert metrics["accuracy"]["folded"] == metrics["accuracy"]["layers"]
    assert metrics["accuracy"]["layers"] == metrics["history"]["accuracies"][-1]
    assert len(metrics["history"]["losses"]) == 1
    assert metrics["largest_relative_difference"] < cl.testing.TOLERANCES[torch.float32]
    for times in metrics["seconds_per_image"].values():
        assert times["ratio"] == pytest.approx(times["layers"] / times["folded"])


def test_pictures_carry_no_date(finished):
    out, _ = finished
    for path in out.glob("*.svg"):
        assert "dc:date" not in path.read_text("utf-8")


def test_equal_figures_give_equal_files(tmp_path):
    contents = []
    for _ in range(2):
        paths = figures.save(figures.training_curve([2.0, 1.0], [0.5, 0.9]), tmp_path, "curve")
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]


def test_run_leaves_seed_and_threads_alone(tmp_path):
    before = torch.get_rng_state(), torch.get_num_threads()
    run_demo(tmp_path / "demo", DemoConfig(epochs=1, depth=1, channels=2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_equal_seeds_give_equal_training():
    data, config = digits(), DemoConfig(epochs=1, depth=2, channels=4)
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(train(build_model(config), data, config).losses)
    assert losses[0] == losses[1]


def test_model_of_the_demo_folds():
    cl.testing.assert_folds(build_model(DemoConfig()), SHAPE)


@pytest.mark.slow
def test_demo_reaches_97_percent(tmp_path):
    metrics = run_demo(tmp_path / "demo", DemoConfig())
    assert metrics["accuracy"]["folded"] >= 0.97


def test_existing_file_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "demo").write_text("mine")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["demo", "--out", str(tmp_path / "demo")])
    assert leaving.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "expected a folder" in captured.err
    assert (tmp_path / "demo").read_text() == "mine"


def test_version_does_not_import_torch():
    code = (
        "import sys\n"
        "from conformallayers.cli.app import main\n"
        "try:\n    main(['--version'])\n"
        "except SystemExit as leaving:\n    assert leaving.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cl.__version__


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("rich", "rich")])
def test_missing_extra_is_one_line(module, package, monkeypatch, capsys, tmp_path):
    for name in [n for n in sys.modules if n.startswith("conformallayers.lab")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    app = cli._app()
    monkeypatch.setattr(cli, "_app", lambda: app)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["demo", "--out", str(tmp_path / "demo")])
    assert leaving.value.code == 1
    message = f"needs {package}: pip install 'conformallayers[experiments]'\n"
    assert capsys.readouterr().err == f"conformallayers: the demo {message}"


def test_interrupt_leaves_one_line_and_no_files(tmp_path):
    command = [sys.executable, "-c", "from conformallayers.cli.app import main; main()"]
    process = subprocess.Popen(
        [*command, "demo", "--epochs", "100000"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.1)  # the folder for unfinished files shows that the run has begun
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert message == "Interrupted.\n"
    assert list(tmp_path.iterdir()) == []
