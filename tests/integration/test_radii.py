"""The ways to get α: young, spectral, learned and a number, against explicit matrices."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl

WIDE = [torch.float64, torch.float32]
RTOL = {torch.float64: 1e-12, torch.float32: 5e-6}
SHAPE = (2, 6, 6)
both = pytest.mark.parametrize("dtype", WIDE)


def network(*alphas, dtype=torch.float64, seed=0):
    """Return two segments; the first has several layers, so that its norm is not the product."""
    torch.manual_seed(seed)
    first, second = (*alphas, None, None)[:2]
    return cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, padding=1, dtype=dtype),
        cl.AvgPool2d(2),
        nn.ReflectionPad2d(1),
        cl.Conv2d(4, 3, 3, dtype=dtype),
        cl.Dropout(0.3),
        cl.ReSPro(first, dtype=dtype) if isinstance(first, str) else cl.ReSPro(first),
        cl.Conv2d(3, 2, 2, dtype=dtype),
        cl.ReSPro(second),
    )


def batch(dtype, size=5):
    x = np.random.default_rng(1).normal(size=(size, *SHAPE))
    return torch.from_numpy(x).to(dtype)


def segment_matrix(model):
    """Return the matrix of the layers before the first activation, in float64."""
    layers = nn.Sequential(*copy.deepcopy(list(model)[:5])).double().eval()
    with torch.no_grad():
        eye = torch.eye(math.prod(SHAPE), dtype=torch.float64).view(-1, *SHAPE)
        return layers(eye).flatten(1).T.numpy()


def young_radii(model):
    """Return Young's bound of both segments; reflection shows the middle of 3×3 nine times."""
    norms = [model[i].weight.detach().double().abs().sum((2, 3)) for i in (0, 3, 6)]
    bounds = [float((A.sum(0).max() * A.sum(1).max()).sqrt()) for A in norms]
    return bounds[0] * 3 * bounds[1], bounds[2]


def output_for(model, x, first, second):
    """Run the published recurrence for given radii in float64."""
    layers = copy.deepcopy(list(model)[:5]), copy.deepcopy(list(model)[6:7])
    x = x.double()
    t = x.flatten(1).square().sum(1).sqrt()
    with torch.no_grad():
        for segment, alpha in zip(layers, (first, second), strict=True):
            x = nn.Sequential(*segment).double().eval()(x)
            t = alpha / 2 * t + x.flatten(1).square().sum(1) / (2 * alpha)
    return x / t.view(-1, 1, 1, 1)


def gap(actual, expected):
    expected = expected.double()
    return float((actual.detach().double() - expected).norm() / expected.norm())


def evaluated(model, x):
    with torch.no_grad():
        return model.eval()(x)


@both
def test_young_is_the_product_of_the_bounds(dtype):
    model, x = network(dtype=dtype), batch(dtype)
    assert cl.trace(model, SHAPE).alphas == pytest.approx(young_radii(model), rel=1e-12)
    assert young_radii(model)[0] > np.linalg.norm(segment_matrix(model), 2)
    assert gap(evaluated(model, x), output_for(model, x, *young_radii(model))) <= RTOL[dtype]


@both
def test_spectral_starts_as_young(dtype):
    model, x = network("spectral", dtype=dtype), batch(dtype)
    assert cl.trace(model, SHAPE).alphas == pytest.approx(young_radii(model), rel=1e-12)
    assert gap(evaluated(model, x), output_for(model, x, *young_radii(model))) <= RTOL[dtype]
    with torch.no_grad(), cl.layer_by_layer():  # evaluation takes no step
        model(x)
    assert cl.trace(model, SHAPE).alphas == pytest.approx(young_radii(model), rel=1e-12)


@both
def test_spectral_state_is_one_scalar(dtype):
    model, x = network("spectral", dtype=dtype), batch(dtype)
    fresh = set(model.state_dict())
    model.train()(x)
    state = model.state_dict()
    assert set(state) == fresh
    assert [key for key in state if key.startswith("5.")] == ["5.norm"]
    assert state["5.norm"].shape == ()
    assert state["5.norm"].dtype == dtype
    other = network("spectral", dtype=dtype, seed=9)
    other.load_state_dict(state)
    assert torch.equal(evaluated(other, x), evaluated(model, x))


@both
def test_learned_starts_as_young_and_trains(dtype):
    model, x = network("learned", dtype=dtype), batch(dtype)
    model[4].p = 0.0
    young = young_radii(model)
    assert cl.trace(model, SHAPE).alphas == pytest.approx(young, rel=1e-12)
    y = model.train()(x)
    assert gap(y, output_for(model, x, *young)) <= RTOL[dtype]

    def loss():
        return (model(x) - 1).square().mean()

    optimiser = torch.optim.SGD(model[5].parameters(), lr=0.5)
    before = loss().item()
    for _ in range(20):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    assert loss().item() < before
    factor = math.exp(model[5].log_factor.item())
    assert abs(factor - 1) > 1e-3
    radii = young[0] * factor, young[1]
    assert cl.trace(model, SHAPE).alphas == pytest.approx(radii, rel=1e-12)
    assert gap(evaluated(model, x), output_for(model, x, *radii)) <= RTOL[dtype]


@both
@pytest.mark.parametrize("projective", [False, True])
@pytest.mark.parametrize("alpha", [None, "spectral", "learned", 2.0])
@pytest.mark.parametrize("zeros", [slice(None), slice(1, 2)], ids=["all", "one"])
def test_zero_weights_give_zero_and_finite_gradients(zeros, alpha, projective, dtype):
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        layers += [cl.Linear(4, 4, dtype=dtype), cl.ReSPro(alpha, projective=projective)]
    model = cl.ConformalLayers(*layers)
    for layer in layers[::2][zeros]:
        nn.init.zeros_(layer.weight)
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    assert cl.trace(model, (4,)).steps[2].bound == 0
    for _ in range(2):
        y = model.train()(x)
        assert not y.any()
        y.sum().backward()
    for tensor in (x, *model.parameters()):
        assert tensor.grad.isfinite().all()
    assert not evaluated(model, x).any()
    assert not cl.fold(model, (4,))(x.detach()).any()
