"""Random stacks, derivatives, odd inputs and great depth, against the oracle."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import conformallayers as cl
from cases import ALPHAS
from conformallayers.folding.strategies import STRATEGIES
from oracle import exact, gradient_error, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, both_forms, folds, samples

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

STYLES = ("free", "circular", "valid")
SEEDS = range(12)


def random_conv(draw: random.Random, style: str, shape: list[int]) -> nn.Module:
    """Return a convolution that fits the shape (C, ...), with every option drawn."""
    axes = len(shape) - 1
    groups = draw.choice([1, 1, 2]) if shape[0] % 2 == 0 else 1
    out = groups * draw.randint(1, 2)
    options: dict[str, object] = {"groups": groups}
    kernel = tuple(draw.randint(1, min(3, size)) for size in shape[1:])
    if style == "circular":
        options |= {"padding": "same", "padding_mode": "circular"}
    elif style == "free":
        mode = draw.choice(["zeros", "reflect", "replicate", "circular"])
        reach = [
            draw.randint(1, 2) if 2 * (k - 1) < size else 1
            for k, size in zip(kernel, shape[1:], strict=True)
        ]
        options |= {"padding_mode": mode, "dilation": tuple(reach)}
        if draw.random() < 0.3 and all(
            d * (k - 1) < size for d, k, size in zip(reach, kernel, shape[1:], strict=True)
        ):
            options |= {"padding": "same"}
        else:
            options |= {"padding": tuple(draw.randint(0, min(2, size - 1)) for size in shape[1:])}
            options |= {"stride": tuple(draw.randint(1, 2) for _ in range(axes))}
    name = f"Conv{axes}d"
    if draw.random() < 0.5:
        return getattr(nn, name)(shape[0], out, kernel, bias=False, **options)
    return getattr(cl, name)(shape[0], out, kernel, **options)


def random_layer(draw: random.Random, style: str, shape: list[int]) -> nn.Module:
    """Return a linear layer that fits the shape of one sample."""
    axes = len(shape) - 1
    choice = draw.random()
    if style == "circular" or choice < 0.6:
        return random_conv(draw, style, shape)
    if choice < 0.7 and min(shape[1:]) > 1:
        return getattr(cl, f"AvgPool{axes}d")(2, draw.randint(1, 2))
    if choice < 0.8 and style == "free":
        pads = tuple(draw.randint(0, 1) for _ in range(2 * axes))
        return getattr(nn, f"{draw.choice(['Zero', 'Replication', 'Circular'])}Pad{axes}d")(pads)
    if choice < 0.9 and style == "free":
        groups = draw.randint(1, 2)
        kind = getattr(cl, f"ConvTranspose{axes}d")
        return (
            kind(shape[0], groups, 2, stride=draw.randint(1, 2), groups=groups)
            if shape[0] % groups == 0
            else cl.Scale()
        )
    return draw.choice([cl.Scale, nn.Identity])()


def random_stack(style: str, seed: int) -> tuple[cl.ConformalLayers, tuple[int, ...]]:
    """Return a stack of 1 to 6 activations on 1 to 3 axes, and its input shape."""
    draw = random.Random(f"{style} {seed}")
    torch.manual_seed(seed)
    axes = 1 + seed % 3
    input_shape = (draw.randint(1, 3), *(draw.randint(4, 10 - 2 * axes) for _ in range(axes)))
    shape = list(input_shape)
    modules: list[nn.Module] = []
    form = draw.choice(["published", "projective", "mixed"])
    depth = draw.randint(1, 6)
    for position in range(depth + 1):
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            layer = random_layer(draw, style, shape)
            with torch.no_grad():
                shape = list(layer(torch.zeros(1, *shape)).shape[1:])
            modules.append(layer)
        if position < depth:
            alpha = draw.choice(ALPHAS)
            projective = form == "projective" or (form == "mixed" and draw.random() < 0.5)
            modules.append(cl.ReSPro(alpha, projective=projective))
    if draw.random() < 0.3:
        modules += [nn.Flatten(), cl.Linear(torch.Size(shape).numel(), 4)]
    model = cl.ConformalLayers(*modules)
    randomise(model, seed)
    return model, input_shape


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.sampled(3)
def test_random_stacks(style: str, seed: int) -> None:
    source, shape = random_stack(style, seed)
    for dtype in DTYPES:
        model, x = copy.deepcopy(source).to(dtype), samples(shape, dtype, seed=seed)
        trained = model.train()(x)
        expected = oracle(exact(model), x.double())
        assert relative_error(trained, expected) <= TOLERANCES[dtype]
        with torch.no_grad():
            assert relative_error(model.eval()(x), expected) <= TOLERANCES[dtype]
            for name, folded in folds(model, shape).items():
                assert relative_error(folded(x), expected) <= TOLERANCES[dtype], name
                assert folded.output_shape == tuple(expected.shape[1:])


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_strategy_applies_to_some_random_stack(name: str) -> None:
    for style in STYLES:
        for seed in SEEDS:
            model, shape = random_stack(style, seed)
            try:
                cl.fold(model, shape, strategy=name)
            except cl.ConformalError:
                continue
            return
    pytest.fail(f"no random stack can be folded by {name}")


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
        # At 1e30 the published form has a gradient of 1e-60, which float32 cannot hold.
        pairs = zip(gradient[: len(SCALES) - 1], wanted, strict=False)
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


def deep(projective: bool, dtype: torch.dtype) -> cl.ConformalLayers:
    modules: list[nn.Module] = []
    for _ in range(100):
        modules += [cl.Conv1d(4, 4, 3, padding=1), cl.ReSPro(projective=projective)]
    return randomise(cl.ConformalLayers(*modules)).to(dtype)


@pytest.mark.sampled(3)
@both_forms
def test_a_hundred_layers_agree_in_float64(projective: bool) -> None:
    model = deep(projective, torch.float64)
    x = samples((4, 6), torch.float64).requires_grad_()
    twin = exact(model)
    y, expected = model(x), oracle(twin, x)
    assert relative_error(y, expected) <= 1e-12
    weights = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view(y.shape) / y.detach().norm()
    actual = torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *twin.parameters()])
    for mine, its in zip(actual, wanted, strict=True):
        assert gradient_error([mine], [its]) <= 1e-9
    with torch.no_grad():
        assert relative_error(model.eval()(x), expected) <= 1e-12
        for name, folded in folds(model, (4, 6)).items():
            assert relative_error(folded(x), expected) <= 1e-12, name


@pytest.mark.slow
@both_forms
def test_a_hundred_layers_stay_in_range_in_float32(projective: bool) -> None:
    model = deep(projective, torch.float32)
    x = samples((4, 6), torch.float32).requires_grad_()
    twin, wide = exact(model), x.detach().double().requires_grad_()
    y, expected = model(x), oracle(twin, wide)
    assert relative_error(y, expected) <= 1e-4
    # Outputs are about 1e-36 here: only a loss of their size has gradients inside float32.
    actual = torch.autograd.grad((y * 1e20).sum(), [x, *model.parameters()])
    wanted = torch.autograd.grad((expected * 1e20).sum(), [wide, *twin.parameters()])
    for mine, its in zip(actual, wanted, strict=True):
        assert gradient_error([mine], [its]) <= 1e-3
    with torch.no_grad():
        for path in (model.eval(), *folds(model, (4, 6)).values()):
            assert relative_error(path(x), expected) <= 1e-4
