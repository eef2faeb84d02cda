"""cl.diagnose: the model is left alone, every number, and one warning for one mistake."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import conformallayers as cl
from blocks import Written
from conformallayers.diagnosis import PartHealth
from models import EMBEDDINGS, Generator
from oracle import exact_output, pair, randomise
from support import FORM, both_forms

SHAPE = (2, 8, 8)


class Noisy(nn.Module):
    """A model with noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = network(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.part(x + 1e-3 * torch.rand_like(x)).flatten(1)[:, :8])
        return y


def network() -> cl.ConformalLayers:
    torch.manual_seed(0)
    return cl.ConformalLayers(
        *(cl.Conv2d(2, 4, 3, bias=True), nn.BatchNorm2d(4), cl.ReSPro("spectral")),
        *(cl.Dropout(0.5), nn.ReLU(), cl.Conv2d(4, 4, 3), cl.ReSPro("learned")),
        offset="learned",
        unit="rms",
    )


def batch() -> Tensor:
    return torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(1))


def state(model: nn.Module) -> tuple[list[Tensor], list[Any]]:
    """Return everything of a model, and of random numbers, that a look at it must leave alone."""
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    tensors = [tensor.clone() for tensor in model.state_dict().values()]
    others = [
        (m.training, dict(m._forward_hooks), dict(m._backward_hooks), sorted(vars(m)))
        for m in model.modules()
    ]
    numpy = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[union-attr]
    needs = [p.requires_grad for p in model.parameters()]
    return [*gradients, *tensors, torch.get_rng_state(), numpy], [others, needs, random.getstate()]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [network, Noisy])
def test_the_model_is_left_alone(make: Any, training: bool) -> None:
    model = make()
    model.train()
    for _ in range(3):
        model(batch()).square().sum().backward()
    model.train(training)
    calls: list[str] = []
    inner = model if isinstance(model, cl.ConformalLayers) else model.part
    inner[0].register_forward_hook(lambda *_: calls.append("forward"))
    inner[5].register_full_backward_hook(lambda *_: calls.append("backward"))
    inner[5].weight.register_hook(lambda gradient: calls.append("tensor"))
    x, (tensors, others) = batch(), state(model)
    found = cl.diagnose(model, x)
    torch.testing.assert_close(state(model)[0], tensors, rtol=0, atol=0)
    assert state(model)[1] == others
    assert torch.equal(x, batch())
    assert calls == []
    assert found.samples == 6


def test_the_mode_makes_no_difference() -> None:
    model = network()
    model(batch())
    assert str(cl.diagnose(model.train(), batch())) == str(cl.diagnose(model.eval(), batch()))


def test_inference_mode_and_float_types() -> None:
    with torch.inference_mode():
        x = torch.rand(4, *SHAPE)
        assert cl.diagnose(network(), x).samples == 4
    for dtype in (torch.float64, torch.bfloat16):
        assert cl.diagnose(network().to(dtype), batch().to(dtype)).parts[0].path == ""


def test_parametrised_and_shared_layers() -> None:
    conv = parametrizations.weight_norm(cl.Conv2d(2, 2, 3, padding=1))
    model = cl.ConformalLayers(conv, nn.ReLU(), conv, cl.ReSPro(1.0), offset=0.5, unit="rms")
    assert len(cl.diagnose(model, batch()).parts[0].layers) == 4


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.rand(2, 3), network()), "got ConformalLayers. The order is diagnose"),
        ((3, batch()), "an nn.Module, got int"),
        ((nn.Linear(8, 3), batch()), "a model that runs a cl.ConformalLayers, got Linear"),
        ((network(), [1.0]), "a floating-point batch of at least one sample, got list"),
        ((network(), torch.ones(2, *SHAPE).long()), "got torch.int64"),
        ((network(), torch.rand(8)), r"got torch.float32 \(8,\)"),
        ((network(), torch.rand(0, *SHAPE)), "a floating-point batch of at least one sample"),
        ((network(), torch.full((2, *SHAPE), torch.nan)), "that are not all zero"),
        ((network(), torch.zeros(2, *SHAPE)), "zeros alone"),
        ((network(), torch.rand(2, 3, 8, 8)), "Conv2d"),
        ((network(), torch.rand(*SHAPE)), "Conv2d"),
        ((Noisy(), torch.rand(2, 2, 3, 3)), "any number of samples|Conv2d"),
        ((Written(lambda m, x: x * 2, part=network()), batch()), "ConformalLayers, got Written"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, Any], match: str) -> None:
    with pytest.raises(cl.ConformalError, match=match) as refused:
        cl.diagnose(*arguments)
    assert FORM.match(str(refused.value))


