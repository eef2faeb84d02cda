"""Inspection: forms, terms and templates against explicit small computations, and the command."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.inspection import Part
from oracle import matrix_of, randomise
from support import both_forms, samples

SHAPE = (2, 8, 7)
ALPHAS = (1.5, 0.7, 2.2)
KINDS = list(itertools.product((False, True), repeat=3))  # published or projective, three times
every_kind = pytest.mark.parametrize("kinds", KINDS, ids=lambda k: "".join("nP"[p] for p in k))


def network(kinds: tuple[bool, ...] = (False,) * 3) -> nn.Sequential:
    first, second, third = (cl.ReSPro(a, projective=p) for a, p in zip(ALPHAS, kinds, strict=True))
    features = cl.ConformalLayers(
        *(cl.Conv2d(2, 3, 3, padding=1), first, cl.AvgPool2d(2), cl.Conv2d(3, 4, 2), second),
        *(cl.Dropout(0.3), cl.Flatten(), cl.Linear(24, 5), third),
    )
    model = nn.Sequential(features, nn.Flatten(), nn.Linear(5, 6), nn.Linear(6, 4))
    return randomise(model)  # type: ignore[return-value]


def literally(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor], float]:
    """Follow (x, t) by the table of the paper: x, t, what each layer added to t/s, and s."""
    t = x.flatten(1).norm(dim=1)
    terms, s = [t], 1.0
    for module in copy.deepcopy(model[0]).double().eval():
        if isinstance(module, cl.ReSPro):
            alpha = float(module.alpha)
            added = x.flatten(1).square().sum(1) / (2 * alpha)
            added = added / t if module.projective else added
            t, s = alpha / 2 * t + added, alpha / 2 * s
            terms.append(added / s)
        else:
            x = module(x)
    return x, t, terms, s


def one(model: nn.Module, *arguments: Any, **options: Any) -> Part:
    (part,) = cl.inspect(model, *arguments, **options).parts
    return part


def expected_forms(kinds: tuple[bool, ...]) -> list[Tensor]:
    """Write out every form by products of matrices; neighbours that are published are one."""
    model, shape, u, s = network(kinds), SHAPE, torch.eye(math.prod(SHAPE)).double(), 1.0
    forms: list[Tensor] = []
    before = True
    for module in model[0]:
        if not isinstance(module, cl.ReSPro):
            u = matrix_of(module, shape) @ u
            shape = tuple(module.eval()(torch.zeros(1, *shape)).shape[1:])
            continue
        alpha, previous, s = float(module.alpha), s, s * float(module.alpha) / 2
        form = u.T @ u / (2 * alpha * s)
        if module.projective:
            forms.append(form / previous)
        elif before:
            forms.append(form)
        else:
            forms[-1] = forms[-1] + form
        before = module.projective
    return forms


# -- forms ------------------------------------------------------------------------------------------


@every_kind
def test_spectra_are_those_of_products_of_matrices(kinds: tuple[bool, ...]) -> None:
    part = one(network(kinds), SHAPE, top=5)
    expected = expected_forms(kinds)
    assert len(part.forms) == len(expected)
    assert [path for form in part.forms for path in form.layers] == ["0.1", "0.4", "0.8"]
    for form, q in zip(part.forms, expected, strict=True):
        values = torch.linalg.eigvalsh(q).flip(0)
        torch.testing.assert_close(form.eigenvalues, values, rtol=1e-9, atol=1e-12 * values[0])
        assert form.trace == pytest.approx(float(q.diagonal().sum()), rel=1e-10)
        images = form.eigenimages.flatten(1)
        assert form.eigenimages.shape == (5, *SHAPE)
        torch.testing.assert_close(images @ images.T, torch.eye(5).double())
        torch.testing.assert_close(images @ q, values[:5, None] * images, rtol=0, atol=1e-9)
        assert bool((images.sum(1) >= 0).all())


@pytest.mark.parametrize("shape", [SHAPE, (3, 9), (1, 3, 4, 3)], ids=str)
def test_falloff_counts_every_pair_of_pixels(shape: tuple[int, ...]) -> None:
    layer = {2: cl.Conv1d, 3: cl.Conv2d, 4: cl.Conv3d}[len(shape)](shape[0], 2, 2)
    (form,) = one(randomise(cl.ConformalLayers(layer, cl.ReSPro(1.0))), shape).forms
    u = matrix_of(layer, shape)
    q = u.T @ u
    places = list(itertools.product(*map(range, shape)))
    expected = [0.0] * max(shape[1:])
    for (i, a), (j, b) in itertools.product(enumerate(places), repeat=2):
        distance = max(abs(m - n) for m, n in zip(a[1:], b[1:], strict=True))
        expected[distance] += float(q[i, j]) ** 2 / float(q.square().sum())
    assert form.falloff is not None
    assert form.falloff.tolist() == pytest.approx(expected, abs=1e-12)
    assert float(form.falloff.sum()) == pytest.approx(1)
    assert form.reach == 1  # a kernel of 2


def test_numbers_of_known_spectra() -> None:
    equal = one(cl.ConformalLayers(cl.Identity(), cl.ReSPro(2.0)), (3, 4, 4)).forms[0]
    assert (equal.trace, equal.effective_rank) == pytest.approx((48 / 4, 48))
    assert equal.share(12) == pytest.approx(0.25)
    assert equal.falloff is not None
    assert equal.falloff.tolist() == [1, 0, 0, 0]
    assert equal.reach == 0
    single = one(cl.ConformalLayers(cl.Linear(6, 1), cl.ReSPro()), (6,)).forms[0]
    assert single.effective_rank == pytest.approx(1)
    assert single.share(1) == pytest.approx(1)
    assert single.falloff is None
    assert single.reach is None


def test_zero_weights_have_a_form_of_zeros_and_no_nan() -> None:
    model = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro())
    nn.init.zeros_(model[0].weight)
    part = one(model, (1, 5, 5), torch.rand(2, 1, 5, 5))
    form = part.forms[0]
    assert (form.trace, form.effective_rank, form.share(3), form.reach) == (0, 0, 0, 0)
    assert part.terms is not None
    assert part.terms.shares.tolist() == [[1, 0], [1, 0]]


def test_without_activation_there_is_only_the_norm() -> None:
    part = one(cl.ConformalLayers(cl.Conv2d(1, 2, 3)), (1, 5, 5), torch.rand(2, 1, 5, 5))
    assert part.forms == ()
    assert part.terms is not None
    assert part.terms.shares.tolist() == [[1], [1]]
    assert part.terms.gains.shape == (2, 0)
    assert "‖x‖" in str(part)


# -- terms and templates ----------------------------------------------------------------------------


@every_kind
def test_terms_and_templates_are_those_of_the_layers(kinds: tuple[bool, ...]) -> None:
    model = network(kinds)
    x = samples(SHAPE, torch.float64, batch=300) * torch.logspace(-3, 3, 300)[:, None, None, None]
    part = one(model, SHAPE, x)
    terms = part.terms
    assert terms is not None
    assert part.bias is not None
    y = x.flatten(1) @ part.templates.flatten(1).T / terms.denominators[:, None] + part.bias
    torch.testing.assert_close(y, cl.testing.reference(model.double(), x))
    _, t, expected, s = literally(model, x)
    assert terms.names == ("‖x‖", "0.1", "0.4", "0.8")
    torch.testing.assert_close(terms.norms, x.flatten(1).norm(dim=1))
    torch.testing.assert_close(terms.denominators, t / s)
    torch.testing.assert_close(terms.shares, torch.stack(expected, 1) / (t / s)[:, None])
    torch.testing.assert_close(terms.shares.sum(1), torch.ones(300).double())


@both_forms
@pytest.mark.parametrize("alpha", [None, "spectral", "learned"])
def test_fields_give_the_output(projective: bool, alpha: str | None) -> None:
    layers = cl.Conv2d(2, 3, 3), cl.ReSPro(alpha, projective=projective)
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.Flatten(), nn.Linear(90, 4))
    model(torch.rand(2, *SHAPE))  # a step of the power iteration
    x = samples(SHAPE, torch.float32)
    part = one(model, SHAPE, x)
    assert part.terms is not None
    assert part.bias is not None
    y = x.double().flatten(1) @ part.templates.flatten(1).T
    y = y / part.terms.denominators[:, None] + part.bias
    torch.testing.assert_close(y, cl.testing.reference(model, x), rtol=1e-5, atol=1e-6)


def test_later_parts_see_what_enters_them() -> None:
    first = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro(0.5))
    second = cl.ConformalLayers(cl.Conv2d(2, 2, 3), cl.ReSPro(0.5, projective=True))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
    x = samples((1, 8, 8), torch.float64)
    found = cl.inspect(model, (1, 8, 8), x)
    assert [part.path for part in found.parts] == ["0", "2"]
    inside = cl.testing.reference(model[:2], x)
    terms = found.parts[1].terms
    assert terms is not None
    torch.testing.assert_close(terms.norms, inside.flatten(1).norm(dim=1))
    alone = one(model[2:], (2, 6, 6), inside).terms
    assert alone is not None
    torch.testing.assert_close(terms.shares, alone.shares)
    assert all(text in str(found) for text in ("0: (1, 8, 8) → (2, 6, 6)", "2.1"))


def test_model_is_left_as_it_is_and_evaluated() -> None:
    model = network().train()
    state = copy.deepcopy(model.state_dict())
    x = samples(SHAPE, torch.float32)
    training, evaluating = one(model, SHAPE, x), one(copy.deepcopy(model).eval(), SHAPE, x)
    assert training.terms is not None
    assert evaluating.terms is not None
    assert torch.equal(training.terms.shares, evaluating.terms.shares)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    with torch.inference_mode():
        assert torch.equal(
            one(model, SHAPE, x * 1.0).forms[0].eigenvalues, training.forms[0].eigenvalues
        )


# -- refusals ---------------------------------------------------------------------------------------

GOOD = torch.rand(2, *SHAPE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "a whole number > 0, got 0"),
        ({"top": True}, "a whole number > 0, got True"),
        ({"data": [1.0]}, "a floating-point tensor, got list"),
        ({"data": GOOD.int()}, "a floating-point tensor, got torch.int32"),
        ({"data": GOOD[0]}, r"a batch of at least one sample of shape \(2, 8, 7\)"),
        ({"data": GOOD[:0]}, "a batch of at least one sample"),
        ({"data": GOOD / 0}, "finite numbers, got NaN or infinity"),
        ({"data": GOOD * torch.tensor([0.0, 1.0])[:, None, None, None]}, "got 1 of zeros"),
        ({"input_shape": (2, 0, 7)}, r"inspect\(input_shape=...\)"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.inspect(network(), **{"input_shape": SHAPE, **options})


def test_images_that_are_too_large_are_refused_before_anything_is_built() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro())
    with pytest.raises(
        cl.ConformalError,
        match=r"inspect\(model\): .*got larger ones: .*12288 coefficients.*smaller",
    ):
        cl.inspect(model, (3, 64, 64))


def test_models_without_conformal_layers_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match="ConformalLayers"):
        cl.inspect(nn.Linear(3, 2), (3,))


def test_a_collapsing_rule_has_one_form() -> None:
    model = randomise(
        cl.ConformalLayers(cl.Linear(4, 3), cl.Gnomonic(1.5), cl.Linear(3, 3), cl.Gnomonic(0.7))
    ).double()
    x = samples((4,), torch.float64)
    (part,) = cl.inspect(model, (4,), x).parts
    assert [form.formula for form in part.forms] == [cl.Gnomonic().formula]
    y = x @ part.templates.T / part.terms.denominators[:, None]
    assert torch.allclose(y, model(x), rtol=1e-12)


# -- stages -----------------------------------------------------------------------------------------


def staged(**embedding: Any) -> nn.Sequential:
    features = cl.ConformalLayers(
        *(cl.Conv2d(2, 3, 3), cl.ReSPro(1.5), cl.Conv2d(3, 4, 2), cl.ReSPro(0.7, projective=True)),
        *(nn.LPPool2d(2, 2), cl.Conv2d(4, 3, 2, bias=True), cl.ReSPro(2.2), nn.ReLU()),
        *(cl.Conv2d(3, 2, 1), cl.ReSPro(0.9)),
        **embedding,
    )
    return randomise(nn.Sequential(features, nn.Flatten(), nn.Linear(8, 3)))  # type: ignore[return-value]


def points_between(model: nn.Sequential, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Follow (x, t) by the table of the paper: where each stage starts, and where the last one ends."""
    features = copy.deepcopy(model[0]).double().eval()
    rms = features.unit == "rms"

    def squared_norm(x: Tensor) -> Tensor:
        total = x.flatten(1).square()
        return total.mean(1) if rms else total.sum(1)

    t = (squared_norm(x) + float(features.offset or 0) ** 2).sqrt()
    found = [(x, t)]
    for module in features:
        if isinstance(module, cl.ReSPro):
            alpha, n = float(module.alpha), squared_norm(x)
            t = alpha / 2 * t + n / (2 * alpha * (t if module.projective else 1))
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            biases = t[:, None, None, None] * module.bias.view(1, -1, 1, 1)
            x = nn.functional.conv2d(x, module.weight) + biases
        else:
            x = module(x)
        if isinstance(module, (nn.LPPool2d, nn.ReLU)):
            found.append((x, t))
    return [*found, (x, t)]


