"""Formulas: traced from ordinary arithmetic, printed, parsed and evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformallayers.nn.formula import FUNCTIONS, OPERATORS, Formula, parse

Q = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
TORCH = {name: getattr(torch, name) for name in FUNCTIONS}
POWER = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
FUNCTIONS_OF_Q: list[Callable[[Any], Any]] = [
    lambda q: 1 + q / 4 - 2 * q,
    lambda q: (1 - q) / (2 / q) - (-q),
    lambda q: torch.sqrt(1 + q**2) + q**0.5,
    lambda q: (1 + q) ** POWER * POWER + POWER / q,
    lambda q: torch.exp(-q).log() * torch.tanh(q).square() + torch.pow(q, 3),
]


@pytest.mark.parametrize("function", FUNCTIONS_OF_Q)
def test_a_formula_computes_what_was_traced(function: Callable[[Any], Any]) -> None:
    formula = function(Formula("q"))
    assert parse(str(formula)) == formula
    torch.testing.assert_close(formula.evaluate({"q": Q}, TORCH), function(Q.clone()).detach())


def formulas() -> st.SearchStrategy[Formula]:
    leaves = st.one_of(
        st.sampled_from(["tau", "m", "n"]).map(Formula),
        st.floats(-1e6, 1e6, allow_nan=False).map(Formula),
    )

    def larger(parts: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
        binary = st.tuples(st.sampled_from([*OPERATORS]), st.tuples(parts, parts))
        unary = st.tuples(st.sampled_from(FUNCTIONS), st.tuples(parts))
        return st.one_of(binary, unary).map(lambda pair: Formula(*pair))

    return st.recursive(leaves, larger, max_leaves=12)


@given(formulas())
def test_a_text_is_read_as_it_was_written(formula: Formula) -> None:
    assert parse(str(formula)) == formula


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "tau +",
            "tau ** n",
            "sin(n)",
            "n.real",
            "n[0]",
            "sqrt(n, n)",
            "True",
            "'n'",
            "1e999",
        ),
        *("f(x=1)", "lambda: n", "n if m else tau", "(" * 1000, "n" + " + n" * 2000),
    ],
)
def test_other_texts_are_no_formulas(text: str) -> None:
    with pytest.raises(ValueError, match="is not a formula"):
        parse(text)


def test_numbers_convert_as_the_caller_says() -> None:
    assert parse("1 + n / 3").evaluate({"n": 6.0}, vars(math)) == 3.0
    signs = {sign: f"({{}} {sign} {{}})".format for sign in OPERATORS}
    assert (
        parse("1 + n / 3").evaluate({"n": "s_n"}, signs, "{:.1f}".format) == "(1.0 + (s_n / 3.0))"
    )
