"""Quadratic forms built from columns."""

from __future__ import annotations

import pytest
import torch

import conformallayers as cl
from conformallayers.folding.forms import forms_of
from conformallayers.folding.negligible import rounding
from support import chain_of

pytestmark = pytest.mark.usefixtures("seeded")


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("activation", "padding", "epsilon"),
    [(cl.ReSPro, 1, 1e-3), (cl.Gnomonic, 1, 1e-3), (cl.Gnomonic, 0, 1e-2)],
    ids=["published, by rows", "gnomonic, by rows", "gnomonic, by columns"],
)
def test_terms_left_out_are_negligible(
    activation: type[cl.RadialActivation], padding: int, epsilon: float
) -> None:
    layers = [
        module
        for channels in (1, *[8] * 11)
        for module in (cl.Conv2d(channels, 8, 3, padding=padding), activation())
    ]
    chain = chain_of(cl.ConformalLayers(*layers), (1, 12, 12) if padding else (1, 26, 26))
    unit = float(activation is cl.Gnomonic)
    assert chain.unit == unit
    exact, short = forms_of(chain, CPU), forms_of(chain, CPU, epsilon)
    assert exact.missing == 0
    lacking = exact.values[0] - short.values[0]
    assert 0 < float(torch.linalg.matrix_norm(lacking, 2)) <= short.missing
    room = epsilon * (exact.values[0] + unit * torch.eye(len(lacking)))
    for sign in (1, -1):
        assert float(torch.linalg.eigvalsh(room + sign * lacking).min()) >= 0


def test_nothing_is_left_out_in_float64() -> None:
    assert rounding(torch.float64) == 0
