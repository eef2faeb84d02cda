"""Stages: where networks are cut, and folds of random staged networks against the recurrence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import conformallayers as cl
from conformallayers.folding.stage_graph import HomogeneousMap, stages_by_part
from conformallayers.folding.stages import AffineStage, Operator, RadialStage
from conformallayers.nn.branches import Join
from conformallayers.recipe.layer_operations import AddConstant, Conv
from conformallayers.recipe.point_operations import Divide, Normalize, Rebase, SumSquares
from models import EMBEDDINGS, Generator
from oracle import exact, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, check_training, folds, operations, samples

pytestmark = pytest.mark.usefixtures("seeded")
KINDS = {AffineStage: "affine", RadialStage: "radial", HomogeneousMap: "map", Join: "join"}


def kinds(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
    (graph,) = stages_by_part(model, shape)
    return [KINDS[type(node.action)] for node in graph.nodes]


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return randomise(model).eval()


# -- where networks are cut -------------------------------------------------------------------------


conv, norm, respro, relu = cl.Conv1d, nn.BatchNorm1d(2), cl.ReSPro(), nn.ReLU()
wide = conv(2, 2, 3, padding=1)
residual = cl.Residual(wide, relu, conv(2, 2, 1), respro)
# The layers of a ConformalLayers for (1, 9), and their stages.
CUTS: dict[str, tuple[list[nn.Module], list[str]]] = {
    "one stage": ([conv(1, 2, 3), respro, conv(2, 2, 3), respro], ["radial"]),
    "a map": (
        [conv(1, 2, 3), respro, conv(2, 4, 3), relu, conv(4, 2, 3), respro],
        ["radial", "map", "radial"],
    ),
    "biases end a stage at each activation": (
        [
            conv(1, 1, 1),
            respro,
            conv(1, 2, 3, bias=True),
            respro,
            conv(2, 2, 3),
            norm,
            respro,
            relu,
        ],
        ["radial", "affine", "affine", "map"],
    ),
    "branches of linear layers": (
        [conv(1, 2, 3), cl.Residual(wide), respro, cl.Parallel(wide, conv(2, 2, 1)), respro],
        ["radial"],
    ),
    "branches across maps": (
        [conv(1, 2, 1), residual, conv(2, 1, 1)],
        ["affine", "affine", "affine", "map", "radial", "join", "affine"],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_where_networks_are_cut(name: str) -> None:
    layers, expected = CUTS[name]
    assert kinds(randomised(cl.ConformalLayers(*layers)), (1, 9)) == expected


@pytest.mark.parametrize(("length", "end"), [(4, ["affine", "affine"]), (2, ["affine"])])
def test_a_head_joins_the_last_stage_or_follows_it(length: int, end: list[str]) -> None:
    layers = conv(1, 2, 3), nn.ReLU(), conv(2, 2, 3, bias=True), cl.ReSPro()
    features = cl.ConformalLayers(*layers[:length])
    model = randomised(
        nn.Sequential(features, nn.Flatten(), nn.Linear(10 if length == 4 else 14, 3))
    )
    assert kinds(model, (1, 9)) == ["affine", "map", *end]


# -- what a fold of stages computes -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(48))
@pytest.mark.sampled(3)
def test_random_staged_networks(seed: int) -> None:
    """Train a step, evaluate, and fold by every strategy."""
    model, shape = Generator(seed).staged(**EMBEDDINGS[seed // 2 % 4])
    dtype = DTYPES[seed % 2]
    model = model.to(dtype)
    check_training(model, samples(shape, dtype, 4, seed), {torch.float32: 2e-4}.get(dtype, 1e-10))
    model.eval()
    x = samples(shape, dtype, 5, seed)
    for index, size in enumerate((1e-2, 0.0, math.nan), 2):
        x[index] *= size
    with torch.no_grad():
        expected = oracle(exact(model), x[:4].double())
        found = {"eval": model, **folds(model, shape), "auto": cl.fold(model, shape)}
        for name, run in found.items():
            y = run(x)
            assert relative_error(y[:4], expected) <= TOLERANCES[dtype], name
            assert bool(y[4].isnan().all()), name
        with cl.layer_by_layer():
            assert relative_error(model(x)[:4], expected) <= TOLERANCES[dtype]


def two_stages(depth: int) -> nn.Module:
    """Return two stages of ``depth`` convolutions, folded to one 5 × 5 and one 3 × 3 convolution each."""

    def stage(inputs: int, channels: int, sizes: list[int]) -> list[nn.Module]:
        widths = [inputs, *[24] * (len(sizes) - 1), channels]
        convs = [cl.Conv2d(a, b, k) for a, b, k in zip(widths, widths[1:], sizes, strict=False)]
        pool = cl.Split([2, channels - 2], [cl.AvgPool2d(2), nn.LPPool2d(2, 2)])
        return [*convs, nn.BatchNorm2d(channels), cl.ReSPro(projective=True), pool]

    first = {1: [5], 2: [3, 3], 3: [3, 1, 3]}[depth]
    second = {1: [3], 2: [1, 3], 3: [1, 3, 1]}[depth]
    layers = cl.ConformalLayers(
        *stage(3, 16, first), *stage(16, 20, second), offset=1.0, unit="rms"
    )
    return randomised(nn.Sequential(layers, nn.Flatten(), nn.Linear(80, 10)))


def test_depth_inside_a_stage_is_free() -> None:
    counted, recipes = [], []
    for depth in (1, 2, 3):
        folded = cl.fold(two_stages(depth), (3, 16, 16), strategy="conv")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            folded(torch.rand(1, 3, 16, 16))
        counted.append(counter.get_total_flops())
        recipes.append([type(operation) for operation in folded.recipe.operations])
        convolutions = operations(folded, Conv)
        sizes = [tuple(folded.recipe.constant_shape(conv.weight)) for conv in convolutions]
        assert sizes == [(16, 3, 5, 5), (20, 16, 3, 3)]
        assert all(conv.bias is not None for conv in convolutions)
        assert len(operations(folded, SumSquares)) == 2
        assert len(operations(folded, Normalize)) == len(operations(folded, Divide)) == 1
        heads = [folded.recipe.constant_shape(op.value) for op in operations(folded, AddConstant)]
        assert heads == [(10,)]
    assert counted[0] == counted[1] == counted[2]
    assert recipes[0] == recipes[1] == recipes[2]


def test_a_stage_that_pads_inside_keeps_its_layers_or_pads_once() -> None:
    inside = cl.Conv2d(2, 3, 3), cl.Conv2d(3, 3, 3, padding=1), nn.ReLU()
    once = cl.Conv2d(2, 3, 3, padding=1), cl.Conv2d(3, 3, 3), nn.ReLU()
    for layers, count in ((inside, 2), (once, 1)):
        model = randomised(cl.ConformalLayers(*layers))
        folded = cl.fold(model, (2, 9, 9), strategy="conv")
        assert len(operations(folded, Conv)) == count
        assert cl.fold_error(model, folded, torch.rand(3, 2, 9, 9)) <= TOLERANCES[torch.float32]


def test_values_with_one_coordinate_are_joined_as_they_are() -> None:
    pool = cl.Split([1, 1], [cl.AvgPool1d(2), nn.LPPool1d(2, 2)])
    folded = cl.fold(cl.ConformalLayers(cl.Conv1d(1, 2, 1), cl.ReSPro(), pool), (1, 8))
    assert not operations(folded, Rebase)


def shifted(pool: nn.Module, *, padding: int, factor: float = 1.0) -> cl.ConformalLayers:
    """A BatchNorm after a map, before convolutions of which the first one pads."""
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 4, 3), cl.ReSPro(projective=True), pool, nn.BatchNorm2d(4)),
        *(cl.Conv2d(4, 6, 3, padding=padding), cl.Conv2d(6, 5, 1, bias=True)),
        *(cl.ReSPro(projective=True), nn.ReLU(), cl.Conv2d(5, 2, 1)),
        offset=1.0,
        unit="rms",
    )
    norm = randomised(model)[3]
    norm.weight.data[1] *= factor
    return model.double()


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("factor", [1.0, 1e-30, 0.0])
def test_a_shift_before_a_padded_convolution_stays_one_number_a_channel(
    padding: int, factor: float
) -> None:
    model = shifted(nn.MaxPool2d(2), padding=padding, factor=factor)
    folded = cl.fold(model, (2, 12, 12))
    added = operations(folded, AddConstant)
    shapes = [tuple(folded.recipe.constants[op.value].shape) for op in added]
    # Without padding it goes into the bias of the convolution.
    assert shapes == ([(4, 1, 1)] if padding else [])
    x = torch.randn(3, 2, 12, 12, dtype=torch.float64)
    assert cl.fold_error(model, folded, x) <= 1e-12


@pytest.mark.parametrize("kernel", [3, (3,), (3, 3)])
def test_multiply_adds_of_windows_count_every_axis(kernel: int | tuple[int, ...]) -> None:
    operator = Operator(nn.AvgPool2d(kernel), (2, 6, 6), (2, 2, 2))
    assert operator.multiply_adds() == 2 * 2 * 2 * 9


def test_the_operator_norm_is_a_bound_and_a_close_one() -> None:
    for weight_shape in ((5, 3, 3, 3), (3, 6, 5, 1), (4, 4, 2, 3)):
        conv = (
            cl.Conv2d(weight_shape[1], weight_shape[0], weight_shape[2:], padding=1)
            .double()
            .requires_grad_(False)
        )
        nn.init.normal_(conv.weight)
        shape = (weight_shape[1], 9, 9)
        size = math.prod(shape)
        columns = conv(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).detach()
        out = tuple(conv(torch.zeros(1, *shape).double()).shape[1:])
        bound = Operator(conv, shape, out).norm
        true = float(torch.linalg.matrix_norm(columns, 2))
        assert true <= bound <= 1.5 * true
