"""Rewrite a recipe in operations that C has: bands as forms, other linear layers as products along axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .. import layer_operations as layer
from .. import places
from .. import point_operations as point
from ..operation import Operation
from ..places import Array, Table
from ..recipe import Recipe
from ..simplify import simplified


def lowered_for_c(recipe: Recipe) -> Recipe:
    """Return a simplified recipe with the same values, and constants as arrays of numpy in float64."""
    recipe = simplified(recipe.with_constants(lambda _, array: _double(array)))
    rewriter = _Rewriter(recipe)
    for operation in recipe.operations:
        rewriter.rewrite(operation)
    operations, wide = tuple(rewriter.operations), frozenset(rewriter.wide)
    return replace(recipe, operations=operations, constants=rewriter.constants, wide=wide).pruned()


def _double(array: Any) -> Array:
    return np.asarray(array.detach().cpu().to(torch.float64).numpy())


class _Rewriter:
    """Collect the operations and the constants of the simpler recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.constants: dict[str, Array] = dict(recipe.constants)
        self.wide = set(recipe.wide)  # names of constants
        self.operations: list[Operation] = []
        self._shapes = recipe.shapes()

    def rewrite(self, op: Operation) -> None:
        """Append an operation, or its replacement."""
        if isinstance(op, point.BandedForm):
            self._write_out(op)
        elif isinstance(op, layer.ConvTranspose):
            self._convolve(op)
        elif isinstance(op, (layer.AdaptiveAvgPool, layer.AvgPool)):
            tables = places.resampled(op, self._shapes[op.inputs[0]])
            self._along_axes(op, tables, op.outputs[0])
        else:
            self.operations.append(op)

    def _constant(self, op: Operation, what: str, array: Array) -> str:
        name = f"{op.outputs[0]}_{what}"
        while name in self.constants:
            name += "_"
        self.constants[name] = array
        return name

    def _write_out(self, op: point.BandedForm) -> None:
        """Append a band as one matrix."""
        size, width = op.size, op.width
        (total,) = self._shapes[op.inputs[0]]
        band = np.zeros((total, total))
        for start, block in zip(range(0, total, size), self.constants[op.band], strict=False):
            band[start : start + (width + 1) * size, start : start + size] += block
        rest = total - width * size
        band[rest:, rest:] += self.constants[op.last]
        factor, image = self._constant(op, "factor", band.T), f"{op.outputs[0]}.image"
        self.operations.append(layer.Matmul(op.inputs, (image,), weight=factor))
        self.operations.append(point.SumSquares((image,), op.outputs, weight=op.weight))

    def _convolve(self, op: layer.ConvTranspose) -> None:
        """Append a transposed convolution as a convolution of spread entries."""
        (x,), (y,) = op.inputs, op.outputs
        shape, weight = self._shapes[x], self.constants[op.weight]
        tables, turned = places.turned(op, shape, self._shapes[y], weight)
        spread = [(axis, table, np.ones(())) for axis, table in enumerate(tables, 1)]
        z, axes = f"{y}.spread", len(tables)  # builders give no such names
        self._along_axes(op, spread, z)
        name, options = self._constant(op, "kernel", turned), {"stride": (1,) * axes}
        options |= {"padding": (0,) * axes, "dilation": op.dilation}
        conv = layer.Conv((z,), op.outputs, weight=name, bias=op.bias, groups=op.groups, **options)
        self.operations.append(conv)

    def _along_axes(
        self, op: Operation, tables: Iterable[tuple[int, Table, Array]], result: str
    ) -> None:
        """Append products with small matrices, axis by axis; permutations bring each axis to the end."""
        value, shape = op.inputs[0], self._shapes[op.inputs[0]]
        order = tuple(range(len(shape)))
        steps: list[Operation] = []
        for axis, table, weights in tables:
            matrix = places.as_matrix(shape[axis], table, weights)
            weight = self._constant(op, "matrix", matrix)
            turn = (*order[:axis], *order[axis + 1 :], axis)
            back = tuple(np.argsort(turn).tolist())
            a, b, c = (f"{result}.{axis}{letter}" for letter in "abc")
            steps.append(layer.Permute((value,), (a,), order=turn))
            steps.append(layer.Matmul((a,), (b,), weight=weight))
            steps.append(layer.Permute((b,), (c,), order=back))
            value, shape = c, (*shape[:axis], len(matrix), *shape[axis + 1 :])
        self.operations += [*steps, layer.Reshape((value,), (result,), shape=shape)]
