"""Numbers far from 1: deep networks, large inputs behind biases, weights of any scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers import functional
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.testing import relative_error
from oracle import exact, oracle
from support import samples

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


def expected_of(model: nn.Module, x: Tensor) -> Tensor:
    return oracle(exact(model), x.double())


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("name", DEEP)
@pytest.mark.sampled(3)
def test_any_depth(name: str) -> None:
    model = orthogonal(*DEEP[name])
    x = samples(SHAPE, torch.float32).requires_grad_()
    with torch.no_grad():
        for _ in range(3 if name == "spectral" else 0):
            model(x)
    y = model(x)
    model.eval()
    wide = x.detach().double().requires_grad_()
    expected = expected_of(model, wide)
    forms = () if name in ("projective, small radius", "published, 400") else ("dense",)
    for strategy in ("auto", "layers", *forms):
        assert relative_error(cl.fold(model, SHAPE, strategy=strategy)(x), expected) < 1e-5
    with torch.no_grad():
        assert relative_error(model(x), expected) < 1e-5
    with cl.layer_by_layer():
        assert relative_error(model(x), expected) < 1e-5
    if name != "spectral":  # whose radii have moved on
        assert relative_error(y, expected) < 1e-5
        weights = samples(SHAPE, torch.float32)  # not y: their norms hardly change
        (gradient,) = torch.autograd.grad((y * weights).sum(), x)
        (wanted,) = torch.autograd.grad((expected * weights).sum(), wide)
        assert relative_error(gradient, wanted) < 1e-4


def test_maps_that_could_overflow_are_not_composed() -> None:
    layers = [q for _ in range(70) for q in (cl.Conv2d(2, 2, 1), cl.ReSPro(projective=True))]
    for layer in layers[::2]:
        nn.init.eye_(layer.weight.view(2, 2))  # type: ignore[union-attr, operator]
    model, shape = cl.ConformalLayers(*layers).eval(), (2, 5, 5)
    x = samples(shape, torch.float32)
    expected = expected_of(model, x)
    with pytest.raises(cl.ConformalError, match="could leave the range of the dtype"):
        cl.fold(model, shape, strategy="conv")
    for strategy in ("auto", "banded", "layers"):
        assert relative_error(cl.fold(model, shape, strategy=strategy)(x), expected) < 1e-5


def test_forms_beyond_float64_are_refused_and_auto_keeps_the_layers() -> None:
    model = orthogonal(120, lambda: cl.ReSPro(0.1, projective=True)).eval()
    x = samples(SHAPE, torch.float32)
    with pytest.raises(cl.ConformalError, match="could leave the range of float64"):
        cl.fold(model, SHAPE, strategy="dense")
    folded = cl.fold(model, SHAPE)
    assert folded.strategy == "layers"
    assert relative_error(folded(x), expected_of(model, x)) < 1e-4
    with torch.no_grad():
        assert relative_error(model(x), expected_of(model, x)) < 1e-4


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
    expected = expected_of(model, x)
    for strategy in ("layers", "dense"):
        assert relative_error(cl.fold(model, SHAPE, strategy=strategy)(x), expected) < 1e-5
    with cl.layer_by_layer():
        assert relative_error(model(x), expected) < 1e-5


# -- the batch axis -----------------------------------------------------------------------------


def layers_on_rows() -> cl.ConformalLayers:
    stages = cl.Linear(4, 2), cl.ReSPro(), cl.Flatten(), cl.Linear(8, 3), cl.ReSPro()
    return cl.ConformalLayers(*stages)


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
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
def test_a_batch_axis_that_is_merged_stays_outside(
    make: Callable[[], nn.Module], strategy: str
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    try:
        folded = cl.fold(model, (3, 4, 4), strategy=strategy)
    except cl.ConformalError:
        assert strategy in ("banded", "conv")
        return
    for batch in (2, 6, 1000):  # more than a piece
        x = torch.randn(batch, 3, 4, 4)
        with cl.layer_by_layer():
            torch.testing.assert_close(folded(x), model(x))


def test_trace_of_several_parts_tells_what_feeds_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro())
            self.b = cl.ConformalLayers(cl.Residual(cl.Linear(4, 4), cl.ReSPro()))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x) + self.b(x)
            return result

    trace = cl.trace(Two(), (4,))
    sources = {step.path: step.sources for step in trace.steps}
    assert sources["a.0"] == sources["b.0.shortcut"] == sources["b.0.body.0"] == (-1,)
    assert sources["b.0.body.1"] == (3,)
    assert not trace.chain
