"""Inspection: forms and templates against explicit small computations."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.inspection import InspectedPart
from oracle import exact, matrix_of, pair, randomise
from support import samples

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


def one(model: nn.Module, shape: tuple[int, ...], **options: Any) -> InspectedPart:
    (part,) = cl.inspect(model, shape, **options).parts
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
    (form,) = one(model, (1, 5, 5)).forms
    assert (form.trace, form.effective_rank, form.share(3), form.reach) == (0, 0, 0, 0)
    assert one(cl.ConformalLayers(cl.Conv2d(1, 2, 3)), (1, 5, 5)).forms == ()


# -- templates --------------------------------------------------------------------------------------


@every_kind
def test_templates_are_the_rows_of_m(kinds: tuple[bool, ...]) -> None:
    model = network(kinds)
    x = samples(SHAPE, torch.float64, batch=50) * torch.logspace(-3, 3, 50)[:, None, None, None]
    part = one(model, SHAPE)
    assert part.bias is not None
    # A stage divides by D = t/s, with its t at the end and s = Π α/2.
    _, t = pair(exact(model[0]).eval(), x)
    d = t / math.prod(alpha / 2 for alpha in ALPHAS)
    y = x.flatten(1) @ part.templates.flatten(1).T / d[:, None] + part.bias
    torch.testing.assert_close(y, cl.testing.reference(model.double(), x))


def test_every_part_is_inspected_by_itself() -> None:
    first = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro(0.5))
    second = cl.ConformalLayers(cl.Conv2d(2, 2, 3), cl.ReSPro(0.5, projective=True))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
    found = cl.inspect(model, (1, 8, 8))
    assert [part.path for part in found.parts] == ["0", "2"]
    alone = one(model[2:], (2, 6, 6))
    assert torch.equal(found.parts[1].templates, alone.templates)
    assert torch.equal(found.parts[1].forms[0].eigenvalues, alone.forms[0].eigenvalues)
    assert all(text in str(found) for text in ("0: (1, 8, 8) → (2, 6, 6)", "2.1"))


def test_model_is_left_as_it_is_and_evaluated() -> None:
    model = network().train()
    state = copy.deepcopy(model.state_dict())
    training, evaluating = one(model, SHAPE), one(copy.deepcopy(model).eval(), SHAPE)
    assert torch.equal(training.templates, evaluating.templates)
    assert all(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    with torch.inference_mode():
        assert torch.equal(one(model, SHAPE).forms[0].eigenvalues, training.forms[0].eigenvalues)


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "an integer > 0, got 0"),
        ({"top": True}, "an integer > 0, got True"),
        ({"input_shape": (2, 0, 7)}, r"inspect\(input_shape=...\)"),
        ({"model": nn.Linear(3, 2), "input_shape": (3,)}, "ConformalLayers"),
        (
            {
                "model": cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro()),
                "input_shape": (3, 64, 64),
            },
            r"inspect\(model\): .*got larger ones: .*12288 coefficients.*smaller",
        ),
        (
            {
                "model": cl.ConformalLayers(cl.Conv2d(1, 16, 3), nn.ReLU(), cl.Conv2d(16, 1, 3)),
                "input_shape": (1, 32, 32),
            },
            r"inspect\(stage 2\): .*14400 coefficients",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.inspect(**{"model": network(), "input_shape": SHAPE, **options})


# -- stages -----------------------------------------------------------------------------------------


def staged(**embedding: Any) -> nn.Sequential:
    features = cl.ConformalLayers(
        *(cl.Conv2d(2, 3, 3), cl.ReSPro(1.5), cl.Conv2d(3, 4, 2), cl.ReSPro(0.7, projective=True)),
        *(nn.LPPool2d(2, 2), cl.Conv2d(4, 3, 2, bias=True), cl.ReSPro(2.2), nn.ReLU()),
        *(cl.Conv2d(3, 2, 1), cl.ReSPro(0.9)),
        **embedding,
    )
    return randomise(nn.Sequential(features, nn.Flatten(), nn.Linear(8, 3)))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "embedding", [{}, {"offset": 0.7}, {"unit": "rms", "offset": 2.0}], ids=str
)
def test_stages_have_parts_of_their_own(embedding: dict[str, Any]) -> None:
    model, x = staged(**embedding), samples((2, 10, 10), torch.float64, batch=50)
    parts = cl.inspect(model, (2, 10, 10)).parts
    assert [(part.path, part.stage) for part in parts] == [(f"0 stage {i}", i) for i in (1, 2, 3)]
    assert [len(part.forms) for part in parts] == [2, 0, 1]
    features = exact(model[0]).eval()
    first, second, third, last = (pair(features[:stop], x) for stop in (0, 5, 8, 10))
    after = mapped(parts[0], *first).view(-1, 4, 7, 7) * (1.5 / 2 * 0.7 / 2)
    torch.testing.assert_close(nn.functional.lp_pool2d(after, 2, 2), second[0])
    after = mapped(parts[1], *second).relu() * (2.2 / 2)
    torch.testing.assert_close(after.view_as(third[0]), third[0])
    divided = parts[2].templates.flatten(1) @ third[0].flatten(1).T * (0.9 / 2) / last[1]
    assert parts[2].bias is not None
    expected = cl.testing.reference(model, x)
    torch.testing.assert_close(divided.T + parts[2].bias, expected)


def mapped(part: InspectedPart, x: Tensor, t: Tensor) -> Tensor:
    """Return M x + t·bias, the point that leaves a stage times its denominator."""
    y = x.flatten(1) @ part.templates.flatten(1).T
    return y if part.bias is None else y + t[:, None] * part.bias
