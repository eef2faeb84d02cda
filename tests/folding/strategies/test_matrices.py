"""Matrices and bands written out: their digits."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.networks import DkNetCL
from oracle import exact, matrix_of, oracle, randomise, relative_error

pytestmark = pytest.mark.usefixtures("seeded")

NEARLY_SINGULAR: dict[str, list[nn.Module]] = {
    "few rows": [cl.Flatten(), cl.Linear(45, 2), cl.ReSPro(1e-8)],
    "many rows of few": [
        *(cl.Flatten(), cl.Linear(45, 2), cl.ReSPro(1e-8)),
        *(cl.Linear(2, 60), cl.ReSPro(1.0)),
    ],
    "a stride": [cl.Conv2d(1, 1, 3, stride=2), cl.ReSPro(1e-8)],
}


@pytest.mark.parametrize("strategy", ["dense", "banded"])
@pytest.mark.parametrize("name", NEARLY_SINGULAR)
def test_no_digits_are_lost_near_a_null_space(name: str, strategy: str) -> None:
    model = exact(randomise(cl.ConformalLayers(*copy.deepcopy(NEARLY_SINGULAR[name]))))
    first = nn.Sequential(*itertools.takewhile(lambda m: not isinstance(m, cl.ReSPro), model))
    with torch.no_grad():
        _, _, basis = torch.linalg.svd(matrix_of(first, (1, 9, 5)))
        x = (basis[-1] + 1e-3 * basis[0]).view(1, 1, 9, 5)
        folded = cl.fold(model, (1, 9, 5), strategy=strategy)
        assert relative_error(folded(x), oracle(model, x)) < 1e-12


@pytest.mark.slow
def test_a_deep_network_keeps_the_terms_that_count() -> None:
    model = DkNetCL(13)
    folded = cl.fold(model, (3, 32, 32), strategy="banded")
    band = folded.recipe.constants["band"]
    assert band.shape[1] < 3072  # blocks far from the diagonal are negligible
    assert cl.fold_error(model, folded, torch.rand(4, 3, 32, 32)) < 5e-6
