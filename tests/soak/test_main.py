"""The soak: it finds planted faults, its lines reproduce them, and without faults it finds none."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from conformallayers import container
from conformallayers.lab.report import page
from conformallayers.recipe import file
from conformallayers.recipe.numpy import operations as numpy_operations
from conformallayers.recipe.point_operations import Divide
from conformallayers.recipe.torch.operations import RUN
from soak import runtimes
from soak.__main__ import main
from soak.case import Case
from soak.run import ATTACKS

SEED = 7
TESTS = Path(__file__).parents[1]
Plant = Callable[[pytest.MonkeyPatch], None]


def first_finding(kind: str, cases: int) -> Case | None:
    """Run cases until one has findings."""
    for number in range(cases):
        case = Case(kind, SEED, number)
        case.run(ATTACKS[kind])
        if case.findings:
            return case
    return None


CASES = {"networks": 12, "files": 12, "runtimes": 3}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_right_library_has_no_findings(kind: str) -> None:
    found = first_finding(kind, CASES.get(kind, 2))
    assert found is None, found.report


def wrong_division(patch: pytest.MonkeyPatch) -> None:
    right = RUN[Divide]

    @wraps(right)
    def divide(*values: Any) -> Any:
        return right(*values) * 1.0001

    patch.setitem(RUN, Divide, divide)


def wrong_growths(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(numpy_operations._FORMULA, "sqrt", lambda q: q**0.5 * 1.0001)
    only = {name: runtimes.RUNTIMES[name] for name in ("torch", "numpy")}
    patch.setattr(runtimes, "RUNTIMES", only)


def blind_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(container, "_matches", lambda model, copied: True)


def blind_checksum(patch: pytest.MonkeyPatch) -> None:
    class Equal(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    patch.setattr(file, "_checksum", lambda document, arrays: Equal())


def raw_markup(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(page, "escape", str)


FAULTS: dict[str, tuple[str, Plant, int]] = {
    "division": ("networks", wrong_division, 6),
    "growths": ("runtimes", wrong_growths, 12),
    "cache": ("stale", blind_cache, 3),
    "checksum": ("files", blind_checksum, 20),
    "markup": ("readers", raw_markup, 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_reproduced(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, plant, cases = FAULTS[name]
    plant(monkeypatch)
    found = first_finding(kind, cases)
    assert found is not None
    line = found.report.splitlines()[0]
    arguments = shlex.split(line.removeprefix("python -m soak"))
    assert main(arguments) == 1
    assert found.report in capsys.readouterr().out
    monkeypatch.undo()
    assert main(arguments) == 0


@pytest.mark.slow  # the minute of make test runs two processes as well
def test_two_processes_share_the_cases() -> None:
    command = [sys.executable, "-m", "soak", "--jobs", "2"]
    options = ["--minutes", "0.001", "--seed", "3", "--only", "stale"]
    done = subprocess.run([*command, *options], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line.split() == ["stale:", "cases", "2"] for line in done.stdout.splitlines())


def test_an_exception_is_a_finding() -> None:
    case = Case("networks", 1, 0)

    def attack(case: Case) -> None:
        raise KeyError("t")

    case.run(attack)
    assert "KeyError" in case.findings[0]
    assert case.report.splitlines()[0].endswith("--seed 1 --case 0 --only networks")
