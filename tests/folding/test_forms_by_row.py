"""Quadratic forms built row by row."""

from __future__ import annotations

import pytest
import torch

import conformallayers as cl
from conformallayers.folding.forms import _forms
from conformallayers.folding.forms_by_row import applies, forms_by_row
from support import chain_of

pytestmark = pytest.mark.usefixtures("seeded")


CPU = torch.device("cpu")


@pytest.mark.parametrize("height", [1, 2, 3, 6, 10])
@pytest.mark.parametrize("projective", [False, True])
def test_forms_from_rows_equal_forms_from_columns(height: int, projective: bool) -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, padding=1),
        cl.ReSPro(projective=projective),
        cl.Conv2d(4, 4, (5, 3), padding=(2, 1), groups=2),
        cl.Scale(1.5),
        cl.ReSPro(projective=projective),
        cl.Conv2d(4, 3, 3, padding=2, dilation=2),
        cl.ReSPro(projective=projective),
    ).double()
    shape = (2, height, 5)
    chain = chain_of(model, shape)
    segments = chain.segments
    assert applies(shape, segments)
    rows = forms_by_row(chain, CPU, 0.0)[0]
    columns = _forms(shape, segments, CPU)[0]
    assert torch.allclose(rows, columns, rtol=1e-12, atol=1e-14 * float(columns.abs().max()))
