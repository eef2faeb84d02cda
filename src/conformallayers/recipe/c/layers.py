"""Operations on features in C: one function each, of (operation, program), which appends statements."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...errors import refusal
from .. import layer_operations as layer
from ..operation import Operation, Shape
from .constants import kernel, matrix, number
from .program import Program

Write = Callable[[Any, Program], None]
WRITE_LAYERS: dict[type[Operation], Write] = {}


def writes(kind: type[Operation], table: dict[type[Operation], Write]) -> Callable[[Write], Write]:
    """Register the function of an operation."""

    def register(function: Write) -> Write:
        table[kind] = function
        return function

    return register


@writes(layer.Matmul, WRITE_LAYERS)
def _matmul(op: layer.Matmul, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    stored = program.weights(op.weight, matrix, x)
    rows, columns = stored.values.shape
    count, width = program.count(x) // columns, program.width(x)
    sizes = f"{rows}" if stored.runs else f"{rows}, {columns}"
    source, target = program.read(x), program.write(y)
    program.multiply_adds += count * stored.entries
    if count == 1:
        program.say(f"times{stored.suffix}({stored.arguments}, {source}, {target}, {sizes});")
    else:
        source = f"{source} + i * {columns * width}"
        target = f"{target} + i * {rows * width}"
        call = f"times{stored.suffix}({stored.arguments}, {source}, {target}, {sizes});"
        program.say("{", "int32_t i;", f"for (i = 0; i < {count}; i++)", call, "}")
    _add_bias(op.bias, program, y, 1, rows)


@writes(layer.Conv, WRITE_LAYERS)
def _conv(op: layer.Conv, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    stored = program.weights(op.weight, kernel, x)
    channels, share, *window = stored.values.shape
    sizes = program.shape(x)[1:], program.shape(y)[1:], window, op.stride, op.dilation
    numbers = [program.shape(x)[0], channels, op.groups]
    numbers += [n for values in sizes for n in _three(tuple(values), 1)]
    geometry = program.numbers(f"{y}_geometry", [*numbers, *_three(op.padding, 0)])
    source, target = program.read(x), program.write(y)
    program.say(f"convolve{stored.suffix}({stored.arguments}, {source}, {target}, {geometry});")
    program.multiply_adds += program.count(y) * share * prod(window)
    _add_bias(op.bias, program, y, prod(program.shape(y)[1:]), channels)


def _three(values: tuple[int, ...], first: int) -> tuple[int, ...]:
    """Give fewer than three axes leading ones."""
    return (*(first,) * (3 - len(values)), *values)


def _add_bias(bias: str | None, program: Program, y: str, inner: int, length: int) -> None:
    if bias is not None:
        held, place = program.exact(bias, program.ctype(y)), program.read(y)
        call = f"{place}, {held}, {place}, {program.count(y)}, {inner}, {length}"
        program.say(f"add_constant{program.suffix(y)}({call});")


def _pool(
    program: Program, function: str, op: Operation, windows: list[tuple[int, ...]], *more: int
) -> None:
    """Append a pooling: for each axis kernel, stride, padding and dilation, as far as there are."""
    (x,), (y,) = op.inputs, op.outputs
    sizes = [program.shape(x)[1:], program.shape(y)[1:], *windows]
    first = [1, 1, 1, 1, 0, 1]  # of the axes that are not there
    numbers = [n for values, one in zip(sizes, first, strict=False) for n in _three(values, one)]
    geometry = program.numbers(f"{y}_geometry", [program.shape(x)[0], *numbers, *more])
    arguments = f"{program.read(x)}, {program.write(y)}, {geometry}"
    program.say(f"{function}{program.suffix(x)}({arguments});")


@writes(layer.AvgPool, WRITE_LAYERS)
def _avg_pool(op: layer.AvgPool, program: Program) -> None:
    windows = [op.kernel, op.stride, op.padding]
    _pool(program, "mean_pool", op, windows, int(op.count_include_pad), op.divisor or 0)
    program.multiply_adds += program.count(op.outputs[0]) * prod(op.kernel)


@writes(layer.AdaptiveAvgPool, WRITE_LAYERS)
def _adaptive_avg_pool(op: layer.AdaptiveAvgPool, program: Program) -> None:
    none = (0,) * len(op.size)  # ranges instead of windows
    _pool(program, "mean_pool", op, [none, none, none], 1, 0)
    program.multiply_adds += program.count(op.inputs[0])


@writes(layer.MaxPool, WRITE_LAYERS)
def _max_pool(op: layer.MaxPool, program: Program) -> None:
    _pool(program, "max_pool", op, [op.kernel, op.stride, op.padding, op.dilation])


@writes(layer.Pad, WRITE_LAYERS)
def _pad(op: layer.Pad, program: Program) -> None:
    shape = program.shape(op.inputs[0])
    pads = [(0, 0)] * (len(shape) - len(op.pads)) + list(op.pads)
    tables = []
    for size, (before, after), stride in zip(shape, pads, _strides(shape), strict=True):
        places = np.arange(-before, size + after)
        if op.mode == "circular":
            places = places % size
        elif op.mode == "replicate":
            places = places.clip(0, size - 1)
        elif op.mode == "reflect":
            places = size - 1 - np.abs(size - 1 - np.abs(places))
        outside = (places < 0) | (places >= size)
        tables.append(np.where(outside, -1, places * stride))
    _gather(op, program, tables, op.value)


@writes(layer.Permute, WRITE_LAYERS)
def _permute(op: layer.Permute, program: Program) -> None:
    shape = program.shape(op.inputs[0])
    strides = _strides(shape)
    _gather(op, program, [np.arange(shape[axis]) * strides[axis] for axis in op.order])


def _gather(op: Operation, program: Program, tables: list[Any], beside: float = 0.0) -> None:
    """Append a copy whose places along each axis stand in a table."""
    (x,), (y,) = op.inputs, op.outputs
    numbers = [*program.shape(y), *(int(n) for table in tables for n in table)]
    held = program.numbers(f"{y}_places", numbers)
    value = number(beside, program.ctype(x))
    arguments = f"{program.read(x)}, {program.write(y)}, {held}, {len(tables)}, {value}"
    program.say(f"gather{program.suffix(x)}({arguments});")


def _strides(shape: Shape) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


@writes(layer.Slice, WRITE_LAYERS)
def _slice(op: layer.Slice, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    shape = program.shape(x)
    inner, rows = prod(shape[op.axis + 1 :]), prod(shape[: op.axis])
    if rows == 1:
        program.alias(y, x, op.start * inner)
        return
    pitch, length = (n * inner * program.width(x) for n in (shape[op.axis], op.stop - op.start))
    source = program.read(x, op.start * inner)
    program.say(f"copy({source}, {pitch}, {program.write(y)}, {length}, {rows}, {length});")


@writes(layer.Concatenate, WRITE_LAYERS)
def _concatenate(op: layer.Concatenate, program: Program) -> None:
    (y,) = op.outputs
    shape = program.shape(y)
    rows, width = prod(shape[: op.axis]), program.width(y)
    pitch = program.count(y) // rows * width
    program.write(y)
    start = 0
    for x in op.inputs:
        length = program.count(x) // rows
        target = program.read(y, start)
        call = f"{program.read(x)}, {length * width}, {target}, {pitch}, {rows}, {length * width}"
        program.say(f"copy({call});")
        start += length


@writes(layer.Reshape, WRITE_LAYERS)
def _reshape(op: layer.Reshape, program: Program) -> None:
    program.alias(op.outputs[0], op.inputs[0])


@writes(layer.Cast, WRITE_LAYERS)
def _cast(op: layer.Cast, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    if program.wide(x) == program.wide(y):
        program.alias(y, x)
        return
    function = "widen" if program.wide(y) else "narrow"
    program.say(f"{function}({program.read(x)}, {program.write(y)}, {program.count(x)});")


@writes(layer.Add, WRITE_LAYERS)
def _add(op: layer.Add, program: Program) -> None:
    (y,) = op.outputs
    total, *others = (program.read(x) for x in op.inputs)
    if not others:
        program.alias(y, op.inputs[0])
        return
    target = program.write(y, over=op.inputs[0])
    for other in others:
        arguments = f"{total}, {other}, {target}, {program.count(y)}"
        program.say(f"add{program.suffix(y)}({arguments});")
        total = target


def _broadcast(op: Operation, program: Program, function: str, constant: str) -> None:
    """Append a function of a value and a constant, which is written out along inner axes."""
    (x,), (y,) = op.inputs, op.outputs
    shape, given = program.shape(x), program.recipe.constant_shape(constant)
    used = [axis + len(shape) - len(given) for axis, n in enumerate(given) if n > 1]
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    written = (*shape[first:last], *(1,) * (len(shape) - last))
    held = program.exact(constant, program.ctype(x), written)
    sizes = f"{program.count(x)}, {prod(shape[last:])}, {prod(written)}"
    arguments = f"{program.read(x)}, {held}, {program.write(y, over=x)}, {sizes}"
    program.say(f"{function}{program.suffix(x)}({arguments});")


@writes(layer.Multiply, WRITE_LAYERS)
def _multiply(op: layer.Multiply, program: Program) -> None:
    _broadcast(op, program, "multiply_constant", op.factor)


@writes(layer.AddConstant, WRITE_LAYERS)
def _add_constant(op: layer.AddConstant, program: Program) -> None:
    _broadcast(op, program, "add_constant", op.value)


@writes(layer.PRelu, WRITE_LAYERS)
def _prelu(op: layer.PRelu, program: Program) -> None:
    _broadcast(op, program, "prelu", op.slope)


@writes(layer.Elementwise, WRITE_LAYERS)
def _elementwise(op: layer.Elementwise, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    more = "".join(f", {number(value)}" for value in op.parameters)
    arguments = f"{program.read(x)}, {program.write(y, over=x)}, {program.count(x)}{more}"
    program.say(f"{op.function}{program.suffix(x)}({arguments});")


def write_scalar(op: Operation, program: Program) -> None:
    """Append an operation on scalars of samples: energies that are added, or cut at 0."""
    given = [program.scalar(name) for name in op.inputs]
    if isinstance(op, layer.Add):
        program.define(op.outputs[0], " + ".join(given))
    elif isinstance(op, layer.Elementwise) and op.function == "relu":
        program.define(op.outputs[0], f"positive({given[0]})")
    else:
        got, remedy = f"{op.kind} of a scalar", 'Fold with strategy="dense".'
        raise refusal("export_c(folded)", "operations that C has", got, remedy)
