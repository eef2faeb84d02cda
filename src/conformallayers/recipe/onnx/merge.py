"""Rewrite a recipe for ONNX: merge constant factors into weights, and poolings of several kinds into one.

A value may be stored times a positive factor, one number or one for each channel, which later weights divide
by. Factors are chosen so that energies need no weights and divisions no scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod, sqrt
from typing import Any

import numpy as np

from .. import layer_operations as layer
from .. import places
from .. import point_operations as point
from ..operation import Operation, Shape, ShapeOf
from ..places import Array
from ..recipe import Recipe
from .points import ROW

_PASS = (
    *(layer.Slice, layer.AvgPool, layer.AdaptiveAvgPool, layer.NormPool),
    *(layer.AddConstant, layer.Multiply, layer.Permute),
)
_LEAST_SHIFT = 1e-6  # the least norm of a constant beside which tiny values do not matter
_LEAST_WEIGHT = 1e-12  # the least weight of a channel whose squares stay in the range of float32
_MODERATE = 1e-12, 1e12  # factors that keep weights in the range of float32


@dataclass(frozen=True, kw_only=True)
class RmsPool(Operation):
    """Average windows: the channels themselves, or the root of the mean of their squares where ``norms`` is True.

    Only ONNX has this operation.
    """

    kind = "rms_pool"
    averages: layer.AvgPool
    norms: tuple[bool, ...]  # (channels,)

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        """Return the shape of the averages."""
        return self.averages.shapes(inputs, constant)

    def divides(self, shape: Shape) -> bool:
        """Tell whether every number of a map is in one window."""
        kernel, spatial = self.averages.kernel, shape[1:]
        whole = not any(n % k for n, k in zip(spatial, kernel, strict=True))
        return whole and kernel == self.averages.stride


def pooling_of(operations: Iterable[Operation], value: str) -> RmsPool | None:
    """Return the pooling that squares a value, if there is one."""
    found = (op for op in operations if isinstance(op, RmsPool) and op.inputs == (value,))
    return next(found, None)


def mean_windows(shape: Shape, pool: RmsPool | None) -> Shape | None:
    """Return the windows to average squares over, before channels are averaged to an energy.

    They are those of a pooling that squares anyway, or single entries. None: a channel has too many for float32.
    """
    spatial = shape[1:]
    windows = (1,) * len(spatial)
    if pool is not None and pool.divides(shape):
        windows = pool.averages.kernel
    return windows if spatial and prod(spatial) // prod(windows) <= ROW else None


def is_shifted_behind(recipe: Recipe, value: str) -> bool:
    """Tell whether a constant is added behind a value, beside which tiny entries do not matter."""
    reached = {value}
    for op in recipe.operations:
        if reached.isdisjoint(op.inputs):
            continue
        reached.update(op.outputs)
        added = op.value if isinstance(op, layer.AddConstant) else getattr(op, "bias", None)
        if added is not None and np.linalg.norm(np.float64(recipe.constants[added])) > _LEAST_SHIFT:
            return True
    return False


def merged(recipe: Recipe) -> Recipe:
    """Return a recipe with the same result and fewer factors, for coordinates that are never 0."""
    merger = _Merger(recipe)
    for operation in recipe.operations:
        merger.rewrite(operation)
    operations, output = tuple(merger.operations), merger.name(recipe.output)
    return replace(
        recipe, operations=operations, output=output, constants=merger.constants
    ).pruned()


class _Merger:
    """Collect the operations and constants of the shorter recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.shapes = recipe, recipe.shapes()
        self.operations: list[Operation] = []
        self.constants: dict[str, Any] = dict(recipe.constants)
        self.factors: defaultdict[str, Array] = defaultdict(lambda: np.ones(()))
        self.names: dict[str, str] = {}  # old value → the value that replaces it
        self.writer = {name: op for op in recipe.operations for name in op.outputs}
        self.readers: defaultdict[str, list[Operation]] = defaultdict(list)
        for op in recipe.operations:
            for name in op.inputs:
                self.readers[name].append(op)
        self.takes_factor = cache(self._takes_factor)
        found = ((op.outputs[0], self._pool(op)) for op in recipe.operations)
        self.pools = {name: pool for name, pool in found if pool is not None}

    def name(self, value: str) -> str:
        """Return the value that replaces a value of the old recipe."""
        return self.names.get(value, value)

    def _takes_factor(self, value: str, channels: bool) -> bool:
        """Tell whether all readers of a value can undo a positive factor, or one for each channel."""
        return value != self.recipe.output and all(
            self._undoes(op, value, channels) for op in self.readers[value]
        )

    def _undoes(self, op: Operation, value: str, channels: bool) -> bool:
        if isinstance(op, layer.Conv):
            return op.groups == 1
        if isinstance(op, layer.Matmul):
            return len(self.shapes[value]) == 1
        if isinstance(op, point.SumSquares):
            return not channels
        if isinstance(op, (point.Rebase, point.Divide)):
            return moderate(op.scale) and (not channels or self.takes_factor(op.outputs[0], True))
        if isinstance(op, layer.Permute) and channels:
            return False
        if isinstance(op, layer.Concatenate):
            return op.axis == 0 and self.takes_factor(op.outputs[0], True)
        if isinstance(op, layer.Reshape):
            rows = len(op.shape) == 1  # a row of all entries keeps those of a channel together
            return (rows or not channels) and self.takes_factor(op.outputs[0], channels)
        rectified = isinstance(op, layer.Elementwise) and op.function in ("relu", "abs")
        passes = rectified or isinstance(op, _PASS)
        return passes and self.takes_factor(op.outputs[0], channels)

    def rewrite(self, op: Operation) -> None:
        """Append an operation, or its replacement, and set the factor of its first output."""
        factor = self.factors[op.inputs[0]]
        out = op.outputs[0]
        new = replace(op, inputs=tuple(self.name(name) for name in op.inputs))
        if isinstance(new, (layer.Conv, layer.Matmul)):
            new = self._weighted(new, factor)
        elif isinstance(new, point.SumSquares):
            new = replace(new, weight=rounded(new.weight / float(factor) ** 2))
        elif isinstance(new, (point.Rebase, point.Divide)):
            if self.takes_factor(out, factor.ndim > 0) and moderate(new.scale):
                self.factors[out] = factor / new.scale
                new = replace(new, scale=1.0)
            else:
                new = replace(new, scale=rounded(new.scale / float(factor)))
            # τ is 1 where no activation has changed it since the last rebase.
            of_point = isinstance(self.writer[op.inputs[1]], point.Rebase)
            if isinstance(new, point.Divide) and new.scale == 1 and of_point:
                self.names[out] = new.inputs[0]
                return
        elif isinstance(op, layer.Multiply) and self._leaves_out(op, factor):
            return
        elif (pool := self.pools.get(out)) is not None:
            (source,) = pool.inputs
            sizes = np.where(pool.norms, 1 / sqrt(prod(pool.averages.kernel)), 1.0)
            self.factors[out] = self.factors[source] * (sizes[0] if all(pool.norms) else sizes)
            new = replace(pool, inputs=(self.name(source),))
        elif isinstance(new, layer.AddConstant):
            if self._add_bias(new, factor):
                return
            if (factor != 1).any():
                across = factor.reshape((*factor.shape, *[1] * (len(self.shapes[out]) - 1)))
                value = self._array(new.value) * across
                new = replace(new, value=self._constant(f"{out}.value", value))
                self.factors[out] = factor
        elif isinstance(new, layer.Concatenate):
            found = [self.factors[name] for name in op.inputs]
            if any(f.ndim or f != found[0] for f in found):
                shapes = [self.shapes[name][0] for name in op.inputs]
                found = [np.broadcast_to(f, n) for f, n in zip(found, shapes, strict=True)]
                self.factors[out] = np.concatenate(found)
            else:
                self.factors[out] = found[0]
        elif isinstance(new, layer.Slice) and new.axis == 0 and factor.ndim:
            self.factors[out] = factor[new.start : new.stop]
        elif isinstance(new, layer.Reshape) and factor.ndim:
            self.factors[out] = np.repeat(factor, prod(self.shapes[out]) // len(factor))
        elif self.takes_factor(op.inputs[0], factor.ndim > 0):
            self.factors[out] = factor
        self.operations.append(new)

    def _weighted(self, op: layer.Conv | layer.Matmul, factor: Array) -> Operation:
        """Divide the weights by the factor of the input, and choose one for the output."""
        out = op.outputs[0]
        weight = self._array(op.weight)
        own = self._wanted(out) if self.takes_factor(out, False) else 1.0
        if own == 1 and (factor == 1).all():
            return op
        self.factors[out] = np.array(own)
        across = (1, *np.shape(factor), *[1] * (weight.ndim - 2))
        changed = self._constant(f"{out}.weight", weight * own / np.reshape(factor, across))
        bias = op.bias
        if bias is not None:
            bias = self._constant(f"{out}.bias", self._array(bias) * own)
        return replace(op, weight=changed, bias=bias)

    def _wanted(self, value: str) -> float:
        """Return the factor of a value for which its energy needs no weight, or its division no scale."""
        for op in self.readers[value]:
            if isinstance(op, point.SumSquares) and moderate(op.weight):
                pool = pooling_of(self.pools.values(), value)
                shape = self.shapes[value]
                averaged = mean_windows(shape, pool) is not None
                return sqrt(op.weight * (prod(shape[1:]) if averaged else 1))
        for op in self.readers[value]:
            if isinstance(op, point.Divide) and not self.takes_factor(op.outputs[0], False):
                return op.scale if moderate(op.scale) else 1.0
        return 1.0

    def _leaves_out(self, op: layer.Multiply, factor: Array) -> bool:
        """Merge a positive number into the weights behind it, if all of them can take it."""
        number = self._array(op.factor)
        out = op.outputs[0]
        if number.size > 1 or not moderate(number.item()):
            return False
        if not self.takes_factor(out, factor.ndim > 0):
            return False
        self.names[out], self.factors[out] = self.name(op.inputs[0]), factor / number.item()
        return True

    def _add_bias(self, op: layer.AddConstant, factor: Array) -> bool:
        """Merge a constant into the bias of the product before it, if nothing else reads the product."""
        (value,) = op.inputs
        made = self.operations[-1] if self.operations else None
        names = [value, *(name for name, stands in self.names.items() if stands == value)]
        alone = all(len(self.readers[name]) == 1 for name in names)
        if not isinstance(made, layer.Matmul) or made.outputs != (value,) or not alone:
            return False
        if self.recipe.output in names or len(self.shapes[value]) != 1:
            return False
        total = np.broadcast_to(self._array(op.value) * factor, self.shapes[value])
        if made.bias is not None:
            total = total + self._array(made.bias)
        bias = self._constant(f"{op.outputs[0]}.bias", total)
        self.operations[-1] = replace(made, bias=bias)
        self.names[op.outputs[0]], self.factors[op.outputs[0]] = value, factor
        return True

    def _may_be_tiny(self, source: str, out: str) -> bool:
        """Tell whether squares may underflow although their roots matter.

        This happens beside an offset unless a constant is added behind, and in channels with tiny weights.
        """
        first = (op for op in self.recipe.operations if isinstance(op, point.Normalize))
        if any(op.offset for op in first) and not is_shifted_behind(self.recipe, out):
            return True
        made, rows = self.writer.get(source), slice(None)
        if isinstance(made, layer.Slice) and made.axis == 0:
            rows = slice(made.start, made.stop)
            made = self.writer.get(made.inputs[0])
        if not isinstance(made, (layer.Conv, layer.Matmul)):
            return False
        weight = self._array(made.weight)[rows]
        sizes = np.abs(weight.reshape(len(weight), -1)).max(1)
        return bool(((sizes > 0) & (sizes < _LEAST_WEIGHT)).any())

    def _array(self, name: str) -> Array:
        return np.asarray(self.constants[name], np.float64)

    def _constant(self, name: str, array: Array) -> str:
        self.constants[name] = array.astype(np.float32)
        return name

    def _pool(self, op: Operation) -> RmsPool | None:
        """Return the pooling that replaces an operation and those before it, if windows and factors allow it.

        The operation is a NormPool, or a concatenation of poolings of consecutive slices of one value.
        """
        if isinstance(op, layer.Concatenate) and op.axis == 0:
            parts = [self.writer.get(name) for name in op.inputs]
            slices = [self.writer.get(part.inputs[0]) if part else None for part in parts]
        elif isinstance(op, layer.NormPool):
            parts, stop = [op], self.shapes[op.inputs[0]][0]
            slices = [layer.Slice(op.inputs, (), axis=0, start=0, stop=stop)]
        else:
            return None
        norms: list[bool] = []
        windows = set()
        for part, piece in zip(parts, slices, strict=True):
            if not isinstance(part, (layer.AvgPool, layer.NormPool)):
                return None
            if not isinstance(piece, layer.Slice) or (piece.axis, piece.start) != (0, len(norms)):
                return None
            averages = part.averages if isinstance(part, layer.NormPool) else part
            norms += [isinstance(part, layer.NormPool)] * (piece.stop - piece.start)
            windows.add(replace(averages, inputs=piece.inputs, outputs=op.outputs))
        if len(windows) > 1 or not any(norms):
            return None
        (window,) = windows
        (source,), shape = window.inputs, self.shapes[window.inputs[0]]
        divisors = places.divisors(window, shape, self.shapes[op.outputs[0]])
        complete = bool((divisors == prod(window.kernel)).all()) and not any(window.padding)
        fits = complete and len(norms) == shape[0]
        if not fits or not self.takes_factor(op.outputs[0], not all(norms)):
            return None
        if self._may_be_tiny(source, op.outputs[0]):
            return None
        return RmsPool(window.inputs, op.outputs, averages=window, norms=tuple(norms))


def moderate(factor: float) -> bool:
    """Tell whether a factor leaves weights and scalars in the range of float32."""
    return _MODERATE[0] < factor < _MODERATE[1]


def rounded(number: float) -> float:
    """Return a number, and 1 for a number that is 1 up to rounding."""
    return 1.0 if abs(number - 1) < 1e-12 else number