# -- how it prints ----------------------------------------------------------------------------------


def diagnosis() -> cl.Diagnosis:
    torch.manual_seed(0)
    layers = cl.Conv2d(1, 4, 3), cl.ReSPro(500.0), nn.BatchNorm2d(4), cl.Flatten()
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.Linear(144, 3))
    return cl.diagnose(model, torch.rand(8, 1, 8, 8))


def test_it_prints_tables_and_every_warning_with_its_remedy() -> None:
    found = diagnosis()
    text = str(found)
    assert repr(found) == text
    for part in found.parts:
        assert str(part) in text
    assert "0.1   ReSPro" in text
    assert f"{len(found.warnings)} warnings on 8 samples" in text
    for warning in found.warnings:
        assert all(piece in text for piece in (warning.seen, warning.why, warning.remedy))
        assert str(warning) in text


# -- measurements -----------------------------------------------------------------------------------


def normal(count: int = 5) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(3))


def part_of(model: nn.Module, x: Tensor) -> PartHealth:
    (part,) = cl.diagnose(model, x).parts
    return part


@both_forms
@pytest.mark.parametrize("unit", ["norm", "rms"])
def test_lengths_and_shares_follow_x_and_t_literally(projective: bool, unit: str) -> None:
    model = randomise(
        cl.ConformalLayers(
            *(cl.Conv2d(2, 3, 3, bias=True), cl.ReSPro(1.5, projective=projective), nn.ReLU()),
            *(cl.Conv2d(3, 2, 3), cl.ReSPro(0.8, projective=projective)),
            offset=0.7,
            unit=unit,
        )
    ).double()
    x = normal().double()

    def length(v: Tensor) -> Tensor:
        found = v.flatten(1).norm(dim=1)
        return found / math.sqrt(v[0].numel()) if unit == "rms" else found

    part = part_of(model, x)
    assert part.entering == pytest.approx(float(length(x).median()))
    after, t = pair(model[:0], x)
    for index, (layer, module) in enumerate(zip(part.layers, model, strict=True), 1):
        (before, entered), (after, t) = (after, t), pair(model[:index], x)
        if isinstance(module, cl.ReSPro):
            alpha, arriving = float(module.alpha), length(before) / entered
            assert layer.alpha == alpha
            assert layer.arriving == pytest.approx(float(arriving.median()))
            assert layer.added == pytest.approx(float((1 - alpha / 2 * entered / t).median()))
        assert layer.finite
        assert layer.length == pytest.approx(float((length(after) / t).median()))
        assert layer.shape == tuple(after.shape[1:])
    leaving = (after / t.view(-1, 1, 1, 1)).square().mean().sqrt()
    assert part.leaving == pytest.approx(float(leaving))


@pytest.mark.parametrize("seed", range(12))
def test_outputs_of_random_networks_are_those_of_the_oracle(seed: int) -> None:
    model, shape = Generator(seed).staged(**EMBEDDINGS[seed % len(EMBEDDINGS)])
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.num_batches_tracked.fill_(1000)  # settled, so that the running statistics count
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(seed))
    expected = exact_output(model, x).square().mean().sqrt()
    assert part_of(model, x).leaving == pytest.approx(float(expected))


def test_a_norm_that_has_seen_no_batch_uses_the_batch() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    model = cl.ConformalLayers(cl.Conv2d(2, 3, 3), norm, nn.ReLU(), unit="rms")
    found = part_of(model, normal()).layers[1]
    assert found.length == pytest.approx(1.0, rel=0.05)
    model.train()
    model(normal())
    sigma = norm.running_var.sub(0.9).div(0.1).median()  # torch stores the unbiased variance
    assert found.variance == pytest.approx(float(sigma), rel=0.02)


