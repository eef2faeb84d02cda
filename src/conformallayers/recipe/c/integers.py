"""Operations on integers in C: one function each, of (operation, program), which appends statements.

Features are int8_t, maps have their channels last. A convolution copies two windows at a time as 16-bit numbers
and multiplies them by two rows of weights at once, which the DSP instructions of a Cortex-M4 do by pairs.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from .. import integer_operations as integer
from ..places import Array
from ..recipe import INPUT
from .constants import number
from .kernels import Windows
from .layers import broadcast, conv_title, conv_windows, each, pool, three
from .points import WRITE, formula_text
from .program import Program
from .shapes import dense, first, last

__all__ = ["WRITE"]
_ONE = number(2.0**integer.FACTOR_BITS)  # divided by τ
_SMALL = 2**30  # numbers below it add up to 32 bits
_MOST_TAPS = 64  # of a depthwise kernel whose addresses lie on the stack


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


def _finish(op: integer.Accumulated, program: Program) -> tuple[str, str, str]:
    """Return how a sum of the channel c becomes a result, and the parameters and arguments for it."""
    constants = program.recipe.constants
    taus = [program.scalar(name) for name in op.inputs[1:]]
    parameters, arguments = list[str](), [""]

    def argument(parameter: str, text: str) -> str:
        parameters.append(f"const {parameter}")
        arguments.append(text)
        return parameter.split()[-1].lstrip("*")

    def array(parameter: str, name: str) -> str:
        values = program.array(name, program.constant(name), parameter.split()[0])
        return f"{argument(parameter, values)}[c]"

    found = "sums[n]" if op.bias is None else f"(sums[n] + {array('int32_t *bias', op.bias)})"
    if op.multiplier is None:
        text = f"apart((double){found} * {array('double *scale', op.scale or '')})"
        text += f" / {argument('double tau', taus[0])}" if taus else ""
        text += f" + {array('double *offset', op.offset)}" if op.offset is not None else ""
        text = f"(float)({text})"
    else:
        # A shift by 32 bits takes the upper word of a product, if multipliers have room for it.
        spare, factors = 32 - op.shift, program.constant(op.multiplier)
        upper = spare > 0 and factors.max() * 2.0**spare < 2**31
        name = program.array(op.multiplier, factors * 2.0 ** (spare * upper), "int32_t")
        product = f"(int64_t){found} * {argument('int32_t *multiplier', name)}[c]"
        addend = "0" if op.addend is None else array("int32_t *addend", op.addend)
        factor = argument("int32_t factor", f"factor_of({_ONE}, {taus[0]})") if taus else "-1"
        sums = zip(op.largest_sums(constants.__getitem__), constants[op.multiplier], strict=True)
        most = max(int(a) * int(b) >> op.shift for a, b in sums)
        text = _feature(
            program, product, replace(op, shift=32) if upper else op, factor, addend, most
        )
    return text, ", ".join(parameters), ", ".join(arguments)


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


@WRITE.runs(integer.IntegerMatmul)
def _matmul(op: integer.IntegerMatmul, program: Program) -> None:
    x, weight = dense(program, op.inputs[0]), program.constant(op.weight)
    rows, columns = weight.shape
    if len(program.shape(x)) > 1:
        x = first(program, x)
    elif program.place(x).map is not None:
        weight = weight[:, program.in_memory(x, np.arange(columns)).ravel()]
    count = program.count(x) // columns
    program.write(op.outputs[0])
    axes = three([(count, count, 1, 1, 0, 1)])
    windows = Windows(axes, columns, columns, 1, rows, (0, 0, rows))
    _products(op, program, windows, x, weight, f"product with a matrix ({rows}, {columns})")


@WRITE.runs(integer.IntegerConv)
def _conv(op: integer.IntegerConv, program: Program) -> None:
    (y,), x, weight = op.outputs, last(program, op.inputs[0]), program.constant(op.weight)
    kernel = np.moveaxis(weight, 1, -1).reshape(len(weight), -1)
    program.write(y, last=True)
    _products(op, program, conv_windows(op, program, x, y), x, kernel, conv_title(op, program))


def _products(
    op: integer.Accumulated, program: Program, windows: Windows, x: str, kernel: Array, title: str
) -> None:
    """Append the products of windows of x with a kernel (outputs, taps)."""
    (y,), taps = op.outputs, windows.taps
    program.multiply_adds += program.count(y) * taps
    depthwise = windows.depthwise and taps <= _MOST_TAPS
    entries = taps + -taps % 4  # rows of weights are read in fours
    geometry = [windows.groups, windows.outputs, windows.channels, entries]
    geometry += [windows.pitch, windows.to[2]]
    geometry += [size for setting in zip(*windows.axes, strict=True) for size in setting]
    result, parameters, arguments = _finish(op, program)
    words = {"$T": program.ctype(y), "$R": result, "$P": parameters}
    words |= {"$A": title[0].upper() + title[1:], "$G": ", ".join(map(str, geometry))}
    words["$N"] = str(taps)
    if depthwise:  # four channels side by side, tap by tap
        rows = np.pad(kernel, [(0, -len(kernel) % 4), (0, 0)]).reshape(-1, 4, taps).swapaxes(1, 2)
        room, kind = (len(kernel) + 6) // 4, "int8_t"  # of zeros, read in fours
    else:
        rows = np.pad(kernel, [(0, 0), (0, entries - taps)])
        room, kind = entries * min(2, prod(windows.positions)) // 2 + 2, "wide_t"
    name = "matmul" if isinstance(op, integer.IntegerMatmul) else "conv"
    function = program.template("depthwise" if depthwise else "products", name, words)
    w = program.array(op.weight, rows, "int8_t", quads=not depthwise)
    ends = f"{program.read(x)}, {w}, {program.read(y)}, ({kind} *)({program.scratch(room)})"
    program.emit(f"{function}({ends}{arguments});")


# -- other operations -----------------------------------------------------------------------------


@WRITE.runs(integer.IntegerPool)
def _pool(op: integer.IntegerPool, program: Program) -> None:
    (x, *taus), (y,) = op.inputs, op.outputs
    entry, found, name, factor = "v[n]", "sums[n]", "sum_pool", f"{op.multiplier}"
    if taus:
        factor = f"factor_of({factor}, {program.scalar(taus[0])})"
    parameters, arguments = ", int32_t multiplier, int32_t shift", f", {factor}, {op.shift}"
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
        program.emit(f"const int32_t {factor} = factor_of({_ONE}, {program.scalar(taus[0])});")
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
