"""The order of values in memory, and operations in C that only copy entries.

Maps have their channels last where an operation reads them so; other operations ask for the order of the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .. import integer_operations as integer
from .. import layer_operations as layer
from .. import places
from ..places import Table
from ..recipe import Runtime
from .constants import number
from .kernels import total
from .program import IMAGE, OUT, Program

WRITE = Runtime("C")
_OUTSIDE = -(2**30)  # a place that stays negative with all others added
# Operations that may write a part of a map.
_PARTS = (
    *(layer.Conv, layer.ConvTranspose, layer.AdaptiveMaxPool, layer.MaxPool, layer.NormPool),
    *(layer.AvgPool, layer.AdaptiveAvgPool, integer.IntegerConv, integer.IntegerPool),
)


def _gather(program: Program, x: str, to: str, tables: Sequence[Table], fill: float = 0.0) -> None:
    """Append a copy of entries to an address, by a table of places along each axis of the result in memory."""
    numbers = [len(table) for table in tables] + [int(n) for table in tables for n in table]
    sizes = program.array(f"{x}_places", np.array(numbers), "int32_t")
    kind, value = ("b", "0") if program.is_int8(x) else ("f", number(fill, "float"))
    program.emit(f"gather_{kind}({program.read(x)}, {to}, {sizes}, {len(tables)}, {value});")


def _axis_steps(program: Program, x: str) -> list[int]:
    """Return the entries of memory between neighbours along each axis of a value, or of a flattened map."""
    place = program.place(x)
    shape = place.map or program.shape(x)
    if place.map is None:
        return [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [1, *(place.pitch * prod(shape[axis + 1 :]) for axis in range(1, len(shape)))]


def _turned(values: Sequence[Any], channels_last: bool) -> list[Any]:
    """Return what belongs to axes in the order of memory."""
    return [*values[1:], values[0]] if channels_last else list(values)


def last(program: Program, x: str) -> str:
    """Return a map with channels last: x, or a copy of it."""
    return x if program.is_last(x) else _reordered(program, x, True)


def first(program: Program, x: str) -> str:
    """Return a value in the order of the recipe, side by side: x, or a copy of it."""
    return x if program.is_first(x) and program.is_dense(x) else _reordered(program, x, False)


def dense(program: Program, x: str) -> str:
    """Return a value whose entries lie side by side: x, or a copy of it."""
    return x if program.is_dense(x) else _reordered(program, x, True)


def in_work(program: Program, x: str) -> str:
    """Return a map in work memory, behind which loops may read: x, or a copy of the image."""
    return x if program.place(x).buffer.base != IMAGE else _reordered(program, x, True)


def _reordered(program: Program, x: str, channels_last: bool) -> str:
    y = program.temporary(x)
    _copy(program, x, y, _tables(program, x), channels_last)
    return y


def _copy(
    program: Program,
    x: str,
    y: str,
    tables: Sequence[Table],
    channels_last: bool,
    fill: float = 0.0,
) -> None:
    """Append a copy of entries to a new value, by a table of places along each of its axes."""
    target = program.write(y, last=channels_last)
    _gather(program, x, target, _turned(tables, channels_last), fill)


def _tables(program: Program, x: str) -> list[Table]:
    """Return where the entries of a value lie, along each of its axes, or of the map that was flattened."""
    shape = program.place(x).map or program.shape(x)
    steps = _axis_steps(program, x)
    return [np.arange(n) * step for n, step in zip(shape, steps, strict=True)]


def like(program: Program, x: str, other: str) -> str:
    """Return a value in the order of another one that lies side by side."""
    if program.place(x).map == program.place(other).map:
        return dense(program, x)
    return last(program, x) if program.place(other).map is not None else first(program, x)


@WRITE.runs(layer.Pad, layer.Upsample)
def _copy_entries(op: layer.Pad | layer.Upsample, program: Program) -> None:
    """Append pads and repetitions."""
    (x,), (y,), shape = op.inputs, op.outputs, program.shape(op.inputs[0])
    x = x if len(shape) > 1 else first(program, x)
    tables = _tables(program, x)
    for axis, (table,), _ in places.resampled(op, shape):
        tables[axis] = np.where(table < 0, _OUTSIDE, tables[axis][table])
    fill = op.value if isinstance(op, layer.Pad) else 0.0
    _copy(program, x, y, tables, program.place(x).map is not None, fill)


@WRITE.runs(layer.Permute)
def _permute(op: layer.Permute, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    shape = program.shape(x)
    if op.order == tuple(range(len(shape))):
        program.alias(y, x)
        return
    found = _tables(program, x)
    tables = [found[axis] for axis in op.order]
    _copy(program, x, y, tables, program.place(x).map is not None)


@WRITE.runs(layer.Slice)
def _slice(op: layer.Slice, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    if len(program.shape(x)) == 1:
        x = first(program, x)
    steps, shape = _axis_steps(program, x), program.shape(x)
    order = _turned(list(range(len(shape))), program.place(x).map is not None)
    before = order[: order.index(op.axis)]
    channels = op.axis == 0 and program.place(x).map is not None
    if channels or prod(shape[axis] for axis in before) == 1:
        program.alias(y, x, op.start * steps[op.axis])
        return
    tables = _tables(program, x)
    tables[op.axis] = tables[op.axis][op.start : op.stop]
    _copy(program, x, y, tables, program.place(x).map is not None)


@WRITE.runs(layer.Concatenate)
def _concatenate(op: layer.Concatenate, program: Program) -> None:
    """Append copies of those values that were not written into the result at once."""
    (y,), shape = op.outputs, program.shape(op.outputs[0])
    keeps = len(shape) > 1
    if not program.available(y):
        program.write(y, last=keeps)
    place, start = program.place(y), 0
    for x in op.inputs:
        mine = program.place(x)
        steps = _axis_steps(program, y)
        if mine.buffer is place.buffer:
            start += program.shape(x)[op.axis]
            continue
        if program.place(x).map is not None and len(program.place(x).map or ()) != len(shape):
            x = first(program, x)
        turned = [_turned(v, keeps) for v in (steps, _axis_steps(program, x), program.shape(x))]
        ends = (y, start * steps[op.axis], turned[0]), (x, 0, turned[1])
        _strided(program, turned[2], "{0} = {1};", *ends)
        start += program.shape(x)[op.axis]


def plan_parts(program: Program) -> None:
    """Let maps that are only concatenated be written into the result at once."""
    writers = {name: op for op in program.recipe.operations for name in op.outputs}
    for op in program.recipe.operations:
        if (
            not isinstance(op, layer.Concatenate)
            or op.axis > 0
            or len(program.shape(op.inputs[0])) < 2
        ):
            continue
        start = 0
        for x in op.inputs:
            alone = len(program.readers[x]) == 1 and op.inputs.count(x) == 1
            if alone and isinstance(writers.get(x), _PARTS):
                program.part(x, op.outputs[0], start)
            start += program.shape(x)[0]


def _strided(
    program: Program, sizes: Sequence[int], statement: str, *values: tuple[str, int, Sequence[int]]
) -> None:
    """Append loops over axes around a statement of entries {0}, {1}, ...: value, start, steps of each."""
    used = [axis for axis, n in enumerate(sizes) if n > 1]
    names = dict(zip(used, "hijkl", strict=False))
    for axis, name in names.items():
        program.emit(f"for ({name} = 0; {name} < {sizes[axis]}; {name}++) {{")
    entries = (
        program.entry(value, total(start, *((n, steps[axis]) for axis, n in names.items())))
        for value, start, steps in values
    )
    program.emit(statement.format(*entries), *("}" for _ in names))


@WRITE.runs(layer.Product)
def _product(op: layer.Product, program: Program) -> None:
    """Append loops over the axes of the result; an axis that is repeated has the step 0."""
    (y,), shape = op.outputs, program.shape(op.outputs[0])
    inputs = [x if len(shape) > 1 else first(program, x) for x in op.inputs]
    keeps = len(shape) > 1
    program.write(y, last=keeps)
    ends = [(y, 0, _turned(_axis_steps(program, y), keeps))]
    for x in inputs:
        sizes = zip(program.shape(x), _axis_steps(program, x), strict=True)
        ends.append((x, 0, _turned([step * (n > 1) for n, step in sizes], keeps)))
    _strided(program, _turned(shape, keeps), "{0} = {1} * {2};", *ends)


@WRITE.runs(layer.Softmax)
def _softmax(op: layer.Softmax, program: Program) -> None:
    (y,), x = op.outputs, dense(program, op.inputs[0])
    program.write(y, over=x)
    sizes, steps = list(program.shape(x)), _axis_steps(program, x)
    count, step = sizes[op.axis], steps[op.axis]
    if len(sizes) == 1:  # the order of a flattened map does not matter
        steps, step = [1], 1
    sizes[op.axis] = 1
    keeps = program.place(x).map is not None and len(sizes) > 1
    statement = f"softmax(&{{0}}, &{{1}}, {count}, {step}, {int(op.log)});"
    ends = [(value, 0, _turned(steps, keeps)) for value in (x, y)]
    _strided(program, _turned(sizes, keeps), statement, *ends)


@WRITE.runs(layer.Reshape)
def _reshape(op: layer.Reshape, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    if len(program.shape(y)) > 1 and program.shape(y) != program.shape(x):
        x = first(program, x)
        program.reshape(y, x)
        return
    program.alias(y, dense(program, x))


def write_output(program: Program) -> None:
    """Append a copy of the result into the output, if it is elsewhere or in another order."""
    y = program.recipe.output
    if program.place(y).buffer.base != OUT:
        _gather(program, y, OUT, _tables(program, y))
