"""Certificates: bounds on what a fold leaves out, under the worst inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.certificate import (
    ErrorBudget,
    holds,
    positive_definite,
    rounding_budget,
    smallest_eigenvalue,
)
from conformallayers.folding.forms import forms_of
from conformallayers.folding.operators import frozen_layers
from conformallayers.folding.part import lower_part
from conformallayers.folding.problem import Conditions
from conformallayers.folding.split import stages_of
from conformallayers.folding.trace import trace_modules
from conformallayers.recipe.point_operations import BandedForm
from conformallayers.recipe.torch.module import RecipeModule
from nets import conv_stack
from support import form_values, operations

pytestmark = pytest.mark.usefixtures("seeded")


def test_the_smallest_eigenvalue_is_a_lower_bound() -> None:
    factor = torch.randn(30, 40, dtype=torch.float64)
    form = factor @ factor.T
    true = float(torch.linalg.eigvalsh(form)[0])
    assert 0.5 * true <= smallest_eigenvalue(form) <= true
    assert smallest_eigenvalue(factor.T @ factor) == 0  # rank 30 of 40
    assert positive_definite(form)
    assert not positive_definite(form - 1.01 * true * torch.eye(30).double())
    assert holds(form, form * 1.009, ErrorBudget(0.01)) is not None
    assert holds(form, form * 1.011, ErrorBudget(0.01)) is None


def denominator(folded: cl.Folded, x: torch.Tensor) -> torch.Tensor:
    (n,) = form_values(folded, x)
    return torch.linalg.vector_norm(x.flatten(1), dim=1) + n


@pytest.mark.parametrize(("tolerance", "radius"), [(1e-1, None), (1e-2, None), (1e-2, 3.0)])
def test_a_certificate_survives_gradient_ascent(tolerance: float, radius: float | None) -> None:
    shape = (3, 12, 10)
    model = conv_stack(5, channels=8, padding=1).double()
    loose = cl.fold(
        model, shape, strategy="banded", tolerance=tolerance, max_norm=radius, dtype=torch.float64
    )
    exact = cl.fold(model, shape, strategy="dense")
    assert loose.certificate is not None
    assert loose.certificate.epsilon == tolerance
    whole = cl.fold(model, shape, strategy="banded")
    (narrow,), (wide,) = (operations(folded, BandedForm) for folded in (loose, whole))
    assert narrow.width < wide.width
    assert cl.verify(loose, model)
    x = torch.randn(16, *shape, dtype=torch.float64)
    worst = 0.0
    for _ in range(60):
        size = torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, 1, 1, 1)
        x = x / size * (radius or 1e3)  # the larger the input, the more the form counts
        x.requires_grad_()
        true = denominator(exact, x)
        error = (denominator(loose, x) - true).abs() / true
        worst = max(worst, float(error.detach().max()))
        (gradient,) = torch.autograd.grad(error.sum(), x)
        step = torch.linalg.vector_norm(gradient.flatten(1), dim=1).view(-1, 1, 1, 1)
        x = (x + 0.2 * (radius or 1e3) * gradient / (step + 1e-300)).detach()
    assert 0 < worst <= tolerance


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


@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse"])
@pytest.mark.parametrize(
    "slack",
    [
        rounding_budget(torch.float32),
        ErrorBudget(1e-3, 20.0, requested=True),
        ErrorBudget(1e-4, requested=True),
    ],
)
@pytest.mark.sampled(2)
def test_the_worst_input_stays_within_the_bound(strategy: str, slack: ErrorBudget) -> None:
    torch.manual_seed(0)
    shape = (3, 10, 10)
    layers = frozen_layers(conv_stack(14, channels=16, padding=1))
    graph = stages_of(trace_modules(layers, shape))
    (stage,) = graph.stages
    cpu = torch.device("cpu")
    exact = forms_of(stage.chain, cpu, ErrorBudget(0.0)).values[0]
    # float64 constants, so that what differs is what was left out and not the rounding of entries
    recipe, (plan,) = lower_part(graph, Conditions(slack, torch.float64, cpu, strategy))
    found = written_out(RecipeModule(recipe, torch.float64), shape)
    error = found - exact
    assert float(error.abs().max()) > 0
    x = worst_input(error, exact, slack.radius)
    room = x @ exact @ x + float(x.norm()) * (0 if math.isinf(slack.radius) else 1)
    assert 0 < float((x @ error @ x).abs() / room) <= slack.epsilon
    assert plan.certificate is not None
    assert plan.certificate.epsilon == slack.epsilon
    assert 0 <= plan.certificate.margin <= 1


def test_a_projective_certificate_does_not_trust_a_small_norm() -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(1, 2, 3, padding=1),
        cl.Conv2d(2, 2, 3, padding=1),
        cl.ReSPro(projective=True),
        cl.Flatten(),
        cl.Linear(512, 4),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    folded = cl.fold(model, (1, 32, 8), strategy="banded", tolerance=1e-2, max_norm=1e-2)
    x = torch.rand(5, 1, 32, 8, dtype=torch.float64)
    x *= 1e-2 / torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, 1, 1, 1)
    assert cl.fold_error(model, folded, x) <= 1.1e-2
    assert cl.verify(folded, model)


@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse", "layers", "auto"])
def test_every_strategy_carries_the_certificate_that_was_asked_for(strategy: str) -> None:
    layers = [m for i in range(8) for m in (cl.Conv2d(8 if i else 1, 8, 3, padding=1), cl.ReSPro())]
    model = cl.ConformalLayers(*layers, cl.Flatten(), cl.Linear(2048, 4))
    folded = cl.fold(model, (1, 16, 16), strategy=strategy, tolerance=1e-2, max_norm=10.0)
    assert folded.certificate is not None
    assert (folded.certificate.epsilon, folded.certificate.max_norm) == (1e-2, 10.0)
    assert 0 <= folded.certificate.margin <= 1
    assert cl.verify(folded, model)


@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse"])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3, None])
def test_proofs_of_gnomonic_do_not_depend_on_the_norm(strategy: str, norm: float | None) -> None:
    torch.manual_seed(0)
    layers = (m for _ in range(8) for m in (cl.Conv2d(1, 1, 3, padding=1), cl.Gnomonic()))
    model = cl.ConformalLayers(*layers)
    folded = cl.fold(model, (1, 6, 6), strategy=strategy, tolerance=1e-3, max_norm=norm)
    assert folded.certificate is not None
    assert folded.certificate.margin >= 0
    assert math.isinf(folded.certificate.max_norm)
    assert cl.verify(folded, model)


def test_the_norm_of_the_input_says_nothing_of_later_parts() -> None:
    model = nn.Sequential(
        *(
            conv_stack(4, channels=4, inputs=1, padding=1),
            nn.Flatten(),
            nn.Linear(400, 100, bias=False),
            nn.ReLU(),
        ),
        *(nn.Unflatten(1, (1, 10, 10)), conv_stack(4, channels=4, inputs=1, padding=1)),
    ).eval()
    with torch.no_grad():
        model[2].weight.mul_(1e4)
    folded = cl.fold(model, (1, 10, 10), tolerance=1e-2, max_norm=1e-3)
    first, second = (plan.certificate for plan in folded.plans.values())
    assert first.max_norm == folded.certificate.max_norm == 1e-3
    assert second.max_norm == float("inf")
    assert cl.verify(folded, model)
    assert cl.fold_error(model, folded, 1e-4 * torch.rand(8, 1, 10, 10)) < 3e-2


def nearly_cancelled(weight: Tensor, delta: float, norm: float) -> Tensor:
    """Return inputs of a norm that a layer maps to about ``delta`` of their length."""
    rows = torch.linalg.svd(weight.detach().double(), full_matrices=True).Vh
    rank = len(weight)
    x = torch.randn(32, len(rows) - rank).double() @ rows[rank:]
    x = x / x.norm(dim=1, keepdim=True)
    seen = torch.randn(32, rank).double() @ rows[:rank]
    x = x + delta * seen / seen.norm(dim=1, keepdim=True)
    return (norm * x / x.norm(dim=1, keepdim=True)).float()


def steep() -> cl.ConformalLayers:
    layers = (cl.Linear(64, 16), cl.ReSPro(0.01), cl.Linear(16, 16), cl.ReSPro(0.01))
    return cl.ConformalLayers(*layers)


@pytest.mark.parametrize("strategy", ["auto", "dense", "sparse", "layers"])
@pytest.mark.parametrize("tolerance", [1e-4, 1e-2, 1e-1])
def test_a_certificate_covers_rounding(strategy: str, tolerance: float) -> None:
    model = steep()
    with pytest.raises(cl.ConformalError, match=r"float32 computes so closely.*float64"):
        cl.fold(model, (64,), strategy=strategy, tolerance=tolerance, max_norm=100.0)
    folded = cl.fold(model, (64,), strategy=strategy, tolerance=tolerance)
    proof = folded.certificate
    assert cl.verify(folded, model)
    exactly = cl.fold(model, (64,), strategy="layers", dtype=torch.float64)
    for delta in (1e-1, 1e-2, 1e-3, 1e-4):
        x = nearly_cancelled(model[0].weight, delta, min(proof.max_norm, 1e4))
        sizes = torch.linalg.vector_norm(x.double(), dim=1)
        true = sizes + form_values(exactly, x.double())[0]
        found = sizes + form_values(folded, x)[0]
        assert float(((found - true).abs() / true).max()) <= tolerance


@pytest.mark.parametrize("strategy", ["dense", "sparse"])
@pytest.mark.parametrize("norm", [1.0, 1e8])
def test_forms_keep_the_digits_that_the_layers_keep(strategy: str, norm: float) -> None:
    model = steep()
    folds = [cl.fold(model, (64,), strategy=name) for name in (strategy, "layers")]
    for delta in (1e-1, 1e-2, 1e-3):
        x = nearly_cancelled(model[0].weight, delta, norm)
        form, layers = (cl.fold_error(model, folded, x) for folded in folds)
        assert form <= 3 * layers + 1e-6


@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse"])
def test_forms_of_images_keep_the_digits_that_the_input_leaves(strategy: str) -> None:
    model = cl.ConformalLayers(cl.Conv2d(2, 2, 3, padding=1), cl.ReSPro(0.01), cl.Conv2d(2, 2, 3))
    with torch.no_grad():
        model[0].weight[:, 1] = -model[0].weight[:, 0]  # two equal channels cancel
    folded = cl.fold(model, (2, 12, 8), strategy=strategy)
    for delta in (1e-1, 1e-2, 1e-3):
        x = torch.randn(8, 1, 12, 8).repeat(1, 2, 1, 1) + delta * torch.randn(8, 2, 12, 8)
        assert cl.fold_error(model, folded, 1e8 * x) <= 4 * torch.finfo(torch.float32).eps / delta


def test_a_form_with_a_large_null_space_is_proven() -> None:
    """What rounds is as large as the trace, not as n times the largest entry."""
    form = torch.full((360,), 2e-9, dtype=torch.float64)
    form[0] = 1e4
    assert positive_definite(form.diag())
    form[-1] = -1e-9
    assert not positive_definite(form.diag())
    form[-1] = 1e-10  # below the guard
    assert not positive_definite(form.diag())
