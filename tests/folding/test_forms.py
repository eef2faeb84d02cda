"""Quadratic forms: built by rows and by columns, and without the terms that rounding hides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.forms import (
    forms_by_column,
    forms_by_row,
    forms_of,
    keeps_rows,
    matrix_of,
    rounding,
)
from support import both_forms, stage_of

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("activation", [cl.ReSPro, cl.Gnomonic])
def test_terms_left_out_are_negligible(activation: type[cl.RadialActivation]) -> None:
    epsilon = 1e-3
    layers = [
        module
        for channels in (1, *[8] * 11)
        for module in (cl.Conv2d(channels, 8, 3, padding=1), activation())
    ]
    stage = stage_of(cl.ConformalLayers(*layers), (1, 12, 12))
    unit = float(activation is cl.Gnomonic)
    assert stage.unit == unit
    exact, short = forms_of(stage), forms_of(stage, epsilon)
    assert exact.missing == 0
    lacking = exact.values[0] - short.values[0]
    assert 0 < float(torch.linalg.matrix_norm(lacking, 2)) <= short.missing
    room = epsilon * (exact.values[0] + unit * torch.eye(len(lacking)))
    for sign in (1, -1):
        assert float(torch.linalg.eigvalsh(room + sign * lacking).min()) >= 0


def test_nothing_is_left_out_in_float64() -> None:
    assert rounding(torch.float64) == 0


@pytest.mark.parametrize("height", [1, 2, 3, 6, 10])
@both_forms
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
    stage = stage_of(model, (2, height, 5))
    assert keeps_rows(stage)
    rows, columns = forms_by_row(stage, 0.0).values, forms_by_column(stage)
    assert torch.allclose(rows, columns, rtol=1e-12, atol=1e-14 * float(columns.abs().max()))


def test_the_matrix_of_few_outputs_takes_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []
    pool = nn.functional.adaptive_avg_pool2d

    def counted(x: Tensor, size: object) -> Tensor:
        passed.append(len(x))
        return pool(x, size)

    monkeypatch.setattr(nn.functional, "adaptive_avg_pool2d", counted)
    layers = cl.Conv2d(1, 25, 1), cl.ReSPro(projective=True), cl.AdaptiveAvgPool2d(1)
    matrix = matrix_of(stage_of(cl.ConformalLayers(*layers), (1, 40, 40)))
    assert matrix.shape == (25, 1600)
    assert sum(passed) < 1600 / 4
