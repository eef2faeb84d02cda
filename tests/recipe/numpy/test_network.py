"""The numpy runtime: every operation and option against torch, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.numpy import network
from conformallayers.recipe.numpy.network import RUN, Network
from conformallayers.recipe.recipe import INPUT, OPERATIONS, Recipe, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from oracle import relative_error
from recipe_cases import RECIPE_CASES, RecipeCase

LIMITS = {torch.float64: 1e-12, torch.float32: 5e-6}
BY_NAME = {case.name: case for case in RECIPE_CASES}


def runtimes(recipe: Recipe, dtype: torch.dtype) -> tuple[Network, RecipeModule]:
    """Return a recipe with equal constants in numpy and in torch."""

    fixed = recipe.fixed_dtypes()
    tensors = recipe.with_constants(lambda name, array: array if name in fixed else array.to(dtype))
    arrays = tensors.with_constants(lambda name, array: array.numpy())
    notes: dict[str, Any] = {"strategy": "dense", "origin": None, "labels": None, "about": None}
    kind = np.dtype(str(dtype).removeprefix("torch."))
    return Network(arrays, kind, **notes), RecipeModule(tensors, dtype)


def samples(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return samples of several scales, one of them zero, two with NaN or infinity."""
    x = torch.randn(9, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[1], x[2], x[3] = 0, 1e-20 * x[2], 1e15 * x[3]
    x[4], x[5] = 1e3 * x[4], 1e-3 * x[5]
    x[6].view(-1)[1], x[7] = float("nan"), float("nan")
    return x.to(dtype)


def test_every_operation_is_there() -> None:
    assert set(OPERATIONS.values()) - {layer.Call} == set(RUN)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", RECIPE_CASES, ids=lambda case: case.name)
def test_numbers_are_those_of_torch(case: RecipeCase, dtype: torch.dtype) -> None:
    net, module = runtimes(case.build(), dtype)
    x = samples(net.input_shape, dtype)
    y = torch.from_numpy(net(x.numpy()))
    with torch.no_grad():
        expected = module(x)
    assert y.dtype == dtype
    assert relative_error(y, expected) < LIMITS[dtype]
    alone = torch.from_numpy(net(x[:1].numpy()))  # no sample looks at another one
    assert relative_error(alone, expected[:1]) < LIMITS[dtype]
    assert net(np.zeros((0, *net.input_shape))).shape == (0, *net.output_shape)


def test_large_batches_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = BY_NAME["points projective"].build()
    whole, _ = runtimes(recipe, torch.float64)
    monkeypatch.setattr(network, "CHUNK_BYTES", 7 * 8 * recipe.peak_elements())
    chunked, _ = runtimes(recipe, torch.float64)
    assert (whole.chunk_size > 1000, chunked.chunk_size) == (True, 7)
    lengths: list[int] = []
    run = chunked._run
    monkeypatch.setattr(chunked, "_run", lambda x: lengths.append(len(x)) or run(x))
    x = np.random.default_rng(0).normal(size=(101, *whole.input_shape))
    np.testing.assert_allclose(chunked(x), whole(x), rtol=1e-12)
    assert lengths == [7] * 14 + [3]
    lengths.clear()
    chunked(x[:14])
    assert lengths == [14]


@pytest.mark.parametrize("name", ["slice", "permute", "reshape"])
def test_results_have_memory_of_their_own(name: str) -> None:
    net, _ = runtimes(BY_NAME[name].build(), torch.float32)
    x = np.ones((2, *net.input_shape), np.float32)
    y = net(x)
    y += 1
    assert (x == 1).all()
    assert y.flags.c_contiguous


def test_torch_modules_are_refused_by_name() -> None:
    builder = RecipeBuilder((3,))
    called = builder.module("attention", nn.Identity())
    y = builder.add(layer.Call, INPUT, module=called, what="MultiheadAttention", result=(3,))
    with pytest.raises(
        cl.ConformalError,
        match=r'operations supported by numpy, got MultiheadAttention\. .*strategy="dense".*cl\.fold\(model\.part',
    ):
        runtimes(builder.recipe(y), torch.float32)
