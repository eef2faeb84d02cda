"""Readers of settings: they return what they take, and refuse everything else with ValueError."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

import pytest

from conformallayers.recipe import fields

NAN, INFINITY = float("nan"), float("inf")
WHOLE = fields.whole(1)
# reader: pairs of what it takes and returns, and what it refuses
READERS: dict[str, tuple[fields.Reader, list[tuple[Any, Any]], list[Any]]] = {
    "number": (
        fields.number,
        [(2, 2.0), (-1e300, -1e300), (0, 0.0)],
        [True, None, "1", NAN, INFINITY, -INFINITY, [1.0], {}, 1j],
    ),
    "flag": (fields.flag, [(True, True), (False, False)], [0, 1, None, "true", [True]]),
    "whole": (
        WHOLE,
        [(1, 1), (2**31 - 1, 2**31 - 1)],
        [0, -1, 2**31, 1.0, True, None, "1", [1]],
    ),
    "word": (
        fields.word("sum", "mean"),
        [("sum", "sum"), ("mean", "mean")],
        ["", "Sum", "other", None, 1, ["sum"]],
    ),
    "name": (fields.name, [("y", "y"), ("n" * 200, "n" * 200)], ["", "n" * 201, None, 1, ["y"]]),
    "several": (
        fields.several(WHOLE),
        [([], ()), ([1, 2], (1, 2)), ((3,), (3,))],
        [None, 1, "12", {1: 2}, [0], [1, None], [[1]]],
    ),
    "optional": (fields.optional(WHOLE), [(None, None), (3, 3)], [0, "3", True]),
    "positives": (fields.positives, [([1, 2], (1, 2))], [[0], [1.0], 1]),
    "sizes": (fields.sizes, [([0, 2], (0, 2))], [[-1], [True], None]),
    "pairs": (fields.pairs, [([[-1, 2]], ((-1, 2),))], [[1], [["1", 2]], [[-(2**31), 0]]]),
}
every_reader = pytest.mark.parametrize("name", READERS)


@every_reader
def test_readers_return_plain_values(name: str) -> None:
    reader, taken, _ = READERS[name]
    for value, expected in taken:
        found = reader(value)
        assert found == expected
        assert type(found) is type(expected)
        assert reader(found) == found, "what is read can be written and read again"


@every_reader
def test_readers_refuse_other_values(name: str) -> None:
    reader, _, refused = READERS[name]
    for value in refused:
        with pytest.raises(ValueError, match=r" is n|list"):
            reader(value)


def test_a_long_value_is_quoted_in_part() -> None:
    with pytest.raises(ValueError, match="is no name") as caught:
        fields.name("a" * 10_000)
    assert len(str(caught.value)) < 100


def test_fields_say_how_they_are_stored() -> None:
    wanted = fields.setting("mode", fields.name)
    assert wanted.default is MISSING
    assert wanted.metadata == {"setting": "mode", "reader": fields.name}
    assert fields.setting("mode", fields.name, "zeros").default == "zeros"
    assert fields.constant("weight").default is MISSING
    assert fields.constant("bias", optional=True).default is None
    assert fields.constant("bias", optional=True).metadata["constant"] == "bias"
