"""Links between the files of the repository, without a network: those that Sphinx does not see, too."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/tutorials/*.ipynb", "src/**/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
)
# A path in the text, such as `tests/oracle.py`: of a file or a folder, not a pattern or a placeholder.
NAMED = re.compile(r"`((?:\.ci|benchmarks|docs|examples|src|tests)/[\w./-]*)`")


def text_of(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def prose(text: str) -> str:
    """Return a page without its blocks of code; directives keep their first line, which may name a figure."""
    text = re.sub(r"^```\{(?:image|figure)\} (.*)$", r"```\n```\n[](\1)\n```", text, flags=re.M)
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(text_of(path)))
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r'(?:src|href)="([^"]+)"', text)


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ +(.*)$", prose(text_of(path)), re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_files_lead_to_something(path: Path) -> None:
    for link in links(path):
        if re.match(r"\w+:", link):
            continue  # outside
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_files_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return  # tells of files that are gone
    for name in NAMED.findall(prose(text_of(path))):
        assert (ROOT / name).exists() or (path.parent / name).exists(), name


def test_links_of_built_pages_are_checked(tmp_path: Path) -> None:
    file = ROOT / "docs" / "check_links.py"
    spec = importlib.util.spec_from_file_location("check_links", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "two.html").write_text('<h1 id="top">Two</h1><a href="../one.html">1</a>')
    one = '<a href="in/two.html#top">a</a><a href="https://example.org/none">b</a><a href="#">c</a>'
    (tmp_path / "one.html").write_text(one)
    assert list(module.broken_links(tmp_path)) == []
    bad = '<a href="in/two.html#end">a</a><img src="none.png"><a href="#none">b</a>'
    (tmp_path / "one.html").write_text(one + bad)
    expected = ["in/two.html#end", "none.png", "#none"]
    assert list(module.broken_links(tmp_path)) == [f"one.html: {link}" for link in expected]


def test_the_checker_of_built_pages_says_how_it_is_called() -> None:
    command = [sys.executable, str(ROOT / "docs" / "check_links.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr[:13]) == (1, "usage: python")
