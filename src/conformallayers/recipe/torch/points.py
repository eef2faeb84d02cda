"""Operations on points, in torch: one function each, of (operation, module, *input values).

Scalars of samples are float64 where the device has it.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from ... import functional
from ...formula import FUNCTIONS
from .. import point_operations as point
from .layers import RUN, Context

__all__ = ["RUN"]
_FUNCTIONS = {name: getattr(torch, name) for name in FUNCTIONS}


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, module: Context, x: Tensor) -> tuple[Tensor, float, Tensor]:
    return x, 1.0, functional.length(x, op.offset)


@RUN.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, module: Context, z: Tensor) -> Tensor:
    energy = functional.squared_norm(z)
    return energy if op.weight == 1.0 else energy * op.weight


@RUN.runs(point.Rescale)
def _rescale(
    op: point.Rescale, module: Context, z: Tensor, m: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = functional.squared_norm(z)
    # Where values may not be read, every sample is rescaled: powers of two are exact.
    if not (functional.may_look(z) and functional.squares_fit(z, n, tau)):
        z, factor = functional.rescaled(z)
        m, tau = m / factor, tau * factor
        n = functional.squared_norm(z)
    return z, m, tau, n * op.weight


@RUN.runs(point.QuadraticForm)
def _quadratic_form(op: point.QuadraticForm, module: Context, x: Tensor) -> Tensor:
    with functional.full_precision(x):
        x = _at_least_float32(x)
        form = module.constant(op.form).to(x.dtype)
        return _wide((x @ form * x).sum(1)) * op.weight


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, module: Context, x: Tensor) -> Tensor:
    with functional.full_precision(x):
        x = _at_least_float32(x)
        band, last = (module.constant(name).to(x.dtype) for name in (op.band, op.last))
        size, width = op.size, op.width
        windows = x.unfold(1, (width + 1) * size, size).transpose(0, 1)  # (blocks - width, B, …)
        images = torch.bmm(windows, band)
        total = (images * (images if op.factor else windows[..., :size])).sum((0, 2))
        if width:
            end = x[:, -width * size :]
            image = end @ last
            total = total + (image * (image if op.factor else end)).sum(1)
        return _wide(total) * op.weight


@RUN.runs(point.Advance)
def _advance(
    op: point.Advance, module: Context, tau: Tensor, m: Tensor | float, *energies: Tensor
) -> Tensor:
    n, formula = reduce(torch.add, energies), op.parsed

    def step(tau: Tensor, m: Tensor | float, n: Tensor) -> Tensor:
        found: Tensor = formula.evaluate({"tau": tau, "m": m, "n": n}, _FUNCTIONS)
        return found

    return functional.advance(step, tau, m, n) if op.divides else step(tau, m, n)


@RUN.runs(point.Divide)
def _divide(op: point.Divide, module: Context, v: Tensor, tau: Tensor, m: Tensor | float) -> Tensor:
    return functional.scale_samples(v, functional.guarded_ratio(op.scale, tau))


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, module: Context, z: Tensor, m: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    coordinate = (m * op.coordinate * tau).clamp_max(point.LARGEST_COORDINATE)
    fixed = tau.detach()
    alive = torch.where(fixed.isnan(), fixed, (fixed != 0).to(tau.dtype))
    return functional.scale_samples(z, functional.guarded_ratio(op.scale, tau)), coordinate, alive


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide(n: Tensor) -> Tensor:
    return n.to(functional.wide_dtype(n.device))
