"""The HTML report: self-contained, with every number, and a command for every gap."""

from __future__ import annotations

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pydantic")

import conformallayers as cl
from conformallayers.lab.experiments import batchsize, depth, paper
from conformallayers.lab.experiments.batchsize import LAYERS, RELU
from conformallayers.lab.report import figures
from conformallayers.lab.report.page import write_report
from support import run_command

BENCHMARKS = Path(__file__).parents[3] / "results" / "benchmarks"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collect text and attributes, and check that the tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def checked(path: Path) -> Page:
    """Read a page, and check that it refers to nothing outside itself."""
    text = path.read_text("utf-8")
    words = re.sub(r"base64,[^\"]*", "", text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", words)
    found = Page(text)
    assert not {"script", "link", "a"} & set(found.tags)
    assert all(str(v).startswith("data:image/") for name, v in found.attributes if name == "src")
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a results folder with a few rows of everything."""
    root = tmp_path_factory.mktemp("results")
    origin = {"commit": "b" * 40, "machine": {"threads": 1, "torch": "2.13"}}

    cell = {"network": "LeNet", "dataset": "mnist", "variant": None, "epochs": 200, "seed": 0}
    record = {"command": "EXP1", **origin, "rows": [{**cell, "accuracy": 0.9764}]}
    write(root / "accuracy" / "accuracy.json", record)

    times = {"median": 2.0, "low": 1.5, "high": 2.5}
    rows = [
        {"depth": k, "strategy": "banded", "milliseconds": {
            depth.RELU: {**times, "median": float(k)}, depth.LAYERS: times, depth.FOLDED: times}}
        for k in (1, 2, 3)
    ]  # fmt: skip
    folder = root / "experiment3"
    write(folder / "times.json", {"command": "EXP3 <&>", "options": {}, **origin, "rows": rows})
    figures.save(depth.depth_figure(rows, 64), folder, "times")

    rows = [
        {"path": path, "batch": batch, "milliseconds": times, "peak_bytes": batch * 2**20}
        for path in (RELU, LAYERS)
        for batch in (1, 64)
    ]
    limits = [{"path": RELU, "budget_bytes": 4 * 2**30, "largest_batch": 4242}]
    failed = {"path": LAYERS, "batch": 128, "failed": "MemoryError"}
    record = {"command": "EXP4", **origin, "rows": [*rows, failed]}
    write(root / "experiment4" / "batches.json", record)
    write(root / "experiment4" / "limits.json", {**record, "rows": limits})
    figures.save(batchsize.batch_figure(record["rows"]), root / "experiment4", "batches")

    cost = {"name": "StageNet-micro", "seed": 0, "accuracy": 0.7654}
    cost |= {"multiply_adds": 424_968, "weights": 25_306, "error": 1e-7}
    record = {"command": "EXP5", **origin, "rows": [cost]}
    write(root / "experiment5" / "cifar10.json", record)
    timed = {"name": "StageNet-micro", "batch": 64, "milliseconds": times, "ratio": 0.678}
    write(root / "experiment5" / "cifar10-times.json", {**record, "rows": [timed]})
    corrupted = {"corruption": "fog", "strength": 2, "name": "LeNet", "accuracy": 0.4321}
    write(root / "experiment6" / "cifar10.json", {"command": "EXP6", **origin, "rows": [corrupted]})

    trial = {"trial": 7, "state": "COMPLETE", "batch_size": 2345, "epochs": 31}
    trial |= {"learning_rate": 0.0625, "optimizer": "adam", "validation_accuracy": 0.9753}
    record = {"command": "SWEEP", **origin, "network": "LeNetCL", "dataset": "mnist"}
    record |= {"options": {"subset": 100}, "images": {"train": 100}, "best": trial}
    folder = root / "sweep" / "LeNetCL-mnist"
    write(folder / "study.json", {**record, "trials": [trial, {**trial, "state": "PRUNED"}]})
    figures.save(figures.respro_curve(), folder, "study")
    shutil.copytree(BENCHMARKS, root / "benchmarks")
    return root


def test_page_of_everything_has_every_number(full: Path, tmp_path: Path) -> None:
    found = checked(write_report(full, tmp_path / "page.html"))
    text = found.text
    assert "LeNet mnist paper's 200 1 98.87 % 97.64 % -1.23" in text
    assert "StageNet-micro 76.54 % 76.54 425 k 25.3 k 1.0e-07" in text
    assert "network mean of corruptions fog LeNet 43.2 43.2" in text
    assert "StageNet-micro 64 2.0000 0.678" in text
    assert f"The paper: {paper.CLAIMS['experiment 3']}" in text
    assert f"EXP3 <&> · commit {'b' * 40} · threads 1" in text
    assert "D3ModNet 4242 4 GiB" in text
    assert "best here 2345 31 0.0625 adam 97.53 %" in text
    assert "the supplement's 2088 200 0.02 adam 97.33 %" in text
    assert "2 trials, 100 training images." in text
    bench = json.loads((BENCHMARKS / "bench.json").read_text())
    assert f"{bench['rows'][0]['times']['folded']['median']:.3f}" in text
    pictures = [str(value) for name, value in found.attributes if name == "src"]
    assert len(pictures) == 3
    for value in pictures:
        kind, _, data = value.partition(";base64,")
        assert kind == "data:image/png"
        assert base64.b64decode(data).startswith(b"\x89PNG")


def test_page_of_nothing_names_the_command_of_each_part(tmp_path: Path) -> None:
    text = checked(write_report(tmp_path)).text
    for command in (*(f"experiment {number}" for number in (1, 3, 4, 5, 6)), "bench", "sweep"):
        assert f"Not measured yet: conformallayers {command}" in text


def test_page_of_the_committed_results(tmp_path: Path) -> None:
    found = checked(write_report(BENCHMARKS.parent, tmp_path / "page.html"))
    assert "Not measured yet:" not in found.text
    assert found.tags.count("img") == 6


def test_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "accuracy").mkdir()
    (tmp_path / "accuracy" / "accuracy.json").write_bytes(b"{")
    with pytest.raises(cl.ConformalError, match=r"report, .*accuracy\.json: expected a record"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_hostile_records_stay_text(full: Path, tmp_path: Path) -> None:
    shutil.copytree(full, tmp_path / "results")
    hostile = "<script>alert('x')</script>\"><img src=x>{{ 1 }}"
    for path in (tmp_path / "results").rglob("*.json"):
        replaced = json.loads(path.read_text())
        replaced |= {key: hostile for key in ("command", "network", "dataset") if key in replaced}
        for entry in replaced.get("rows", []):
            entry |= {key: hostile for key in ("path", "strategy", "variant") if key in entry}
        path.write_text(json.dumps(replaced))
    found = checked(write_report(tmp_path / "results"))
    assert found.text.count("<script>alert('x')</script>") > 20


def test_report_on_the_command_line(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, code in ((tmp_path / "new" / "page.html", 0), (tmp_path, 1)):
        assert run_command("report", "--results", full, "--out", out) == code
    assert run_command("report", "--results", tmp_path / "none") == 1
    assert not (tmp_path / "none").exists()
    shown = capsys.readouterr()
    assert "report --results: expected a folder with results, got" in shown.err
    assert shown.out == f"Wrote {tmp_path / 'new' / 'page.html'}\n"
    assert "report --out: expected a file" in shown.err
