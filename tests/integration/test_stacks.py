"""Derivatives, odd inputs, numbers far from 1 and great depth, against the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import conformallayers as cl
from blocks import Written
from conformallayers import functional
from conformallayers.folding.strategies import STRATEGIES
from oracle import exact, exact_output, gradient_error, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, both_forms, folds, samples


def test_a_stack_of_nothing_gives_the_direction() -> None:
    x = samples((2, 3), torch.float64)
    expected = x / x.flatten(1).norm(dim=1).view(-1, 1, 1)
    for model in (cl.ConformalLayers(), cl.ConformalLayers(nn.Identity())):
        assert relative_error(model(x), expected) <= 1e-15
        assert relative_error(model.eval()(x), expected) <= 1e-15
        for folded in folds(model.double(), (2, 3)).values():
            assert relative_error(folded.double()(x.to(folded.dtype)), expected) <= 1e-6


def small(projective: bool, alpha: str | float | None = None) -> cl.ConformalLayers:
    """Return a stack of every kind of step, in float64 and randomised."""
    model = cl.ConformalLayers(
        cl.Conv2d(1, 2, 2, padding=1, padding_mode="replicate"),
        cl.ReSPro(alpha, projective=projective),
        nn.Sequential(cl.AvgPool2d(2), cl.Scale()),
        cl.ReSPro(1.5, projective=not projective),
        nn.Flatten(),
        cl.Linear(8, 3),
        cl.ReSPro(alpha, projective=projective),
    ).double()
    randomise(model, 1)
    return model


@pytest.mark.parametrize("alpha", [None, "learned", 2.0])
@both_forms
@pytest.mark.sampled(2)
def test_first_and_second_derivatives(projective: bool, alpha: str | float | None) -> None:
    model = small(projective, alpha)
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]
    x = samples((1, 3, 3), torch.float64, batch=2).requires_grad_()

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(run, (x, *values))
    assert gradgradcheck(run, (x, *values), atol=1e-4)


@both_forms
def test_derivatives_of_folds(projective: bool) -> None:
    model = small(projective)
    x = samples((1, 3, 3), torch.float64, batch=2).requires_grad_()
    for folded in folds(model, (1, 3, 3)).values():
        assert gradcheck(folded, x)
        assert gradgradcheck(folded, x, atol=1e-4)


SCALES = (1e-12, 1e-6, 1.0, 1e6, 1e11)


@pytest.mark.parametrize("dtype", DTYPES)
@both_forms
def test_odd_samples_are_defined_and_keep_to_themselves(
    projective: bool, dtype: torch.dtype
) -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 3, 3, padding="same", padding_mode="circular"),
        cl.ReSPro(projective=projective),
        cl.Conv2d(3, 2, 2),
        cl.ReSPro(projective=projective),
    ).to(dtype)
    randomise(model)
    x = samples((2, 4, 4), dtype, batch=len(SCALES) + 3)
    x[: len(SCALES)] *= torch.tensor(SCALES, dtype=dtype).view(-1, 1, 1, 1)
    x[-3], x[-2, 0, 1, 2], x[-1, 1, 0, 0] = 0, float("nan"), float("inf")
    good = slice(0, len(SCALES) + 1)
    wide = x[good].double().requires_grad_()
    expected = oracle(exact(model), wide)
    (wanted,) = torch.autograd.grad(expected[: len(SCALES)].sum(), wide)
    paths = {"train": model.train(), "eval": copy.deepcopy(model).requires_grad_(False).eval()}
    for name, path in {**paths, **folds(model, (2, 4, 4))}.items():
        leaf = x.clone().requires_grad_()
        y = path(leaf)
        assert relative_error(y[good], expected) <= TOLERANCES[dtype], name
        assert not y[len(SCALES)].any(), f"{name}: a zero sample must give zeros"
        assert y[-2:].isnan().all(), f"{name}: a sample that is not finite must give NaN"
        (gradient,) = torch.autograd.grad(y[good].sum(), leaf)
        assert not gradient[len(SCALES)].any(), f"{name}: nor may it pass a gradient"
        pairs = zip(gradient[: len(SCALES)], wanted, strict=False)
        assert all(gradient_error([a], [e]) <= 1e-4 for a, e in pairs), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch(dtype: torch.dtype) -> None:
    model = small(False).to(dtype)
    x = torch.empty(0, 1, 3, 3, dtype=dtype)
    for path in (
        model.train(),
        copy.deepcopy(model).requires_grad_(False).eval(),
        *folds(model, (1, 3, 3)).values(),
    ):
        leaf = x.clone().requires_grad_()
        y = path(leaf)
        assert y.shape == (0, 3)
        assert y.dtype == dtype
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
        assert gradient.shape == x.shape


SHAPE = (4,)
# The layers keep the norm, so that the balanced scaling alone would double z, or more, at each.
DEEP: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "projective": (70, lambda: cl.ReSPro(projective=True)),
    "published": (130, cl.ReSPro),
    "published, small radius": (40, lambda: cl.ReSPro(0.1)),
    "projective, small radius": (100, lambda: cl.ReSPro(0.1, projective=True)),
    "gnomonic": (70, lambda: cl.Gnomonic(0.5)),
    "spectral": (80, lambda: cl.ReSPro("spectral", projective=True)),
    "published, 400": (400, lambda: cl.ReSPro(0.5)),
}


@pytest.fixture(params=[True, False], ids=["looking", "blind"])
def looking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Also run as on devices and in graphs, where nobody may look at values."""
    if not request.param:
        monkeypatch.setattr(functional, "may_look", lambda x: False)
    return bool(request.param)


