"""The tolerance of the soak: what rounding costs layers and folds."""

from __future__ import annotations

import torch

import conformallayers as cl
from soak.reference import Reference, noise_of


@torch.no_grad()
def test_noise_of_a_fold_shows_the_square_of_cancelling_parts() -> None:
    model = cl.ConformalLayers(cl.Linear(1, 1, bias=True), cl.Gnomonic(1e-4)).double()
    model[0].weight.fill_(1.0), model[0].bias.fill_(-1.0 + 1e-4)
    x = torch.tensor([[2.0], [-2.0]], dtype=torch.float64)  # the points 1e-4 and −2 + 1e-4
    folded = cl.fold(model, (1,), strategy="dense")
    error = noise_of(folded, x) / folded(x).abs().flatten()
    assert error[0] > 1e-9 > 1e-14 > error[1]
    expected = Reference(model, x, torch.float64)
    assert expected.error(folded(x), noise=noise_of(folded, x)) is None
    assert expected.error(folded(x) * (1 + 1e-6), noise=noise_of(folded, x)) is not None
