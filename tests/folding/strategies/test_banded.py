"""The banded strategy."""

from __future__ import annotations

import pytest
import torch

import conformallayers as cl
from conformallayers.networks import DkNetCL

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.slow
def test_a_deep_network_keeps_the_terms_that_count() -> None:
    model = DkNetCL(13)
    folded = cl.fold(model, (3, 32, 32), strategy="banded")
    band = folded.recipe.constants["band"]
    assert band.shape[1] < 3072  # blocks far from the diagonal are negligible
    assert cl.fold_error(model, folded, torch.rand(4, 3, 32, 32)) < 5e-6
