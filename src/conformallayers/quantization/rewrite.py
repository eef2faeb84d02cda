"""Rewrite a recipe in integers, operation by operation.

A value is held as features with a scale, and with the coordinate τ that still divides it: the division commutes
with pooling, ReLU and reshapes, and the next product applies it to its sums. A product is pending until its value is
needed, so that the division, the bias and the ReLU behind it are fused into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ..errors import ConformalError, refusal
from ..recipe import integer_operations as integer
from ..recipe import layer_operations as layer
from ..recipe import places
from ..recipe import point_operations as point
from ..recipe.integer_operations import LEVELS, PART_BITS
from ..recipe.places import Array
from ..recipe.recipe import INPUT, Operation, Recipe, RecipeBuilder, Runtime
from .calibration import Calibration, multipliers, single_shift, weight_scales

RUN = Runtime("int8")
_POOLS = layer.AvgPool, layer.AdaptiveAvgPool, layer.NormPool
_ALIKE = (
    "Use ReLU, ReLU6 or LeakyReLU between layers, nearest for upsampling; it may stay at the end."
)
_LARGEST_EXPONENT = 100  # of the addend of ``quantize``
_LARGEST_ADDEND = 2**28  # in parts: beyond every feature, and sums with it fit into 32 bits
# Operations on floats that round alike in all runtimes, so that integers may follow.
_EXACT = (
    *(layer.AddConstant, layer.Multiply, layer.PRelu, layer.Product),
    *(layer.Pad, layer.AdaptiveMaxPool, layer.Upsample),
)


@dataclass(frozen=True)
class Number:
    """A value in floats.

    ``addend`` is a constant of the float recipe that is still to be added. ``inexact`` is the first operation
    that runtimes round differently: no integers may follow it.
    """

    name: str
    addend: str | None = None
    inexact: str | None = None


@dataclass(frozen=True)
class Features:
    """Integers q that stand for ``scale·q``, or ``scale·q/τ``; ``tau`` is a name in the float recipe.

    A pooling divides by the coordinate ``early``, ahead of the division in the float recipe.
    """

    name: str
    scale: float
    tau: str | None = None
    early: str | None = None


@dataclass(frozen=True)
class Sums:
    """A pending product: ``(W x + bias)/τ + addend``, at least 0 if ``low`` is 0.

    x is ``scale`` times features; bias and addend have one number for each channel.
    """

    op: layer.Matmul | layer.Conv
    x: str
    scale: float
    weight: Array
    bias: Array
    addend: Array
    tau: str | None
    low: int = -LEVELS


class Quantizer:
    """Rewrite the operations of a recipe on the CPU as operations on integers."""

    def __init__(self, recipe: Recipe, calibration: Calibration) -> None:
        self.recipe, self.calibration = recipe, calibration
        self.builder = RecipeBuilder(recipe.input_shape)
        self.shapes = recipe.shapes()
        self.held: dict[str, Number | Features | Sums] = {INPUT: Number(INPUT)}
        self.names: dict[str, str] = {}  # of constants in the new recipe
        self.scalars: dict[str, str] = {}  # names in the new recipe
        self.ones: set[str] = set()  # coordinates of the new recipe that are 1 for every sample
        # Divided value → whether the first pooling before it knew τ.
        self._known: dict[str, bool] = {}
        self._writers = {name: op for op in recipe.operations for name in op.outputs}
        self.inexact: dict[str, None] = {}  # operations before integers that runtimes round apart
        self._readers: dict[str, list[Operation]] = {name: [] for name in self.shapes}
        for op in recipe.operations:
            for name in op.inputs:
                self._readers[name].append(op)

    def quantized(self) -> Recipe:
        """Rewrite all operations; refuse what int8 lacks."""
        for op in self.recipe.operations:
            if type(op) in RUN:
                RUN[type(op)](op, self)
            elif op.keeps_integers:
                _pass(op, self)
            else:
                self.keep(op)
        output = self.number(self.recipe.output)
        if self.inexact:
            raise _refusal(f"{', '.join(self.inexact)} before other layers", _ALIKE)
        return self.builder.recipe(output).pruned()

    def keep(self, op: Operation) -> None:
        """Keep an operation on floats; refuse one that reads or writes scalars of samples."""
        if isinstance(op, layer.Call):
            RUN.check(op, "quantize(folded)")
        if not self.held.keys() >= set(op.inputs) or () in map(self.shapes.get, op.outputs):
            raise _refusal(op.kind, 'Fold with strategy="layers" or "conv".')
        inputs = [self.number(name) for name in op.inputs]
        before = (getattr(self.held[name], "inexact", None) for name in op.inputs)
        described = f"{op.kind} {getattr(op, 'function', '')}".strip()
        inexact = next(filter(None, before), None if _rounds_alike(op) else described)
        names = self.copy(op, inputs)
        self.held |= {
            y: Number(name, None, inexact) for y, name in zip(op.outputs, names, strict=True)
        }

    def copy(self, op: Operation, inputs: Sequence[str]) -> tuple[str, ...]:
        """Append an operation as it is, with other inputs; return its outputs."""
        return self.builder.copy(op, inputs, self.recipe, self.names)

    def read_once(self, name: str) -> bool:
        """Tell whether exactly one operation reads a value, which is not the output."""
        return len(self._readers[name]) == 1 and name != self.recipe.output

    def array(self, name: str) -> Array:
        """Return a constant in float64."""
        found: Array = self.recipe.constants[name].detach().double().numpy()
        return found

    def constant(self, name: str, array: Any) -> str:
        """Add a constant to the new recipe; return its name."""
        return self.builder.constant(name, torch.as_tensor(array))

    # -- values in the form that an operation needs ---------------------------------------------------

    def number(self, name: str) -> str:
        """Return the name of a value in floats."""
        held = self.held[name]
        if isinstance(held, Features):
            inputs, scale = (held.name, *self.taus(held.tau)), held.scale
            found = self.builder.add(integer.Dequantize, *inputs, name="y", scale=scale)
        elif isinstance(held, Sums):
            found = self._product(held, name, None)
        elif held.addend is not None:
            value = self.constant("value", self.recipe.constants[held.addend])
            found = self.builder.add(layer.AddConstant, held.name, name=name, value=value)
        else:
            return held.name
        self.held[name] = Number(found)
        return found

    def features(self, name: str, *, divided: bool = False) -> Features:
        """Return a value as features, ``divided`` by its coordinate if asked for."""
        held = self.held[name]
        if isinstance(held, Sums):
            scale = self.scale(name)
            held = Features(self._product(held, name, scale), scale)
        elif isinstance(held, Number):
            factor = float(np.float32(1 / self.scale(name)))
            q = self.builder.add(
                integer.Quantize, held.name, name="q", factor=factor, **self.addend(held)
            )
            held = Features(q, 1 / factor)
        if divided and held.tau is not None:
            held = self.requantized([held], name, self.scale(name), held.tau)
        self.held[name] = held
        return held

    def addend(self, held: Number) -> dict[str, Any]:
        """Return the options of ``quantize`` that add the pending constant, rounded to 8 bits."""
        if held.inexact is not None:
            self.inexact[held.inexact] = None
        if held.addend is None:
            return {}
        value = self.array(held.addend)
        exponent = _exponent(value)
        rounded = np.rint(value * 2.0**exponent).astype(np.int8)
        return {"addend": self.constant("addend", rounded), "exponent": exponent}

    def taus(self, tau: str | None) -> tuple[str, ...]:
        """Return the input of an operation that divides by a coordinate; none without one."""
        return () if tau is None else (self.scalars[tau],)

    def scale(self, name: str, tau: str | None = None) -> float:
        """Return the scale of a value, times its coordinate if there is one.

        Operations that keep integers, such as a ReLU or a concatenation, keep the scale too: it is calibrated on
        the value behind them.
        """
        while self.read_once(name):
            (op,) = self._readers[name]
            kept = op.keeps_integers or _saturates(op)
            if isinstance(op, layer.Slice) or not kept:
                break
            (name,) = op.outputs
        return self.calibration.scale(name, tau)

    def division(self, name: str) -> point.Rebase | None:
        """Return the division that alone reads a pooled value, or poolings concatenated with it, if τ is known."""
        while self.read_once(name):
            (op,) = self._readers[name]
            if isinstance(op, point.Rebase):
                known = self._known.setdefault(name, op.inputs[2] in self.scalars)
                return op if known and self.scalars[op.inputs[2]] not in self.ones else None
            pooled = (isinstance(self._writers[x], _POOLS) and self.read_once(x) for x in op.inputs)
            if not isinstance(op, layer.Concatenate) or not all(pooled):
                return None
            (name,) = op.outputs
        return None

    def requantized(
        self,
        values: list[Features],
        name: str,
        scale: float,
        tau: str | None = None,
        addend: Array | None = None,
    ) -> Features:
        """Append a sum of features, divided by a coordinate, with a constant added, in another scale."""
        factors = np.array([value.scale / scale for value in values])
        most = np.full(len(values), LEVELS * len(values))
        found, options = self._rescaling(factors, most, scale, tau, addend)
        options["multipliers"] = tuple(int(n) for n in found)
        inputs = [value.name for value in values]
        made = self.builder.add(integer.Requantize, *inputs, *self.taus(tau), name=name, **options)
        return Features(made, scale)

    def _rescaling(
        self, factors: Array, most: Array, scale: float, tau: str | None, addend: Array | None
    ) -> tuple[Array, dict[str, Any]]:
        """Return the multipliers of sums of at most ``most``, and the shift and the addend behind them."""
        parts = tau is not None or addend is not None
        found, shift = multipliers(factors * 2.0 ** (PART_BITS * parts), most, parts)
        options: dict[str, Any] = {"shift": shift}
        if addend is not None:
            rounded = np.rint(addend / scale * 2.0**PART_BITS)
            rounded = np.clip(rounded, -_LARGEST_ADDEND, _LARGEST_ADDEND)
            options["addend"] = self.constant("addend", rounded.astype(np.int32))
        return found, options

    def _product(self, sums: Sums, name: str, scale: float | None) -> str:
        """Append a pending product: as features of a scale, or as floats without one."""
        unit = weight_scales(sums.weight, sums.bias / sums.scale)
        added = sums.addend if sums.addend.any() else None
        if scale is not None and added is None and sums.tau is None:
            # Scales of weights a little larger, so that the multipliers are exact, and their products
            # with sums have 24 bits where a few bits of the multipliers suffice for it.
            factors, rows = unit * sums.scale / scale, np.abs(sums.weight.reshape(len(unit), -1))
            most = LEVELS * (rows.sum(1) / unit + rows.shape[1] / 2) + np.abs(sums.bias) / unit + 1
            needed = np.minimum(factors * most / integer.EXACT_SINGLE, factors / 32)
            step = 2.0 ** np.maximum(np.ceil(np.log2(needed)), -single_shift(factors))
            unit *= np.ceil(factors / step) * step / factors
        weight = np.rint(sums.weight / unit.reshape(-1, *[1] * (sums.weight.ndim - 1)))
        steps = unit * sums.scale  # of the sums of each channel
        bias = np.rint(sums.bias / steps)
        options: dict[str, Any] = {"weight": self.constant("weight", weight.astype(np.int8))}
        if bias.any():
            options["bias"] = self.constant("bias", bias.astype(np.int32))
        if scale is not None:
            most = LEVELS * np.abs(weight.reshape(len(weight), -1)).sum(1) + np.abs(bias)
            found, more = self._rescaling(steps / scale, most, scale, sums.tau, added)
            options |= {"multiplier": self.constant("multiplier", found), "low": sums.low, **more}
        else:
            options["scale"] = self.constant("scale", steps)
            if added is not None:
                options["offset"] = self.constant("offset", added)
        kind: type[Operation] = integer.IntegerMatmul
        if isinstance(sums.op, layer.Conv):
            kind, kept = integer.IntegerConv, ("stride", "padding", "dilation", "groups")
            options |= {field: getattr(sums.op, field) for field in kept}
        made = self.builder.add(kind, sums.x, *self.taus(sums.tau), name=name, **options)
        if scale is None and sums.low == 0:
            made = self.builder.add(layer.Elementwise, made, name=name, function="relu")
        return made


def _refusal(got: str, remedy: str) -> ConformalError:
    return refusal("quantize(folded)", "operations supported by int8", got, remedy)


def _rounds_alike(op: Operation) -> bool:
    if isinstance(op, layer.Elementwise):
        return op.function in ("relu", "abs", "leaky_relu", "clip")
    return isinstance(op, _EXACT) or op.keeps_integers


def _saturates(op: Operation) -> bool:
    """Tell whether it cuts numbers at 0 and at a largest one, as features do at the end of their scale."""
    return isinstance(op, layer.Elementwise) and op.function == "clip" and op.parameters[0] == 0


def _exponent(value: Array) -> int:
    """Return the largest power of two with which a constant fits into 8 bits; -1 if there is none."""
    largest = np.abs(value).max(initial=0)
    found = int(np.floor(np.log2(LEVELS / largest))) if largest else 0
    return found if 0 <= found <= _LARGEST_EXPONENT else -1


# -- one function for each operation ------------------------------------------------------------------


@RUN.runs(layer.Matmul, layer.Conv)
def _product(op: layer.Matmul | layer.Conv, to: Quantizer) -> None:
    x, weight = to.features(op.inputs[0]), to.array(op.weight)
    none = np.zeros(len(weight))
    bias = none if op.bias is None else to.array(op.bias)
    before, behind = (bias, none) if x.tau is None else (none, bias)
    to.held[op.outputs[0]] = Sums(op, x.name, x.scale, weight, before, behind, x.tau)


@RUN.runs(layer.AddConstant)
def _add_constant(op: layer.AddConstant, to: Quantizer) -> None:
    (x,), (y,) = op.inputs, op.outputs
    held, value = to.held[x], to.array(op.value)
    if isinstance(held, Number):
        if held == Number(held.name) and to.read_once(x) and _exponent(value) >= 0:
            to.held[y] = replace(held, addend=op.value)
        else:
            to.keep(op)
        return
    if isinstance(held, Sums) and to.read_once(x) and held.low:
        shape = len(held.weight), *[1] * (held.weight.ndim - 2)  # of a constant of channels
        if value.size == 1 or (value.size == shape[0] and value.shape[-len(shape) :] == shape):
            field = "bias" if held.tau is None else "addend"
            to.held[y] = replace(held, **{field: getattr(held, field) + value.ravel()})
            return
    found = to.features(x)
    to.held[y] = to.requantized([found], y, to.scale(y), found.tau, value)


@RUN.runs(layer.Multiply)
def _multiply(op: layer.Multiply, to: Quantizer) -> None:
    (x,), (y,) = op.inputs, op.outputs
    factor = to.array(op.factor)
    if isinstance(to.held[x], Number) or factor.size > 1 or factor.item() <= 0:
        to.keep(op)
        return
    found = to.features(x)
    to.held[y] = replace(found, scale=found.scale * factor.item())


def _pass(op: Operation, to: Quantizer) -> None:
    """Append an operation that maps integers to integers of the same scale."""
    (x,), (y,) = op.inputs, op.outputs
    held = to.held[x]
    if isinstance(held, Number):
        to.keep(op)
    elif isinstance(held, Sums) and getattr(op, "function", "") == "relu" and to.read_once(x):
        to.held[y] = replace(held, low=0)
    else:
        found = to.features(x)
        (name,) = to.copy(op, [found.name])
        to.held[y] = replace(found, name=name)


@RUN.runs(layer.Elementwise)
def _elementwise(op: layer.Elementwise, to: Quantizer) -> None:
    (x,), (y,) = op.inputs, op.outputs
    if op.keeps_integers:
        _pass(op, to)
    elif not _saturates(op) or isinstance(to.held[x], Number) or y == to.recipe.output:
        to.keep(op)
    else:  # The scale of what follows ends where the function cuts.
        held, scale = to.held[x], to.scale(y)
        if isinstance(held, Sums) and to.read_once(x):
            to.held[x] = replace(held, low=0)
            to.held[y] = to.features(x)
            return
        found = to.requantized([to.features(x, divided=True)], y, scale)
        name = to.builder.add(layer.Elementwise, found.name, name=y, function="relu")
        to.held[y] = replace(found, name=name)


@RUN.runs(layer.Concatenate)
def _concatenate(op: layer.Concatenate, to: Quantizer) -> None:
    (y,) = op.outputs
    if all(isinstance(to.held[x], Number) for x in op.inputs):
        to.keep(op)
        return
    found = [to.features(x) for x in op.inputs]
    if len({value.tau for value in found}) > 1:
        found = [to.features(x, divided=True) for x in op.inputs]
    scales = {value.scale for value in found}
    scale = scales.pop() if len(scales) == 1 else to.scale(y, found[0].tau)
    same = [
        value if value.scale == scale else replace(to.requantized([value], y, scale), tau=value.tau)
        for value in found
    ]
    (name,) = to.copy(op, [value.name for value in same])
    to.held[y] = replace(same[0], name=name)


@RUN.runs(layer.Add)
def _add(op: layer.Add, to: Quantizer) -> None:
    (y,) = op.outputs
    found = [to.features(x, divided=True) for x in op.inputs]
    to.held[y] = to.requantized(found, y, to.scale(y))


@RUN.runs(*_POOLS)
def _pool(op: layer.AvgPool | layer.AdaptiveAvgPool | layer.NormPool, to: Quantizer) -> None:
    (x,), (y,) = op.inputs, op.outputs
    windows: Any = op.averages if isinstance(op, layer.NormPool) else op
    if isinstance(op, layer.AdaptiveAvgPool):
        windows = op.regular(to.shapes[x])
    sizes: Any = np.unique(places.divisors(windows, to.shapes[x])) if windows else ()
    if len(sizes) != 1 or prod(windows.kernel) > integer.LARGEST_WINDOW:
        got = f"{op.kind} of windows of different sizes, or of more than 1024 numbers"
        raise _refusal(got, "Use another pooling.")
    division = to.division(y)
    found = to.features(x, divided=division is not None)
    scale = to.scale(y, found.tau)
    if division is not None:
        scale = to.scale(division.outputs[0]) / division.scale
    kept = "kernel", "stride", "padding", "ceil_mode"
    options: dict[str, Any] = {field: getattr(windows, field) for field in kept}
    norms = isinstance(op, layer.NormPool)
    divisor = 2.0 ** integer.root_bits(windows.kernel) if norms else float(sizes[0])
    factor = np.array([found.scale / scale / divisor])
    most = np.array([integer.LARGEST_WINDOW * LEVELS])  # a norm in parts has 12 bits at most
    (multiplier,), options["shift"] = multipliers(factor, most, False)
    options |= {"function": "norm" if norms else "sum", "multiplier": int(multiplier)}
    early = None if division is None else division.inputs[2]
    name = to.builder.add(integer.IntegerPool, found.name, *to.taus(early), name=y, **options)
    to.held[y] = Features(name, scale, found.tau, early)


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, to: Quantizer) -> None:
    (x,), (unit, m, tau) = op.inputs, op.outputs
    held = to.held[x]
    if not isinstance(held, Number):
        held = Number(to.number(x))
    levels = float(np.float32(min(1 / to.scale(unit), 1e7)))
    options = {"levels": levels, "offset": op.offset, **to.addend(held)}
    names = to.builder.add_many(integer.QuantizePoint, held.name, names=op.outputs, **options)
    to.held[unit] = Features(names[0], 1 / levels)
    to.scalars |= {m: names[1], tau: names[2]}


@RUN.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, to: Quantizer) -> None:
    found = to.features(op.inputs[0], divided=True)
    weight = op.weight * found.scale * found.scale
    (n,) = op.outputs
    to.scalars[n] = to.builder.add(integer.IntegerEnergy, found.name, name=n, weight=weight)


@RUN.runs(point.Advance)
def _advance(op: point.Advance, to: Quantizer) -> None:
    inexact = ", ".join(sorted(integer.INEXACT & op.parsed.heads()))
    if inexact:
        expected, remedy = "activations of + - * / and sqrt", "Use ReSPro or Gnomonic."
        raise refusal("quantize(folded)", expected, inexact, remedy)
    inputs, (tau,) = [to.scalars[name] for name in op.inputs], op.outputs
    to.scalars[tau] = to.builder.add(integer.IntegerAdvance, *inputs, name=tau, formula=op.formula)


@RUN.runs(point.Divide, point.Rebase)
def _divide(op: point.Divide | point.Rebase, to: Quantizer) -> None:
    """Let ``y = scale·x/τ`` without an operation: change the scale, and keep τ pending."""
    (y, *scalars), rebase = op.outputs, isinstance(op, point.Rebase)
    x, m, tau = op.inputs if rebase else (op.inputs[0], op.inputs[2], op.inputs[1])
    held, one = to.held[x], to.scalars[tau] in to.ones
    if isinstance(held, Features) and held.early is not None:
        to.held[y] = Features(held.name, held.scale * op.scale)
    elif isinstance(held, Sums) and to.read_once(x) and held.low and (one or held.tau is None):
        bias, addend = held.bias * op.scale, held.addend * op.scale
        to.held[y] = replace(
            held,
            scale=held.scale * op.scale,
            bias=bias,
            addend=addend,
            tau=held.tau if one else tau,
        )
    else:
        found = to.features(x) if one else replace(to.features(x, divided=True), tau=tau)
        to.held[y] = replace(found, scale=found.scale * op.scale)
    if isinstance(op, point.Rebase):
        inputs, options = [to.scalars[m], to.scalars[tau]], {"coordinate": op.coordinate}
        names = to.builder.add_many(integer.IntegerRebase, *inputs, names=tuple(scalars), **options)
        to.scalars.update(zip(scalars, names, strict=True))
        to.ones.add(names[1])
