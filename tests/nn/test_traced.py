"""Traced modules: against the same network written with composites, and refused graphs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from blocks import Written
from conformallayers.nn.registry import SPECS
from oracle import oracle, randomise, relative_error
from support import samples

SHAPE = (2, 5, 4)


class Block(nn.Module):
    """What a user would write: one activation used twice, a sum, a concatenation, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.first = cl.Conv2d(2, 2, 3, padding=1, bias=True)
        self.second = nn.Conv2d(2, 2, 1)
        self.activation = cl.ReSPro(projective=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.first(x))
        unused = self.second(h)  # noqa: F841
        h = x + self.second(self.activation(h))
        return torch.cat([h, x], dim=1).flatten(start_dim=1)


def test_a_traced_module_is_the_graph_it_draws() -> None:
    block = randomise(Block())
    traced = cl.ConformalLayers(cl.Traced(block), cl.ReSPro()).double().eval()
    inner = nn.Sequential(
        block.first, cl.ReSPro(projective=True), cl.ReSPro(projective=True), block.second
    )
    written = cl.ConformalLayers(
        cl.Parallel(cl.Residual(*inner), nn.Identity(), join="concatenate"),
        nn.Flatten(),
        cl.ReSPro(),
    )
    written = copy.deepcopy(written).double().eval()
    x = samples(SHAPE, torch.float64)
    expected = oracle(written, x)
    for strategy in ("dense", "layers"):
        assert relative_error(cl.fold(traced, SHAPE, strategy=strategy)(x), expected) <= 1e-12
    assert "first.weight" in "".join(traced.state_dict())


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (lambda x: x * x, r"got mul\(x, x\)\. Use nn.ReLU\(\)"),
        (lambda x: torch.cat([x, x]), r"got cat\(\[x, x\]\)"),
        (lambda x: torch.tanh(x), r"got tanh\(x\)\."),
        (
            lambda x: nn.functional.relu(x, inplace=True),
            r"got relu\(x, inplace=True\)",
        ),
        (lambda x: (x, x), r"one output, got the output \(x, x\)\. Take"),
        (lambda x: x if x.sum() > 0 else -x, "trace"),
    ],
)
def test_what_cannot_be_traced(forward: object, named: str) -> None:
    with pytest.raises(cl.ConformalError, match=named):
        cl.Traced(Written(lambda m, x: forward(x)))  # type: ignore[operator]


def test_a_container_is_no_layer_of_a_graph() -> None:
    part = cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro())
    with pytest.raises(cl.ConformalError, match=r"got a ConformalLayers at part.* Put its layers"):
        cl.Traced(Written(lambda m, x: x + m.part(x), part=part))


def test_a_spectral_activation_stands_once_in_a_traced_module_too() -> None:
    block = Block()
    block.activation = cl.ReSPro("spectral")
    with pytest.raises(cl.ConformalError, match="used twice"):
        cl.ConformalLayers(cl.Traced(block))


def dead(m: Any, x: Tensor) -> Tensor:
    """Run a layer whose result nobody takes."""
    y: Tensor = x + m.g(m.a(x))
    m.d(y)
    return y


def test_dead_code_stays_dead_after_pickle() -> None:
    model = cl.ConformalLayers(
        cl.Traced(Written(dead, a=cl.Linear(6, 6), d=cl.Linear(6, 6), g=cl.Gnomonic()))
    ).eval()
    x = samples((6,), torch.float32)
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.allclose(again(x), model(x))
    assert cl.fold_error(model, cl.fold(again, (6,), strategy="dense"), x) <= 5e-6


class Weighted(nn.Module):
    """A registered module with a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.full((6,), 0.5)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.factor


@pytest.fixture
def registered() -> object:
    cl.register_linear(Weighted, bound=lambda module, shape: 0.5)
    yield
    del SPECS[Weighted]


def test_registered_modules_and_subclasses_are_leaves_of_a_traced_module(
    registered: object,
) -> None:
    class Mine(cl.Linear):
        pass

    block = Written(
        lambda m, x: torch.cat(tensors=[m.g(m.b(m.a(x))), x], dim=1),
        a=Weighted(),
        b=Mine(6, 6),
        g=cl.Gnomonic(),
    )
    cl.testing.assert_folds(cl.ConformalLayers(cl.Traced(block)), (6,), dtypes=(torch.float32,))


def test_bounds_do_not_feed_the_statistics(registered: object) -> None:
    inner = cl.Residual(Weighted(), nn.BatchNorm1d(6))
    model = cl.ConformalLayers(cl.Residual(inner), cl.Gnomonic())
    model(samples((6,), torch.float32))
    assert int(inner.body[1].num_batches_tracked) == 1
