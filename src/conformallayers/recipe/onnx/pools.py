"""Poolings of several kinds as one operation of ONNX: slices of a map that are averaged, others whose norms are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from .. import layer_operations as layer
from .. import places
from ..operation import Operation, Shape, ShapeOf
from ..places import Array
from ..recipe import Recipe
from .graph import OnnxGraph, Value
from .layers import RUN


@dataclass(frozen=True, kw_only=True)
class MixedPool(Operation):
    """Average windows of the channels where ``norms`` is False, and take norms of windows where it is True."""

    kind = "mixed_pool"
    averages: layer.AvgPool
    norms: tuple[bool, ...]  # (channels,)

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        """Return the shape of the averages."""
        return self.averages.shapes(inputs, constant)


def merged_pools(recipe: Recipe) -> Recipe:
    """Replace concatenated poolings of consecutive slices, and norms of windows, if all windows are whole."""
    writer = {name: op for op in recipe.operations for name in op.outputs}
    shapes = recipe.shapes()
    operations = [_merged(op, writer, shapes) or op for op in recipe.operations]
    return replace(recipe, operations=tuple(operations)).pruned()


def _merged(
    op: Operation, writer: dict[str, Operation], shapes: dict[str, Shape]
) -> MixedPool | None:
    if isinstance(op, layer.NormPool):
        parts: list[Operation | None] = [op]
        whole = layer.Slice(op.inputs, (), axis=0, start=0, stop=shapes[op.inputs[0]][0])
        slices: list[Operation | None] = [whole]
    elif isinstance(op, layer.Concatenate) and op.axis == 0:
        parts = [writer.get(name) for name in op.inputs]
        slices = [writer.get(part.inputs[0]) if part else None for part in parts]
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
    shape = shapes[window.inputs[0]]
    divisors = places.divisors(window, shape, shapes[op.outputs[0]])
    complete = bool((divisors == prod(window.kernel)).all()) and not any(window.padding)
    if not complete or len(norms) != shape[0]:
        return None
    return MixedPool(window.inputs, op.outputs, averages=window, norms=tuple(norms))


@RUN.runs(MixedPool)
def _mixed_pool(op: MixedPool, graph: OnnxGraph, x: Value) -> Value:
    # All channels are pooled twice: to split a map, ONNX Runtime would copy it to another layout first.
    norms = np.array(op.norms)
    roots = _weighted_windows(op, x * x, np.ones(len(norms))).node("Sqrt")
    if norms.all():
        return roots
    # The mean of a window is at most its norm. In channels of norms the largest number replaces the mean.
    shares = np.where(norms, 0.0, 1 / prod(op.averages.kernel))
    bias = np.where(norms, float(np.finfo(x.dtype).max), 0.0)
    return roots.node("Min", _weighted_windows(op, x, shares, bias))


def _weighted_windows(op: MixedPool, x: Value, weights: Array, *bias: Array) -> Value:
    """Add the entries of windows times the weight of their channel."""
    kernel, channels = op.averages.kernel, len(op.norms)
    weight = np.broadcast_to(weights.reshape(-1, *[1] * (len(kernel) + 1)), (channels, 1, *kernel))
    options = {"kernel_shape": list(kernel), "strides": list(op.averages.stride), "group": channels}
    return x.node("Conv", weight, *bias, shape=x.graph.result_shape(op), **options)
