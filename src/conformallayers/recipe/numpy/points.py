"""Operations on points, in numpy: one function each, of (operation, network, *input values).

The scalars of samples, m, τ and n, are float64 arrays of shape (B,).
"""

from __future__ import annotations

from functools import reduce

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...formula import FUNCTIONS
from .. import point_operations as point
from ..integer_arithmetic import column, flat
from ..places import Array
from ..point_operations import LARGEST_COORDINATE
from .layers import RUN, Context

__all__ = ["RUN"]


_FUNCTIONS = {name: getattr(np, name) for name in FUNCTIONS}


# -- embedding and energies -------------------------------------------------------------------------


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, net: Context, x: Array) -> tuple[Array, Array, Array]:
    tau = np.sqrt(_squared_norm(x) + op.offset**2)
    return x, np.ones_like(tau), tau


RUN[point.SumSquares] = lambda op, _, z: _squared_norm(z) * op.weight
RUN[point.QuadraticForm] = lambda op, net, x: _dots(x @ net.constant(op.form), x) * op.weight


@RUN.runs(point.Rescale)
def _rescale(
    op: point.Rescale, net: Context, z: Array, m: Array, tau: Array
) -> tuple[Array, Array, Array, Array]:
    n = _squared_norm(z)
    _, double = np.frexp(np.where(np.isfinite(n), n, 1.0))
    power = double // 2  # of the norm; powers of two are exact
    z, n = np.ldexp(z, -column(power, z)), np.ldexp(n, -2 * power)
    return z, np.ldexp(m, power), np.ldexp(tau, -power), n * op.weight


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, net: Context, x: Array) -> Array:
    size, width = op.size, op.width
    windows = sliding_window_view(x, (width + 1) * size, 1)[:, ::size]
    windows = windows.transpose(1, 0, 2)  # (blocks - width, B, …)
    images = windows @ net.constant(op.band)
    others = images if op.factor else windows[..., :size]
    total = (images * others).sum((0, 2), dtype=np.float64)
    end = x[:, x.shape[1] - width * size :]
    image = end @ net.constant(op.last)
    return np.asarray((total + _dots(image, image if op.factor else end)) * op.weight)


# -- the coordinate, and leaving --------------------------------------------------------------------


@RUN.runs(point.Advance)
def _advance(op: point.Advance, net: Context, tau: Array, m: Array, *energies: Array) -> Array:
    zero = tau == 0
    values = {"tau": np.where(zero, 1.0, tau), "m": m, "n": reduce(np.add, energies)}
    return np.where(zero, 0.0, op.parsed.evaluate(values, _FUNCTIONS))


RUN[point.Divide] = lambda op, _net, v, tau, _m: _scaled(v, op.scale * _inverse(tau))


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, net: Context, z: Array, m: Array, tau: Array
) -> tuple[Array, Array, Array]:
    coordinate = np.minimum(m * op.coordinate * tau, LARGEST_COORDINATE)
    alive = np.where(np.isnan(tau), tau, tau != 0)
    return _scaled(z, op.scale * _inverse(tau)), coordinate, alive


def _squared_norm(z: Array) -> Array:
    """Return ‖z‖² of each sample in float64."""
    return np.asarray(np.square(flat(z), dtype=np.float64).sum(1))


def _dots(a: Array, b: Array) -> Array:
    """Return the dot products of the rows of two matrices in float64."""
    return np.asarray((a * b).sum(1, dtype=np.float64))


def _inverse(t: Array) -> Array:
    """Return 1/t, and 0 where t = 0; NaN stays NaN."""
    return np.divide(1.0, t, out=np.zeros_like(t), where=t != 0)


def _scaled(z: Array, factor: Array) -> Array:
    """Multiply each sample by its factor (B,), in the dtype of z."""
    return np.asarray(z * column(factor, z).astype(z.dtype))
