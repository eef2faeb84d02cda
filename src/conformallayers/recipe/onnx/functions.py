"""Functions of single numbers in ONNX; NaN stays NaN in every runtime that compares as IEEE 754 says.

They are made of operators that ONNX Runtime has in float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..places import Array
from .graph import WIDE, OnnxGraph, Value

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_STEP, _TERMS, _REACH = 0.5, 26, 6.0  # of the sines that make the error function in float64


def leaky(graph: OnnxGraph, x: Value, slope: float | Array) -> Value:
    """Return x, and ``slope·x`` where it is negative."""
    return _positive_or(graph, x, graph.add("Mul", x, slope))


def _positive_or(graph: OnnxGraph, x: Value, other: Value) -> Value:
    return graph.add("Where", graph.add("Greater", x, 0.0, dtype=bool), x, other)


def _clip(graph: OnnxGraph, x: Value, low: float, high: float) -> Value:
    below = graph.add("Less", x, low, dtype=bool)
    above = graph.add("Greater", x, high, dtype=bool)
    return graph.add("Where", below, low, graph.add("Where", above, high, x))


def _elu(
    graph: OnnxGraph, x: Value, alpha: float, scale: float = 1.0, inside: float = 1.0
) -> Value:
    """Return ``scale·x``, and ``scale·alpha·(exp(inside·x) − 1)`` where x is negative.

    The difference is ``2h/(1 − h)`` with ``h = tanh(x/2)``, which loses no digits near 0.
    """
    h = graph.add("Tanh", graph.add("Mul", x, inside / 2))
    twice = graph.add("Mul", h, 2 * alpha)
    y = _positive_or(graph, x, graph.add("Div", twice, graph.add("Sub", 1.0, h)))
    return y if scale == 1.0 else graph.add("Mul", y, scale)


def _gelu(graph: OnnxGraph, x: Value) -> Value:
    """Return ``x·(1 + erf(x/√2))/2``."""
    erf = _erf(graph, graph.add("Mul", x, np.sqrt(0.5)))
    return graph.add("Mul", graph.add("Mul", x, 0.5), graph.add("Add", erf, 1.0))


def _erf(graph: OnnxGraph, x: Value) -> Value:
    """Return the error function; in float64, which ONNX Runtime lacks, as a sum of sines.

    ``erf x = (2/π) ∫ exp(−t²/4) sin(x t)/t dt``: the midpoint rule errs by less than 1e-16 where |x| ≤ 6.
    """
    if x.dtype != WIDE:
        return graph.add("Erf", x)
    t = (np.arange(_TERMS) + 0.5) * _STEP
    weights = 2 / np.pi * _STEP * np.exp(-t * t / 4) / t
    column = graph.reshape(_clip(graph, x, -_REACH, _REACH), (*x.shape, 1))
    waves = graph.add("Sin", graph.add("Mul", column, t, shape=(*x.shape, _TERMS)))
    return graph.reshape(graph.add("MatMul", waves, weights[:, None], shape=column.shape), x.shape)


def _gelu_tanh(graph: OnnxGraph, x: Value) -> Value:
    """Return ``x·(1 + tanh u)/2 = x·sigmoid(2u)`` with ``u = √(2/π)·(x + 0.044715·x³)``."""
    factor = 2 * np.sqrt(2 / np.pi)
    square = graph.add("Mul", graph.add("Mul", x, x), factor * 0.044715)
    inside = graph.add("Mul", x, graph.add("Add", square, factor))
    return graph.add("Div", x, _one_and_exp(graph, inside))


def _one_and_exp(graph: OnnxGraph, x: Value) -> Value:
    """Return ``1 + exp(−x)``; the Sigmoid of ONNX Runtime in float32 is constant below −18."""
    return graph.add("Add", graph.add("Exp", graph.add("Neg", x)), 1.0)


def _mish(graph: OnnxGraph, x: Value) -> Value:
    """Return ``x·tanh(log(1 + e)) = x·n/(n + 2)`` with ``e = exp x`` and ``n = e·(e + 2)``."""
    e = graph.add("Exp", graph.add("Min", x, 20.0))  # beyond it the fraction is 1
    n = graph.add("Mul", e, graph.add("Add", e, 2.0))
    return graph.add("Mul", x, graph.add("Div", n, graph.add("Add", n, 2.0)))


def _softplus(graph: OnnxGraph, x: Value, beta: float, threshold: float) -> Value:
    """Return ``log(1 + exp(beta·x))/beta``, and x where ``beta·x`` is above the threshold.

    With ``w = 1 + e`` rounded, ``log(1 + e) = log(w)·e/(w − 1)`` to the last digit (Kahan).
    """
    inside = x if beta == 1.0 else graph.add("Mul", x, beta)
    e = graph.add("Exp", inside)
    w = graph.add("Add", e, 1.0)
    ratio = graph.add("Div", e, graph.add("Sub", w, 1.0))
    y = graph.add("Mul", graph.add("Log", w), ratio)
    y = graph.add("Where", graph.add("Equal", w, 1.0, dtype=bool), e, y)
    y = y if beta == 1.0 else graph.add("Div", y, beta)
    return graph.add("Where", graph.add("Greater", inside, threshold, dtype=bool), x, y)


def _hardswish(graph: OnnxGraph, x: Value) -> Value:
    inside = graph.add("Clip", graph.add("Add", x, 3.0), 0.0, 6.0)
    return graph.add("Mul", graph.add("Div", x, 6.0), inside)


def _hardsigmoid(graph: OnnxGraph, x: Value) -> Value:
    return graph.add("Div", _clip(graph, graph.add("Add", x, 3.0), 0.0, 6.0), 6.0)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": lambda graph, x: graph.add("Abs", x),
    # ONNX Runtime merges it with the product before it, and keeps NaN.
    "relu": lambda graph, x: graph.add("Relu", x),
    "relu6": lambda graph, x: _clip(graph, x, 0.0, 6.0),
    "leaky_relu": leaky,
    "elu": _elu,
    "celu": lambda graph, x, alpha: _elu(graph, x, alpha, inside=1 / alpha),
    "selu": lambda graph, x: _elu(graph, x, _SELU_ALPHA, _SELU_SCALE),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda graph, x: graph.add("Div", x, _one_and_exp(graph, x)),
    "mish": _mish,
    "sigmoid": lambda graph, x: graph.add("Div", 1.0, _one_and_exp(graph, x)),
    "tanh": lambda graph, x: graph.add("Tanh", x),
    "softplus": _softplus,
    "hardtanh": _clip,
    "hardswish": _hardswish,
    "hardsigmoid": _hardsigmoid,
}
