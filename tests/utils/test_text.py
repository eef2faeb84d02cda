"""HTML of records in notebooks: the same blocks as their text, and no markup from names."""

from __future__ import annotations

from collections import OrderedDict
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.utils.text import Printed, Table, table

EVIL = "<script>alert('x')</script>&"
TAGS = {"pre", "table", "thead", "tbody", "tr", "th", "td"}


class Reader(HTMLParser):
    """Collect the tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert attrs in ([], [("style", "text-align: left")], [("style", "text-align: right")])
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def evil_model() -> nn.Module:
    """Return a model whose modules have markup in their names."""
    layers = OrderedDict([(EVIL, cl.Linear(4, 4)), ("act" + EVIL, cl.ReSPro(1.0))])
    return nn.Sequential(OrderedDict([("p" + EVIL, cl.ConformalLayers(layers))]))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    model, x = evil_model(), torch.rand(3, 4)
    folded = cl.fold(model, (4,), strategy="layers")
    return {
        "explain": folded.explain(),
        "plan": next(iter(folded.plans.values())),
        "trace": cl.trace(model, (4,)),
        "recipe": folded.recipe,
        "inspect": cl.inspect(model, (4,)),
        "diagnose": cl.diagnose(model, x),
    }


@pytest.mark.parametrize("name", ["explain", "plan", "trace", "recipe", "inspect", "diagnose"])
def test_records_show_what_they_print_and_no_markup_of_their_own(
    found: dict[str, Any], name: str
) -> None:
    record = found[name]
    assert isinstance(record, Printed)
    read = Reader(record._repr_html_())
    assert read.tags <= TAGS
    printed = "".join(str(record).split())
    # Rules below headers are dashes; words are the same in the same order.
    assert "".join(read.text.split()).replace("-", "") == printed.replace("-", "")


@pytest.mark.parametrize("name", ["explain", "trace", "inspect", "diagnose"])
def test_names_with_markup_are_escaped(found: dict[str, Any], name: str) -> None:
    assert EVIL in str(found[name])
    page = found[name]._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_tables_print_as_before_and_empty_paragraphs_are_empty_lines() -> None:
    class Two(Printed):
        def _blocks(self) -> list[str | Table]:
            return ["above", "", Table(["a", "b"], [["x", "1"]])]

    assert str(Two()) == repr(Two()) == "above\n\n" + table(["a", "b"], [["x", "1"]])
    assert Two()._repr_html_().startswith("<pre>above</pre><table>")