@pytest.mark.parametrize(("momentum", "batches", "settled"), [(0.1, 28, False), (0.1, 29, True)])
def test_statistics_settle_with_the_momentum(momentum: float, batches: int, settled: bool) -> None:
    norm = nn.BatchNorm2d(3, momentum=momentum)
    norm.num_batches_tracked.fill_(batches)
    norm.running_var.fill_(4.0)
    found = part_of(cl.ConformalLayers(cl.Conv2d(2, 3, 3), norm), normal()).layers[1]
    assert (found.variance == 4.0) is settled


def test_every_call_of_a_part_is_measured() -> None:
    part = cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro())
    found = cl.diagnose(nn.Sequential(part, nn.Identity(), part), torch.rand(3, 4))
    assert [part.path for part in found.parts] == ["0", "0"]


# -- warnings ----------------------------------------------------------------------------------------


def uniform(count: int = 16) -> Tensor:
    return torch.rand(count, 2, 12, 12, generator=torch.Generator().manual_seed(0))


def healthy(
    *middle: nn.Module,
    respro: Callable[[], nn.Module] = lambda: cl.ReSPro(1.0, projective=True),
    pool: Callable[[], nn.Module] = lambda: nn.LPPool2d(2, 2),
    norm: nn.Module | None = None,
    offset: float | str | None = 0.5,
    unit: str = "rms",
) -> cl.ConformalLayers:
    """Return two stages by the rules of docs/conformal-layers.md, or with one of them broken."""
    torch.manual_seed(0)
    convolutions = [cl.Conv2d(2, 4, 3), cl.Conv2d(4, 8, 3), cl.Conv2d(8, 8, 1), cl.Conv2d(8, 8, 3)]
    for layer in convolutions:
        nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
    first, second, third, fourth = convolutions
    return cl.ConformalLayers(
        *(first, second, respro(), pool(), *(middle or [norm or nn.BatchNorm2d(8)])),
        *(() if middle else (third, fourth, respro(), nn.Flatten())),
        offset=offset,
        unit=unit,
    )


