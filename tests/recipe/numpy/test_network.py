"""Networks in numpy: chunks, and results of their own; integration/test_runtimes.py has their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.numpy import network
from conformallayers.recipe.numpy.network import RUN, Network
from conformallayers.recipe.recipe import OPERATIONS
from recipe_cases import RECIPE_CASES

BY_NAME = {case.name: case for case in RECIPE_CASES}


def network_of(name: str) -> Network:
    """Return a recipe with float64 constants as a network of numpy."""
    notes: dict[str, Any] = {"strategy": "dense", "origin": None, "labels": None, "about": None}
    recipe = BY_NAME[name].build().with_constants(lambda name, array: array.numpy())
    return Network(recipe, np.dtype(np.float64), **notes)


def test_every_operation_is_there() -> None:
    assert set(OPERATIONS.values()) - {layer.Call} == set(RUN)


def test_large_batches_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = network_of("points projective")
    monkeypatch.setattr(network, "CHUNK_BYTES", 7 * 8 * whole.recipe.peak_elements())
    chunked = network_of("points projective")
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
    net = network_of(name)
    x = np.ones((2, *net.input_shape))
    y = net(x)
    y += 1
    assert (x == 1).all()
    assert y.flags.c_contiguous
