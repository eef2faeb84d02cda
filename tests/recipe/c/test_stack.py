"""The stack of a program: the estimate is never below what compilers say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from conformallayers.recipe.c.stack import MARGIN, SAVED, stack_bytes
from programs import compiler, export, small_networks

LIBRARY = 256  # bytes that functions of newlib stay below
INNER = """static double inner(double a, const float *b)
{
    double sums[4] = {0, 0, 0, 0};
    int32_t i = 0, k = (int32_t)(a, b);
    return sums[0];
}
"""


def test_every_variable_counts() -> None:
    assert stack_bytes("", "") == SAVED + 8 * 3 + MARGIN
    assert stack_bytes("", "const double a = f(1, 2);\n    double b[5];") == 8 * 10 + SAVED + MARGIN
    deeper = stack_bytes(INNER, "inner(1, x);")
    assert deeper == stack_bytes("", "") + SAVED + 8 * (2 + 5 + 2)
    assert stack_bytes(INNER, "other(1, x);") == stack_bytes("", "")


@pytest.mark.parametrize("machine", ["gcc", "arm"])
@pytest.mark.parametrize(
    "level",
    ["-O2", *(pytest.param(level, marks=pytest.mark.slow) for level in ("-O0", "-Os", "-O3"))],
)
def test_compilers_need_no_more(machine: str, level: str, tmp_path: Path) -> None:
    command = [*compiler(machine), "-std=c99", level, "-fstack-usage", "-Werror", "-c"]
    for number, fold in enumerate(small_networks().values()):
        made = export(fold, tmp_path, name=f"net{number}")
        subprocess.run([*command, made.source.name], cwd=tmp_path, check=True)
        text = made.source.with_suffix(".su").read_text()
        frames = {name: int(size) for name, size in re.findall(r":(\w+)[.\w]*\t(\d+)\t", text)}
        own = frames.pop(f"net{number}_predict_with")
        # Three levels of functions below, as convolutions, products and dot products are.
        below = sorted([*frames.values(), 0, 0, 0])[-3:]
        assert own + sum(below) <= made.stack_bytes - LIBRARY
