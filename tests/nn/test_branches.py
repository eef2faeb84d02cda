"""Residual and parallel branches, traced modules: against the oracle, folded, and refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import conformallayers as cl
from models import Generator
from oracle import exact, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, check_training, samples

SHAPE = (2, 5, 4)


def made(seed: int, dtype: torch.dtype = torch.float64) -> cl.ConformalLayers:
    """Draw nested branches with and without biases, maps and activations between layers."""
    generator = Generator(seed)
    parts = [generator.branch(SHAPE, seed % 3 / 5), generator.activation()]
    model = cl.ConformalLayers(cl.Conv2d(2, 2, 3, padding=1), *parts)
    return randomise(model, seed).to(dtype)  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(32))
@pytest.mark.sampled(2)
def test_random_branches_agree_with_the_oracle(seed: int) -> None:
    model, x = made(seed), samples(SHAPE, torch.float64, 4, seed)
    for module in model.modules():
        if isinstance(module, cl.RadialActivation) and module.alpha == "spectral":
            module.alpha = 1.3  # its vector is another matter, see test_cases
    check_training(model, x, 1e-9)
    x[1] = 0
    expected = oracle(exact(model.eval()), x).detach()
    with torch.no_grad():
        assert relative_error(model(x), expected) <= 1e-12
        with cl.layer_by_layer():
            assert relative_error(model(x), expected) <= 1e-12
        for dtype in (*DTYPES, torch.bfloat16):
            for strategy in ("auto", "dense", "layers"):
                folded = cl.fold(model, SHAPE, strategy=strategy, dtype=dtype)
                narrow = folded(x.to(dtype))
                error = relative_error(narrow, oracle(exact(model), x.to(dtype).double()))
                assert error <= TOLERANCES[dtype], strategy
                assert not narrow[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_spectral_radius_after_a_join_is_the_same_everywhere(dtype: torch.dtype) -> None:
    block = cl.Residual(cl.Linear(4, 4), cl.ReSPro(projective=True))
    model = cl.ConformalLayers(
        cl.Linear(4, 4), block, cl.Linear(4, 3), cl.ReSPro("spectral", projective=True)
    ).to(dtype)
    x = samples((4,), dtype)
    for _ in range(3):
        y = model(x)
    expected = oracle(exact(model).eval(), x.double())
    with torch.no_grad():
        found = model.eval()(x)
    assert relative_error(found, expected) <= TOLERANCES[dtype]
    # The last training forward used the norm that it left behind.
    assert relative_error(y, expected) <= TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cl.Parallel(), "at least one branch"),
        (lambda: cl.Parallel(nn.Identity(), join="product"), '"sum" or "concatenate"'),
        (lambda: cl.Parallel(nn.Identity(), dim=0), "after the batch axis"),
        (lambda: cl.Parallel(torch.relu), "modules"),
        (lambda: cl.Residual(torch.relu), "modules"),
        (lambda: cl.ConformalLayers(cl.Residual(nn.GELU())), "position 0.body.0"),
        (lambda: cl.ConformalLayers(cl.Parallel(nn.Tanh())), "position 0.branches.0"),
    ],
)
def test_refused_branches(build: object, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        build()  # type: ignore[operator]


@pytest.mark.parametrize("join", ["sum", "concatenate"])
def test_branches_that_do_not_fit(join: str) -> None:
    acts = cl.ReSPro(projective=True)
    branches = nn.Sequential(cl.Conv2d(2, 2, 3), acts), cl.Conv2d(2, 2, 1)
    model = cl.ConformalLayers(cl.Parallel(*branches, join=join))
    with pytest.raises(cl.ConformalError, match="branches"):
        cl.fold(model, SHAPE)


def test_bounds_of_a_pruned_branch_leave_its_weight_alone() -> None:
    model = exact(randomise(cl.ConformalLayers(cl.Residual(cl.Conv2d(2, 2, 1)), cl.ReSPro())))
    plain, x = copy.deepcopy(model), samples(SHAPE, torch.float64)
    conv = model[0].body[0]
    for layer in (conv, plain[0].body[0]):
        prune.l1_unstructured(layer, "weight", 0.5)
    prune.remove(plain[0].body[0], "weight")
    for _ in range(2):
        with torch.no_grad():
            assert relative_error(model.eval()(x), oracle(plain, x)) <= 1e-12
        assert conv.weight.device.type == "cpu"


def test_a_sum_does_not_broadcast() -> None:
    model = cl.ConformalLayers(cl.Residual(cl.AdaptiveAvgPool2d(1)), cl.Gnomonic())
    for act in (lambda: model(torch.rand(2, 1, 8, 8)), lambda: cl.fold(model, (1, 8, 8))):
        with pytest.raises(cl.ConformalError, match="sum of branches"):
            act()


def test_concatenation_leaves_the_batch_alone() -> None:
    model = cl.ConformalLayers(
        cl.Parallel(nn.Identity(), nn.Identity(), join="concatenate", dim=-4)
    )
    with pytest.raises(cl.ConformalError, match="not the batch axis"):
        model(torch.rand(1, 1, 4, 4))
