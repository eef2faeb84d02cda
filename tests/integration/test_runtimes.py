"""Every runtime gives the numbers of torch: folds of networks by every strategy, and random recipes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import conformallayers as cl
from conformallayers.folding.folded import Folded
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.integer_operations import integer_values
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from nets import NETS, OFFSETS, SHAPE, Offset, features, net
from oracle import randomise, relative_error
from programs import hard
from random_recipes import recipes
from recipe_cases import RECIPE_CASES
from runtimes import ALL, QUICK, run, with_types, wrong
from support import DTYPES, folds, samples


def geometries() -> Mapping[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks whose layers use every number of a convolution."""
    line = [cl.Conv1d(2, 4, 3, stride=2, padding=2, dilation=2), cl.ReSPro()]
    line += [cl.Conv1d(4, 6, 2, padding="same", groups=2), cl.ReSPro(), cl.AvgPool1d(2)]
    plane = [cl.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1)), cl.ReSPro()]
    plane += [cl.AvgPool2d(3, 2, padding=1), cl.Conv2d(4, 2, 2), cl.ReSPro()]
    block = [cl.Conv3d(1, 2, (2, 3, 2), padding=1), cl.ReSPro(projective=True)]
    block += [cl.AvgPool3d((1, 2, 2)), cl.Conv3d(2, 3, 2, dilation=(1, 2, 1)), cl.Gnomonic()]
    odd = [cl.AdaptiveAvgPool2d((4, 3)), cl.ReSPro(), nn.Upsample(scale_factor=2), cl.Scale(0.3)]
    odd += [cl.ReSPro(), nn.PixelShuffle(1), cl.AvgPool2d(3, ceil_mode=True), cl.ReSPro()]
    bare = [cl.ReSPro(2.0), cl.Flatten(), cl.ReSPro(0.5), cl.Linear(12, 3)]
    deep = [m for _ in range(60) for m in (cl.Linear(4, 4), cl.ReSPro())]
    for linear in deep[::2]:
        nn.init.orthogonal_(linear.weight)
    shapes = {
        "line": (2, 17),
        "plane": (2, 9, 8),
        "block": (1, 4, 7, 6),
        "bare": (3, 4),
        "deep": (4,),
    }
    stacks = {"line": line, "plane": plane, "block": block, "odd": odd, "bare": bare, "deep": deep}
    return {n: (cl.ConformalLayers(*s), shapes.get(n, (2, 7, 7))) for n, s in stacks.items()}


def check(found: list[Any], folder: Path) -> None:
    xs = [hard(fold.recipe.input_shape).to(fold.dtype) for fold in found]
    assert wrong(found, folder, xs) == {}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [*NETS, *geometries()])
@pytest.mark.sampled(4)
def test_folds_of_every_strategy(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, shape = (net(name), SHAPE) if name in NETS else geometries()[name]
    model = randomise(model) if name not in (*NETS, "deep") else model
    check([*folds(model, shape).values(), *folds(model.double(), shape).values()], tmp_path)


@pytest.mark.parametrize("offset", OFFSETS)
def test_constants_before_and_behind_a_network(offset: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), Offset(5, add=True))
    model = nn.Sequential(OFFSETS[offset](), features(), head)
    found = [cl.fold(model, SHAPE, strategy=strategy) for strategy in ("dense", "conv")]
    # Beside a mean, tiny samples leave no digits of their own.
    x = hard(SHAPE)[[0, 1, 4, 5]]
    assert wrong(found, tmp_path, [x, x]) == {}


def test_networks_of_the_zoo(tmp_path: Path) -> None:
    names = [record.name for record in cl.zoo.list() if record.dataset == "digits"]
    check([cl.zoo.load(name) for name in names], tmp_path)


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option_of_every_operation(dtype: torch.dtype, part: int, tmp_path: Path) -> None:
    """tests/recipe/c/test_export.py has them in C, a few programs for all of them."""
    cases = RECIPE_CASES[part::8]
    found = [with_types(case.build(), dtype) for case in cases]
    xs = [hard(fold.input_shape).to(dtype) for fold in found]
    others = [name for name in QUICK if name not in ("JavaScript", "ONNX Runtime")]
    faults = wrong(found, tmp_path, xs, others)
    floats = [i for i, fold in enumerate(found) if not integer_values(fold.recipe.operations)]
    chosen = [found[i] for i in floats]
    faults |= wrong(chosen, tmp_path, [xs[i] for i in floats], ("JavaScript",))
    plain = [samples(fold.input_shape, dtype) for fold in found]
    faults |= wrong(found, tmp_path, plain, ("ONNX Runtime",))
    assert {(cases[i].name, *key): error for (*key, i), error in faults.items()} == {}


@settings(max_examples=25, deadline=None)
@given(recipes())
def test_random_recipes(recipe: Recipe) -> None:
    found = [with_types(recipe, dtype) for dtype in DTYPES]
    xs = [samples(recipe.input_shape, fold.dtype, 2) for fold in found]
    with tempfile.TemporaryDirectory() as folder:
        assert wrong(found, Path(folder), xs, QUICK) == {}, recipe


@pytest.mark.parametrize("count", [layer.LONG_ROW + 1, 20_001])
def test_long_products_lose_no_digits(count: int, tmp_path: Path) -> None:
    """Sums of equal products are the hard case: each is rounded to the same side."""
    torch.manual_seed(0)
    random, equal = torch.rand(3, count), (torch.rand(3, 1) + 0.5).repeat(1, count)
    for weight in (random, equal):
        builder = RecipeBuilder((count,))
        held = {"weight": builder.constant("weight", weight)}
        held["bias"] = builder.constant("bias", weight[:, 0])
        recipe = builder.recipe(builder.add(layer.Matmul, INPUT, **held))
        x = (torch.rand(2, 1) + 0.5).repeat(1, count)
        exact = x.double() @ weight.double().T + weight[:, 0].double()
        for name in ALL:
            y = run(name, Folded(recipe, torch.float32, {}), tmp_path, x)
            assert relative_error(y, exact) < 5e-6, name
