"""The benchmark against other engines: its rows, its command, its engines, and costs of deployed networks."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.errors import ignored_warnings
from conformallayers.lab.experiments import bench
from conformallayers.lab.experiments.bench import Subject, relu_engines, run_bench
from conformallayers.lab.experiments.records import Row
from conformallayers.lab.options import BenchOptions
from support import run_command


def test_command_of_the_record_measures_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[tuple[str, BenchOptions]] = []

    def measure(name: str, subject: Subject, options: BenchOptions) -> list[Row]:
        measured.append((name, options))
        row = {"network": name, "strategy": "conv", "error": 1e-7, "notes": {}}
        row["times"] = {"eager": {"median": 2.0}, "folded": {"median": 0.5}}
        return [{**row, "batch": batch} for batch in options.batch]

    monkeypatch.setattr(bench, "measure", measure)
    words = ["LeNet", "DkNet 9", "--batch", 1, 64, "--executions", 6]
    assert run_command("bench", *words, "--out", tmp_path) == 0
    command = json.loads((tmp_path / "bench.json").read_text())["command"]
    assert command.startswith("conformallayers bench LeNet 'DkNet 9' --batch 1 64 --executions 6")
    assert [name for name, _ in measured] == ["LeNet", "DkNet 9"]
    assert run_command(*shlex.split(command)[1:], "--out", tmp_path) == 0
    assert measured[:2] == measured[2:]
    assert run_command("bench", "Base", "--out", tmp_path) == 0  # rows of earlier runs are kept
    lines = (tmp_path / "bench.md").read_text().splitlines()
    assert len(lines) == 2 + 4 + 1
    assert lines[0].startswith("| network | batch | eager (ms) | folded (ms) | strategy |")
    line = "64 | 2.000 | 0.500 | conv | folded | eager | 4.00 | 1.0e-07 |"
    assert [lines[3], lines[5]] == [f"| LeNet | {line}", f"| DkNet 9 | {line}"]


def test_speed_up_is_that_of_the_fastest_fold() -> None:
    medians = {"eager": 2.0, "onnx": 0.8, "layers": 3.0, "folded": 0.5, bench.SESSION: 0.4}
    times = {name: {"median": median} for name, median in medians.items()}
    row = {"network": "a b.safetensors", "batch": 1, "strategy": "conv", "error": None}
    _, (line,) = bench.cells([{**row, "times": times}])
    assert line[-5:] == ["conv", bench.SESSION, "onnx", "2.00", ""]
    plain = {**row, "times": {"eager": {"median": 1.0}}, "strategy": ""}
    assert bench.cells([plain])[1][0][2:] == ["1.000", "", "", "eager", "", ""]


def tiny(convolution: type[nn.Module], *activation: nn.Module) -> nn.Module:
    features = convolution(3, 2, 5, stride=9, bias=False), *activation
    whole = cl.ConformalLayers if convolution is cl.Conv2d else nn.Sequential
    return nn.Sequential(whole(*features), nn.Flatten(), nn.Linear(32, 2))


def test_networks_and_files_are_timed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BUILDERS", some("eager"))
    file = tmp_path / "my net.safetensors"
    cl.save(cl.fold(tiny(cl.Conv2d, cl.ReSPro()), (3, 32, 32)), file)
    subjects = {
        "tiny": Subject(
            conformal=lambda: tiny(cl.Conv2d, cl.ReSPro()), relu=lambda: tiny(nn.Conv2d, nn.ReLU())
        ),
        **bench.chosen_subjects(["ResNet8", str(file)]),
    }
    monkeypatch.setattr(bench, "chosen_subjects", lambda *_: subjects)
    record = run_bench([], BenchOptions(out=tmp_path, batch=(2,), executions=1))
    both, plain, folded = record["rows"]
    assert set(both["times"]) == {"eager", "layers", "folded", bench.SESSION}
    assert all(0 < t["low"] <= t["median"] <= t["high"] for t in both["times"].values())
    assert both["error"] < 5e-6
    assert (plain["network"], set(plain["times"]), plain["error"]) == ("ResNet8", {"eager"}, None)
    assert (folded["network"], set(folded["times"])) == (str(file), {"folded", bench.SESSION})


def some(*names: str) -> dict[str, Any]:
    return {name: bench.BUILDERS[name] for name in names}


def test_engines_that_are_missing_or_differ_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), torch.rand(4, 3)
    monkeypatch.setattr(bench, "BUILDERS", some("eager", "openvino"))
    engines, notes = relu_engines(model, x)
    assert list(engines) == ["eager"]
    assert notes["openvino"].startswith("skipped: ModuleNotFoundError: ")
    noisy = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).train()
    torch.manual_seed(0)
    assert relu_engines(noisy, x)[1]["eager"].startswith("skipped: AssertionError")


def test_a_plain_network_runs_in_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUILDERS", some("onnx"))
    model, x = cl.networks.LeNet().eval(), torch.rand(2, 3, 32, 32)
    with ignored_warnings():
        engines, notes = relu_engines(model, x)
    assert notes == {}
    result: Any = engines["onnx"]()
    torch.testing.assert_close(torch.from_numpy(result), model(x).detach())
