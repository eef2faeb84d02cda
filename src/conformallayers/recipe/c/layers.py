"""Operations on features in C: one function each, of (operation, program), which appends statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from .. import layer_operations as layer
from .. import places
from .. import point_operations as point
from ..places import Array
from ..recipe import Operation
from .constants import number, runs_of
from .kernels import Axis, Epilogue, Windows, conv_lines, in_blocks, total
from .program import Program
from .shapes import WRITE, dense, first, in_work, last, like
from .text import indented

_ONE: Axis = (1, 1, 1, 1, 0, 1)
# Functions of one number v; {0} is a parameter.
MAPS = {
    "abs": "v < 0 ? -v : v",
    "relu": "v < 0 ? 0 : v",  # NaN stays, as everywhere
    "clip": "v < {0} ? {0} : v > {1} ? {1} : v",
    "leaky_relu": "v < 0 ? {0} * v : v",
    "gelu": "(float)(0.5 * (double)v * erfc(-0.7071067811865476 * (double)v))",
    "silu": "(float)((double)v / (1 + exp(-(double)v)))",
    "sigmoid": "(float)(1 / (1 + exp(-(double)v)))",
    "tanh": "(float)tanh((double)v)",
    "hardswish": "v <= -3 ? 0 : v >= 3 ? v : v * (v + 3) / 6",
    "hardsigmoid": "v <= -3 ? 0 : v >= 3 ? 1 : v / 6 + 0.5f",
}
_BROADCASTS: dict[type[Operation], str] = {
    layer.Multiply: "v * {}",
    layer.AddConstant: "v + {}",
    layer.PRelu: "v > 0 ? v : v * {}",
}
# How windows are reduced: the type of sums, the first, the next with an entry v[n], the result; parameters.
_POOLS = {
    "max_pool": (
        "$V",
        "-INFINITY",
        "v[n] > sums[n] || v[n] != v[n] ? v[n] : sums[n]",
        "sums[n]",
        "",
    ),
    "avg_pool": ("float", "0", "sums[n] + v[n]", "sums[n] / divisor", ", float divisor"),
    "avg_pool_each": (
        "float",
        "0",
        "sums[n] + v[n]",
        "sums[n] / divisors[(p * to[1] + q) * to[2] + r]",
        ", const float *divisors",
    ),
    "norm_pool": (
        "double",
        "0",
        "sums[n] + (double)v[n] * (double)v[n]",
        "(float)sqrt(sums[n] * kernel / window_size(g, p, q, r))",
        ", int32_t kernel",
    ),
}


# -- products -------------------------------------------------------------------------------------


@WRITE.runs(layer.Matmul)
def _matmul(op: layer.Matmul, program: Program) -> None:
    (x,), (y,), weight = op.inputs, op.outputs, program.constant(op.weight)
    bias = np.zeros(len(weight)) if op.bias is None else program.constant(op.bias)
    rows, columns = weight.shape
    count = program.count(x) // columns
    if len(program.shape(x)) > 1:
        x = first(program, x)
    else:
        weight = weight[:, program.in_memory(x, np.arange(columns)).ravel()]
    b = program.array(f"{y}_bias", bias)
    if (count == 1 and runs_of(weight) is not None) or columns > layer.LONG_ROW:
        multiply(program, op.weight, weight, (program.read(x), b, program.write(y)), count)
        return
    program.multiply_adds += rows * columns * count
    y, epilogue = _chain(program, y, last=False)
    axes = _ONE, _ONE, (count, count, 1, 1, 0, 1)
    windows = Windows(axes, columns, columns, 1, rows, (0, 0, rows))
    title = f"product with a matrix ({rows}, {columns})" + f" of {count} rows" * (count > 1)
    places_in_c = program.read(x), b, y, 0
    _emit_conv(program, windows, weight[None], op.weight, places_in_c, epilogue, title)


def multiply(
    program: Program, name: str, weight: Array, ends: tuple[str, str, str], count: int = 1
) -> None:
    """Append a product row by row, of nonzero stretches where these are shorter: from, bias, to."""
    x, b, y = ends
    runs = runs_of(weight) if count == 1 else None
    program.multiply_adds += len(runs[0]) if runs else weight.size * count
    w = program.array(name, runs[0] if runs else weight)
    if runs:
        counts, pairs = (program.array(f"{name}_runs", one, "uint16_t") for one in runs[1:])
        program.emit(f"times_runs({w}, {counts}, {pairs}, {x}, {b}, {y}, {len(weight)});")
    else:
        program.emit(f"times({w}, {x}, {b}, {y}, {', '.join(map(str, weight.shape))}, {count});")


@WRITE.runs(layer.Conv)
def _conv(op: layer.Conv, program: Program) -> None:
    (x,), (y,), weight = op.inputs, op.outputs, program.constant(op.weight)
    outputs, share, *window = weight.shape
    program.multiply_adds += program.count(y) * share * prod(window)
    title = conv_title(op, program)
    planes = program.is_first(x) and not program.is_last(x) and op.groups == 1 and len(window) < 3
    if not planes:
        x, weight = last(program, x), np.moveaxis(weight, 1, -1)
    bias = np.zeros(outputs) if op.bias is None else program.constant(op.bias)
    y, epilogue = _chain(program, y)
    windows = conv_windows(op, program, x, y)
    if planes:  # the channels of the image are one axis more of its windows
        axes = three([(share, 1, share, 1, 0, 1), *windows.axes[3 - len(window) :]])
        windows = replace(windows, axes=axes, channels=1, pitch=1)
    kernel = weight.reshape(op.groups, windows.outputs, -1)
    ends = program.read(x), program.array(f"{y}_bias", bias), y, 0
    _emit_conv(program, windows, kernel, op.weight, ends, epilogue, title)


def conv_windows(op: layer.Conv, program: Program, x: str, y: str) -> Windows:
    """Return the windows of a convolution of x, whose channels come last."""
    outputs, share, *window = program.recipe.constant_shape(op.weight)
    settings = window, op.stride, op.padding, op.dilation
    axes = list(zip(program.shape(x)[1:], program.shape(y)[1:], *settings, strict=True))
    pitch, each = program.place(x).pitch, outputs // op.groups
    return Windows(three(axes), share, pitch, op.groups, each, _steps(program, y))


def conv_title(op: layer.Conv, program: Program) -> str:
    """Describe a convolution for the comment of its function."""
    ends = program.shape(op.inputs[0]), program.shape(op.outputs[0])
    title = f"convolution {by(program.recipe.constant_shape(op.weight)[2:])}: "
    title += f"{by(ends[0])} to {by(ends[1])}"
    title += f", stride {by(op.stride)}" if prod(op.stride) > 1 else ""
    title += f", padding {by(op.padding)}" if sum(op.padding) else ""
    return title + (f", {op.groups} groups" if op.groups > 1 else "")


@WRITE.runs(layer.ConvTranspose)
def _conv_transpose(op: layer.ConvTranspose, program: Program) -> None:
    """Append one convolution for each remainder of output positions by the stride."""
    (x,), (y,) = op.inputs, op.outputs
    weight, shape, result = program.constant(op.weight), program.shape(x), program.shape(y)
    program.multiply_adds += prod(shape) * prod(weight.shape[1:])
    bias = np.zeros(result[0]) if op.bias is None else program.constant(op.bias)
    x = last(program, x)
    share, outputs = shape[0] // op.groups, result[0] // op.groups
    split = weight.reshape(op.groups, share, outputs, *weight.shape[2:])
    split = np.moveaxis(split, 1, -1)  # (groups, outputs, ..., channels)
    split = np.pad(split, [(0, 0), (0, 0), *[(0, 1)] * (len(shape) - 1), (0, 0)])
    y, epilogue = _chain(program, y)
    steps, b = _steps(program, y), program.array(f"{y}_bias", bias)
    settings = shape[1:], result[1:], weight.shape[2:], op.stride, op.padding, op.dilation
    phases = [list(_phases(*axis)) for axis in zip(*settings, strict=True)]
    stride = (*(1,) * (3 - len(phases)), *op.stride)
    for choice in product(*phases):
        kernel = split
        for axis, (_, _, taps) in enumerate(choice, 2):
            kernel = np.take(kernel, taps, axis)
        remainders = (*(0,) * (3 - len(choice)), *(remainder for remainder, _, _ in choice))
        offset = sum(a * b for a, b in zip(remainders, steps, strict=True))
        to = tuple(a * b for a, b in zip(stride, steps, strict=True))
        axes = three([axis for _, axis, _ in choice])
        pitch = program.place(x).pitch
        windows = Windows(axes, share, pitch, op.groups, outputs, (to[0], to[1], to[2]))
        title = (
            f"part of a transposed convolution {by(weight.shape[2:])}: {by(shape)} to {by(result)}"
        )
        ends = program.read(x), b, y, offset
        kernel = kernel.reshape(op.groups, outputs, -1)
        _emit_conv(program, windows, kernel, op.weight, ends, epilogue, title)


def _phases(
    n: int, m: int, k: int, stride: int, padding: int, dilation: int
) -> Iterator[tuple[int, Axis, list[int]]]:
    """Yield remainders of output positions along an axis, their windows of the input, and the taps they use.

    Output ``stride·q + remainder`` reads the inputs ``q + (remainder + padding - tap·dilation)/stride``.
    """
    for remainder in range(min(stride, m)):
        start = remainder + padding
        taps = [tap for tap in range(k) if (start - tap * dilation) % stride == 0][::-1]
        at = [(start - tap * dilation) // stride for tap in taps] or [0]
        taps = taps or [k]  # an additional one with weight 0
        gap = at[1] - at[0] if len(at) > 1 else 1
        yield remainder, (n, -(-(m - remainder) // stride), len(taps), 1, -at[0], gap), taps


def _emit_conv(
    program: Program,
    windows: Windows,
    kernel: Array,
    name: str,
    ends: tuple[str, str, str, int],
    epilogue: Epilogue,
    title: str,
) -> None:
    """Append the call of a convolution: kernel (groups, outputs, taps); source, bias, result and where in it."""
    if windows.depthwise:
        kernel = kernel.reshape(1, windows.groups, -1)
    (x, b, y, offset), w = ends, program.array(name, in_blocks(kernel))
    text = indented(conv_lines(windows, epilogue, title, program.speed), 0) + "\n"
    kind = "matmul" if isinstance(program.operation, layer.Matmul) else "conv"
    function = program.function(kind, text)
    arguments = [x, w, b, program.read(y, offset)]
    if windows.is_padded:
        planes, rows, _ = windows.axes
        arguments.append(program.scratch(planes[2] * rows[2] * windows.row))
    program.emit(f"{function}({', '.join([*arguments, *epilogue.arguments])});")


def _steps(program: Program, y: str) -> tuple[int, int, int]:
    """Return the entries between positions of a map along three axes."""
    _, rows, columns = three(program.shape(y)[1:], 1)
    pitch = program.place(y).pitch
    return rows * columns * pitch, columns * pitch, pitch


def three(values: Sequence[Any], one: Any = _ONE) -> tuple[Any, Any, Any]:
    """Return three axes or sizes: those that are given, behind others of size 1."""
    a, b, c = [*[one] * (3 - len(values)), *values]
    return a, b, c


def by(sizes: Sequence[int]) -> str:
    """Return sizes as text."""
    return " x ".join(map(str, sizes))


# -- functions of single numbers ------------------------------------------------------------------


def _chain(program: Program, y: str, last: bool = True) -> tuple[str, Epilogue]:
    """Write the place of a result, along with the operations on single numbers that follow it.

    Returns:
        The value that is written, and what happens to each number before.
    """
    epilogue, over = Epilogue(), None
    while len(program.readers.get(y, ())) == 1 and y != program.recipe.output:
        (index,) = program.readers[y]
        op = program.recipe.operations[index]
        others = [name for name in op.inputs if name != y]
        # The kernels count entries and channels of maps whose channels come last.
        by_place = isinstance(op, (layer.Add, *_BROADCASTS)) and len(program.shape(y)) > 1
        if not all(map(program.available, others)) or (by_place and not last):
            break
        if not _append(op, program, y, epilogue):
            break
        if isinstance(op, layer.Add):
            over = others[0]
        program.done.add(index)
        y = op.outputs[0]
    read = [program.place(x).buffer for x in program.operation.inputs if program.shape(x)]
    if over is not None and program.place(over).buffer not in read:
        program.write(y, over=over)
    else:
        program.write(y, last=last and len(program.shape(y)) > 1)
    return y, epilogue


def _append(op: Operation, program: Program, value: str, epilogue: Epilogue) -> bool:
    """Append an operation to an epilogue; tell whether it can be."""
    count = len(epilogue.parameters)
    if isinstance(op, layer.Elementwise):
        epilogue.statements.append(f"v = {_function(op)};")
    elif isinstance(op, point.Divide):
        epilogue.statements.append(f"v *= p{count};")
        epilogue.parameters.append(f"float p{count}")
        epilogue.arguments.append(factor_text(op, program))
    elif isinstance(op, layer.Add) and len(op.inputs) == 2 and len(set(op.inputs)) == 2:
        (other,) = (name for name in op.inputs if name != value)
        place = program.place(other)
        if place.map != program.shape(value) or not program.is_dense(other):
            return False
        epilogue.statements.append(f"v += p{count}[{{i}}];")
        epilogue.parameters.append(f"const float *p{count}")
        epilogue.arguments.append(program.read(other))
    elif isinstance(op, tuple(_BROADCASTS)):
        ((_, name),), shape = op.constants(), program.shape(value)
        array = program.constant(name)
        channels = (shape[0], *[1] * len(shape[1:])) if len(shape) > 1 else shape
        if np.broadcast_shapes(array.shape, channels) != channels:
            return False
        numbers = program.array(name, np.broadcast_to(array, channels))
        epilogue.statements.append(f"v = {_BROADCASTS[type(op)].format(f'p{count}[{{c}}]')};")
        epilogue.parameters.append(f"const float *p{count}")
        epilogue.arguments.append(numbers)
    else:
        return False
    return True


def _function(op: layer.Elementwise) -> str:
    return MAPS[op.function].format(*(number(value, "float") for value in op.parameters))


def factor_text(op: point.Divide | point.Rebase, program: Program) -> str:
    """Return scale/τ of a division."""
    tau = op.inputs[1] if isinstance(op, point.Divide) else op.inputs[2]
    return f"(float)ratio({number(op.scale)}, {program.scalar(tau)})"


def scale(program: Program, x: str, y: str, factor: str) -> None:
    """Append the product of a value with a number."""
    name = program.identifier(f"f_{y}")
    program.emit(f"const float {name} = {factor};")
    each(program, (x,), y, f"v * {name}")


def each(
    program: Program, inputs: Sequence[str], y: str, text: str, inner: int = 1, length: int = 1
) -> None:
    """Append a loop that computes every entry of y from those of inputs: v, and {1}, {2}, ... in the text.

    [j] is the entry of a constant, which meets ``inner`` entries; then the constant begins again.
    """
    x = dense(program, inputs[0])
    others = [like(program, other, x) for other in inputs[1:]]
    program.write(y, over=x)
    count, index = program.count(x), "i"
    sizes = {"h": count // (length * inner), "j": length, "i": inner}
    if length == 1 or count == length:
        sizes, text = {"i": count}, text.replace("[j]", "[i]")
    steps = {"h": length * inner, "j": inner, "i": 1}
    used = [name for name, size in sizes.items() if size > 1]
    index = total(*((name, steps[name]) for name in used))
    program.emit(*(f"for ({name} = 0; {name} < {sizes[name]}; {name}++) {{" for name in used))
    program.emit(*["{"] * (not used))
    program.emit(
        f"const {program.ctype(x)} v = {program.entry(x, index)};",
        f"{program.entry(y, index)} = {text.format('', *(program.entry(o, index) for o in others))};",
        *["}"] * max(1, len(used)),
    )


@WRITE.runs(layer.Elementwise)
def _elementwise(op: layer.Elementwise, program: Program) -> None:
    text = _function(op)
    text = f"(int8_t)({text})" if program.is_int8(op.inputs[0]) else text
    each(program, op.inputs, op.outputs[0], text)


@WRITE.runs(*_BROADCASTS)
def _broadcast(op: Operation, program: Program) -> None:
    """Append a function of a value and a constant that broadcasts."""
    (x,), (y,), ((_, name),) = op.inputs, op.outputs, op.constants()
    array, inner, length = broadcast(program, name, x, "float")
    entry = f"{array}[{'j' if length > 1 else '0'}]"
    each(program, (x,), y, _BROADCASTS[type(op)].format(entry), inner, length)


def broadcast(program: Program, name: str, x: str, ctype: str) -> tuple[str, int, int]:
    """Return the array of a constant, how many entries of x each of its numbers meets, and its length.

    Leading and trailing axes of length 1 are left to loops; axes between are written out.
    """
    values = program.in_memory(x, program.constant(name))
    channels, *spatial = program.place(x).map or program.shape(x)
    shape = (*spatial, channels) if program.place(x).map else program.shape(x)
    shape = shape if values.ndim > 1 else values.shape
    used = [axis for axis, n in enumerate(values.shape) if n > 1]
    start, stop = (used[0], used[-1] + 1) if used else (0, 0)
    written = np.broadcast_to(
        values, (*values.shape[:start], *shape[start:stop], *values.shape[stop:])
    )
    return program.array(name, written, ctype), prod(shape[stop:]), written.size


@WRITE.runs(layer.Add)
def _add(op: layer.Add, program: Program) -> None:
    (y,), count = op.outputs, len(op.inputs)
    each(program, op.inputs, y, " + ".join(["v", *(f"{{{n}}}" for n in range(1, count))]))


# -- windows, shapes and order --------------------------------------------------------------------


@WRITE.runs(
    layer.AdaptiveMaxPool, layer.MaxPool, layer.NormPool, layer.AvgPool, layer.AdaptiveAvgPool
)
def _pool(op: Any, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    x, more = in_work(program, last(program, x)), ""
    kind = "max_pool"
    if isinstance(op, layer.NormPool):
        kind, more = "norm_pool", f", {prod(op.kernel)}"
    elif isinstance(op, (layer.AvgPool, layer.AdaptiveAvgPool)):
        divisors = places.divisors(op, program.shape(x))
        kind, more = "avg_pool", f", {number(float(divisors.flat[0]), 'float')}"
        if np.ptp(divisors) > 0:
            kind, more = "avg_pool_each", f", {program.array(f'{y}_divisors', divisors)}"
    pool(program, kind, _POOLS[kind], op, x, y, more)


def pool(
    program: Program, name: str, words: Sequence[str], op: Any, x: str, y: str, arguments: str
) -> None:
    """Append a reduction of windows by the template ``pool``."""
    sums, begin, entry, result, parameters = words
    if program.is_int8(x) and name == "max_pool":
        begin, entry = "-128", "v[n] > sums[n] ? v[n] : sums[n]"
    marks = {"$T": sums, "$I": begin, "$E": entry, "$R": result, "$P": parameters}
    function = program.template("pool", name, marks | {"$V": program.ctype(x)})
    target = program.write(y, last=True)
    program.emit(
        f"{function}({program.read(x)}, {target}, {_geometry(op, program, x, y)}{arguments});"
    )


def _geometry(op: Any, program: Program, x: str, y: str) -> str:
    """Append the sizes of windows, and where each begins and ends; return their array."""
    before, after = program.shape(x)[1:], program.shape(y)[1:]
    ends = places.window_ends(op, program.shape(x))
    steps = op.dilation if isinstance(op, layer.MaxPool) else (1,) * len(before)
    numbers = [program.shape(x)[0], program.place(x).pitch, program.place(y).pitch]
    for values in (before, after, steps):
        numbers += three(values, 1)
    missing = [(np.zeros(1, int), np.ones(1, int))] * (3 - len(ends))
    for pair in (*missing, *ends):
        numbers += [int(n) for table in pair for n in table]
    return program.array(f"{y}_windows", np.array(numbers), "int32_t")
