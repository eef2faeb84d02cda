"""Factors in weights and poolings at once: few nodes, and the numbers of torch."""

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
from conformallayers.recipe.onnx.merge import RmsPool, merged
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
    "LeNetCL": (cl.networks.LeNetCL, 20, 25),
    "D3ModNetCL": (cl.networks.D3ModNetCL, 20, 26),
    "two stages": (micro, 23, 27),
    "two stages, without RMSNormalization": (micro, 22, 32),
    "two stages, published": (lambda: micro(projective=False), 23, 42),
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
        (cl.networks.LeNetCL, 25),
        (cl.networks.D3ModNetCL, 26),
        (partial(cl.networks.StageNet, "micro"), 26),
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
    # Before opset 23 six nodes do what RMSNormalization and a factor do.
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
    assert [isinstance(op, RmsPool) for op in merged(recipe).operations].count(True) == 1
    kinds = node_kinds(recipe)
    fast = sum(sizes) % 8 == 0  # else a convolution with equal weights is faster
    means = len(sizes) > 1  # of some channels, by a convolution too
    expected = [1, 3 + means] if fast else [0, 4 + means]  # one adds the energies of channels to 1
    assert [kinds.count(kind) for kind in ("AveragePool", "Conv")] == expected
    # Two of the embedding, and one of squares, which are those of the energy as well.
    assert kinds.count("Mul") == 3
    assert error(recipe, samples((2, 6, 7), torch.float32, 4)) <= 5e-6


@pytest.mark.parametrize("sizes", [(3,), (2, 3)], ids=str)
def test_windows_that_are_cut_off_are_pooled_apart(sizes: tuple[int, ...]) -> None:
    recipe = windows(sizes, ceil_mode=True)
    assert not any(isinstance(op, RmsPool) for op in merged(recipe).operations)
    assert error(recipe, samples((2, 6, 7), torch.float32, 4)) <= 5e-6


def test_energies_lose_their_weights_and_divisions_their_scales() -> None:
    operations = merged(windows((2, 3))).operations
    (weight,) = [op.weight for op in operations if isinstance(op, point.SumSquares)]
    assert weight * 6 * 7 == pytest.approx(
        1
    )  # the energy is the sum of the means of whole channels
    assert [op.scale for op in operations if isinstance(op, point.Divide)] == [1.0]


@pytest.mark.parametrize("weight", [1e-30, 1e30])
def test_extreme_weights_stay_where_they_are(weight: float) -> None:
    builder, z, m, tau = embedded((4,))
    z = builder.add(layer.Matmul, z, weight=normal(builder, "first", 5, 4))
    n = builder.add(point.SumSquares, z, weight=weight)
    tau = builder.add(point.Advance, tau, m, n, formula=FORMULAS["projective"])
    z = builder.add(layer.Matmul, z, weight=normal(builder, "second", 3, 5))
    recipe = builder.recipe(builder.add(point.Divide, z, tau, m, scale=weight))
    (found,) = [op.weight for op in merged(recipe).operations if isinstance(op, point.SumSquares)]
    assert found == weight
    assert error(recipe, samples((4,), torch.float32, 4)) <= 5e-6


def test_a_value_that_is_read_elsewhere_keeps_its_factor() -> None:
    builder, z, m, tau = embedded((4,))
    z = builder.add(layer.Matmul, z, weight=normal(builder, "first", 5, 4))
    n = builder.add(point.SumSquares, z, weight=0.3)
    tau = builder.add(point.Advance, tau, m, n, formula=FORMULAS["published"])
    z = builder.add(layer.Add, z, builder.add(layer.Elementwise, z, function="abs"))
    recipe = builder.recipe(builder.add(point.Divide, z, tau, m, scale=0.7))
    assert error(recipe, samples((4,), torch.float32, 4)) <= 5e-6


