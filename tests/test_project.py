"""The files around the package: workflows, templates, tools."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_commands_that_exist(workflow: Path) -> None:
    assert workflow.read_text("utf-8").startswith("# Not run yet")
    found = commands(workflow)
    assert found
    for command in found:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", MAKEFILE, re.M), command
        if command.startswith(".ci/"):
            assert (ROOT / command).stat().st_mode & 0o100, command


def test_targets_that_pages_and_hooks_name_exist() -> None:
    hooks = ROOT / ".pre-commit-config.yaml"
    for path in (hooks, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        named = re.findall(r"(?:`|entry: |^)make (\w[\w-]*)", path.read_text("utf-8"), re.M)
        assert path != hooks or named == ["lint", "types"]
        for target in named:
            assert re.search(rf"^{target}:", MAKEFILE, re.M), f"{path.name}: {target}"


def test_workflows_cover_the_versions_of_the_metadata() -> None:
    text = (ROOT / ".github/workflows/test.yml").read_text("utf-8")
    matrix = yaml.safe_load(text)["jobs"]["versions"]["strategy"]["matrix"]
    lowest = next(one for one in METADATA["dependencies"] if one.startswith("torch")).split(">=")[1]
    assert matrix["torch"] == [f"torch=={lowest}.*", "torch"]
    python = [c.split(" :: ")[-1] for c in METADATA["classifiers"] if "Python :: 3." in c]
    assert matrix["python"] == python
    assert METADATA["requires-python"] == f">={python[0]}"
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}


def test_every_tool_of_make_is_pinned() -> None:
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = METADATA["optional-dependencies"]
    for extra in ("dev", "experiments", "onnx", "docs"):
        names = {re.split(r"[>=\[]", one)[0] for one in extras[extra]}
        assert names <= pinned, names - pinned


def test_quick_tests_exist() -> None:
    text = re.search(r"^QUICK := \$\(addprefix tests/,(.*?)\)", MAKEFILE, re.M | re.S)
    assert text is not None
    for name in text[1].replace("\\", "").split():
        assert (ROOT / "tests" / name).exists(), name
