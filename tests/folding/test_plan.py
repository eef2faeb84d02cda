"""Plans: the choice of a strategy, and its explanation."""

from __future__ import annotations

import pytest
from torch import nn

import conformallayers as cl

pytestmark = pytest.mark.usefixtures("seeded")


def test_explain_is_what_it_was() -> None:
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(3.0), cl.Conv2d(8, 8, 3), cl.ReSPro(3.0)),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    text = str(cl.fold(model, (1, 8, 8)).explain())
    assert text == SNAPSHOT, text


def test_a_strategy_that_is_misspelt_is_named() -> None:
    message = r'got .bandd.\. Try "auto"\. Did you mean "banded"\?'
    with pytest.raises(cl.ConformalError, match=message):
        cl.fold(cl.ConformalLayers(cl.Conv1d(1, 1, 1)), (1, 4), strategy="bandd")


SNAPSHOT = """\
0
  strategy  multiply-adds  constants  estimate for 64  note
----------  -------------  ---------  ---------------  ----
→ dense            4.74 k   18.5 KiB        0.0241 ms
  banded           4.74 k   18.5 KiB        0.0375 ms
  conv             7.24 k   20.9 KiB        0.0586 ms
  layers           13.1 k   7.53 KiB        0.0709 ms
dense: expected 2.9 times as fast as the layers
head: 2 following layers absorbed into the matrix"""


def test_explain_has_a_block_for_each_radial_stage() -> None:
    first, second = (
        (cl.Conv2d(3, 3, 1), cl.ReSPro(), cl.Conv2d(3, 3, 1), cl.ReSPro()) for _ in range(2)
    )
    biased = cl.Conv2d(3, 3, 3, bias=True), nn.ReLU()
    folded = cl.fold(cl.ConformalLayers(*first, *biased, *second), (3, 16, 16))
    assert list(folded.explain()) == ["stage 1", "stage 3"]


def test_a_named_strategy_is_used_where_it_applies() -> None:
    radial = cl.Linear(4, 4), cl.ReSPro(), cl.Linear(4, 4)
    for layers in (radial, (*radial, nn.ReLU(), cl.Linear(4, 2))):
        with pytest.raises(cl.ConformalError, match="one where a sample has no image rows"):
            cl.fold(cl.ConformalLayers(*layers), (4,), strategy="banded")
