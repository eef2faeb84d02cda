"""Functions of single numbers in ONNX; NaN stays NaN in every runtime that compares as IEEE 754 says.

They are made of operators that ONNX Runtime has in float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..places import Array
from .graph import WIDE, Value

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_STEP, _TERMS, _REACH = 0.5, 26, 6.0  # of the sines that make the error function in float64


def leaky(x: Value, slope: float | Array) -> Value:
    """Return x, and ``slope·x`` where it is negative."""
    return _positive_or(x, x * slope)


def _positive_or(x: Value, other: Value) -> Value:
    return (x > 0.0).node("Where", x, other)


def _clip(x: Value, low: float, high: float) -> Value:
    # Comparisons instead of Clip, which may lose NaN.
    below, above = x < low, x > high
    return below.node("Where", low, above.node("Where", high, x))


def _elu(x: Value, alpha: float, scale: float = 1.0, inside: float = 1.0) -> Value:
    """Return ``scale·x``, and ``scale·alpha·(exp(inside·x) − 1)`` where x is negative.

    The difference is ``2h/(1 − h)`` with ``h = tanh(x/2)``, which loses no digits near 0.
    """
    h = (x * (inside / 2)).node("Tanh")
    return _positive_or(x, h * (2 * alpha) / (1.0 - h)).weighted(scale)


def _gelu(x: Value) -> Value:
    """Return ``x·(1 + erf(x/√2))/2``."""
    erf = _erf(x * np.sqrt(0.5))
    return x * 0.5 * (erf + 1.0)


def _erf(x: Value) -> Value:
    """Return the error function; in float64, which ONNX Runtime lacks, as a sum of sines.

    ``erf x = (2/π) ∫ exp(−t²/4) sin(x t)/t dt``: the midpoint rule errs by less than 1e-16 where |x| ≤ 6.
    """
    if x.dtype != WIDE:
        return x.node("Erf")
    t = (np.arange(_TERMS) + 0.5) * _STEP
    weights = 2 / np.pi * _STEP * np.exp(-t * t / 4) / t
    column = _clip(x, -_REACH, _REACH).reshape((*x.shape, 1))
    waves = column.node("Mul", t, shape=(*x.shape, _TERMS)).node("Sin")
    return (waves @ weights[:, None]).reshape(x.shape)


def _gelu_tanh(x: Value) -> Value:
    """Return ``x·(1 + tanh u)/2 = x·sigmoid(2u)`` with ``u = √(2/π)·(x + 0.044715·x³)``."""
    factor = 2 * np.sqrt(2 / np.pi)
    return x / _one_and_exp(x * (x * x * (factor * 0.044715) + factor))


def _one_and_exp(x: Value) -> Value:
    """Return ``1 + exp(−x)``; the Sigmoid of ONNX Runtime in float32 is constant below −18."""
    return x.node("Neg").node("Exp") + 1.0


def _mish(x: Value) -> Value:
    """Return ``x·tanh(log(1 + e)) = x·n/(n + 2)`` with ``e = exp x`` and ``n = e·(e + 2)``."""
    e = x.node("Min", 20.0).node("Exp")  # beyond it the fraction is 1
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))


def _softplus(x: Value, beta: float, threshold: float) -> Value:
    """Return ``log(1 + exp(beta·x))/beta``, and x where ``beta·x`` is above the threshold.

    With ``w = 1 + e`` rounded, ``log(1 + e) = log(w)·e/(w − 1)`` to the last digit (Kahan).
    """
    inside = x.weighted(beta)
    e = inside.node("Exp")
    w = e + 1.0
    ratio = e / (w - 1.0)
    y = w.node("Equal", 1.0).node("Where", e, w.node("Log") * ratio)
    return (inside > threshold).node("Where", x, y if beta == 1.0 else y / beta)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": abs,
    # ONNX Runtime merges it with the product before it, and keeps NaN.
    "relu": lambda x: x.node("Relu"),
    "relu6": lambda x: _clip(x, 0.0, 6.0),
    "leaky_relu": leaky,
    "elu": _elu,
    "celu": lambda x, alpha: _elu(x, alpha, inside=1 / alpha),
    "selu": lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x / _one_and_exp(x),
    "mish": _mish,
    "sigmoid": lambda x: 1.0 / _one_and_exp(x),
    "tanh": lambda x: x.node("Tanh"),
    "softplus": _softplus,
    "hardtanh": _clip,
    "hardswish": lambda x: x / 6.0 * (x + 3.0).node("Clip", 0.0, 6.0),
    "hardsigmoid": lambda x: _clip(x + 3.0, 0.0, 6.0) / 6.0,
}
