"""Stages: layers merged into operators between activations."""

from __future__ import annotations

from torch import nn

import conformallayers as cl
from oracle import randomise
from support import chain_of

SHAPE = (2, 8, 7)


def test_a_normalisation_disappears_into_the_convolution_before_it() -> None:
    model = randomise(cl.ConformalLayers(cl.Conv2d(2, 3, 3), nn.BatchNorm2d(3), cl.ReSPro()))
    chain = chain_of(model, SHAPE)
    assert [type(op.module).__name__ for op in chain.operators] == ["Conv2d"]
    linear = cl.ConformalLayers(cl.Linear(4, 3), nn.BatchNorm1d(3), cl.ReSPro())
    assert len(chain_of(randomise(linear), (4,)).operators) == 1