def orthogonal(
    depth: int, activation: Callable[[], nn.Module], **options: Any
) -> cl.ConformalLayers:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [cl.Linear(4, 4, **options), activation()]
        nn.init.orthogonal_(layers[-2].weight)  # type: ignore[arg-type]
    return cl.ConformalLayers(*layers)


LIMITS = {torch.float64: (1e-12, 1e-9), torch.float32: (1e-5, 1e-4)}  # of values and of gradients


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.sampled(3)
def test_any_depth(name: str, dtype: torch.dtype) -> None:
    model, (limit, steep) = orthogonal(*DEEP[name]).to(dtype), LIMITS[dtype]
    x = samples(SHAPE, dtype).requires_grad_()
    with torch.no_grad():
        for _ in range(3 if name == "spectral" else 0):
            model(x)
    y = model(x)
    model.eval()
    twin, wide = exact(model), x.detach().double().requires_grad_()
    expected = oracle(twin, wide)
    forms = () if name in ("projective, small radius", "published, 400") else ("dense",)
    for strategy in ("auto", "layers", *forms):
        assert relative_error(cl.fold(model, SHAPE, strategy=strategy)(x), expected) < limit
    with torch.no_grad():
        assert relative_error(model(x), expected) < limit
    with cl.layer_by_layer():
        assert relative_error(model(x), expected) < limit
    if name != "spectral":  # whose radii have moved on
        assert relative_error(y, expected) < limit
        weights = samples(SHAPE, dtype)  # not y: their norms hardly change
        actual = torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])
        wanted = torch.autograd.grad((expected * weights).sum(), [wide, *twin.parameters()])
        assert relative_error(actual[0], wanted[0]) < steep
        assert gradient_error(list(actual), list(wanted)) < steep


def test_maps_that_could_overflow_are_not_composed() -> None:
    layers = [q for _ in range(70) for q in (cl.Conv2d(2, 2, 1), cl.ReSPro(projective=True))]
    for layer in layers[::2]:
        nn.init.eye_(layer.weight.view(2, 2))  # type: ignore[union-attr, operator]
    model, shape = cl.ConformalLayers(*layers).eval(), (2, 5, 5)
    x = samples(shape, torch.float32)
    expected = exact_output(model, x)
    with pytest.raises(cl.ConformalError, match="could leave the range of the dtype"):
        cl.fold(model, shape, strategy="conv")
    with pytest.raises(cl.ConformalError, match="could leave the range of the dtype"):
        cl.fold(model[:26], shape, strategy="conv", dtype=torch.float16)
    assert cl.fold(model[:26], shape, strategy="conv").strategy == "conv"
    for strategy in ("auto", "banded", "layers"):
        assert relative_error(cl.fold(model, shape, strategy=strategy)(x), expected) < 1e-5


