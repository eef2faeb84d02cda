"""The registry: warnings about batch norms."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import conformallayers as cl
from support import samples

SHAPE = (2, 7, 6)


def network(variance: float, eps: float = 1e-5) -> cl.ConformalLayers:
    model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), nn.BatchNorm2d(4, eps), cl.ReSPro()).eval()
    model[1].running_var[1:] = variance
    return model


def test_a_variance_below_eps_warns_once_with_the_remedy() -> None:
    model = network(1e-7)
    x = samples(SHAPE, torch.float32)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"at position 1:.*below eps.*cl\.Scale"):
            model(x)
        model(x)  # folded before
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            cl.trace(model, SHAPE)
    assert len(shown) == 1


def test_a_variance_below_eps_in_a_branch_is_found() -> None:
    block = cl.Residual(nn.BatchNorm2d(2), cl.ReSPro())
    block.body[0].running_var.fill_(1e-9)
    with pytest.warns(UserWarning, match=r"position 0\.body\.0"):
        cl.trace(cl.ConformalLayers(block), SHAPE)


def test_usual_variances_do_not_warn() -> None:
    half = network(1.0)
    half[1].running_var[:2] = 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (network(1e-7, eps=1e-9), network(1.0), half):
            cl.fold(model, SHAPE)
