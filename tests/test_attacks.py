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
from conformallayers.folding.forms import forms_of
from conformallayers.folding.operators import frozen_layers
from conformallayers.folding.part import lower_part
from conformallayers.folding.plan import Plan
from conformallayers.folding.problem import Problem
from conformallayers.folding.stages import stage_of
from conformallayers.folding.trace import trace_modules
from conformallayers.recipe.torch.module import RecipeModule
from support import form_values


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


def written_out(folded: RecipeModule, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the form that a fold evaluates: half the gradient of its value at every impulse."""
    size = math.prod(shape)
    x = torch.eye(size, dtype=torch.float64).view(size, *shape).requires_grad_()
    (gradient,) = torch.autograd.grad(form_values(folded, x)[0].sum() / 2, x)
    return (gradient.flatten(1) + gradient.flatten(1).T) / 2


@pytest.mark.parametrize("strategy", ["dense", "banded"])
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
    stage = stage_of(trace_modules(frozen_layers(stack(14, 16)), shape))
    cpu = torch.device("cpu")
    exact = forms_of(stage.chain, cpu, ErrorBudget(0.0)).values[0]
    # float64 constants, so that what differs is what was left out and not the rounding of entries
    problem = Problem(stage, slack, torch.float64, cpu)
    recipe, plan = lower_part(problem, Plan(strategy, "", ()))
    found = written_out(RecipeModule(recipe, torch.float64), shape)
    error = found - exact
    assert float(error.abs().max()) > 0
    x = worst_input(error, exact, slack.radius)
    room = x @ exact @ x + float(x.norm()) * (0 if math.isinf(slack.radius) else 1)
    assert 0 < float((x @ error @ x).abs() / room) <= slack.epsilon
    assert plan.certificate is not None
    assert plan.certificate.epsilon == slack.epsilon
    assert 0 <= plan.certificate.margin <= 1


@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(1, 3),
    alpha=st.sampled_from(["young", "spectral", "learned", 2.5]),
    projective=st.booleans(),
    training=st.booleans(),
    double=st.booleans(),
    strategy=st.sampled_from(["auto", "dense", "banded", "conv", "layers"]),
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