@pytest.mark.parametrize(
    "embedding", [{}, {"offset": 0.7}, {"unit": "rms", "offset": 2.0}], ids=str
)
def test_stages_have_parts_of_their_own(embedding: dict[str, Any]) -> None:
    model, x = staged(**embedding), samples((2, 10, 10), torch.float64, batch=300)
    parts = cl.inspect(model, (2, 10, 10), x).parts
    assert [(part.path, part.stage) for part in parts] == [(f"0 stage {i}", i) for i in (1, 2, 3)]
    assert [len(part.forms) for part in parts] == [2, 0, 1]
    entered = points_between(model, x)
    with torch.no_grad():
        last = (
            copy.deepcopy(model)
            .double()
            .eval()[1:](entered[3][0] / entered[3][1].view(-1, 1, 1, 1))
        )
    for part, (x, t) in zip(parts, entered, strict=False):
        terms = part.terms
        assert terms is not None
        assert terms.names[0] == "t"
        torch.testing.assert_close(terms.norms, t)
        torch.testing.assert_close(terms.shares.sum(1), torch.ones(300).double())
        assert bool((terms.shares > 0).all())
        y = x.flatten(1) @ part.templates.flatten(1).T
        if part.stage == 2:
            assert part.bias is not None
            y = (y + t[:, None] * part.bias) / terms.denominators[:, None]
            after, t_after = entered[2]  # behind the ReLU
            torch.testing.assert_close(y.relu(), (after / t_after.view(-1, 1, 1, 1)).flatten(1))
        elif part.stage == 3:
            assert part.bias is not None
            torch.testing.assert_close(y / terms.denominators[:, None] + part.bias, last)


