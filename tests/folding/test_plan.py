"""The plan of a fold, and its explanation."""

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
