"""What the tests of int8 share: a fold in int8, run by torch, numpy, ONNX Runtime and C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import conformallayers.numpy as cln
from conformallayers.recipe.integer_operations import integer_values
from conformallayers.recipe.numpy.operations import RUN as NUMPY
from conformallayers.recipe.recipe import INPUT, Recipe, Runtime
from conformallayers.recipe.torch.operations import RUN as TORCH
from runtimes import ALL, run, takes


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether all numbers are equal; none is NaN."""
    return a.dtype == b.dtype and torch.equal(a, b)


def torch_numbers(fold: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = fold(x)
    return found


def all_values(run: Runtime, holder: Any, x: Any) -> dict[str, Any]:
    """Return the values of all operations of a fold or network, by name."""
    values = {INPUT: x}
    for operation in holder.recipe.operations:
        run.step(operation, holder, values)
    return values


def whole_values(recipe: Recipe) -> list[str]:
    return sorted(integer_values(recipe.operations))


def assert_same_everywhere(fold: Any, x: Tensor, folder: Path) -> None:
    """Run samples in every runtime: every output is equal, and in torch and numpy every integer."""
    expected = torch_numbers(fold, x)
    for name in ALL:
        if name != "JavaScript" and takes(name, fold):
            assert same(run(name, fold, folder, x), expected), name
    net = cln.load(folder / "net.safetensors")
    with torch.inference_mode(), np.errstate(all="ignore"):
        values, others = all_values(TORCH, fold, x), all_values(NUMPY, net, x.numpy())
    for name in whole_values(fold.recipe):
        assert same(values[name].contiguous(), torch.from_numpy(np.ascontiguousarray(others[name])))
