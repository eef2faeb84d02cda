"""Modules as operations: each gives the numbers of its torch module, in every runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from cases import HOMOGENEOUS_CASES, LINEAR_CASES, Case
from conformallayers.folding.lower import LOWER, Lowering, by_sample, find_lowering
from conformallayers.nn.layers import Channels, ChannelScale, Permute, Rescale
from conformallayers.recipe.layer_operations import Call
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from oracle import randomise, relative_error
from runtimes import QUICK, with_types, wrong
from support import DTYPES, samples

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def centre() -> cl.Centre:
    module = cl.Centre((4, 6))
    module.fit(torch.rand(3, 4, 6))
    return module


FUNCTIONS: tuple[Callable[[], nn.Module], ...] = (
    lambda: Channels(1, 3, 4),
    nn.ReLU6,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.GELU,
    lambda: nn.Softmax(dim=1),
    lambda: nn.Softmax(dim=-1),
    lambda: nn.LogSoftmax(dim=2),
    lambda: nn.Linear(6, 3),
    lambda: nn.Conv1d(4, 3, 3, padding=1),
    lambda: nn.ConvTranspose1d(4, 3, 3),
    lambda: nn.ConstantPad1d((1, 2), 0.7),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.AlphaDropout(0.3),
    lambda: ChannelScale(torch.rand(4)),
    lambda: Rescale(torch.rand(4, 1), torch.rand(4, 6)),
    lambda: Permute((1, 0)),
    centre,
)
HEAD_CASES = [Case(str(build()), build, (4, 6)) for build in FUNCTIONS]
CASES: dict[str, list[Case]] = {}  # by the class of the module
for case in (*LINEAR_CASES, *HOMOGENEOUS_CASES, *HEAD_CASES):
    CASES.setdefault(type(case.build()).__name__, []).append(case)


def module_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return randomise(case.build()).double().eval().requires_grad_(False)


def lowered(module: nn.Module, x: Tensor) -> RecipeModule:
    builder = RecipeBuilder(tuple(x.shape[1:]))
    shape = tuple(module(x).shape[1:])
    return RecipeModule(builder.recipe(Lowering(builder).module(INPUT, module, shape)), x.dtype)


@pytest.mark.parametrize("kind", CASES)
def test_numbers_are_those_of_the_module(kind: str, tmp_path: Path) -> None:
    recipes, xs = list[Recipe](), list[Tensor]()
    for case in CASES[kind]:
        module = module_of(case)
        x = samples(case.input_shape, torch.float64)
        y = module(x)
        run = lowered(module, x)
        assert bool(run.calls) == ("linear" in case.name or "bicubic" in case.name), case.name
        assert relative_error(run(x), y) <= 1e-12, case.name
        if not run.calls:
            recipes.append(run.recipe)
            xs.append(x)
    for dtype in DTYPES:
        found = [with_types(recipe, dtype) for recipe in recipes]
        assert wrong(found, tmp_path, [x.to(dtype) for x in xs], QUICK) == {}


def test_every_lowering_has_a_case() -> None:
    modules = [case.build() for cases in CASES.values() for case in cases]
    missing = [kind for kind in LOWER if not any(isinstance(m, kind) for m in modules)]
    assert not missing


def test_a_forward_of_its_own_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    patched = nn.ReLU()
    patched.forward = torch.tanh  # type: ignore[method-assign]
    x = samples((4,), torch.float64)
    for module in (Doubled(4, 3).double().requires_grad_(False), patched, nn.Softmax(dim=0)):
        run = lowered(module, x)
        (operation,) = run.recipe.operations
        assert isinstance(operation, Call)
        assert operation.what == type(module).__name__
        assert torch.equal(run(x), module(x))
    assert find_lowering(Doubled(4, 3)) is None
    assert find_lowering(patched) is None
    assert find_lowering(cl.Linear(4, 3)) is find_lowering(nn.Linear(4, 3)) is LOWER[nn.Linear]


@pytest.mark.parametrize(
    "module",
    [
        nn.MaxPool1d(2, return_indices=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.AdaptiveMaxPool1d(2, return_indices=True),
        nn.LPPool1d(3, 2),
        nn.LPPool2d(1.5, 2),
    ],
    ids=str,
)
def test_pools_that_are_none_of_the_operations_are_called(module: nn.Module) -> None:
    axes = int(type(module).__name__[-2])
    builder = RecipeBuilder((2, *[6] * axes))
    recipe = builder.recipe(Lowering(builder).module(INPUT, module, (2, *[3] * axes)))
    (operation,) = recipe.operations
    assert isinstance(operation, Call)


def test_a_function_of_samples_is_known_as_one() -> None:
    assert by_sample(nn.ReLU())
    assert by_sample(nn.BatchNorm2d(3))
    assert by_sample(nn.ConstantPad2d(1, 2.0))
    assert not by_sample(nn.BatchNorm2d(3, track_running_stats=False))
    of_batch = nn.BatchNorm1d(8, track_running_stats=False)
    assert not by_sample(cl.Residual(nn.Linear(8, 8), of_batch))
    assert not by_sample(nn.Flatten(0))
    assert not by_sample(nn.Module())