def trained_norm(variance: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(8)
    norm.num_batches_tracked.fill_(1000)
    norm.running_var.fill_(variance)
    return norm


def deep(alpha: str | None, depth: int) -> cl.ConformalLayers:
    torch.manual_seed(0)
    layers = [m for _ in range(depth) for m in (cl.Conv2d(2, 2, 3, padding=1), cl.ReSPro(alpha))]
    return cl.ConformalLayers(*layers, nn.ReLU(), offset=1.0)


def dead(channels: int) -> cl.ConformalLayers:
    conv = cl.Conv2d(2, 8, 3, bias=True)
    with torch.no_grad():
        conv.bias[:channels] = -100.0
    return cl.ConformalLayers(conv, nn.ReLU(), cl.Conv2d(8, 4, 3), offset=0.5, unit="rms")


def broken(name: str, value: float) -> nn.Module:
    norm = nn.BatchNorm1d(32)
    norm.num_batches_tracked.fill_(1000)
    model = nn.Sequential(healthy(), norm, nn.Linear(32, 3))
    with torch.no_grad():
        {**model.state_dict()}[name].view(-1)[0] = value
    return model


def warned(model: nn.Module, x: Tensor | None = None) -> tuple[Any, ...]:
    return cl.diagnose(model, uniform() if x is None else x).warnings


def test_healthy_networks_have_no_warning() -> None:
    assert warned(healthy()) == ()
    assert warned(healthy(), uniform(1)) == ()
    assert warned(dead(0)) == ()
    masked = healthy()
    masked.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert warned(masked) == ()


ALONE = [  # exactly one warning: its kind, its paths, and pieces of its text
    (
        lambda: healthy(pool=lambda: cl.AvgPool2d(2)),
        "no map",
        ("",),
        "odd in x",
        "conformal-layers.md",
    ),
    (lambda: healthy(offset=None), "offset", ("",), "contrast", 'offset="learned"'),
    (lambda: healthy(offset=1e-5), "offset", ("",), "Scale the inputs down"),
    (
        lambda: healthy(respro=lambda: cl.ReSPro(0.01, projective=True)),
        *("alpha too small", ("2", "7"), "longer points come out shorter"),
    ),
    (lambda: healthy(cl.Scale(1e-6)), "vanishing", ("4",), 'unit="rms"'),
    (lambda: healthy(cl.Scale(1e6)), "exploding", ("4",), "BatchNorm"),
    (lambda: healthy(cl.Scale(3e-4)), "small features", ("",), "cl.Scale"),
    (lambda: broken("0.1.weight", torch.nan), "non-finite", ("0.1",), "in 0.1.weight;"),
    (lambda: broken("0.1.weight", torch.inf), "non-finite", ("0.1",), "in 0.1.weight;"),
    (lambda: broken("2.bias", torch.nan), "non-finite", ("2",), "in 2.bias;"),
    (lambda: broken("1.running_var", torch.inf), "non-finite", ("1",), "in 1.running_var;"),
    (
        lambda: cl.ConformalLayers(*(cl.Scale(1e30) for _ in range(12)), nn.ReLU(), offset=0.5),
        *("non-finite", ("10",), "NaN or infinity after this Scale"),
    ),
    (lambda: dead(3), "dead", ("1",), "3 of 8 channels"),
]


@pytest.mark.parametrize(
    ("build", "kind", "paths", "pieces"), [(*row[:3], row[3:]) for row in ALONE]
)
def test_one_mistake_has_one_warning(
    build: Any, kind: str, paths: tuple[str, ...], pieces: tuple[str, ...]
) -> None:
    (warning,) = warned(build())
    assert (warning.kind, warning.paths) == (kind, paths)
    assert all(piece in str(warning) for piece in pieces)
    assert "\n" not in str(warning)
    assert warning.remedy.endswith(".")


AMONG = [  # a mistake that has consequences, which have warnings too
    (
        lambda: healthy(unit="norm", offset=None, respro=lambda: cl.ReSPro(30.0)),
        *("variance below eps", "4", 'unit="rms"'),
    ),
    (lambda: healthy(norm=trained_norm(1e-8)), "variance below eps", "4", "100 % of the", "1e-05"),
    (lambda: healthy(offset=300.0), "offset", "model", "all points are short"),
    (
        lambda: healthy(respro=lambda: cl.ReSPro(1000.0)),
        *("alpha too large", "2", "alpha 1e+03", "root mean square of its input"),
    ),
    (
        lambda: healthy(respro=lambda: cl.ReSPro(1000.0, projective=True)),
        *("alpha too large", "2", "alpha 1e+03", "root mean square of its input"),
    ),
    (lambda: deep(None, 8), "alpha too large", "", "more: ", '"spectral"'),
    (lambda: deep("spectral", 8), "alpha too large", "", "Train a few steps"),
    (lambda: dead(8), "dead", "1", "no gradient reaches"),
]


@pytest.mark.parametrize(
    ("build", "kind", "path", "pieces"), [(*row[:3], row[3:]) for row in AMONG]
)
def test_a_mistake_with_consequences(
    build: Any, kind: str, path: str, pieces: tuple[str, ...]
) -> None:
    (warning,) = [warning for warning in warned(build()) if warning.kind == kind]
    assert warning.path.startswith(path)
    assert all(piece in str(warning) for piece in pieces)


def test_a_map_between_two_parts_counts_and_one_in_the_head_does_not() -> None:
    torch.manual_seed(0)
    first, second = (cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro(1.0)) for _ in range(2))
    x = torch.rand(8, 8)
    assert warned(nn.Sequential(first, nn.ReLU(), second), x) == ()
    (warning,) = warned(nn.Sequential(first, second, nn.ReLU()), x)
    assert (warning.kind, warning.paths) == ("no map", ("0", "1"))
