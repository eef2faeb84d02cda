"""The text of C programs: functions by name, and those that they call."""

from __future__ import annotations

import pytest

from conformallayers.recipe.c.text import (
    BROADCASTS,
    MAPS,
    POOLS,
    SUMS,
    comment,
    functions,
    helpers,
    indented,
)


def test_a_program_gets_what_it_calls() -> None:
    text = functions("times_runs_f(w, runs, places, x, y, 3); sqrt(2); own_call();")
    assert text.index("static float dot_f(") < text.index("static void times_runs_f(")
    assert text.count("static ") == 2
    assert "load" in functions("times_d(w, x, y, 1, 1)")
    assert functions("sqrt(2)") == ""


@pytest.mark.parametrize("suffix", ["f", "d"])
def test_functions_are_plain_c(suffix: str) -> None:
    names = [*helpers(), *MAPS, *BROADCASTS, *POOLS]
    calls = [f"{name}() {name}_{suffix}()" for name in names]
    text = functions(" ".join([*calls, *(f"convolve_{name}()" for name in SUMS)]))
    assert "$" not in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100


def test_functions_of_whole_numbers() -> None:
    text = functions(
        "relu_b(x, y, 3); abs_b(x, y, 3); max_pool_b(x, y, g); gather_b(x, y, g, 1, 0);"
    )
    assert "$" not in text
    assert "float" not in text
    assert "static void max_pool_b(const int8_t *x, int8_t *y," in text


def test_statements_are_indented_and_wrapped() -> None:
    call = "f(" + ", ".join(f"argument{i}" for i in range(12)) + ");"
    lines = indented(["{", call, "}"]).splitlines()
    assert lines[0] == "    {"
    assert lines[1].startswith("        f(")
    assert lines[2].startswith("            argument")
    assert lines[-1] == "    }"
    assert max(map(len, lines)) <= 98
    assert " ".join(line.strip() for line in lines[1:-1]) == call


def test_comments_cannot_end_early() -> None:
    assert comment(["a */ é"]).count("*/") == 1
