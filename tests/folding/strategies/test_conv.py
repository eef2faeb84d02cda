"""Routes of the strategy conv, and the kernels of their steps."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import conformallayers as cl
from conformallayers.folding import plan
from conformallayers.folding.strategies.conv import Move, RouteMap, best_route, kernel_of
from support import stage_of

pytestmark = pytest.mark.usefixtures("seeded")


# Machines that make one kind of work look free, so that every kind of step is taken somewhere.
CHANGES: dict[str, dict[str, float]] = {
    "fixed": {},
    "free products": {"gemm": 1e18},
    "free convolutions": {"conv": 1e18, "idle": 1e18},
    "free passes": {"stream": 1e18, "call": 0.0},
    "dear calls": {"call": 1.0},
    "dear passes": {"stream": 1e5},
}


def take_rates(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Count work at other rates."""
    rates = {**plan.RATES, **CHANGES[kind]}
    patch.setattr(plan, "CALL", rates.pop("call", plan.CALL))
    patch.setattr(plan, "RATES", rates)


def pooled(*, pool: int = 2, kernel: int = 3, padding: int = 0) -> nn.Module:
    features = cl.ConformalLayers(
        cl.Conv2d(3, 5, kernel, padding=padding),
        cl.ReSPro(),
        cl.AvgPool2d(pool),
        cl.Conv2d(5, 4, 3),
        cl.ReSPro(),
        cl.AvgPool2d(2),
    )
    size = cl.trace(features, (3, 14, 14)).output_shape
    return nn.Sequential(features, nn.Flatten(), nn.Linear(size[0] * size[1] * size[2], 3))


NETWORKS = {
    "tiles": (pooled(), (3, 14, 14)),
    "thirds": (pooled(pool=3), (3, 14, 14)),
    "padded": (pooled(padding=1), (3, 14, 14)),
    "leftover": (pooled(kernel=2), (3, 14, 14)),
    "one": (
        nn.Sequential(
            cl.ConformalLayers(cl.Conv2d(2, 9, 3), cl.ReSPro()), nn.Flatten(), nn.Linear(576, 2)
        ),
        (2, 10, 10),
    ),
    "wide": (
        nn.Sequential(
            cl.ConformalLayers(
                *(cl.Conv2d(1, 9, 3, padding=1), cl.ReSPro()),
                *(cl.Conv2d(9, 9, 3, padding=1), cl.ReSPro()),
            ),
            nn.Flatten(),
            nn.Linear(9 * 64, 2),
        ),
        (1, 8, 8),
    ),
    "line": (
        cl.ConformalLayers(cl.Conv1d(2, 4, 3), cl.ReSPro(), cl.AvgPool1d(2), cl.Conv1d(4, 3, 3)),
        (2, 18),
    ),
    "volume": (
        cl.ConformalLayers(cl.Conv3d(1, 2, 3), cl.ReSPro(), cl.AvgPool3d(2), cl.ReSPro()),
        (1, 8, 8, 8),
    ),
    "strided": (
        cl.ConformalLayers(
            cl.Conv2d(2, 4, 3, stride=2, padding=1),
            cl.ReSPro(),
            cl.Scale(2.0),
            cl.ReSPro(projective=True),
            cl.Conv2d(4, 4, 3, padding="same"),
            cl.ReSPro(),
        ),
        (2, 13, 12),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.sampled(2)
def test_every_route_gives_the_layers_numbers(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_rates(monkeypatch, kind)
    model, shape = NETWORKS[name]
    cl.testing.assert_folds(model, shape, strategy="conv")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_stacks(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    layers: list[nn.Module] = []
    channels = inputs = data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 4))):
        out = data.draw(st.integers(1, 6))
        kernel = data.draw(st.integers(1, 3))
        padding, stride = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 2))
        layers.append(cl.Conv2d(channels, out, kernel, padding=padding, stride=stride))
        layers.append(cl.ReSPro(projective=data.draw(st.booleans())))
        if data.draw(st.booleans()):
            layers.append(cl.AvgPool2d(2, ceil_mode=data.draw(st.booleans())))
        channels = out
    model = cl.ConformalLayers(*layers)
    shape = (inputs, data.draw(st.integers(12, 20)), data.draw(st.integers(12, 20)))
    try:
        cl.trace(model, shape)
    except cl.ConformalError:
        return  # the image became too small
    kind = data.draw(st.sampled_from(sorted(CHANGES)))
    with pytest.MonkeyPatch.context() as patch:
        take_rates(patch, kind)
        cl.testing.assert_folds(model, shape, strategy="conv", dtypes=(torch.float64,))
        x = torch.rand(5, *shape)
        folds = [cl.fold(model, shape, strategy=name) for name in ("conv", "layers")]
    composed, layered = (cl.fold_error(model, folded, x) for folded in folds)
    # Sums that nearly cancel lose digits in float32, in the layers as well.
    assert composed <= max(cl.testing.TOLERANCES[torch.float32], 4 * layered)


def test_every_kind_of_step_is_taken_somewhere() -> None:
    found = {
        move
        for model, shape in NETWORKS.values()
        for kind in CHANGES
        for move in route(model, shape, kind)
    }
    assert {move.how for move in found} == {"layers", "conv", "pooled", "matrix"}
    assert any(move.how == "conv" and move.phase > 1 for move in found)
    # of the input, and of a later map
    assert {move.start > 0 for move in found if move.how == "matrix"} == {False, True}


def route(model: nn.Module, shape: tuple[int, ...], kind: str) -> tuple[Move, ...]:
    with pytest.MonkeyPatch.context() as patch:
        take_rates(patch, kind)
        return best_route(stage_of(model, shape), 4)[0]


def test_patches_have_the_energy_of_the_map() -> None:
    places = RouteMap(stage_of(NETWORKS["tiles"][0], (3, 14, 14)))
    x = torch.rand(4, 3, 14, 14, dtype=torch.float64)
    plain = Move("conv", 0, 1, (0, 1), 0)
    expected = nn.functional.conv2d(x, kernel_of(places, plain))
    pool = nn.functional.avg_pool2d(expected, 2)
    for how, phase in (("conv", 2), ("conv", 3), ("conv", 4), ("pooled", 2)):
        move = replace(plain, how=how, phase=phase)
        kernel = kernel_of(places, move)
        assert len(kernel) == places.patches(move)
        result = nn.functional.conv2d(x, kernel, stride=phase)
        torch.testing.assert_close(
            result.square().sum((1, 2, 3)), expected.square().sum((1, 2, 3)), rtol=1e-13, atol=0
        )
        if how == "pooled":
            torch.testing.assert_close(result[:, :5] / phase, pool, rtol=1e-12, atol=1e-14)


def test_a_deep_stack_has_a_route() -> None:
    layers = [layer for _ in range(120) for layer in (cl.Conv2d(2, 2, 1), cl.ReSPro())]
    model = cl.ConformalLayers(*layers).double()
    folded = cl.fold(model, (2, 4, 4), strategy="conv")
    # In float32 a product of 120 matrices of 2×2 loses more than the tolerance, however it is made.
    assert cl.fold_error(model, folded, torch.rand(3, 2, 4, 4, dtype=torch.float64)) < 1e-12
