"""What the tests of the ONNX runtime share: recipes as modules of torch and as sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conformallayers.recipe.onnx.export import onnx_model
from conformallayers.recipe.recipe import INPUT, Operation, Recipe, RecipeBuilder
from oracle import relative_error
from programs import Fold

runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
LIMIT = 1e-5


def single(kind: type[Operation], shape: tuple[int, ...], **fields: Any) -> Recipe:
    """Return a recipe of one operation; tensors among its fields become constants."""
    builder = RecipeBuilder(shape)
    for name, value in fields.items():
        if isinstance(value, Tensor):
            fields[name] = builder.constant(name, value)
    return builder.recipe(builder.add(kind, INPUT, **fields))


def session(recipe: Recipe, opset: int = 20) -> Callable[[Tensor], Tensor]:
    """Return the recipe as a function that ONNX Runtime runs."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    data = onnx_model(recipe, opset).SerializeToString()
    held = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(held.run(["y"], {"x": x.numpy()})[0])


def node_kinds(recipe: Recipe, opset: int = 20) -> list[str]:
    return [node.op_type for node in onnx_model(recipe, opset).graph.node]


def error(recipe: Recipe, x: Tensor) -> float:
    """Return the relative error of ONNX Runtime against torch, NaN in the same places."""
    network = Fold(recipe)
    with torch.no_grad():
        return relative_error(session(network.recipe)(x), network(x))
