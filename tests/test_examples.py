"""Every example runs as a program of its own and prints something."""

from pathlib import Path

import pytest

from support import run_script

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    assert run_script(path, tmp_path).strip()
    assert not list(tmp_path.iterdir())


def test_quickstart_is_short():
    lines = (EXAMPLES[0].parent / "quickstart.py").read_text("utf-8").splitlines()
    assert len(lines) < 40
