"""Records print as a table, as HTML, and as cards."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import conformallayers as cl
from conformallayers.utils.html import html
from conformallayers.zoo.records import Record, Records

RECORD = Record(
    name="toy<1>",
    dataset="digits",
    accuracy=0.98765,
    multiply_adds=394_568,
    parameters=48_599,
    bytes=203_076,
    weights=28_970,
    network="StageNet micro",
    input_shape=(1, 8, 8),
    labels=("no", "yes | perhaps"),
    images=450,
    command="conformallayers train StageNet digits",
    commit="0123abc",
    licence="Apache-2.0",
    limits="Digits.",
)


def test_list_of_records_is_a_list_that_prints_as_a_table() -> None:
    records = Records([RECORD, replace(RECORD, name="other")])
    assert isinstance(records, list)
    assert str(records) == repr(records)
    header, _, first, second = str(records).splitlines()
    assert header.split("  ")[0] == "name"
    assert first.split() == [
        "toy<1>",
        "digits",
        "98.77",
        "%",
        "395",
        "k",
        "48.6",
        "k",
        "198",
        "KiB",
    ]
    assert second.startswith("other")
    assert str(Records()).startswith("name  data set  accuracy")


def test_notebooks_show_the_same_cells() -> None:
    cells: list[str] = []

    class Parser(HTMLParser):
        def handle_data(self, data: str) -> None:
            cells.append(data)

    text = Records([RECORD])._repr_html_()
    Parser().feed(text)
    assert text.count("<tr>") == 2
    assert "<1>" not in text
    assert text == html(Records([RECORD])._blocks())
    assert cells[6:] == ["toy<1>", "digits", "98.77 %", "395 k", "48.6 k", "198 KiB"]


def test_card_holds_every_field() -> None:
    lines = RECORD.card.splitlines()
    assert lines[0] == "# toy<1>"
    rows = dict(line[2:-2].split(" | ", 1) for line in lines[4:])
    assert rows["Accuracy"] == "98.77 % of 450 test images"
    assert rows["Weights"] == "28,970 folded, from 48,599 trained parameters"
    assert rows["Classes"] == "no, yes \\| perhaps"
    assert rows["Commit"] == "0123abc"
    text = RECORD.card
    for value in ("394,568", "203,076", "(1, 8, 8)", "`conformallayers train", "Apache", "Digits."):
        assert value in text
    assert "| Commit | not recorded |" in replace(RECORD, commit=None).card
    assert all(one.card.count("\n") == text.count("\n") for one in cl.zoo.list())