def test_an_offset_is_part_of_what_enters() -> None:
    model = randomise(cl.ConformalLayers(cl.Linear(4, 3), cl.ReSPro(), offset=1.5, unit="rms"))
    x = samples((4,), torch.float64, batch=3) * torch.tensor([1.0, 0.1, 0.0]).double()[:, None]
    part = one(model, (4,), x)
    assert part.terms is not None
    assert part.terms.names[0] == "√(‖x‖² + c²)"
    y = x @ part.templates.T / part.terms.denominators[:, None]
    torch.testing.assert_close(y, cl.testing.reference(model, x))


def test_stages_of_any_graph_print_and_name_what_is_too_large() -> None:
    block = cl.Residual(cl.Conv2d(2, 2, 3, padding=1), cl.ReSPro(), nn.ReLU())
    model = cl.ConformalLayers(cl.Conv2d(1, 2, 3), block, nn.MaxPool2d(2), cl.Flatten())
    dark = torch.rand(3, 1, 8, 8)
    found = cl.inspect(model, (1, 8, 8), dark)
    assert [part.path for part in found.parts] == ["stage 1", "stage 2"]
    assert "stage 2: (2, 6, 6) → (2, 6, 6)" in str(found)
    wide = cl.ConformalLayers(cl.Conv2d(1, 16, 3), nn.ReLU(), cl.Conv2d(16, 1, 3))
    with pytest.raises(cl.ConformalError, match=r"inspect\(stage 2\): .*14400 coefficients"):
        cl.inspect(wide, (1, 32, 32))


def test_a_part_prints_as_its_tables() -> None:
    found = cl.inspect(cl.ConformalLayers(cl.Linear(4, 3), cl.ReSPro()), (4,))
    (part,) = found.parts
    assert repr(part) == str(part) == str(found)


@both_forms
def test_gains_are_quotients_of_the_forms(projective: bool) -> None:
    kinds = (projective,) * 3
    x = samples(SHAPE, torch.float64)
    part = one(network(kinds), SHAPE, x)
    assert part.terms is not None
    flat = x.flatten(1)
    quotients = [(flat @ q * flat).sum(1) / flat.square().sum(1) for q in expected_forms(kinds)]
    gains = part.terms.gains if projective else part.terms.gains.sum(1, keepdim=True)
    torch.testing.assert_close(gains, torch.stack(quotients, 1))
