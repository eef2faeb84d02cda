"""Pure tensor functions on the pair (x, t): the mathematics of the library, without modules.

The first three functions follow the table of the paper to the letter. The others carry the same
numbers in a balanced scaling that stays inside float range at any depth and any input scale.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_PIECE = 2**18  # elements of a feature map that stay in the cache
Scalar = float | Tensor  # a Python number or a 0-dim tensor, whichever the layer gives


def embed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Embed a batch of points: ``t = ‖x‖₂`` over all coefficients of the sample.

    Args:
        x: coefficients, shape (B, ...).

    Returns:
        The pair (x, t) with t of shape (B,), never narrower than float32.

    Examples:
        >>> x, t = embed(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        >>> t
        tensor([5., 0.])
    """
    _, m, tau = normalise(x)
    return x, (m * tau).to(_at_least_float32(x.dtype))


def respro(
    x: Tensor, t: Tensor, alpha: Scalar, *, projective: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply ReSPro to (x, t): only the homogeneous coordinate changes.

    Published form: ``t ← (α/2)·t + ‖x‖²/(2α)``. Projective form: ``t ← (α/2)·t + ‖x‖²/(2α·t)``.
    They agree at t = 1.

    Args:
        x: coefficients, shape (B, ...).
        t: homogeneous coordinates, shape (B,).
        alpha: the radius of the sphere, positive.
        projective: take the projective form.

    Examples:
        >>> x, t = respro(torch.tensor([[3.0, 0.0]]), torch.ones(1), alpha=3.0)
        >>> project(x, t)  # a point at distance alpha lands at distance 1
        tensor([[1., 0.]])
    """
    x, n = energy(x)
    n = guarded_ratio(n, t) if projective else n
    return x, t * (alpha / 2) + n / (2 * alpha)


def project(x: Tensor, t: Tensor) -> Tensor:
    """Leave the conformal space: ``x / t``, and 0 (with zero gradient) where ``t = 0``.

    Args:
        x: coefficients, shape (B, ...).
        t: homogeneous coordinates, shape (B,).
    """
    return scale_samples(x, _inverse(t))


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float the device has; per-sample and per-layer scalars use it."""
    return torch.float32 if device.type == "mps" else torch.float64


def normalise(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split x into ``m · x̂`` with ``max|x̂| = 1``, and give ``τ = ‖x̂‖``.

    The output of a network does not depend on how x is split, as long as every path uses the
    same m, so m carries no gradient. It keeps squares inside the range of float32 for inputs
    of any scale. A zero sample has m = 1 and τ = 0.

    Returns:
        x̂ (B, ...), m (B,), τ (B,); the last two in the wide dtype.
    """
    fixed, axes = x.detach(), _features(x)
    # Two reads and no write; a norm of order infinity would take twenty times as long.
    peak = torch.maximum(fixed.amax(axes, keepdim=True), -fixed.amin(axes, keepdim=True))
    peak = peak + (peak == 0)
    unit = x / peak
    wide = wide_dtype(x.device)
    dtype = _at_least_float32(x.dtype)
    tau = torch.linalg.vector_norm(unit, dim=_features(x), dtype=dtype)
    return unit, peak.flatten().to(wide), tau.to(wide)


def moderate_norm(x: Tensor, limits: tuple[float, float] | None) -> Tensor | None:
    """Return ``‖x‖`` if no sample needs :func:`normalise`, None if one does or nobody may look.

    Looking at values is for plain inference on the CPU, where it costs less than dividing.

    Args:
        x: coefficients, shape (B, ...).
        limits: of the norms that need no :func:`normalise`; None: all need it.
    """
    moderate = (
        limits is not None
        and may_look(x)
        and x.dtype in (torch.float32, torch.float64)
        and x.shape[0] > 0
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not autocasts(x)
    )
    if not moderate or limits is None:
        return None
    norm: Tensor = torch.linalg.vector_norm(x, dim=_features(x))
    low, high = torch.aminmax(norm)
    inside = limits[0] < float(low) and float(high) < limits[1]  # NaN is not
    return norm.to(wide_dtype(x.device)) if inside else None


def may_look(x: Tensor) -> bool:
    """Tell whether the values of a tensor are there to be looked at, at no cost: on the CPU."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu":
        return False
    return not (torch._C._get_tracing_state() or transformed())


def squares_fit(z: Tensor, n: Tensor, tau: Tensor) -> bool:
    """Tell whether ``n = ‖z‖²`` is far from both ends of the range, but where a sample is zero.

    Args:
        z: coefficients, shape (B, ...).
        n: as :func:`energy` gives it.
        tau: coordinates; 0 for a sample of zeros.
    """
    high = torch.finfo(z.dtype).max ** 0.6
    if n.shape[0] == 0:
        return True
    least, most = (float(end) for end in torch.aminmax(n.detach()))
    if 1 / high < least and most < high:
        return True
    outside = (n > high) | ((n < 1 / high) & (tau != 0))  # NaN is neither
    return not bool(outside.any())


def rescaled(z: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply every sample by a power of two that brings its norm near 1; return it as well.

    Nothing is rounded, so that it does not matter which samples are rescaled, and when.
    """
    wide = wide_dtype(z.device)
    norm = torch.linalg.vector_norm(z.detach(), dim=_features(z), dtype=wide)
    norm = torch.where((norm > 0) & norm.isfinite(), norm, torch.ones_like(norm))
    most = 1000.0 if z.dtype == torch.float64 else 120.0
    factor = torch.exp2(-norm.log2().floor().clamp(-most, most))
    return scale_samples(z, factor), factor


def energy(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return z itself and ``‖z‖²`` per sample, shape (B,), never narrower than float32.

    Use the returned z afterwards: both gradients are then added in one pass over the feature map.
    """
    result: tuple[Tensor, Tensor] = _Energy.apply(z)  # type: ignore[no-untyped-call]
    return result


def dehomogenize(z: Tensor, rho: Scalar, tau: Tensor) -> Tensor:
    """Return the point ``ρ z / τ`` in the dtype of z, 0 where τ = 0."""
    return scale_samples(z, rho * _inverse(tau))


def activate_and_dehomogenize(
    z: Tensor, tau: Tensor, gain: Tensor, rho: Scalar
) -> tuple[Tensor, Tensor]:
    """Return ``ρ z / (τ + gain·‖z‖²)`` and ``‖z‖²``: the last activation and the division in one pass.

    Args:
        z: coefficients, shape (B, ...).
        tau: coordinate before the activation, shape (B,).
        gain: factor of the energy, shape (B,).
        rho: scale of the result.
    """
    if not isinstance(rho, Tensor):
        rho = torch.full((), rho, dtype=tau.dtype, device=tau.device)
    result: tuple[Tensor, Tensor] = _ActivateAndDehomogenize.apply(z, tau, gain, rho)  # type: ignore[no-untyped-call]
    return result


def scale_samples(z: Tensor, factor: Tensor) -> Tensor:
    """Multiply each sample of z (B, ...) by its factor (B,), in the dtype of z."""
    factor = factor.view(-1, *[1] * (z.dim() - 1))
    if _narrow(z):
        return (z.float() * factor.float()).to(z.dtype)
    return z * factor.to(z.dtype)


def guarded_ratio(n: Scalar, tau: Tensor) -> Tensor:
    """Return ``n / τ``, and 0 where τ = 0 (a zero sample has no energy either)."""
    return n * _inverse(tau)


def transformed(g: Tensor | None = None) -> bool:
    """Tell whether a torch.func transform (vmap, grad, jacrev, …) is under way.

    A gradient g also tells the batching of ``torch.autograd.grad(is_grads_batched=True)``.
    """
    if torch.compiler.is_compiling():
        return False  # the compiler cannot look, and would take the answer for yes
    active: Any = torch._C._functorch.peek_interpreter_stack()
    return active is not None or (
        g is not None and bool(torch._C._functorch.is_legacy_batchedtensor(g))
    )


def autocasts(x: Tensor) -> bool:
    """Tell whether autocast is on for the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Keep autocast away from the denominator."""
    if autocasts(x):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def positive(alpha: Scalar) -> Scalar:
    """Replace a bound of 0 (zero weights) by 1: x is 0 there, and so is the output."""
    return alpha + (alpha == 0) if isinstance(alpha, Tensor) else alpha or 1.0


class Scaling:
    """The scalars of ``x = m·κ·z`` and ``t = m·σ·τ``, kept so that nothing over- or underflows.

    ``balance = κ²/σ`` and ``rho = κ/σ``. A published activation wants balance 1 (z = x/√s), one
    that acts on points wants rho 1 (z/τ is the point); :meth:`take` gives the factor that z has to
    be multiplied with to get there. It can wait until a layer takes it on its weights.
    """

    def __init__(self, norm_factor: float = 1.0) -> None:
        # t starts as norm_factor·‖x‖, so κ = 1 and σ = norm_factor.
        self._balance: Scalar = 1.0 / norm_factor
        self._rho: Scalar = 1.0 / norm_factor
        # What the last activation divides by, and whether it acts on points; until it is taken.
        self._last: tuple[Scalar, bool] | None = None

    @property
    def rho(self) -> Scalar:
        """The point is ``rho · z / τ``, for z as it is now."""
        return self._rho if self._last is None else self._rho * self._last[0]

    def copy(self) -> Scaling:
        """Return the same scalars for a branch of its own."""
        other = Scaling()
        other._balance, other._rho, other._last = self._balance, self._rho, self._last
        return other

    @property
    def sigma(self) -> Scalar:
        """The coordinate is ``m · sigma · τ``."""
        balance, rho = self._balance, self._rho
        if self._last is not None:
            balance, rho = balance * self._last[0], rho * self._last[0]
        return balance / (rho * rho)  # a power of a Python number would raise beyond the range

    def activate(self, alpha: Scalar, on_points: bool, slope: float = 2.0) -> Scalar:
        """Pass an activation; return the weight that ``‖z‖²`` has in τ, for z as it is now."""
        if self._last is not None:  # no layer took the factor of the one before
            before = self._last[0]
            self._balance, self._rho = self._balance * before, self._rho * before
        self._last = slope / alpha, on_points
        weight = self._rho * self._rho if on_points else self._balance
        return 1.0 / (alpha * alpha) if _is_one(weight) else weight / (alpha * alpha)

    def take(self) -> Scalar | None:
        """Return the factor that z must be multiplied with now, or None if there is none."""
        if self._last is None:
            return None
        (double, on_points), self._last = self._last, None
        if on_points:
            factor = double if _is_one(self._rho) else self._rho * double
            if not _is_one(self._balance):
                self._balance = self._balance * double / factor**2
            else:
                self._balance = double / factor**2
            self._rho = 1.0
        elif _is_one(self._balance):
            factor = double**0.5
            self._rho = factor if _is_one(self._rho) else self._rho * factor
        else:
            factor = (self._balance * double) ** 0.5
            self._balance, self._rho = 1.0, self._rho * double / factor
        return factor


def _is_one(scalar: Scalar) -> bool:
    """Tell whether a scalar is the plain number 1, which needs no operation."""
    return isinstance(scalar, float) and scalar == 1.0


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _narrow(z: Tensor) -> bool:
    return z.dtype in (torch.float16, torch.bfloat16)


def _features(z: Tensor) -> tuple[int, ...]:
    return tuple(range(1, z.dim()))


def _inverse(t: Tensor) -> Tensor:
    """Return 1/t, and 0 with zero gradient where t = 0; NaN stays NaN."""
    zero = t == 0
    return ~zero / (t + zero)


def _squared_norm(z: Tensor) -> Tensor:
    dtype = _at_least_float32(z.dtype)
    norm: Tensor = torch.linalg.vector_norm(z, dim=_features(z), dtype=dtype)
    return norm.square()


def _combine(
    g: Tensor, p: Tensor | None, z: Tensor, q: Tensor, spare: Tensor | None = None
) -> Tensor:
    """Return ``p·g + q·z`` with per-sample factors p (None: 1) and q, in the dtype of z.

    ``spare`` is a tensor like z that may be overwritten: fresh memory costs more than arithmetic.
    """
    dtype = _at_least_float32(z.dtype)
    q = q.to(dtype).view(-1, *[1] * (z.dim() - 1))
    if p is None:
        total = torch.addcmul(g.to(dtype), z.to(dtype), q)
    else:
        p = p.to(dtype).view(-1, *[1] * (z.dim() - 1))
        if spare is not None and spare.dtype == dtype:
            total = torch.mul(g.to(dtype), p, out=spare).addcmul_(z.to(dtype), q)
        else:
            total = torch.addcmul(g.to(dtype) * p, z.to(dtype), q)
    return total.to(z.dtype)


def signed(function: Callable[..., T]) -> Callable[..., T]:
    """Keep a function's signature: ``Function.apply`` would work it out anew at every call."""
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


class _Energy(torch.autograd.Function):
    """z ↦ (z, ‖z‖²). A function of its own because autograd would make three passes of it."""

    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(z: Tensor) -> tuple[Tensor, Tensor]:
        return z.view_as(z), _squared_norm(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_n: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return _combine(g, None, z, 2 * g_n)


class _ActivateAndDehomogenize(torch.autograd.Function):
    """(z, τ, gain, ρ) ↦ (ρ z / D, ‖z‖²) with D = τ + gain·‖z‖²; 0 where D = 0."""

    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(z: Tensor, tau: Tensor, gain: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
        n = _squared_norm(z)
        return scale_samples(z, rho * _inverse(tau + gain * n)), n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        # y instead of z: the layer behind keeps y anyway, so that z need not stay in memory.
        ctx.save_for_backward(output[0], *inputs[1:], output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, tau, gain, rho, n = ctx.saved_tensors
        inverse = _inverse(tau + gain * n)
        factor = rho * inverse  # y = factor · z
        # g_z = factor·g + q·y with q = slope·(g·y) + offset, per sample
        back = _inverse(factor)
        slope, offset = -2 * gain * inverse * back, 2 * g_n * back
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed(g):
            s = (g * y).sum(_features(y), dtype=_at_least_float32(y.dtype)).to(tau.dtype)
            g_z = _combine(g, factor, y, slope * s + offset)
        else:
            g_z, s = _combine_in_pieces(g, factor, y, slope, offset)
        g_d = -s * inverse
        return g_z, g_d, g_d * n, s.sum() * _inverse(rho)


def _combine_in_pieces(
    g: Tensor, p: Tensor, y: Tensor, slope: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``p·g + (slope·s + offset)·y`` and ``s = g·y``, a few samples at a time.

    Both need g and y; in pieces they come from the cache the second time.
    """
    step = max(1, _PIECE // max(1, y[:1].numel()))
    result, dots = torch.empty_like(y), torch.empty_like(p)
    for start in range(0, y.shape[0], step):
        piece = slice(start, start + step)
        product = g[piece] * y[piece]
        dots[piece] = product.sum(_features(y), dtype=_at_least_float32(y.dtype))
        q = torch.addcmul(offset[piece], slope[piece], dots[piece])
        combined = _combine(g[piece], p[piece], y[piece], q, result[piece])
        if _narrow(y):  # computed in float32 beside it
            result[piece] = combined
    return result, dots
