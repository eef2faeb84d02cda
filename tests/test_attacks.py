"""The worst inputs for what a fold leaves out, and the promise that folding leaves the model alone."""

from __future__ import annotations

import copy
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.certificate import ErrorBudget, rounding_budget
from conformallayers.folding.stages import forms_of, program_of
from conformallayers.folding.strategies import STRATEGIES, Request


def stack(depth: int, channels: int = 8) -> cl.ConformalLayers:
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(cl.Conv2d(channels if index else 3, channels, 3, padding=1))
        layers.append(cl.ReSPro())
    return cl.ConformalLayers(*layers)


def worst_input(error: Tensor, exact: Tensor, radius: float) -> Tensor:
    """Return the x of norm radius that maximises |xᵀEx| / (xᵀQx + ‖x‖²/R): an eigenvector."""
    room = exact + torch.eye(len(exact), dtype=exact.dtype) / radius
    factor = torch.linalg.cholesky(room)
    inner = torch.linalg.solve_triangular(factor, error, upper=False)
    inner = torch.linalg.solve_triangular(factor, inner.T, upper=False)
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    vector = vectors[:, int(values.abs().argmax())]
    x = torch.linalg.solve_triangular(factor.T, vector[:, None], upper=True)[:, 0]
    return x * (radius / x.norm()) if math.isfinite(radius) else x / x.norm()


@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse"])
@pytest.mark.parametrize(
    "slack",
    [
        rounding_budget(torch.float32),
        ErrorBudget(1e-3, 20.0, requested=True),
        ErrorBudget(1e-4, requested=True),
    ],
)
def test_the_worst_input_stays_within_the_bound(strategy: str, slack: ErrorBudget) -> None:
    torch.manual_seed(0)
    shape = (3, 10, 10)
    program = program_of(stack(14, 16).trace(shape))
    exact = forms_of(program, ErrorBudget(0.0)).values[0]
    # float64 constants, so that what differs is what was left out and not the rounding of entries
    request = Request(program, slack, torch.float64, torch.device("cpu"))
    core = STRATEGIES[strategy].make(request)
    found = core.dense_forms(shape)[0]
    error = found - exact
    assert float(error.abs().max()) > 0
    x = worst_input(error, exact, slack.radius)
    room = x @ exact @ x + float(x.norm()) * (0 if math.isinf(slack.radius) else 1)
    assert 0 < float((x @ error @ x).abs() / room) <= slack.epsilon
    assert core.certificate is not None
    assert core.certificate.epsilon == slack.epsilon
    assert 0 <= core.certificate.margin <= 1


@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(1, 3),
    alpha=st.sampled_from(["young", "spectral", "learned", 2.5]),
    projective=st.booleans(),
    training=st.booleans(),
    double=st.booleans(),
    strategy=st.sampled_from(["auto", "dense", "banded", "sparse", "conv", "layers"]),
    tolerance=st.sampled_from([None, 1e-2]),
)
def test_folding_never_changes_the_model(
    depth: int,
    alpha: str | float,
    projective: bool,
    training: bool,
    double: bool,
    strategy: str,
    tolerance: float | None,
) -> None:
    torch.manual_seed(depth)
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [cl.Conv2d(4 if index else 2, 4, 3, padding=1), cl.Dropout(0.3)]
        layers.append(cl.ReSPro(alpha, projective=projective))
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.Flatten(), nn.Linear(4 * 36, 3))
    model = (model.double() if double else model).train(training)
    x = torch.rand(3, 2, 6, 6, dtype=torch.float64 if double else torch.float32)
    before = copy.deepcopy(model)
    versions = {name: tensor._version for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    folded = cl.fold(model, (2, 6, 6), strategy=strategy, tolerance=tolerance)
    folded(x)
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert [p.requires_grad for p in model.parameters()] == [True] * len(list(before.parameters()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name])
        assert tensor._version == versions[name]
    with cl.layer_by_layer():
        assert torch.equal(model.eval()(x), before.eval()(x))
