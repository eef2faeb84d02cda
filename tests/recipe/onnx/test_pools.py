"""Whole networks in ONNX, and poolings of several kinds: few nodes, and the numbers of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.onnx.layers import MixedPool, merged_pools
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from onnx_support import error, node_kinds, session
from oracle import relative_error
from recipe_cases import FORMULAS
from support import samples


def micro(*, projective: bool = True, offset: Any = "learned", unit: str = "rms") -> nn.Module:
    """Return a network of two stages with signed and norm-pooled channels, and a head."""
    options: dict[str, Any] = {"alpha": "learned", "projective": projective}
    layers = cl.ConformalLayers(
        *(cl.Conv2d(3, 16, 3), cl.Conv2d(16, 16, 3, stride=2), cl.ReSPro(**options)),
        *(cl.Split([4, 12], [cl.AvgPool2d(2), nn.LPPool2d(2, 2)]), nn.BatchNorm2d(16)),
        *(cl.Conv2d(16, 64, 1), cl.Conv2d(64, 48, 3), cl.ReSPro(**options)),
        *(cl.Split([12, 36], [cl.AvgPool2d(3, 2), nn.LPPool2d(2, 3, 2)]), nn.BatchNorm2d(48)),
        offset=offset,
        unit=unit,
    )
    head = nn.Linear(192, 84), nn.ReLU(), nn.Linear(84, 10)
    return nn.Sequential(layers, nn.Flatten(), *head)


def randomised(model: nn.Module) -> nn.Module:
    """Give every batch normalisation statistics of its own."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight, module.bias):
                assert tensor is not None
                tensor.data.normal_(0.2, 0.5, generator=generator)
            assert module.running_var is not None
            module.running_var.uniform_(0.5, 2, generator=generator)
    return model.eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "LeNetCL": (cl.networks.LeNetCL, 20, 20),
    "D3ModNetCL": (cl.networks.D3ModNetCL, 20, 26),
    "two stages": (micro, 23, 22),
    "two stages, without RMSNormalization": (micro, 22, 32),
    "two stages, published": (lambda: micro(projective=False), 23, 43),
    "two stages, no offset": (lambda: micro(offset=None, unit="norm"), 23, 75),
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
    y = session(folded.recipe, torch.float32, opset)(x)
    with torch.no_grad():
        expected = folded(x)
    assert y[6:].isnan().all()
    assert expected[6:].isnan().all()
    assert relative_error(y[:6], expected[:6]) <= 5e-6
    # Equal numbers round to the same side in long sums.
    x = torch.tensor([0.1, 0.3, 0.7, 1.1]).view(-1, 1, 1, 1).expand(4, 3, 32, 32).contiguous()
    with torch.no_grad():
        expected = folded(x)
    assert relative_error(session(folded.recipe, torch.float32, opset)(x), expected) <= 5e-6


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (cl.networks.LeNetCL, 20),
        (cl.networks.D3ModNetCL, 26),
        (partial(cl.networks.StageNet, "micro"), 22),
        (partial(cl.networks.StageNet, "small"), 26),
        (partial(cl.networks.StageNet, "base"), 33),
        (partial(cl.networks.StageNet, "large"), 44),
    ],
)
def test_graphs_grow_no_larger(make: Callable[[], nn.Module], most: int) -> None:
    torch.manual_seed(0)
    recipe = cl.fold(make().eval(), (3, 32, 32), strategy="conv").recipe
    assert len(node_kinds(recipe, opset=23)) <= most
    published = isinstance(make, type)
    # Before opset 23 five more nodes do what RMSNormalization does.
    assert len(node_kinds(recipe, opset=22)) <= most + (0 if published else 5)


def embedded(shape: tuple[int, ...], offset: float = 0.0) -> tuple[RecipeBuilder, str, str, str]:
    builder = RecipeBuilder(shape)
    names = "unit", "m", "tau"
    return builder, *builder.add_many(point.Normalize, INPUT, names=names, offset=offset)


def normal(builder: RecipeBuilder, name: str, *shape: int) -> str:
    torch.manual_seed(len(name) + len(shape))
    return builder.constant(name, torch.randn(shape, dtype=torch.float64))


