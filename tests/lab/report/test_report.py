"""The HTML report: self-contained, with every number, and a command for every gap."""

from __future__ import annotations

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conformallayers.lab.experiments import paper
from conformallayers.lab.report import page
from conformallayers.lab.report.page import write_report
from support import run_command

RESULTS = Path(__file__).parents[3] / "results"
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


def test_page_of_the_committed_results_has_every_number(tmp_path: Path) -> None:
    found = checked(write_report(RESULTS, tmp_path / "page.html"))
    assert "Not measured yet:" not in found.text
    for _, path, cells in page._SECTIONS.values():
        record = json.loads((RESULTS / path).read_text())
        for line in cells(record["rows"])[1]:
            assert " ".join(" ".join(line).split()) in found.text
        assert f"{record['command']} · commit {record['commit']}" in found.text
    for claim in paper.CLAIMS.values():
        assert f"The paper: {claim}" in found.text
    assert "BaseReSProNet, fashion-mnist: 16 trials, 6000 training images." in found.text
    assert "best here 3029 47 0.33122942834698177 adam 83.62 %" in found.text
    assert "the supplement's 2339 45 0.5601 adam 84.01 %" in found.text
    pictures = [str(value) for name, value in found.attributes if name == "src"]
    assert len(pictures) == 7
    for value in pictures:
        kind, _, data = value.partition(";base64,")
        assert kind == "data:image/png"
        assert base64.b64decode(data).startswith(b"\x89PNG")


def test_page_of_nothing_names_the_command_of_each_part(tmp_path: Path) -> None:
    text = checked(write_report(tmp_path)).text
    for command in (*(f"experiment {number}" for number in (1, 3, 4, 5, 6)), "bench", "sweep"):
        assert f"Not measured yet: conformallayers {command}" in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("accuracy/accuracy.json", b"{", "accuracy.json: expected a file of conformallayers"),
        (
            "experiment3/times.json",
            b'{"rows": [{"depth": 1}]}',
            "got a damaged one (KeyError: 'millis",
        ),
        ("sweep/x/study.json", b"{}", "sweep: expected a file of conformallayers"),
        ("run/result.json", b"{}", "got a damaged one (KeyError: 'samples')"),
        ("run/confusion.csv", b"", "got a damaged one (ValueError: not enough values"),
        ("run/confusion.csv", b"\xff", "got a damaged one (UnicodeDecodeError"),
    ],
)
def test_damaged_files_are_refused(
    file: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    result = {"network": "LeNet", "dataset": "digits", "command": "", "commit": ""}
    (run / "result.json").write_text(json.dumps({**result, "samples": {"train": 1, "test": 1}}))
    assert run_command("report", run, "--out", tmp_path / "page.html") == 0
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(content)
    words = [run] if file.startswith("run") else ["--results", tmp_path]
    assert run_command("report", *words) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("report.html"))


def test_hostile_records_stay_text(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    hostile = "<script>alert('x')</script>\"><img src=x>{{ 1 }}"
    for path in (tmp_path / "results").rglob("*.json"):
        replaced = json.loads(path.read_text())
        replaced |= {key: hostile for key in ("command", "network", "dataset") if key in replaced}
        for entry in replaced.get("rows", []):
            entry |= {key: hostile for key in ("path", "strategy", "variant") if key in entry}
        path.write_text(json.dumps(replaced))
    found = checked(write_report(tmp_path / "results"))
    assert found.text.count("<script>alert('x')</script>") > 20


def test_report_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, code in ((tmp_path / "new" / "page.html", 0), (tmp_path, 1)):
        assert run_command("report", "--results", RESULTS, "--out", out) == code
    assert run_command("report", "--results", tmp_path / "none") == 1
    assert not (tmp_path / "none").exists()
    shown = capsys.readouterr()
    assert "report --results: expected a folder with results, got" in shown.err
    assert shown.out == f"Wrote {tmp_path / 'new' / 'page.html'}\n"
    assert f"write {tmp_path}: expected the path of a file, got a folder" in shown.err
