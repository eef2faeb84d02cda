"""The benchmark against other engines: its rows, its command and its units."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import torch
from torch import nn

import conformallayers as cl
from conformallayers.lab.experiments import bench
from conformallayers.lab.experiments.bench import run_bench
from conformallayers.lab.experiments.options import BenchOptions
from conformallayers.lab.experiments.records import Row
from conformallayers.lab.experiments.subjects import Subject
from support import run_command

RESULTS = Path(__file__).parents[3] / "results" / "benchmarks"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BenchOptions]]:
    """Replace the measurement by numbers; collect what is measured."""
    measured: list[tuple[str, BenchOptions]] = []

    def measure(subject: Subject, options: BenchOptions, against: object) -> list[Row]:
        measured.append((subject.name, options))
        row = {"network": subject.name, "strategy": "conv", "error": 1e-7, "notes": {}}
        row["times"] = {"eager": [2.0, 1.0, 3.0], "folded": [0.5, 0.4, 0.6]}
        return [{**row, "accuracy": subject.accuracy, "batch": batch} for batch in options.batch]

    monkeypatch.setattr(bench, "measure", measure)
    return measured


def test_command_of_the_record_measures_the_same(
    quick: list[tuple[str, BenchOptions]], tmp_path: Path
) -> None:
    words = ["LeNet", "DkNet 7", "--batch", 1, 64, "--depths", 7, "--executions", 6]
    assert run_command("bench", *words, "--sessions", "numpy", "--out", tmp_path) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    command = record["command"]
    assert command.startswith("conformallayers bench LeNet 'DkNet 7' --batch 1 64 --depths 7")
    assert [name for name, _ in quick] == ["LeNet", "DkNet 7"]
    assert run_command(*shlex.split(command)[1:], "--out", tmp_path) == 0
    assert quick[:2] == quick[2:]
    assert [(row["network"], row["batch"]) for row in record["rows"]] == [
        ("DkNet 7", 1), ("DkNet 7", 64), ("LeNet", 1), ("LeNet", 64),
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_table_has_units(tmp_path: Path) -> None:
    run_bench(["LeNet"], out=tmp_path, results=tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert "milliseconds (ms) per batch" in text
    assert "| network | batch | eager (ms) | folded (ms) | strategy |" in text
    line = "| LeNet | 64 | 2.000 | 0.500 | conv | folded | eager | 4.00 | 1.0e-07 | untrained |"
    assert line in text


def test_speed_up_is_that_of_the_fastest_fold() -> None:
    times = {"eager": [2.0], "onnx": [1.0], "against": [0.8], "layers": [3.0], "folded": [0.5]}
    times |= {"session-numpy": [0.4], "tolerance": [0.1]}
    row = {"network": "a b.safetensors", "batch": 1, "strategy": "conv", "error": None}
    accuracy = {"relu": 0.7, "fold": 0.75}
    header, (line,) = bench.cells([{**row, "times": times, "accuracy": accuracy}])
    assert header[-6:] == [
        *("strategy", "fastest fold", "fastest other", "speed-up", "error", "accuracy")
    ]
    assert line[-6:] == ["conv", "session-numpy", "against", "2.00", "", "75.00 %, ReLU 70.00 %"]
    plain = {**row, "times": {"eager": [1.0]}, "accuracy": None, "strategy": ""}
    assert bench.cells([plain])[1][0][2:] == ["1.000", "", "", "eager", "", "", "not known"]


@pytest.mark.usefixtures("quick")
def test_rows_of_an_earlier_run_are_kept_on_request(tmp_path: Path) -> None:
    run_bench(["LeNet"], out=tmp_path)
    assert len(run_bench(["Base"], out=tmp_path, keep=True)) == 2
    assert len(run_bench(["Base"], out=tmp_path)) == 1
    (tmp_path / "bench.json").write_text("[]")
    with pytest.raises(cl.ConformalError, match=r"bench --keep, .*: expected a record"):
        run_bench(["Base"], out=tmp_path, keep=True)


@pytest.mark.usefixtures("quick")
def test_depths_of_one_batch_size_become_a_figure(tmp_path: Path) -> None:
    names = [f"DkNet {depth}" for depth in (1, 3)]
    run_bench(names[:1], out=tmp_path)
    assert not (tmp_path / "bench.png").exists()
    run_bench(names, out=tmp_path)
    assert (tmp_path / "bench.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["Lenet"]}, r"bench: expected one of Base, .* Did you mean \"LeNet\"\?"),
        ({"names": ["a.safetensors"]}, r"bench a.safetensors: expected a file .* got no such file"),
        ({"executions": 0}, "bench --executions: expected a value greater than 0, got 0"),
        ({"batch": (1, -2)}, "bench --batch: expected a value greater than 0, got -2"),
        ({"threads": 0}, "bench --threads: expected a value greater than 0"),
        ({"sessions": ("onnx",)}, "bench --sessions: expected one of onnxruntime, .*'onnx'"),
        (
            {"against": Path("relu.onnx")},
            r"--against relu.onnx: expected an ONNX file, got no such",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        run_bench(out=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_an_earlier_record_of_the_repository_is_read() -> None:
    """Rows are added to the committed file: its fields must stay those that a run writes."""
    record = json.loads((RESULTS / "bench.json").read_text())
    text = bench.markdown(*bench.cells(record["rows"]))
    assert text in (RESULTS / "bench.md").read_text()
    assert record["rows"] == sorted(record["rows"], key=bench._order)


def tiny(convolution: type[nn.Module], *activation: nn.Module) -> nn.Module:
    features = convolution(3, 2, 5, stride=9, bias=False), *activation
    whole = cl.ConformalLayers if convolution is cl.Conv2d else nn.Sequential
    return nn.Sequential(whole(*features), nn.Flatten(), nn.Linear(32, 2))


@pytest.fixture
def eager_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = functools.partial(bench.relu_engines, names=("eager",))
    monkeypatch.setattr(bench, "relu_engines", alone)


@pytest.mark.usefixtures("eager_alone")
def test_engines_are_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(
        "tiny",
        conformal=lambda: tiny(cl.Conv2d, cl.ReSPro()),
        relu=lambda: tiny(nn.Conv2d, nn.ReLU()),
        accuracy={},
    )
    monkeypatch.setattr(bench, "chosen_subjects", lambda *_: [subject])
    (row,) = run_bench(["tiny"], out=tmp_path, batch=(2,), executions=1, sessions=("numpy",))
    assert set(row["times"]) == {"eager", "layers", "folded", "tolerance", "session-numpy"}
    assert row["error"] < 1e-5
    assert all(0 < low <= median <= high for median, low, high in row["times"].values())
    assert "| tiny | 2 |" in (tmp_path / "bench.md").read_text()
    command = row["command"].removeprefix("conformallayers bench tiny ")
    assert command.startswith("--batch 2 --depths 1 3 9 13 30 --executions 1 --tolerance 0.001")
    assert "--sessions numpy" in command


@pytest.mark.usefixtures("eager_alone")
def test_networks_of_stages_and_plain_ones_have_rows(tmp_path: Path) -> None:
    trained = [{"name": "StageNet-micro", "accuracy": share} for share in (0.75, 0.76)]
    (tmp_path / "experiment5").mkdir()
    (tmp_path / "experiment5" / "cifar10.json").write_text(json.dumps({"rows": trained}))
    words = ["StageNet-micro", "ResNet8", "--batch", 2, "--executions", 1, "--sessions", "numpy"]
    assert run_command("bench", *words, "--results", tmp_path, "--out", tmp_path) == 0
    plain, staged = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (plain["network"], set(plain["times"])) == ("ResNet8", {"eager"})
    assert (plain["strategy"], plain["error"]) == ("", None)
    assert set(staged["times"]) == {"eager", "layers", "folded", "session-numpy"}
    assert "homogeneous maps" in staged["notes"]["tolerance"]
    assert staged["error"] < 5e-6
    text = (tmp_path / "bench.md").read_text()
    assert "| eager |  |  | untrained |" in text
    assert f"| {staged['error']:.1e} | 75.50 % |" in text


def test_a_file_is_timed_against_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = tiny(cl.Conv2d, cl.ReSPro())
    path, relu = tmp_path / "my net.safetensors", tmp_path / "relu.onnx"
    cl.save(cl.fold(model, (3, 32, 32)), path, about={"accuracy": 0.875})
    cl.export_onnx(cl.fold(model, (3, 32, 32), strategy="dense"), relu)
    words = [path, "--against", relu, "--batch", 1, 3, "--executions", 1, "--tolerance", 0.01]
    out = ["--sessions", "onnxruntime", "--out", tmp_path / "out"]
    assert run_command("bench", *words, *out) == 0
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [row["batch"] for row in record["rows"]] == [1, 3]
    for row in record["rows"]:
        assert row["network"] == str(path)
        assert set(row["times"]) == {"against", "folded", "session-onnxruntime"}
        assert (row["error"], row["accuracy"]) == (None, {"fold": 0.875})
        assert list(row["notes"]) == ["tolerance"]
        assert f"--against {relu}" in row["command"]
        again = tmp_path / f"again {row['batch']}"
        assert run_command(*shlex.split(row["command"])[1:], "--out", again) == 0
        (repeated,) = json.loads((again / "bench.json").read_text())["rows"]
        timed = {"times": None}
        assert {**repeated, **timed} == {**row, **timed}
    capsys.readouterr()
    assert run_command("bench", path, "--against", path, "--out", tmp_path / "no") == 1
    assert "expected a model that ONNX Runtime" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_times_of_a_file_do_not_replace_those_of_the_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cl.save(cl.fold(tiny(cl.Conv2d, cl.ReSPro()), (3, 32, 32)), tmp_path / "net.safetensors")
    monkeypatch.chdir(tmp_path)
    options = ["--batch", 1, "--executions", 1, "--sessions", "numpy"]
    assert run_command("bench", "net.safetensors", *options) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench", "net.safetensors"]