ONES: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
TWOS: dict[str, Any] = {"kernel": (2, 2), "stride": (2, 2)}


def windows(sizes: tuple[int, ...], **options: Any) -> Recipe:
    """Embed, convolve, pool channels by norms and averages in turn, convolve, divide."""
    builder, z, m, tau = embedded((2, 6, 7))
    channels = sum(sizes)
    weight = normal(builder, "first", channels, 2, 3, 3)
    z = builder.add(layer.Conv, z, weight=weight, **ONES)
    n = builder.add(point.SumSquares, z, weight=0.3)
    tau = builder.add(point.Advance, tau, m, n, formula=FORMULAS["projective"])
    parts, at = [], 0
    for index, size in enumerate(sizes):
        part = z
        if len(sizes) > 1:
            part = builder.add(layer.Slice, z, axis=0, start=at, stop=at + size)
        kind, more = (layer.AvgPool, {"padding": (0, 0)}) if index % 2 else (layer.NormPool, {})
        parts.append(builder.add(kind, part, **more, **TWOS | options))
        at += size
    if len(parts) > 1:
        z = builder.add(layer.Concatenate, *parts, axis=0)
    else:
        (z,) = parts
    z = builder.add(layer.Conv, z, weight=normal(builder, "second", 2, channels, 3, 3), **ONES)
    return builder.recipe(builder.add(point.Divide, z, tau, m, scale=0.7))


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (1, 2, 3), (3, 5)], ids=str)
def test_channels_of_several_kinds_are_pooled_at_once(sizes: tuple[int, ...]) -> None:
    recipe = windows(sizes)
    assert [isinstance(op, MixedPool) for op in merged_pools(recipe).operations].count(True) == 1
    kinds = node_kinds(recipe)
    means = (
        len(sizes) > 1
    )  # of some channels, by a convolution like the sums of squares and the energy
    assert [kinds.count(kind) for kind in ("AveragePool", "Conv")] == [0, 4 + means]
    assert (
        kinds.count("Mul") == 2
    )  # a scale, and the squares, which are those of the energy as well
    assert error(recipe, samples((2, 6, 7), torch.float32, 4)) <= 5e-6


@pytest.mark.parametrize("sizes", [(3,), (2, 3)], ids=str)
def test_windows_that_are_cut_off_are_pooled_apart(sizes: tuple[int, ...]) -> None:
    recipe = windows(sizes, ceil_mode=True)
    assert not any(isinstance(op, MixedPool) for op in merged_pools(recipe).operations)
    assert error(recipe, samples((2, 6, 7), torch.float32, 4)) <= 5e-6


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e11])
@pytest.mark.parametrize("bias", [None, 0.0, 0.5])
@pytest.mark.parametrize("opset", [20, 25])
@pytest.mark.parametrize("offset", [1.0, 50.0])
def test_norms_of_small_points_beside_an_offset(
    size: float, bias: float | None, opset: int, offset: float
) -> None:
    torch.manual_seed(2)
    last = cl.Conv2d(8, 4, 2, bias=bias is not None)
    if last.bias is not None:
        nn.init.constant_(last.bias, bias or 0.0)
    model = cl.ConformalLayers(
        *(cl.Conv2d(1, 8, 3), cl.ReSPro(projective=True)),
        *(cl.Split([4, 4], [cl.AvgPool2d(2), nn.LPPool2d(2, 2)]), last, cl.Flatten()),
        offset=offset,
    )
    folded = cl.fold(model, (1, 8, 8))
    x = size * samples((1, 8, 8), torch.float32, 3)
    y = session(folded.recipe, torch.float32, opset)(x)
    assert relative_error(y, folded(x).detach()) <= 5e-6


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e11])
def test_norms_outside_of_points(size: float) -> None:
    builder = RecipeBuilder((1, 4, 4))
    recipe = builder.recipe(builder.add(layer.NormPool, INPUT, **TWOS))
    assert error(recipe, size * samples((1, 4, 4), torch.float32, 3)) <= 5e-6
