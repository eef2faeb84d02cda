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
from conformallayers.lab.experiments.bench import run_bench
from conformallayers.lab.experiments.options import BenchOptions
from conformallayers.lab.experiments.records import Row
from support import run_command

RESULTS = Path(__file__).parents[3] / "results" / "benchmarks"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BenchOptions]]:
    """Replace the measurement by numbers; collect what is measured."""
    measured: list[tuple[str, BenchOptions]] = []

    def measure(name: str, pair: Any, options: BenchOptions) -> list[Row]:
        measured.append((name, options))
        row = {"network": name, "strategy": "conv", "error": 1e-7, "notes": {}}
        row["times"] = {"eager": [2.0, 1.0, 3.0], "folded": [0.5, 0.4, 0.6]}
        return [{**row, "batch": batch} for batch in options.batch]

    monkeypatch.setattr(bench, "measure", measure)
    return measured


def test_command_of_the_record_measures_the_same(
    quick: list[tuple[str, BenchOptions]], tmp_path: Path
) -> None:
    words = ["LeNet", "DkNet 7", "--batch", 1, 64, "--depths", 7, "--executions", 6]
    assert run_command("bench", *words, "--out", tmp_path) == 0
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
    run_bench(["LeNet"], out=tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert "milliseconds (ms) per batch" in text
    assert "| network | batch | eager (ms) | folded (ms) | strategy |" in text
    assert "| LeNet | 64 | 2.000 | 0.500 | conv | eager | 4.00 | 1.0e-07 |" in text


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
        ({"executions": 0}, "bench --executions: expected a value greater than 0, got 0"),
        ({"batch": (1, -2)}, "bench --batch: expected a value greater than 0, got -2"),
        ({"threads": 0}, "bench --threads: expected a value greater than 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        run_bench(out=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_an_earlier_record_of_the_repository_is_read() -> None:
    """Rows are added to the committed file: its fields must stay those that a run writes."""
    record = json.loads((RESULTS / "bench.json").read_text())
    text = bench.markdown(record["rows"])
    assert text in (RESULTS / "bench.md").read_text()
    assert record["rows"] == sorted(record["rows"], key=bench._order)


def tiny(convolution: type[nn.Module], *activation: nn.Module) -> nn.Module:
    features = convolution(3, 2, 5, stride=9, bias=False), *activation
    whole = cl.ConformalLayers if convolution is cl.Conv2d else nn.Sequential
    return nn.Sequential(whole(*features), nn.Flatten(), nn.Linear(32, 2))


def test_engines_are_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = lambda: tiny(nn.Conv2d, nn.ReLU()), lambda: tiny(cl.Conv2d, cl.ReSPro())
    eager_alone = functools.partial(bench.relu_engines, names=("eager",))
    monkeypatch.setattr(bench, "pairs", lambda depths: {"tiny": pair})
    monkeypatch.setattr(bench, "relu_engines", eager_alone)
    (row,) = run_bench(["tiny"], out=tmp_path, batch=(2,), executions=1)
    assert set(row["times"]) == {"eager", "layers", "folded", "tolerance"}
    assert row["error"] < 1e-5
    assert all(0 < low <= median <= high for median, low, high in row["times"].values())
    assert "| tiny | 2 |" in (tmp_path / "bench.md").read_text()
