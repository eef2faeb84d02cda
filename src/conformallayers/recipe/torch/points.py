"""Operations on points, in torch: one function each, of (operation, module, *input values).

Scalars of samples are float64 where the device has it.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import functional
from ...nn.activations import GNOMONIC, PROJECTIVE, PUBLISHED, Rule
from .. import point_operations as point
from .layers import RUN

if TYPE_CHECKING:
    from .module import RecipeModule

__all__ = ["RULES", "RUN"]

# The built-in rules by their names in recipes.
RULES: dict[str, Rule] = {rule.name: rule for rule in (PUBLISHED, PROJECTIVE, GNOMONIC)}


@RUN.runs(point.Normalize)
def _normalize(
    op: point.Normalize, module: RecipeModule, x: Tensor
) -> tuple[Tensor, float, Tensor]:
    return x, 1.0, functional.length(x, op.offset)


@RUN.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, module: RecipeModule, z: Tensor) -> Tensor:
    energy = functional.squared_norm(z)
    return energy if op.weight == 1.0 else energy * op.weight


@RUN.runs(point.Rescale)
def _rescale(
    op: point.Rescale, module: RecipeModule, z: Tensor, m: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = functional.squared_norm(z)
    # Where values may not be read, every sample is rescaled: powers of two are exact.
    if not (functional.may_look(z) and functional.squares_fit(z, n, tau)):
        z, factor = functional.rescaled(z)
        m, tau = m / factor, tau * factor
        n = functional.squared_norm(z)
    return z, m, tau, n * op.weight


@RUN.runs(point.Dot)
def _dot(op: point.Dot, module: RecipeModule, a: Tensor, b: Tensor) -> Tensor:
    with functional.full_precision(a):
        a, b = _at_least_float32(a), _at_least_float32(b)
        return _wide((a * b).flatten(1).sum(1)) * op.weight


@RUN.runs(point.QuadraticForm)
def _quadratic_form(op: point.QuadraticForm, module: RecipeModule, x: Tensor) -> Tensor:
    with functional.full_precision(x):
        x = _at_least_float32(x)
        form = module.constant(op.form).to(x.dtype)
        return _wide((x @ form * x).sum(1)) * op.weight


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, module: RecipeModule, x: Tensor) -> Tensor:
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


@RUN.runs(point.Fourier)
def _fourier(op: point.Fourier, module: RecipeModule, x: Tensor) -> Tensor:
    with functional.full_precision(x):
        x = _at_least_float32(x)
        if x.shape[0] == 0:  # rfftn refuses an empty batch
            count = point.frequencies(x.shape[2:])
            return torch.view_as_complex(x.new_zeros(0, x.shape[1], count, 2))
        spectrum: Tensor = torch.fft.rfftn(x, dim=tuple(range(2, x.dim())))
        return spectrum.flatten(2)


@RUN.runs(point.SpectralForm)
def _spectral_form(op: point.SpectralForm, module: RecipeModule, spectrum: Tensor) -> Tensor:
    with functional.full_precision(spectrum):
        images = _multiply(_complex(module.constant(op.symbol), spectrum), spectrum)
        image, rows = (torch.view_as_real(value).flatten(1) for value in (images, spectrum))
        if op.factor:
            return functional.squared_norm(image) * op.weight
        return _wide(torch.linalg.vecdot(image, rows)) * op.weight


@RUN.runs(point.SpectralProduct)
def _spectral_product(op: point.SpectralProduct, module: RecipeModule, spectrum: Tensor) -> Tensor:
    with functional.full_precision(spectrum):
        return _multiply(_complex(module.constant(op.transfer), spectrum), spectrum)


@RUN.runs(point.InverseFourier)
def _inverse_fourier(op: point.InverseFourier, module: RecipeModule, spectrum: Tensor) -> Tensor:
    if spectrum.shape[0] == 0:
        return torch.view_as_real(spectrum).new_zeros(0, spectrum.shape[1], *op.size)
    half = (*op.size[:-1], op.size[-1] // 2 + 1)
    image = spectrum.reshape(*spectrum.shape[:2], *half)
    result: Tensor = torch.fft.irfftn(image, s=op.size, dim=tuple(range(2, 2 + len(op.size))))
    return result


@RUN.runs(point.Advance)
def _advance(
    op: point.Advance, module: RecipeModule, tau: Tensor, m: Tensor | float, *energies: Tensor
) -> Tensor:
    return module.rule(op).advance(tau, reduce(torch.add, energies), m)


@RUN.runs(point.Divide)
def _divide(
    op: point.Divide, module: RecipeModule, v: Tensor, tau: Tensor, m: Tensor | float
) -> Tensor:
    return functional.scale_samples(v, functional.guarded_ratio(op.scale, tau))


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, module: RecipeModule, z: Tensor, m: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    coordinate = (m * op.coordinate * tau).clamp_max(point.LARGEST_COORDINATE)
    fixed = tau.detach()
    alive = torch.where(fixed.isnan(), fixed, (fixed != 0).to(tau.dtype))
    return functional.scale_samples(z, functional.guarded_ratio(op.scale, tau)), coordinate, alive


def _multiply(symbol: Tensor, spectrum: Tensor) -> Tensor:
    """Multiply (C_out, C_in, F) by (B, C_in, F) at each frequency: (B, C_out, F)."""
    total = symbol[:, 0] * spectrum[:, :1]
    for channel in range(1, symbol.shape[1]):
        total.addcmul_(symbol[:, channel], spectrum[:, channel : channel + 1])
    return total


def _complex(pairs: Tensor, spectrum: Tensor) -> Tensor:
    """Return (…, 2) as complex numbers as wide as a spectrum."""
    return torch.view_as_complex(pairs.to(spectrum.dtype.to_real()))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide(n: Tensor) -> Tensor:
    return n.to(functional.wide_dtype(n.device))
