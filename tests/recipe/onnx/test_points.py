"""Points and whole networks in ONNX: samples of every size without a branch, long norms, few nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from blocks import randomised
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.recipe import INPUT, RecipeBuilder
from onnx_support import LIMIT, node_kinds, session, single
from oracle import relative_error
from programs import Fold
from recipe_cases import FORMULAS, RECIPE_CASES, RecipeCase
from support import samples

POINT_CASES = [
    case
    for case in RECIPE_CASES
    if any(isinstance(op, point.Normalize) for op in case.build().operations)
]


@pytest.mark.parametrize("opset", [20, 23])  # without and with RMSNormalization
@pytest.mark.parametrize("case", POINT_CASES, ids=lambda case: case.name)
def test_samples_of_every_size(case: RecipeCase, opset: int) -> None:
    network = Fold(case.build())
    x = samples(network.input_shape, torch.float32, 5)
    x[1] *= 1e-12
    x[2] *= 1e11
    x[3] = 0
    x[4].view(-1)[-1] = float("nan")
    with torch.no_grad():
        expected = network(x)
    actual = session(network.recipe, opset)(x)
    offset = any(getattr(operation, "offset", 0) for operation in network.recipe.operations)
    assert offset or not actual[3].any()
    assert actual[4].isnan().all()
    error = (actual - expected)[:4].double().flatten(1).norm(dim=1)
    assert (error <= LIMIT * expected[:4].double().flatten(1).norm(dim=1)).all()


def embedded(shape: tuple[int, ...]) -> tuple[RecipeBuilder, str, str, str]:
    builder = RecipeBuilder(shape)
    return builder, *builder.add_many(point.Normalize, INPUT, names=("unit", "m", "tau"))


LARGE = [(300,), (4096,), (5003,), (2, 128, 128), (3, 60_000), (1024, 6, 1), (3, 1024, 1024)]


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_energies_of_large_maps_lose_no_digits(shape: tuple[int, ...]) -> None:
    # Equal numbers are the hard case: each sum is rounded the same way.
    x = torch.full((2, *shape), 0.3)
    x[1], x[:, 0] = samples(shape, torch.float32, 1)[0].abs(), 1.0
    exact = x.double().flatten(1).square().sum(1)
    n = session(single(point.SumSquares, shape))(x)
    assert torch.allclose(n, exact, rtol=3e-6, atol=0)
    builder, unit, m, tau = embedded(shape)
    n = builder.add(point.SumSquares, unit, name="n", weight=0.5)
    tau = builder.add(point.Advance, tau, m, n, formula=FORMULAS["published"], name="tau")
    y = builder.recipe(builder.add(point.Divide, unit, tau, m, scale=3.0))
    expected = 3 * x / (exact.sqrt() + exact / 2).view(-1, *[1] * len(shape))
    assert torch.allclose(session(y)(x).double(), expected, rtol=3e-6, atol=0)


def test_forms_of_large_maps_lose_no_digits() -> None:
    count, size = 4096, 64
    x = torch.full((1, count), 0.3)
    x[:, 0] = 1.0
    exact = x.double().square().sum(1)
    bands = torch.eye(size).expand(count // size, size, size)
    settings = {"size": size, "width": 0, "weight": 1.0}
    band = single(point.BandedForm, (count,), band=bands, last=torch.zeros(0, 0), **settings)
    assert torch.allclose(session(band)(x), exact, rtol=5e-7, atol=0)


# -- whole networks ---------------------------------------------------------------------------------


def micro(*, projective: bool = True, **options: Any) -> nn.Module:
    model = cl.networks.StageNet("micro", **options)
    for module in model.modules():
        if isinstance(module, cl.ReSPro):
            module.projective = projective
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "LeNetCL": (cl.networks.LeNetCL, 20, 20),
    "D3ModNetCL": (cl.networks.D3ModNetCL, 20, 26),
    "two stages": (micro, 23, 22),
    "two stages, without RMSNormalization": (micro, 22, 32),
    "two stages, published": (lambda: micro(projective=False), 23, 43),
    "two stages, no offset": (lambda: micro(offset=None, unit="norm"), 23, 75),
    "StageNet micro": (partial(cl.networks.StageNet, "micro"), 23, 22),
    "StageNet large": (partial(cl.networks.StageNet, "large"), 22, 49),
    "two stages, small offset": (lambda: micro(offset=1e-3, unit="norm"), 23, 32),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_small_and_right_for_samples_of_every_size(name: str) -> None:
    make, opset, most = NETWORKS[name]
    torch.manual_seed(0)
    folded = cl.fold(randomised(make()), (3, 32, 32), strategy="conv")
    kinds = node_kinds(folded.recipe, opset=opset)
    assert len(kinds) <= most, (folded.recipe, kinds)
    assert not {"Where", "Equal", "Sign"} & set(kinds) or "no offset" in name
    x = samples((3, 32, 32), torch.float32, 7)
    for index, size in enumerate((1e-12, 1e10, 0.0, 1e-6, 1e6), 1):
        x[index] *= size
    x[6].view(-1)[7] = float("nan")
    y = session(folded.recipe, opset)(x)
    with torch.no_grad():
        expected = folded(x)
    assert y[6:].isnan().all()
    assert expected[6:].isnan().all()
    assert relative_error(y[:6], expected[:6]) <= 5e-6
    # Equal numbers round to the same side in long sums.
    x = torch.tensor([0.1, 0.3, 0.7, 1.1]).view(-1, 1, 1, 1).expand(4, 3, 32, 32).contiguous()
    with torch.no_grad():
        expected = folded(x)
    assert relative_error(session(folded.recipe, opset)(x), expected) <= 5e-6
