"""Operations on whole numbers in C: one function each, of (operation, program), which appends statements.

Features are int8_t, four in the memory of a float. Only loops that read the image or write outputs compute
with floats.
"""

from __future__ import annotations

from math import prod

import numpy as np

from .. import integer_operations as integer
from .constants import number
from .layers import conv_geometry, pool_geometry, written_out
from .points import WRITE, formula_text
from .program import Program

__all__ = ["WRITE"]
_NONE = "NULL"


def _array(program: Program, name: str | None, ctype: str) -> str:
    """Return the array of a constant, NULL where an operation has none."""
    return _NONE if name is None else program.exact(name, ctype)


def _broadcast(program: Program, name: str | None, like: str, ctype: str) -> tuple[str, int, int]:
    """Return an array, how many values each of its numbers meets, and its length."""
    if name is None:
        return _NONE, program.count(like), 1
    written, inner = written_out(program, name, like)
    return program.exact(name, ctype, written), inner, prod(written)


def _quantized(
    op: integer.Quantize | integer.QuantizePoint, program: Program
) -> tuple[str, str, str, str]:
    """Return the image, its addend, the unit of the addend, and sizes, as arguments."""
    x = op.inputs[0]
    addend, inner, length = _broadcast(program, op.addend, x, "int8_t")
    unit = number(2.0**-op.exponent, "float")
    return program.read(x), addend, unit, f"{program.count(x)}, {inner}, {length}"


@WRITE.runs(integer.Quantize)
def _quantize(op: integer.Quantize, program: Program) -> None:
    x, addend, unit, sizes = _quantized(op, program)
    target = program.write(op.outputs[0])
    factor = number(float(np.float32(op.factor)), "float")
    program.emit(f"quantize({x}, {addend}, {unit}, {target}, {sizes}, {factor});")


@WRITE.runs(integer.QuantizePoint)
def _quantize_point(op: integer.QuantizePoint, program: Program) -> None:
    q, m, tau = op.outputs
    x, addend, unit, sizes = _quantized(op, program)
    target, peak = program.write(q), program.identifier(f"s_{m}_float")
    least, most, levels = (
        number(float(np.float32(value)), "float")
        for value in (max(op.offset, integer.SMALLEST_PEAK), integer.LARGEST_PEAK, op.levels)
    )
    call = f"shifted_peak({x}, {addend}, {unit}, {sizes}, {least}, {most})"
    program.emit(f"const float {peak} = {call};")
    program.emit(f"quantize({x}, {addend}, {unit}, {target}, {sizes}, {levels} / {peak});")
    share = f"{number(op.offset)} / {program.define(m, f'(double){peak}')}"
    squares = f"squared({target}, {program.count(q)})"
    unit = number(integer.inverse_square(op.levels))
    program.define(tau, f"length_of({squares}, {unit}, {share})")


def _tau(op: integer.Accumulated | integer.Dequantize, program: Program) -> str:
    return program.scalar(op.inputs[1]) if len(op.inputs) > 1 else "1.0"


def _arguments(op: integer.Accumulated, program: Program) -> str:
    """Return the constants of a product, as a function takes them."""
    weight = program.exact(op.weight, "int8_t")
    bias = _array(program, op.bias, "int32_t")
    if op.multiplier is None:
        scale, offset = (_array(program, name, "double") for name in (op.scale, op.offset))
        return f"{weight}, {bias}, {scale}, {offset}, {_tau(op, program)}"
    factor = f"factor_of({_tau(op, program)})" if len(op.inputs) > 1 else "-1"
    multiplier = program.exact(op.multiplier, "int32_t")
    addend = _array(program, op.addend, "int32_t")
    return f"{weight}, {bias}, {multiplier}, {addend}, {op.shift}, {op.low}, {factor}"


@WRITE.runs(integer.IntegerMatmul)
def _matmul(op: integer.IntegerMatmul, program: Program) -> None:
    x, (y,) = op.inputs[0], op.outputs
    rows, columns = program.recipe.constant_shape(op.weight)
    function = "times_number" if op.multiplier is None else "times_whole"
    arguments, target = _arguments(op, program), program.write(y)
    for index in range(program.count(x) // columns):
        source = program.read(x, index * columns)
        target = program.read(y, index * rows)
        program.emit(f"{function}({arguments}, {source}, {target}, {rows}, {columns}, 1);")
        program.multiply_adds += rows * columns


@WRITE.runs(integer.IntegerConv)
def _conv(op: integer.IntegerConv, program: Program) -> None:
    x, (y,) = op.inputs[0], op.outputs
    _, share, *window = program.recipe.constant_shape(op.weight)
    function = "convolve_number" if op.multiplier is None else "convolve_whole"
    arguments, source, target = _arguments(op, program), program.read(x), program.write(y)
    geometry = conv_geometry(op, program)
    scratch = program.scratch(share * prod(window))
    program.emit(f"{function}({arguments}, {source}, {target}, {geometry}, {scratch});")
    program.multiply_adds += program.count(y) * share * prod(window)


@WRITE.runs(integer.IntegerPool)
def _pool(op: integer.IntegerPool, program: Program) -> None:
    (x,), (y,) = op.inputs, op.outputs
    bits = integer.root_bits(op.kernel) if op.function == "norm" else -1
    # One function for sums and norms: a device has little flash.
    addresses = f"{program.read(x)}, {program.write(y)}, {pool_geometry(op, program)}"
    program.emit(f"pool_whole({addresses}, {bits}, {op.multiplier}, {op.shift});")


@WRITE.runs(integer.Requantize)
def _requantize(op: integer.Requantize, program: Program) -> None:
    (y,), count = op.outputs, len(op.multipliers)
    features, taus = op.inputs[:count], op.inputs[count:]
    multipliers = program.integers(f"{y}_multipliers", op.multipliers)
    addend, inner, length = _broadcast(program, op.addend, y, "int32_t")
    factor = f"factor_of({program.scalar(taus[0])})" if taus else "-1"
    target = program.write(y, over=features[0])
    values = program.identifier(f"s_{y}_sources")
    program.emit("{", f"const int8_t *{values}[{count}];")
    for index, source in enumerate(program.read(x) for x in features):
        program.emit(f"{values}[{index}] = {source};")
    sizes = f"{inner}, {length}, {op.shift}, {op.low}, {factor}"
    arguments = f"{values}, {multipliers}, {count}, {addend}, {sizes}"
    program.emit(f"requantize({arguments}, {target}, {program.count(y)});", "}")


@WRITE.runs(integer.Dequantize)
def _dequantize(op: integer.Dequantize, program: Program) -> None:
    x, (y,) = op.inputs[0], op.outputs
    source, target = program.read(x), program.write(y)
    scale, tau = number(op.scale), _tau(op, program)
    program.emit(f"dequantize({source}, {scale}, {tau}, {target}, {program.count(x)});")


@WRITE.runs(integer.IntegerEnergy)
def _energy(op: integer.IntegerEnergy, program: Program) -> None:
    (z,) = op.inputs
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
