"""The folding engine: strategies against each other, proofs under attack, memory, explanations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.folding.certificate import (
    ErrorBudget,
    holds,
    positive_definite,
    smallest_eigenvalue,
)
from conformallayers.folding.forms import _forms, forms_of
from conformallayers.folding.forms_by_row import applies, forms_by_row
from conformallayers.folding.operators import Operator
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.networks import DkNetCL
from conformallayers.recipe.point_operations import BandedForm
from support import chain_of, form_values, operations

CPU = torch.device("cpu")


def stack(
    depth: int, channels: int = 6, *, projective: bool = False, **options
) -> cl.ConformalLayers:
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(cl.Conv2d(channels if index else 3, channels, 3, **options))
        layers.append(cl.ReSPro(projective=projective))
    return cl.ConformalLayers(*layers)


def with_head(features: cl.ConformalLayers, shape: tuple[int, ...]) -> nn.Sequential:
    size = math.prod(cl.trace(features, shape).output_shape)
    return nn.Sequential(features, nn.Flatten(), nn.Linear(size, 7))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


STACKS = {
    "padded": {"padding": 1},
    "unpadded": {},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "dilated": {"padding": 2, "dilation": 2},
}


@pytest.mark.parametrize("projective", [False, True])
@pytest.mark.parametrize("kind", STACKS)
def test_all_strategies_agree(kind: str, projective: bool) -> None:
    shape = (3, 11, 9)
    expected = {"dense", "banded", "layers"}
    expected |= {"spectral"} if kind in ("circular", "unpadded") else set()
    expected |= {"conv"} if kind != "circular" else set()
    for model in (
        stack(3, projective=projective, **STACKS[kind]),
        with_head(stack(3, projective=projective, **STACKS[kind]), shape),
    ):
        for name in STRATEGIES:
            if name in expected:
                cl.testing.assert_folds(model, shape, strategy=name)
            else:
                with pytest.raises(cl.ConformalError, match=f'fold.strategy="{name}"'):
                    cl.fold(model, shape, strategy=name)


@pytest.mark.parametrize("height", [1, 2, 3, 6, 10])
@pytest.mark.parametrize("projective", [False, True])
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
    shape = (2, height, 5)
    segments = chain_of(model, shape).segments
    assert applies(shape, segments)
    rows = forms_by_row(shape, segments, CPU, ErrorBudget(0.0))[0]
    columns = _forms(shape, segments, CPU)[0]
    assert torch.allclose(rows, columns, rtol=1e-12, atol=1e-14 * float(columns.abs().max()))


def test_what_a_truncated_form_lacks_is_below_its_bound() -> None:
    model = stack(8, channels=16, padding=1)
    chain = chain_of(model, (3, 12, 12))
    exact = forms_of(chain, CPU, ErrorBudget(0.0))
    short = forms_of(chain, CPU, ErrorBudget(1e-3, radius=20.0))
    assert exact.depth == 8
    assert exact.missing == 0
    assert short.depth < 8
    lacking = torch.linalg.matrix_norm(exact.values[0] - short.values[0], 2)
    assert 0 < float(lacking) <= short.missing


def test_the_operator_norm_is_a_bound_and_a_close_one() -> None:
    for weight_shape in ((5, 3, 3, 3), (3, 6, 5, 1), (4, 4, 2, 3)):
        conv = (
            cl.Conv2d(weight_shape[1], weight_shape[0], weight_shape[2:], padding=1)
            .double()
            .requires_grad_(False)
        )
        nn.init.normal_(conv.weight)
        shape = (weight_shape[1], 9, 9)
        size = math.prod(shape)
        columns = conv(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).detach()
        out = tuple(conv(torch.zeros(1, *shape).double()).shape[1:])
        bound = Operator(conv, shape, out).norm
        true = float(torch.linalg.matrix_norm(columns, 2))
        assert true <= bound <= 1.5 * true


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
    model = stack(5, channels=8, padding=1).double()
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


def test_verify_finds_a_tampered_fold_and_another_model() -> None:
    shape = (3, 12, 10)
    model = with_head(stack(3, padding=1), shape)
    folded = cl.fold(model, shape, strategy="banded")
    assert cl.verify(folded, model)
    assert "proven" in str(cl.verify(folded, model))
    tampered = copy.deepcopy(folded)
    tampered.constants.band[1] *= 1.01
    assert not cl.verify(tampered, model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0][0].weight[0] *= 1.01
    assert not cl.verify(folded, changed)
    assert not cl.verify(folded, with_head(stack(3), shape))
    with pytest.raises(cl.ConformalError, match="Pass the model that was folded"):
        cl.verify(folded, nn.Sequential(stack(3, padding=1), nn.Flatten()))


def test_folding_changes_nothing_in_the_model() -> None:
    model = with_head(stack(3, padding=1), (3, 8, 8)).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    for name in ("auto", "dense", "banded", "layers"):
        cl.fold(model, (3, 8, 8), strategy=name)
    assert model.training
    assert all(module.training for module in model.modules())
    assert [p._version for p in model.parameters()] == versions
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["dense", "banded", "conv", "layers"])
def test_large_batches_run_in_chunks_with_the_same_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(2, channels=4)
    folded = cl.fold(model, (3, 12, 12), strategy=name)
    x = torch.rand(50, 3, 12, 12)
    expected = folded(x)
    sizes = []
    run = folded._run
    monkeypatch.setattr(folded, "_run", lambda x: sizes.append(len(x)) or run(x))
    folded.chunk_size = 8
    assert cl.testing.relative_error(folded(x), expected) < 5e-6
    assert sizes == [8] * 6 + [2]
    x.requires_grad_()
    folded(x).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).flatten(1).any(1).all())


def test_a_model_with_several_conformal_parts_folds_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = stack(2, padding=1)
            self.second = cl.ConformalLayers(cl.Linear(20, 10), cl.ReSPro())
            self.middle = nn.Linear(6 * 64, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = torch.relu(self.middle(self.first(x).flatten(1)))
            return self.second(features) + features[:, :10]

    model = Two()
    folded = cl.fold(model, (3, 8, 8))
    assert set(folded.explain()) == {"first", "second"}
    x = torch.rand(4, 3, 8, 8)
    assert cl.fold_error(model, folded, x) < cl.testing.TOLERANCES[torch.float32]


def test_explain_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from conformallayers.folding import plan
    from conformallayers.folding.cost import TYPICAL

    monkeypatch.setattr(plan, "machine", lambda: TYPICAL)
    monkeypatch.setattr("conformallayers.folding.fold.machine", lambda: TYPICAL)
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(3.0), cl.Conv2d(8, 8, 3), cl.ReSPro(3.0)),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    text = str(cl.fold(model, (1, 8, 8)).explain())
    assert text == SNAPSHOT, text


SNAPSHOT = """\
0
  strategy  multiply-adds  constants  batch of 64  note
----------  -------------  ---------  -----------  ----
→ dense            4.74 k   18.5 KiB    0.0241 ms
  banded           4.74 k   18.5 KiB    0.0375 ms
  conv             7.24 k   20.9 KiB    0.0586 ms
  layers           13.1 k   7.53 KiB    0.0709 ms
  spectral         12.3 k   4.19 KiB     0.266 ms
dense: expected 2.9 times as fast as the layers
head: 2 following layers absorbed into the matrix"""


@pytest.mark.slow
def test_a_deep_network_keeps_the_terms_that_count() -> None:
    model = DkNetCL(13)
    folded = cl.fold(model, (3, 32, 32), strategy="banded")
    assert folded.certificate is not None
    assert folded.certificate.epsilon < 6e-8
    assert cl.fold_error(model, folded, torch.rand(4, 3, 32, 32)) < 5e-6
