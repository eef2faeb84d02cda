"""The ways to get α: young, spectral, learned and a number, against explicit bounds and the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import conformallayers as cl
from oracle import exact_output, relative_error
from support import DTYPES, TOLERANCES, both_forms, samples

SHAPE = (2, 6, 6)
both = pytest.mark.parametrize("dtype", DTYPES)


def network(alpha: str | None, dtype: torch.dtype, seed: int = 0) -> cl.ConformalLayers:
    """Return two segments; the first has several layers, so that its norm is not the product."""
    torch.manual_seed(seed)
    first = (
        cl.Conv2d(2, 4, 3, padding=1),
        cl.AvgPool2d(2),
        nn.ReflectionPad2d(1),
        cl.Conv2d(4, 3, 3),
    )
    last = cl.ReSPro(alpha), cl.Conv2d(3, 2, 2), cl.ReSPro()
    return cl.ConformalLayers(*first, cl.Dropout(0.0), *last).to(dtype)


def young_radii(model: cl.ConformalLayers) -> tuple[float, float]:
    """Return Young's bound of both segments; reflection shows the middle of 3×3 nine times."""
    norms = [model[i].weight.detach().double().abs().sum((2, 3)) for i in (0, 3, 6)]
    bounds = [float((A.sum(0).max() * A.sum(1).max()).sqrt()) for A in norms]
    return bounds[0] * 3 * bounds[1], bounds[2]


@both
def test_spectral_state_is_one_scalar(dtype: torch.dtype) -> None:
    model, x = network("spectral", dtype), samples(SHAPE, dtype, 5)
    fresh, random = set(model.state_dict()), torch.get_rng_state()
    model.train()(x)
    assert torch.equal(torch.get_rng_state(), random)  # its first vector has a seed of its own
    state = model.state_dict()
    assert set(state) == fresh
    assert [key for key in state if key.startswith("5.")] == ["5.norm"]
    assert (state["5.norm"].shape, state["5.norm"].dtype) == ((), dtype)
    other = network("spectral", dtype, seed=9)
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(other.eval()(x), model.eval()(x))


@both
def test_learned_radii_train(dtype: torch.dtype) -> None:
    model, x = network("learned", dtype), samples(SHAPE, dtype, 5)
    optimiser = torch.optim.SGD(model[5].parameters(), lr=5.0)
    losses = []
    for _ in range(21):
        loss = (model(x) - 1).square().mean()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    factor, young = math.exp(model[5].log_factor.item()), young_radii(model)
    assert abs(factor - 1) > 1e-3
    assert cl.trace(model, SHAPE).alphas == pytest.approx((young[0] * factor, young[1]), rel=1e-12)
    with torch.no_grad():
        assert relative_error(model.eval()(x), exact_output(model, x)) <= TOLERANCES[dtype]


@both
@both_forms
@pytest.mark.parametrize("alpha", [None, "spectral", "learned", 2.0])
@pytest.mark.parametrize("zeros", [slice(None), slice(1, 2)], ids=["all", "one"])
def test_zero_weights_give_zero_and_finite_gradients(
    zeros: slice, alpha: str | float | None, projective: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = [cl.Linear(4, 4) for _ in range(3)]
    for layer in linear[zeros]:
        nn.init.zeros_(layer.weight)
    pairs = [(layer, cl.ReSPro(alpha, projective=projective)) for layer in linear]
    model = cl.ConformalLayers(*(module for pair in pairs for module in pair)).to(dtype)
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    assert cl.trace(model, (4,)).steps[2].bound == 0
    for _ in range(2):
        y = model.train()(x)
        assert not y.any()
        y.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *model.parameters()))
    with torch.no_grad():
        assert not model.eval()(x).any()
    assert not cl.fold(model, (4,))(x.detach()).any()