def test_forms_beyond_float64_are_refused_and_auto_keeps_the_layers() -> None:
    model = orthogonal(120, lambda: cl.ReSPro(0.1, projective=True)).eval()
    x = samples(SHAPE, torch.float32)
    with pytest.raises(cl.ConformalError, match="could leave the range of float64"):
        cl.fold(model, SHAPE, strategy="dense")
    folded = cl.fold(model, SHAPE)
    assert folded.strategy == "layers"
    assert relative_error(folded(x), exact_output(model, x)) < 1e-4
    with torch.no_grad():
        assert relative_error(model(x), exact_output(model, x)) < 1e-4


BIASED: dict[str, Callable[[], nn.Module]] = {
    "zero bias": lambda: cl.ConformalLayers(
        cl.Linear(4, 4), cl.ReSPro(1.0), cl.Linear(4, 4, bias=True), cl.ReSPro(1.0)
    ),
    "batch norm": lambda: cl.ConformalLayers(
        cl.Linear(4, 4), cl.ReSPro(1.0), nn.BatchNorm1d(4), cl.ReSPro(1.0)
    ),
    "residual": lambda: cl.ConformalLayers(
        cl.Residual(cl.Linear(4, 4), cl.ReSPro(1.0)), cl.ReSPro(1.0)
    ),
}


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("name", BIASED)
def test_inputs_of_all_promised_sizes_behind_a_bias(name: str, size: float) -> None:
    torch.manual_seed(0)
    model = BIASED[name]().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 and name == "zero bias":
            nn.init.zeros_(parameter)
    x = (size * samples(SHAPE, torch.float64)).float()
    expected = exact_output(model, x)
    for strategy in ("layers", "dense"):
        assert relative_error(cl.fold(model, SHAPE, strategy=strategy)(x), expected) < 1e-5
    with cl.layer_by_layer():
        assert relative_error(model(x), expected) < 1e-5


def layers_on_rows() -> cl.ConformalLayers:
    stages = cl.Linear(4, 2), cl.ReSPro(), cl.Flatten(), cl.Linear(8, 3), cl.ReSPro()
    return cl.ConformalLayers(*stages)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Flatten(-4, -3), layers_on_rows()),
        lambda: nn.Sequential(nn.Flatten(0, 1), layers_on_rows()),
        lambda: nn.Sequential(cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro()), nn.Flatten(-4, -3)),
        lambda: nn.Sequential(
            cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro()), nn.Unflatten(-4, (-1, 2))
        ),
    ],
    ids=["before", "before, from 0", "behind", "split"],
)
def test_a_batch_axis_that_is_merged_stays_outside(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    for strategy in ("auto", *STRATEGIES):
        try:
            folded = cl.fold(model, (3, 4, 4), strategy=strategy)
        except cl.ConformalError:
            assert strategy in ("banded", "conv")
            continue
        for batch in (2, 6, 1000):  # more than a piece
            x = torch.randn(batch, 3, 4, 4)
            with cl.layer_by_layer():
                torch.testing.assert_close(folded(x), model(x))


def test_trace_of_several_parts_tells_what_feeds_them() -> None:
    first = cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro())
    second = cl.ConformalLayers(cl.Residual(cl.Linear(4, 4), cl.ReSPro()))
    trace = cl.trace(Written(lambda m, x: m.a(x) + m.b(x), a=first, b=second), (4,))
    sources = {step.path: step.sources for step in trace.steps}
    assert sources["a.0"] == sources["b.0.shortcut"] == sources["b.0.body.0"] == (-1,)
    assert sources["b.0.body.1"] == (3,)
    assert not trace.chain
