"""Simplify a recipe for runtimes that run it from a file: ONNX, C and JavaScript.

m is 1 behind an embedding, and τ is 1 behind a rebase if an offset keeps t from 0. Formulas are written without
them, divisions by 1 become factors, and factors and constants go into the product before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..nn.formula import FUNCTIONS, Formula
from . import layer_operations as layer
from . import point_operations as point
from .places import Array
from .recipe import Operation, Recipe

_ONE = Formula(1.0)
# Products and quotients with 1 are left out.
_SHORT: dict[str, Callable[..., Any]] = {
    **{name: partial(lambda head, x: Formula(head, (x,)), name) for name in FUNCTIONS},
    "*": lambda a, b: b if a == _ONE else a if b == _ONE else a * b,
    "/": lambda a, b: a if b == _ONE else a / b,
}


def simplified(recipe: Recipe) -> Recipe:
    """Return a recipe of fewer operations with the same result; constants are arrays of numpy."""
    rewriter = _Rewriter(recipe)
    for operation in recipe.operations:
        rewriter.rewrite(operation)
    operations = tuple(rewriter.operations)
    output = rewriter.names.get(recipe.output, recipe.output)
    return replace(
        recipe, operations=operations, output=output, constants=rewriter.constants
    ).pruned()


class _Rewriter:
    """Collect the operations and constants of the shorter recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.shapes = recipe, recipe.shapes()
        self.operations: list[Operation] = []
        self.constants: dict[str, Any] = dict(recipe.constants)
        self.names: dict[str, str] = {}  # old value → the value that replaces it
        self.readers = Counter(name for op in recipe.operations for name in op.inputs)
        embeddings = [op for op in recipe.operations if isinstance(op, point.Normalize)]
        positive = all(op.offset > 0 for op in embeddings)
        self.ones = {op.outputs[1] for op in embeddings}  # values that are 1 for every sample
        for op in recipe.operations:
            if isinstance(op, point.Rebase) and positive:
                self.ones.add(op.outputs[2])

    def rewrite(self, op: Operation) -> None:
        """Append an operation, or its replacement."""
        op = replace(op, inputs=tuple(self.names.get(name, name) for name in op.inputs))
        if isinstance(op, point.Advance):
            known = zip(("tau", "m"), op.inputs[:2], strict=True)
            values = {name: _ONE if x in self.ones else Formula(name) for name, x in known}
            formula = op.parsed.evaluate(values | {"n": Formula("n")}, _SHORT, Formula)
            op = replace(op, formula=str(formula))
        elif isinstance(op, point.Divide) and op.inputs[1] in self.ones:
            factor = self._constant(op, "factor", np.array(op.scale))
            op = layer.Multiply(op.inputs[:1], op.outputs, factor=factor)
        if not (isinstance(op, (layer.Multiply, layer.AddConstant)) and self._merge(op)):
            self.operations.append(op)

    def _merge(self, op: layer.Multiply | layer.AddConstant) -> bool:
        """Merge a factor or a constant of channels into the product before it, if nothing else reads that."""
        made = self.operations[-1] if self.operations else None
        (value,), (result,) = op.inputs, op.outputs
        if not isinstance(made, (layer.Conv, layer.Matmul)) or made.outputs != (value,):
            return False
        if made.fixed_dtypes():  # of integers
            return False
        named = [value, *(old for old, new in self.names.items() if new == value)]
        if self.recipe.output in named or sum(self.readers[name] for name in named) != len(named):
            return False
        ((_, name),) = op.constants()
        shape = self.shapes[result]
        channels = (
            shape[-1:] if isinstance(made, layer.Matmul) else (shape[0], *[1] * len(shape[1:]))
        )
        array = np.asarray(self.constants[name], np.float64)
        if np.broadcast_shapes(array.shape, channels) != channels:
            return False
        numbers = np.broadcast_to(array, channels).ravel()
        bias = np.zeros(len(numbers)) if made.bias is None else self._array(made.bias)
        if isinstance(op, layer.Multiply):
            weight = self._array(made.weight)
            across = numbers.reshape(-1, *[1] * (weight.ndim - 1))
            made = replace(made, weight=self._constant(op, "weight", weight * across))
            numbers = bias * numbers
        else:
            numbers = bias + numbers
        if made.bias is not None or isinstance(op, layer.AddConstant):
            made = replace(made, bias=self._constant(op, "bias", numbers))
        self.operations[-1], self.names[result] = made, value
        return True

    def _array(self, name: str) -> Array:
        return np.asarray(self.constants[name], np.float64)

    def _constant(self, op: Operation, what: str, array: Array) -> str:
        name = f"{op.outputs[0]}.{what}"
        self.constants[name] = array
        return name