def test_the_bias_of_a_head_joins_that_of_the_last_stage() -> None:
    builder, z, m, tau = embedded((2, 3), offset=1.5)
    names = "z", "m", "tau"
    options = {"scale": 0.6, "coordinate": 1.4}
    z, m, tau = builder.add_many(point.Rebase, z, m, tau, names=names, **options)
    z = builder.add(layer.AddConstant, z, value=normal(builder, "shift", 2, 1))
    z = builder.add(layer.Reshape, z, shape=(6,))
    constants = {"weight": normal(builder, "weight", 5, 6), "bias": normal(builder, "bias", 5)}
    z = builder.add(layer.Matmul, z, **constants)
    z = builder.add(point.Divide, z, tau, m, scale=0.3)
    z = builder.add(layer.AddConstant, z, value=normal(builder, "head", 5))
    z = builder.add(layer.Elementwise, z, function="relu")
    z = builder.add(layer.Matmul, z, weight=normal(builder, "last", 3, 5))
    recipe = builder.recipe(z)
    kinds = node_kinds(recipe)
    assert kinds[-4:] == ["Reshape", "Gemm", "Relu", "Gemm"]
    x = samples((2, 3), torch.float32, 4)
    x[1], x[2] = 0, 1e11
    assert error(recipe, x) <= 5e-6


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("size", [4, 20])
def test_energies_of_pooled_maps_come_from_means_of_squares(
    kernel: tuple[int, int], size: int
) -> None:
    torch.manual_seed(1)
    pools = [cl.AvgPool2d(kernel), nn.LPPool2d(2, kernel)]
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 8, 3, padding=1, bias=True), cl.ReSPro(projective=True)),
        *(cl.Split([3, 5], pools), cl.Conv2d(8, 3, 1, bias=True), cl.ReSPro(0.5, projective=True)),
        *(nn.LPPool2d(2, 1), cl.Conv2d(3, 2, 1), cl.Flatten()),
        offset=1.0,
    )
    folded = cl.fold(model, (2, size, size), strategy="conv")
    kinds = node_kinds(folded.recipe)
    long = size**2 > 256  # its channels are averaged only where the windows of the pooling are
    tiled = size % kernel[0] == 0
    assert kinds.count("GlobalAveragePool") == (tiled or not long) + 1
    assert error(folded.recipe, samples((2, size, size), torch.float32, 4)) <= 5e-6


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


@pytest.mark.parametrize("tiny", [slice(0, 2), slice(2, 4), slice(0, 4)], ids=str)
def test_channels_with_tiny_weights(tiny: slice) -> None:
    torch.manual_seed(3)
    model = cl.ConformalLayers(
        *(cl.Conv2d(1, 4, 3), cl.ReSPro(1.0, projective=True)),
        *(cl.Split([2, 2], [cl.AvgPool2d(2), nn.LPPool2d(2, 2)]), cl.Conv2d(4, 3, 2)),
    )
    model[0].weight.data[tiny] *= 1e-22
    model[3].weight.data[:, tiny] /= 1e-22
    folded = cl.fold(model, (1, 8, 8), strategy="conv")
    assert error(folded.recipe, samples((1, 8, 8), torch.float32, 3)) <= 5e-6


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e11])
def test_norms_outside_of_points(size: float) -> None:
    builder = RecipeBuilder((1, 4, 4))
    recipe = builder.recipe(builder.add(layer.NormPool, INPUT, **TWOS))
    assert error(recipe, size * samples((1, 4, 4), torch.float32, 3)) <= 5e-6


@pytest.mark.parametrize("number", [0.25, 1e-20, 0.0, -2.0])
def test_a_positive_number_goes_into_the_weights_behind_it(number: float) -> None:
    builder, z, m, tau = embedded((2, 6, 7))
    z = builder.add(layer.Conv, z, weight=normal(builder, "first", 8, 2, 3, 3), **ONES)
    z = builder.add(layer.Multiply, z, factor=builder.constant("number", torch.tensor(number)))
    y = builder.add(point.Divide, z, tau, m, scale=1.0)
    y = builder.add(layer.Conv, y, weight=normal(builder, "second", 3, 8, 3, 3), **ONES)
    recipe = builder.recipe(y)
    left = [op for op in merged(recipe).operations if isinstance(op, layer.Multiply)]
    assert len(left) == (number != 0.25)
    assert error(recipe, samples((2, 6, 7), torch.float32, 4)) <= 5e-6
