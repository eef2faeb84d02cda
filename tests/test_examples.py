"""Every example and the code of every tutorial run as programs of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import run_script

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    assert run_script(path, tmp_path).strip()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path: Path, tmp_path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "tutorial.py"
    script.write_text(code, "utf-8")
    run_script(script, tmp_path, 300)
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_hold_no_outputs(path: Path) -> None:
    """They are executed when the docs are built: what a page shows is what the code does."""
    document = json.loads(path.read_text("utf-8"))
    assert document["nbformat"] == 4
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
