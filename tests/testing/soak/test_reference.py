"""The tolerance of the soak: what rounding costs layers and folds."""

from __future__ import annotations

import torch
from torch import nn

import conformallayers as cl
from conformallayers.testing.soak.reference import Reference, noise_of


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


@torch.no_grad()
def test_tolerance_includes_the_digits_that_torch_loses_in_gelu() -> None:
    """At −7 the value is −9e-12, of which float64 has 6 digits; a part without a scale of its own shows them."""
    model = nn.Sequential(nn.Identity(), nn.GELU(), cl.ConformalLayers(cl.ReSPro(projective=True)))
    x = torch.tensor([[-7.0, -7.1, -7.2], [7.0, 7.1, 7.2]], dtype=torch.float64)
    exact = 0.5 * x * torch.special.erfc(-x / 2**0.5)
    expected = Reference(model, x, torch.float64)
    assert (model[2](exact) - model(x)).norm() > 1e-8
    assert expected.error(model[2](exact)) is None
    assert expected.error(model(x) * (1 + 1e-3)) is not None
    assert expected.allowed[1] < 2e-12
