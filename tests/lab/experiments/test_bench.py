"""The benchmark against other engines: its rows, its command and its units."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from torch import nn

import conformallayers as cl
from conformallayers.lab.experiments import bench
from conformallayers.lab.experiments.bench import Subject, run_bench
from conformallayers.lab.experiments.records import Row
from conformallayers.lab.options import BenchOptions
from conformallayers.utils.text import markdown
from support import run_command

RESULTS = Path(__file__).parents[3] / "results" / "benchmarks"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BenchOptions]]:
    """Replace the measurement by numbers; collect what is measured."""
    measured: list[tuple[str, BenchOptions]] = []

    def measure(name: str, subject: Subject, options: BenchOptions) -> list[Row]:
        measured.append((name, options))
        row = {"network": name, "strategy": "conv", "error": 1e-7, "notes": {}}
        row["times"] = {"eager": {"median": 2.0}, "folded": {"median": 0.5}}
        return [{**row, "batch": batch} for batch in options.batch]

    monkeypatch.setattr(bench, "measure", measure)
    return measured


def test_command_of_the_record_measures_the_same(
    quick: list[tuple[str, BenchOptions]], tmp_path: Path
) -> None:
    words = ["LeNet", "DkNet 7", "--batch", 1, 64, "--depths", 7, "--executions", 6]
    assert run_command("bench", *words, "--out", tmp_path) == 0
    command = json.loads((tmp_path / "bench.json").read_text())["command"]
    assert command.startswith("conformallayers bench LeNet 'DkNet 7' --batch 1 64 --depths 7")
    assert [name for name, _ in quick] == ["LeNet", "DkNet 7"]
    assert run_command(*shlex.split(command)[1:], "--out", tmp_path) == 0
    assert quick[:2] == quick[2:]
    lines = (tmp_path / "bench.md").read_text().splitlines()
    assert lines[0].startswith("| network | batch | eager (ms) | folded (ms) | strategy |")
    line = "64 | 2.000 | 0.500 | conv | folded | eager | 4.00 | 1.0e-07 |"
    assert [lines[3], lines[5]] == [f"| LeNet | {line}", f"| DkNet 7 | {line}"]


def test_speed_up_is_that_of_the_fastest_fold() -> None:
    medians = {"eager": 2.0, "onnx": 0.8, "layers": 3.0, "folded": 0.5, bench.SESSION: 0.4}
    times = {name: {"median": median} for name, median in medians.items()}
    row = {"network": "a b.safetensors", "batch": 1, "strategy": "conv", "error": None}
    _, (line,) = bench.cells([{**row, "times": times}])
    assert line[-5:] == ["conv", bench.SESSION, "onnx", "2.00", ""]
    plain = {**row, "times": {"eager": {"median": 1.0}}, "strategy": ""}
    assert bench.cells([plain])[1][0][2:] == ["1.000", "", "", "eager", "", ""]


@pytest.mark.usefixtures("quick")
def test_rows_of_an_earlier_run_are_kept_unless_refused(tmp_path: Path) -> None:
    run_bench(["DkNet 1"], out=tmp_path)
    assert len(run_bench(["DkNet 3"], out=tmp_path)["rows"]) == 2
    assert len(run_bench(["Base"], out=tmp_path, resume=False)["rows"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["Lenet"]}, r"bench: expected one of Base, .* Did you mean \"LeNet\"\?"),
        ({"executions": 0}, "bench --executions: expected a value greater than 0, got 0"),
        ({"batch": (1, -2)}, "bench --batch: expected a value greater than 0, got -2"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        run_bench(out=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_the_committed_table_is_that_of_its_record() -> None:
    rows = json.loads((RESULTS / "bench.json").read_text())["rows"]
    assert markdown(*bench.cells(rows)) in (RESULTS / "bench.md").read_text()


def tiny(convolution: type[nn.Module], *activation: nn.Module) -> nn.Module:
    features = convolution(3, 2, 5, stride=9, bias=False), *activation
    whole = cl.ConformalLayers if convolution is cl.Conv2d else nn.Sequential
    return nn.Sequential(whole(*features), nn.Flatten(), nn.Linear(32, 2))


def test_networks_and_files_are_timed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    alone = functools.partial(bench.relu_engines, names=("eager",))
    monkeypatch.setattr(bench, "relu_engines", alone)
    file = tmp_path / "my net.safetensors"
    cl.save(cl.fold(tiny(cl.Conv2d, cl.ReSPro()), (3, 32, 32)), file)
    subjects = {
        "tiny": Subject(
            conformal=lambda: tiny(cl.Conv2d, cl.ReSPro()), relu=lambda: tiny(nn.Conv2d, nn.ReLU())
        ),
        **bench.chosen_subjects(["ResNet8", str(file)], ()),
    }
    monkeypatch.setattr(bench, "chosen_subjects", lambda *_: subjects)
    record = run_bench(out=tmp_path, batch=(2,), executions=1)
    both, plain, folded = record["rows"]
    assert set(both["times"]) == {"eager", "layers", "folded", bench.SESSION}
    assert all(0 < t["low"] <= t["median"] <= t["high"] for t in both["times"].values())
    assert both["error"] < 5e-6
    assert (plain["network"], set(plain["times"]), plain["error"]) == ("ResNet8", {"eager"}, None)
    assert (folded["network"], set(folded["times"])) == (str(file), {"folded", bench.SESSION})
