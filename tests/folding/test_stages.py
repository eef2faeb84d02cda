"""Stages: layers merged into operators between activations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe import layer_operations as layer
from oracle import randomise
from support import chain_of

SHAPE = (2, 8, 7)


def test_a_normalisation_disappears_into_the_convolution_before_it() -> None:
    model = randomise(cl.ConformalLayers(cl.Conv2d(2, 3, 3), nn.BatchNorm2d(3), cl.ReSPro()))
    chain = chain_of(model, SHAPE)
    assert [type(op.module).__name__ for op in chain.operators] == ["Conv2d"]
    linear = cl.ConformalLayers(cl.Linear(4, 3), nn.BatchNorm1d(3), cl.ReSPro())
    assert len(chain_of(randomise(linear), (4,)).operators) == 1


def shifted(pool: nn.Module, *, padding: int, factor: float = 1.0) -> cl.ConformalLayers:
    """A BatchNorm behind a map, before convolutions of which the first one pads."""
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 4, 3), cl.ReSPro(projective=True), pool, nn.BatchNorm2d(4)),
        *(cl.Conv2d(4, 3, 3, padding=padding), cl.Conv2d(3, 5, 1, bias=True)),
        *(cl.ReSPro(projective=True), nn.ReLU(), cl.Conv2d(5, 2, 1)),
        offset=1.0,
        unit="rms",
    )
    norm = randomise(model)[3]
    norm.weight.data[1] *= factor
    return model.double()


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e-30, 0.0])
def test_a_shift_before_a_padded_convolution_stays_one_number_a_channel(
    padding: int, factor: float
) -> None:
    model = shifted(nn.MaxPool2d(2), padding=padding, factor=factor)
    folded = cl.fold(model, (2, 12, 12), strategy="conv")
    added = [op for op in folded.recipe.operations if isinstance(op, layer.AddConstant)]
    shapes = [tuple(folded.recipe.constants[op.value].shape) for op in added]
    short = padding == 1 and factor >= 1e-6
    # Without padding it goes into the bias of the convolution. A factor near 0 leaves a map behind it.
    assert shapes == ([] if padding == 0 else [(4, 1, 1)] if short else [(5, 5, 5)])
    x = torch.randn(3, 2, 12, 12, dtype=torch.float64)
    assert cl.fold_error(model, folded, x) <= 1e-12
