"""Operations on whole numbers in C: one function each, of (operation, program), which appends statements.

Features are int8_t, maps have their channels last. A convolution copies two windows at a time as 16-bit numbers
and multiplies them by two rows of weights at once, which the DSP instructions of a Cortex-M4 do by pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod

import numpy as np

from .. import integer_operations as integer
from ..places import Array
from ..recipe import INPUT
from .constants import number
from .kernels import Axis, Lines, is_padded, total
from .layers import broadcast, by, each, pool
from .points import WRITE, formula_text
from .program import Program
from .shapes import dense, first, last
from .text import indented

__all__ = ["WRITE"]
_SMALL = 2**30  # numbers below it add up to 32 bits


# -- the image ------------------------------------------------------------------------------------


def _pixels(op: integer.Quantize | integer.QuantizePoint, program: Program, statement: str) -> None:
    """Append loops over an image or a map, with a statement of the number v and its place {to}."""
    x, shape = op.inputs[0], program.shape(op.inputs[0])
    channels, positions = shape[0], prod(shape[1:])
    shift = "0.0f"
    if op.addend is not None:
        array = program.constant(op.addend)
        array = np.broadcast_to(array, shape) if array.size > channels else array
        name, unit = program.array(op.addend, array, "int8_t"), number(2.0**-op.exponent, "float")
        index = f"j * {positions} + i" if array.size > channels else "j" if array.size > 1 else "0"
        shift = f"{unit} * (float){name}[{index}]"
    if x != INPUT:
        x = dense(program, last(program, x)) if len(shape) > 1 else first(program, x)
    image = x == INPUT and program.reads_bytes
    arrays = "image, levels" if image else f"{program.read(x)}, NULL"
    place = f"j * {positions} + i" if x == INPUT else f"i * {channels} + j"
    program.emit(
        f"for (j = 0; j < {channels}; j++) {{",
        f"for (i = 0; i < {positions}; i++) {{",
        f"const float v = pixel({arrays}, {place}, {shift});",
        statement.replace("{to}", f"i * {channels} + j"),
        "}",
        "}",
    )


@WRITE.runs(integer.Quantize)
def _quantize(op: integer.Quantize, program: Program) -> None:
    (y,) = op.outputs
    program.write(y, last=len(program.shape(y)) > 1)
    factor = number(float(np.float32(op.factor)), "float")
    _pixels(op, program, f"{program.entry(y, '{to}')} = quantized(v * {factor});")


@WRITE.runs(integer.QuantizePoint)
def _quantize_point(op: integer.QuantizePoint, program: Program) -> None:
    q, m, tau = op.outputs
    program.write(q, last=len(program.shape(q)) > 1)
    least, most, levels = (
        number(float(np.float32(value)), "float")
        for value in (max(op.offset, integer.SMALLEST_PEAK), integer.LARGEST_PEAK, op.levels)
    )
    found, factor = (program.identifier(f"f_{m}_{end}") for end in ("peak", "factor"))
    program.emit(f"float {found} = {least};")
    _pixels(op, program, f"{found} = peak({found}, v);")
    program.emit(
        f"{found} = {found} > {most} ? {most} : {found};",
        f"const float {factor} = {levels} / {found};",
    )
    _pixels(op, program, f"{program.entry(q, '{to}')} = quantized(v * {factor});")
    share = f"{number(op.offset)} / {program.define(m, f'(double){found}')}"
    squares = f"squared({program.read(q)}, {program.count(q)})"
    unit = number(integer.inverse_square(op.levels))
    program.define(tau, f"length_of({squares}, {unit}, {share})")


# -- products -------------------------------------------------------------------------------------


def _finish(op: integer.Accumulated, program: Program) -> tuple[str, list[str], list[str]]:
    """Return how a sum {s} of a channel {c} becomes a result, and the parameters and arguments for it."""
    constants = program.recipe.constants
    taus = [program.scalar(name) for name in op.inputs[1:]]
    parameters: list[str] = []
    arguments: list[str] = []
    found = "{s}"

    def array(kind: str, name: str) -> str:
        parameters.append(f"const {kind} *p{len(parameters)}")
        arguments.append(program.array(name, program.constant(name), kind))
        return f"p{len(parameters) - 1}[{{c}}]"

    if op.bias is not None:
        found = f"({{s}} + {array('int32_t', op.bias)})"
    if op.multiplier is None:
        text = f"apart((double){found} * {array('double', op.scale or '')})"
        if taus:
            parameters.append(f"double p{len(parameters)}")
            arguments.append(taus[0])
            text += f" / p{len(parameters) - 1}"
        text += f" + {array('double', op.offset)}" if op.offset is not None else ""
        return f"(float)({text})", parameters, arguments
    product = f"(int64_t){found} * {array('int32_t', op.multiplier)}"
    addend = "0" if op.addend is None else array("int32_t", op.addend)
    factor = "-1"
    if taus:
        parameters.append(f"int32_t p{len(parameters)}")
        arguments.append(f"factor_of({taus[0]})")
        factor = f"p{len(parameters) - 1}"
    most = max(
        int(a) * int(b) >> op.shift
        for a, b in zip(
            op.largest_sums(constants.__getitem__), constants[op.multiplier], strict=True
        )
    )
    text = _feature(program, product, op, factor, addend, most)
    return text, parameters, arguments


def _feature(
    program: Program,
    product: str,
    op: integer.Accumulated | integer.Requantize,
    factor: str,
    addend: str,
    most: int,
) -> str:
    """Return the feature of a product with a multiplier; ``most`` bounds its quotient by 2^shift."""
    # In 64 bits, as the magnitude of the least 32-bit number has no 32-bit one.
    added = (
        0 if op.addend is None else int(np.abs(program.constant(op.addend).astype(np.int64)).max())
    )
    plain = factor == "-1" and op.addend is None
    if max(most, added) >= _SMALL:
        return f"feature_of_large({product}, {op.shift}, {int(not plain)}, {addend}, {op.low})"
    if plain:
        return f"feature({product}, {op.shift}, {op.low})"
    return f"feature_of_parts({product}, {op.shift}, {factor}, {addend}, {op.low})"


def _rows(kernel: Array) -> Array:
    """Fill the rows of a kernel (..., outputs, taps) up to a multiple of four."""
    return np.pad(kernel, [(0, 0)] * (kernel.ndim - 1) + [(0, -kernel.shape[-1] % 4)])


@WRITE.runs(integer.IntegerMatmul)
def _matmul(op: integer.IntegerMatmul, program: Program) -> None:
    x, (y,), weight = op.inputs[0], op.outputs, program.constant(op.weight)
    rows, columns = weight.shape
    x = dense(program, x)
    if len(program.shape(x)) > 1:
        x = first(program, x)
    elif program.place(x).map is not None:
        weight = weight[:, program.in_memory(x, np.arange(columns)).ravel()]
    count = program.count(x) // columns
    program.multiply_adds += rows * columns * count
    program.write(y)
    text = Lines()
    with text.loop("t", count) as t:
        text.lines += [f"widen({total('x', (t, columns))}, columns, {columns});"]
        padded = columns + -columns % 4
        text.lines += [f"blank(columns + {columns}, {padded - columns});"] * (columns % 4 > 0)
        _multiply(op, program, text, rows, padded, 0, total("y", (t, rows)))
    title = f"product of a matrix ({rows}, {columns}) in int8"
    _emit(op, program, text, (x, y), _rows(weight), padded, title)


@WRITE.runs(integer.IntegerConv)
def _conv(op: integer.IntegerConv, program: Program) -> None:
    x, (y,), weight = op.inputs[0], op.outputs, program.constant(op.weight)
    (outputs, share, *window), shape = weight.shape, program.shape(x)
    program.multiply_adds += program.count(y) * share * prod(window)
    x = last(program, x)
    program.write(y, last=True)
    settings = shape[1:], program.shape(y)[1:], window, op.stride, op.padding, op.dilation
    axes = [(1, 1, 1, 1, 0, 1)] * (4 - len(shape)) + list(zip(*settings, strict=True))
    taps, pitch = share * prod(window), program.place(x).pitch
    padded, each = taps + -taps % 4, outputs // op.groups
    text = Lines()
    positions = program.count(y) // outputs
    with text.loop("g", op.groups) as g:
        text.lines.append("t = 0;")
        text.variables.add("t")
        with text.nest("zrc", [axis[1] for axis in axes]) as (z, r, c):
            text.lines.append(f"wide_t *to = columns + (t % 2) * {padded};")
            _window(text, axes, (z, r, c), total("x", (g, share)), pitch, share)
            text.lines += [f"blank(to, {padded - taps});"] * (padded > taps)
            with text.block(f"if (++t % 2 == 0 || t == {positions}) "):
                step = program.place(y).pitch
                start = total("y", ("(t - 1) / 2", 2 * step), (g, each))
                _multiply(op, program, text, each, padded, step, start, g)
    title = f"convolution {by(window)} in int8: {by(shape)} to {by(program.shape(y))}"
    kernel = np.moveaxis(weight, 1, -1).reshape(outputs, taps)
    _emit(op, program, text, (x, y), _rows(kernel), 2 * padded, title)


def _window(
    text: Lines, axes: Sequence[Axis], at: Sequence[str], source: str, pitch: int, channels: int
) -> None:
    """Append the copy of a window, with zeros where it is outside of the map."""
    sizes = axes[1][0] * axes[2][0] * pitch, axes[2][0] * pitch
    with text.loop("i", axes[0][2]) as i, text.loop("j", axes[1][2]) as j:
        planes, rows = (
            total((x, axis[3]), (tap, axis[5]), -axis[4])
            for x, tap, axis in zip(at, (i, j), axes, strict=False)
        )
        checks = [
            f"{place} >= 0 && {place} < {axis[0]}"
            for place, axis in zip((planes, rows), axes, strict=False)
            if is_padded(axis)
        ]
        line = total(source, (planes, sizes[0]), (rows, sizes[1]))
        _, _, taps, stride, padding, _ = axes[2]
        start = total((at[2], stride), -padding)
        if not checks:
            _window_row(text, axes[2], line, start, pitch, channels)
            return
        with text.block(f"if ({' && '.join(checks)}) "):
            _window_row(text, axes[2], line, start, pitch, channels)
        text.lines += ["else", f"to = blank(to, {taps * channels});"]


def _window_row(text: Lines, axis: Axis, line: str, start: str, pitch: int, channels: int) -> None:
    """Append the copy of a row of a window."""
    n, _, taps, _, _, gap = axis
    if gap == 1 and pitch == channels and not is_padded(axis):
        text.lines.append(f"to = widen({total(line, (start, pitch))}, to, {taps * channels});")
    elif gap == 1 and pitch == channels:
        text.lines += [
            f"const int32_t from = {start} < 0 ? -({start}) : 0;",
            f"const int32_t stop = {n} - ({start}) < {taps} ? {n} - ({start}) : {taps};",
            f"to = blank(to, {total(('from', channels))});",
            f"to = widen({line} + ({start} + from) * {pitch}, to, (stop - from) * {channels});",
            f"to = blank(to, ({taps} - stop) * {channels});",
        ]
    else:
        with text.loop("k", taps) as k:
            place = total(start, (k, gap))
            copy = f"to = widen({total(line, (place, pitch))}, to, {channels});"
            inside = [f"if ({place} < 0 || {place} >= {n})", f"to = blank(to, {channels});", "else"]
            text.lines += [*(inside if is_padded(axis) else []), copy]


def _multiply(
    op: integer.Accumulated,
    program: Program,
    text: Lines,
    rows: int,
    taps: int,
    step: int,
    start: str,
    group: str = "0",
) -> None:
    """Append the products of columns with all rows, and what becomes of the sums."""
    single = step == 0
    finish, _, _ = _finish(op, program)
    text.variables |= {"o"}
    with text.block(f"for (o = 0; o < {rows}; o += 2) "):
        row = total("w", (group, rows * taps), ("o", taps))
        other = f"u + {taps}" if rows % 2 == 0 else f"(o + 1 < {rows} ? u + {taps} : u)"
        second = "columns" if single else f"columns + {taps}"
        text.lines += [
            "int32_t sums[4];",
            f"const int8_t *const u = {row};",
            f"dots(u, {other}, columns, {second}, {taps}, sums);",
        ]
        kind = program.ctype(op.outputs[0])
        text.lines.append(f"{kind} *const at = {start} + o;")
        channel = total((group, rows), "o")
        for column in range(1 if single else 2):
            with text.block("if (t % 2 == 0) ") if column else nullcontext():
                for k in range(2):
                    result = finish.format(s=f"sums[{2 * k + column}]", c=total(channel, k))
                    text.lines += [f"if (o + 1 < {rows})"] * (k * rows % 2)
                    text.lines.append(f"at[{column * step + k}] = {result};")


def _emit(
    op: integer.Accumulated,
    program: Program,
    text: Lines,
    ends: tuple[str, str],
    weight: Array,
    columns: int,
    title: str,
) -> None:
    """Append the function of a product, and its call."""
    (x, y), (_, parameters, arguments) = ends, _finish(op, program)
    kind = program.ctype(y)
    given = ["const int8_t *x", "const int8_t *w", f"{kind} *y", "wide_t *columns", *parameters]
    head = [f"/* {title} */", f"static void $name({', '.join(given)})", "{"]
    lines = [*head, f"int32_t {', '.join(sorted(text.variables - {'n'}))};", *text.lines, "}"]
    function = program.function("conv", indented(lines, 0) + "\n")
    w = program.array(op.weight, weight, "int8_t", quads=True)
    scratch = f"(wide_t *)({program.scratch(columns // 2 + 2)})"
    names = [program.read(x), w, program.read(y), scratch, *arguments]
    program.emit(f"{function}({', '.join(names)});")


# -- other operations -----------------------------------------------------------------------------


@WRITE.runs(integer.IntegerPool)
def _pool(op: integer.IntegerPool, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    entry, found, name = "v[n]", "sums[n]", "foundpool"
    parameters, arguments = ", int32_t multiplier, int32_t shift", f", {op.multiplier}, {op.shift}"
    if op.function == "norm":
        entry, name = "v[n] * v[n]", "norm_pool"
        found = "root((uint32_t)sums[n] << bits)"
        parameters += ", int32_t bits"
        arguments += f", {2 * integer.root_bits(op.kernel)}"
    result = f"feature((int64_t){found} * multiplier, shift, -127)"
    words = "int32_t", "0", f"sums[n] + {entry}", result, parameters
    pool(program, name, words, op, last(program, x), y, arguments)


@WRITE.runs(integer.Requantize)
def _requantize(op: integer.Requantize, program: Program) -> None:
    (y,), count = op.outputs, len(op.multipliers)
    features, taus = op.inputs[:count], op.inputs[count:]
    addend, inner, length = "0", 1, 1
    if op.addend is not None:
        addend, inner, length = broadcast(program, op.addend, features[0], "int32_t")
        addend += "[j]" if length > 1 else "[0]"
    factor = "-1"
    if taus:
        factor = program.identifier(f"g_{y}")
        program.emit(f"const int32_t {factor} = factor_of({program.scalar(taus[0])});")
    entries = ["v", *(f"{{{n}}}" for n in range(1, count))]
    products = [f"(int64_t){v} * {m}" for v, m in zip(entries, op.multipliers, strict=True)]
    most = integer.LEVELS * sum(op.multipliers) >> op.shift
    text = _feature(program, " + ".join(products), op, factor, addend, most)
    each(program, features, y, text, inner, length)


@WRITE.runs(integer.Dequantize)
def _dequantize(op: integer.Dequantize, program: Program) -> None:
    x, (y,) = op.inputs[0], op.outputs
    tau = f" / {program.scalar(op.inputs[1])}" if len(op.inputs) > 1 else ""
    each(program, (x,), y, f"(float)(v * {number(op.scale)}{tau})")


@WRITE.runs(integer.IntegerEnergy)
def _energy(op: integer.IntegerEnergy, program: Program) -> None:
    z = dense(program, op.inputs[0])
    squares = f"squared({program.read(z)}, {program.count(z)})"
    program.define(op.outputs[0], f"apart({squares} * {number(op.weight)})")
    program.multiply_adds += program.count(z)


@WRITE.runs(integer.IntegerAdvance)
def _advance(op: integer.IntegerAdvance, program: Program) -> None:
    text = formula_text(program, op.inputs, op.parsed, "apart({} * {})")
    program.define(op.outputs[0], text)


@WRITE.runs(integer.IntegerRebase)
def _rebase(op: integer.IntegerRebase, program: Program) -> None:
    m, tau = (program.scalar(name) for name in op.inputs)
    program.define(op.outputs[0], f"limited({m} * {number(op.coordinate)} * {tau})")
    program.define(op.outputs[1], "1.0")
