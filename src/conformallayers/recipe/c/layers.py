"""Operations on features in C: one function each, of (operation, program), which appends statements."""

from __future__ import annotations

from math import prod

import numpy as np

from ...errors import refusal
from .. import layer_operations as layer
from .. import places
from ..operation import Operation, Runtime, Shape
from ..places import Table
from .constants import kernel, matrix, number
from .program import Program

WRITE = Runtime("C")


@WRITE.runs(layer.Matmul)
def _matmul(op: layer.Matmul, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    stored = program.weights(op.weight, matrix, x)
    rows, columns = stored.values.shape
    count = program.count(x) // columns
    addresses = f"{program.read(x)}, {program.write(y)}"
    call = f"{stored.arguments}, {addresses}, {rows}, {columns}, {count}"
    program.emit(f"times{stored.suffix}({call});")
    program.multiply_adds += count * stored.entries
    _add_bias(op.bias, program, y, 1, rows)


@WRITE.runs(layer.Conv)
def _conv(op: layer.Conv, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    stored = program.weights(op.weight, kernel, x)
    channels, share, *window = stored.values.shape
    geometry = conv_geometry(op, program)
    source, target = program.read(x), program.write(y)
    program.emit(f"convolve{stored.suffix}({stored.arguments}, {source}, {target}, {geometry});")
    program.multiply_adds += program.count(y) * share * prod(window)
    _add_bias(op.bias, program, y, prod(program.shape(y)[1:]), channels)


def conv_geometry(op: layer.Conv, program: Program) -> str:
    """Append the sizes and steps of a convolution; return their array."""
    x, (y,) = op.inputs[0], op.outputs
    channels, _, *window = program.recipe.constant_shape(op.weight)
    sizes = program.shape(x)[1:], program.shape(y)[1:], window, op.stride, op.dilation
    numbers = [program.shape(x)[0], channels, op.groups]
    numbers += [n for values in sizes for n in _three(tuple(values), 1)]
    return program.integers(f"{y}_geometry", [*numbers, *_three(op.padding, 0)])


def _three(values: tuple[int, ...], first: int) -> tuple[int, ...]:
    """Fill up to three axes in front."""
    return (*(first,) * (3 - len(values)), *values)


def _add_bias(bias: str | None, program: Program, y: str, inner: int, length: int) -> None:
    if bias is not None:
        array, address = program.exact(bias, program.ctype(y)), program.read(y)
        program.call("add_constant", y, address, array, address, program.count(y), inner, length)


@WRITE.runs(layer.AdaptiveMaxPool, layer.MaxPool, layer.NormPool)
def _pool(op: layer.AdaptiveMaxPool | layer.MaxPool | layer.NormPool, program: Program) -> None:
    """Append the largest entries or the norms of windows; a table says where each begins and ends."""
    (x,), (y,) = op.inputs, op.outputs
    geometry = pool_geometry(op, program)
    function = "norm_pool" if isinstance(op, layer.NormPool) else "max_pool"
    program.call(function, x, program.read(x), program.write(y), geometry)


def pool_geometry(op: layer.AdaptiveMaxPool | layer.Pool | layer.NormPool, program: Program) -> str:
    """Append the sizes of windows, and where each begins and ends; return their array."""
    (x,), (y,) = op.inputs, op.outputs
    (channels, *before), (_, *after) = program.shape(x), program.shape(y)
    ends = places.window_ends(op, program.shape(x))
    steps = op.dilation if isinstance(op, layer.MaxPool) else (1,) * len(before)
    numbers = [channels]
    for values in (before, after, steps):
        numbers += _three(tuple(values), 1)
    numbers.append(prod(op.kernel) if isinstance(op, layer.NormPool) else 1)
    missing = [(np.zeros(1, int), np.ones(1, int))] * (3 - len(ends))
    for pair in (*missing, *ends):
        numbers += [int(n) for table in pair for n in table]
    return program.integers(f"{y}_windows", numbers)


@WRITE.runs(layer.Pad, layer.Upsample)
def _copy_entries(op: layer.Pad | layer.Upsample, program: Program) -> None:
    """Append pads or repetitions."""
    shape = program.shape(op.inputs[0])
    tables = [np.arange(n) for n in shape]
    if isinstance(op, layer.Pad) and op.mode == "zeros":
        for axis, (before, after) in enumerate(op.pads, len(shape) - len(op.pads)):
            n = shape[axis]
            (tables[axis],) = places.sliding(n, 1, n + before + after, 1, before, 1)
    else:
        for axis, table, _ in places.resampled(op, shape):
            tables[axis] = table[0]
    steps = zip(tables, _strides(shape), strict=True)
    tables = [np.where(table < 0, -1, table * stride) for table, stride in steps]
    _gather(op, program, tables, op.value if isinstance(op, layer.Pad) else 0.0)


@WRITE.runs(layer.Permute)
def _permute(op: layer.Permute, program: Program) -> None:
    shape = program.shape(op.inputs[0])
    if op.order == tuple(range(len(shape))):
        program.alias(op.outputs[0], op.inputs[0])
        return
    strides = _strides(shape)
    _gather(op, program, [np.arange(shape[axis]) * strides[axis] for axis in op.order])


def _gather(op: Operation, program: Program, tables: list[Table], fill: float = 0.0) -> None:
    """Append a copy of entries, by a table of places along each axis."""
    (x,), (y,) = op.inputs, op.outputs
    numbers = [*program.shape(y), *(int(n) for table in tables for n in table)]
    sizes = program.integers(f"{y}_places", numbers)
    value = number(fill, program.ctype(x))
    program.call("gather", x, program.read(x), program.write(y), sizes, len(tables), value)


def _strides(shape: Shape) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


@WRITE.runs(layer.Slice)
def _slice(op: layer.Slice, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    shape = program.shape(x)
    inner, rows = prod(shape[op.axis + 1 :]), prod(shape[: op.axis])
    if rows == 1:
        program.alias(y, x, op.start * inner)
        return
    pitch, length = shape[op.axis] * inner, (op.stop - op.start) * inner
    source, target = program.read(x, op.start * inner), program.write(y)
    program.call("copy", x, source, pitch, target, length, rows, length)


@WRITE.runs(layer.Concatenate)
def _concatenate(op: layer.Concatenate, program: Program) -> None:
    (y,) = op.outputs
    rows = prod(program.shape(y)[: op.axis])
    pitch = program.count(y) // rows
    program.write(y)
    start = 0
    for x in op.inputs:
        length, target = program.count(x) // rows, program.read(y, start)
        program.call("copy", x, program.read(x), length, target, pitch, rows, length)
        start += length


@WRITE.runs(layer.Reshape)
def _reshape(op: layer.Reshape, program: Program) -> None:
    program.alias(op.outputs[0], op.inputs[0])


@WRITE.runs(layer.Add)
def _add(op: layer.Add, program: Program) -> None:
    (y,) = op.outputs
    total, *others = (program.read(x) for x in op.inputs)
    if not others:
        program.alias(y, op.inputs[0])
        return
    target = program.write(y, over=op.inputs[0])
    for other in others:
        program.call("add", y, total, other, target, program.count(y))
        total = target


_BROADCASTS: dict[type[Operation], str] = {
    layer.Multiply: "multiply_constant",
    layer.AddConstant: "add_constant",
    layer.PRelu: "prelu",
}


@WRITE.runs(*_BROADCASTS)
def _broadcast(op: Operation, program: Program) -> None:
    """Append a function of a value and a constant that broadcasts."""
    (x,), (y,), ((_, constant),) = op.inputs, op.outputs, op.constants()
    written, inner = written_out(program, constant, x)
    array = program.exact(constant, program.ctype(x), written)
    source, target = program.read(x), program.write(y, over=x)
    sizes = program.count(x), inner, prod(written)
    program.call(_BROADCASTS[type(op)], x, source, array, target, *sizes)


def written_out(program: Program, constant: str, x: str) -> tuple[Shape, int]:
    """Return the shape to broadcast a constant to, and how many entries of x each of its numbers meets.

    Leading and trailing axes of length 1 are left to the loops in C; axes between are written out.
    """
    shape, given = program.shape(x), program.recipe.constant_shape(constant)
    used = [axis + len(shape) - len(given) for axis, n in enumerate(given) if n > 1]
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    return (*shape[first:last], *(1,) * (len(shape) - last)), prod(shape[last:])


@WRITE.runs(layer.Elementwise)
def _elementwise(op: layer.Elementwise, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    source, target = program.read(x), program.write(y, over=x)
    program.call(op.function, x, source, target, program.count(x), *map(number, op.parameters))


def write_scalar(op: Operation, program: Program) -> None:
    """Append an operation on scalars of samples: a sum of energies, or an energy clamped at 0."""
    given = [program.scalar(name) for name in op.inputs]
    if isinstance(op, layer.Add):
        program.define(op.outputs[0], " + ".join(given))
    elif isinstance(op, layer.Elementwise) and op.function == "relu":
        program.define(op.outputs[0], f"positive({given[0]})")
    else:
        got, remedy = f"{op.kind} of a scalar", 'Fold with strategy="dense".'
        raise refusal("export_c(folded)", "operations supported by C", got, remedy)
