"""The numpy runtime: every operation and option against torch, without torch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.numpy import network
from conformallayers.recipe.numpy.network import RUN, Network
from conformallayers.recipe.operation import OPERATIONS
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from oracle import relative_error
from recipe_cases import FORMULAS, RECIPE_CASES, RecipeCase

LIMITS = {torch.float64: 1e-12, torch.float32: 5e-6}
BY_NAME = {case.name: case for case in RECIPE_CASES}


def runtimes(recipe: Recipe, dtype: torch.dtype) -> tuple[Network, RecipeModule]:
    """Return a recipe with equal constants in numpy and in torch."""

    def cast(name: str, array: Tensor) -> Tensor:
        if not array.is_floating_point():  # indices
            return array
        return array.double() if name in recipe.wide else array.to(dtype)

    tensors = recipe.with_constants(cast)
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


@pytest.mark.parametrize("rule", FORMULAS)
@pytest.mark.parametrize("size", [1e6, 1e-6])
def test_maps_beyond_the_range_are_rescaled(rule: str, size: float) -> None:
    builder = RecipeBuilder((2, 5))
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=("unit", "peak", "tau"))
    kernel = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = builder.constant("weight", size * kernel)
    z = builder.add(layer.Conv, unit, weight=weight, stride=(1,), padding=(1,), dilation=(1,))
    names = "z", "peak", "tau", "n"
    z, m, tau, n = builder.add_many(point.Rescale, z, m, tau, names=names, weight=size**-2)
    tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS[rule])
    y = builder.add(point.Divide, z, tau, m, name="y", scale=1 / size)
    for dtype, limit in LIMITS.items():
        net, module = runtimes(builder.recipe(y), dtype)
        x = samples(net.input_shape, dtype)
        with torch.no_grad():
            expected = module(x)
        assert expected[:6].isfinite().all()
        assert expected[0].norm() > 1e-3
        assert relative_error(torch.from_numpy(net(x.numpy())), expected) < limit


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


def test_network_says_what_it_is() -> None:
    net, _ = runtimes(BY_NAME["slice"].build(), torch.float32)
    assert repr(net) == "Network((4, 3, 5) → (4, 2, 5), dtype=float32, strategy='dense')"
    assert (net.origin, net.labels, net.about) == (None, None, None)
    assert str(net.recipe).startswith("x: (4, 3, 5) → (4, 2, 5)\n  y = slice(x;")
    whole = np.arange(60, dtype=np.int16).reshape(1, 4, 3, 5)
    assert net(whole).dtype == np.float32
    np.testing.assert_array_equal(net(whole), net(whole.astype(np.float64)))


@pytest.mark.parametrize("name", ["slice", "permute", "reshape"])
def test_results_have_memory_of_their_own(name: str) -> None:
    net, _ = runtimes(BY_NAME[name].build(), torch.float32)
    x = np.ones((2, *net.input_shape), np.float32)
    y = net(x)
    y += 1
    assert (x == 1).all()
    assert y.flags.c_contiguous


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 3, 5)), r"Network: expected a batch.*\(4, 3, 5\), got an unbatched.*x\[None"),
        (np.zeros((1, 3)), "Fold for this shape"),
        (np.float32(1), "an array of shape"),
        (np.zeros((1, 4, 3, 5), complex), "expected an array of real numbers, got complex128"),
    ],
)
def test_wrong_inputs_are_refused(x: Any, message: str) -> None:
    net, _ = runtimes(BY_NAME["slice"].build(), torch.float32)
    with pytest.raises(cl.ConformalError, match=message):
        net(x)


def test_torch_modules_are_refused_by_name() -> None:
    builder = RecipeBuilder((3,))
    called = builder.module("attention", nn.Identity())
    y = builder.add(layer.Call, INPUT, module=called, what="MultiheadAttention", result=(3,))
    with pytest.raises(
        cl.ConformalError,
        match=r'operations supported by numpy, got MultiheadAttention\. .*nn\.Flatten.*strategy="dense"',
    ):
        runtimes(builder.recipe(y), torch.float32)


PROGRAM = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "scipy"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Forbidden())
import pickle
import numpy as np
from conformallayers.recipe.numpy.network import Network

recipe, x = pickle.load(open(sys.argv[1], "rb"))
net = Network(recipe, x.dtype, strategy="dense", origin=None, labels=None, about=None)
np.save(sys.argv[2], net(x))
"""


@pytest.mark.parametrize("name", ["rebase and bias published", "elementwise gelu"])
def test_it_runs_where_torch_is_not(name: str, tmp_path: Path) -> None:
    net, _ = runtimes(BY_NAME[name].build(), torch.float64)
    x = samples(net.input_shape, torch.float64).numpy()
    (tmp_path / "recipe.pickle").write_bytes(pickle.dumps((net.recipe, x)))
    environment = {**os.environ, "PYTHONPATH": str(Path(cl.__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, "recipe.pickle", "y.npy"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), net(x))
