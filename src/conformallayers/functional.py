"""Pure tensor functions on the pair (x, t), without modules.

``embed``, ``respro`` and ``project`` follow the formulas of the paper literally. The other functions
compute the same values in a balanced scaling, ``x = m·κ·z`` and ``t = m·σ·τ``, that stays within the
range of the dtype at any depth.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import refusal

_CHUNK = 2**18  # elements of a feature map that fit into the cache
SHORT = 2048  # elements; a longer sum of squares loses digits
_BLOCK = 512  # elements of a block of a longer sum
Scalar = float | Tensor  # a Python number or a 0-dim tensor
_norm: Callable[..., Tensor] = torch.linalg.vector_norm


def embed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Embed a batch of points: ``t = ‖x‖₂`` over all coefficients of a sample.

    Args:
        x: coefficients, shape (B, ...).

    Returns:
        The pair (x, t) with t of shape (B,), never narrower than float32.

    Examples:
        >>> x, t = embed(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        >>> t
        tensor([5., 0.])
    """
    return x, norm(x).to(at_least_float32(x.dtype))


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
        projective: use the projective form.

    Examples:
        >>> x, t = respro(torch.tensor([[3.0, 0.0]]), torch.ones(1), alpha=3.0)
        >>> project(x, t)  # a point at distance alpha lands at distance 1
        tensor([[1., 0.]])
    """
    x, n = energy(x)
    n = n.to(torch.promote_types(t.dtype, at_least_float32(x.dtype)))
    n = guarded_ratio(n, t) if projective else n
    return x, t * (alpha / 2) + n / (2 * alpha)


def project(x: Tensor, t: Tensor) -> Tensor:
    """Return the points ``x / t``, and 0 (with zero gradient) where ``t = 0``.

    Args:
        x: coefficients, shape (B, ...).
        t: homogeneous coordinates, shape (B,).
    """
    return scale_samples(x, guarded_inverse(t))


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float dtype of the device, used for scalars per sample and per layer."""
    return torch.float32 if device.type == "mps" else torch.float64


def length(x: Tensor, offset: Scalar = 0.0) -> Tensor:
    """Return ``√(‖x‖² + c²)`` of each sample with an offset c ≥ 0, shape (B,), in the wide dtype."""
    if not isinstance(offset, Tensor) and offset == 0:
        return norm(x)
    return guarded_root(squared_norm(x) + offset * offset)


def may_look(x: Tensor) -> bool:
    """Check whether Python code may read the values of x: eager, on the CPU, no transform active."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.is_cpu:
        return False
    return not (torch._C._get_tracing_state() or transformed())


def squares_fit(z: Tensor, n: Tensor, tau: Tensor) -> bool:
    """Check that ``n = ‖z‖²`` is far from overflow and, for nonzero samples (τ ≠ 0), from underflow."""
    high = torch.finfo(z.dtype).max ** 0.6
    if n.shape[0] == 0:
        return True
    least, most = (float(end) for end in torch.aminmax(n.detach()))
    if 1 / high < least and most < high:
        return True
    outside = (n > high) | ((n < 1 / high) & (tau != 0))  # False for NaN
    return not bool(outside.any())


def rescaled(z: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply each sample by the power of two that brings its norm near 1; return the factors too.

    Powers of two are exact, so the result does not depend on which samples are rescaled.
    """
    wide = wide_dtype(z.device)
    size = torch.linalg.vector_norm(z.detach(), dim=_features(z), dtype=wide)
    size = torch.where((size > 0) & size.isfinite(), size, torch.ones_like(size))
    most = 1000.0 if z.dtype == torch.float64 else 120.0  # exponents of normal numbers
    factor = torch.exp2(-size.log2().floor().clamp(-most, most))
    return scale_samples(z, factor), factor


def norm(z: Tensor) -> Tensor:
    """Return ``‖z‖`` of each sample (B, ...) in the wide dtype, shape (B,).

    A sum of many squares loses digits, so that a long sample is cut into blocks. So does one in strides, whose
    squares torch adds one by one.
    """
    count, wide = math.prod(z.shape[1:]), wide_dtype(z.device)
    dtype = None if z.dtype in (torch.float32, torch.float64) else at_least_float32(z.dtype)
    if z.dim() == 4 and z.stride(1) == 1:
        z = z.permute(0, 2, 3, 1)  # rows of memory
    z = z.contiguous()
    if count <= SHORT:
        return _norm(z, dim=_features(z), dtype=dtype).to(wide)
    block = block_size(count)
    if not block:
        parts = z.flatten(1).split(count - count % _BLOCK, 1)  # whole blocks, and the rest
        return _norm(torch.stack([norm(part) for part in parts]), dim=0)
    blocks = z.reshape(z.shape[0], count // block, block)
    return _norm(_norm(blocks, dim=2, dtype=dtype), dim=1, dtype=wide)


def block_size(count: int, most: int = _BLOCK) -> int:
    """Return a large divisor of a count, at most ``most``, or 0 if a short search finds none."""
    fewest = -(-count // most)
    for blocks in range(fewest, fewest + 32):
        if count % blocks == 0:
            return count // blocks
    return 0


def norm_unit(shape: Sequence[int], rms: bool) -> float:
    """Return √d, the norm of a sample of root mean square 1; 1.0 where lengths are norms."""
    return math.sqrt(math.prod(shape)) if rms else 1.0


def squared_norm(z: Tensor) -> Tensor:
    """Return ``‖z‖²`` of each sample (B, ...) in the wide dtype, shape (B,)."""
    if transformed() or (z.requires_grad and torch.is_grad_enabled()):
        # The norm has no second derivative at 0, its square has.
        return z.to(wide_dtype(z.device)).square().sum(_features(z))
    return norm(z).square()


def guarded_root(n: Tensor, taken: Tensor | bool = True) -> Tensor:
    """Return √n with gradient 0 where n = 0; 0 where ``taken`` is False."""
    alive = (n != 0) & taken
    return torch.where(alive, torch.where(alive, n, 1.0).sqrt(), 0.0)


def energy(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return z itself and ``‖z‖²`` per sample in the wide dtype, shape (B,).

    Use the returned z afterwards: both gradients are then summed in one pass over the feature map.
    """
    if transformed() or not z.requires_grad:  # a custom function has no derivative in forward mode
        return z, squared_norm(z)
    zero = z.new_zeros(z.shape[0], dtype=wide_dtype(z.device))
    z, n, _ = apply(_Activate, z, zero, torch.ones_like(zero), None)
    return z, n


def dehomogenize(z: Tensor, rho: Scalar, tau: Tensor, alive: bool = False) -> Tensor:
    """Return the point ``ρ z / τ`` in the dtype of z, 0 where τ = 0; ``alive`` if no τ is 0."""
    if isinstance(rho, Tensor) or transformed():
        return scale_samples(z, rho * guarded_inverse(tau, alive))
    result: Tensor = apply(_Dehomogenize, z, tau, rho, alive)
    return result


def activate(
    z: Tensor, tau: Tensor, gain: Tensor, alpha: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z itself, ``r·τ + gain·‖z‖²/r`` and ``‖z‖²``, where r = α/α is 1 and carries the gradient of α.

    Use the returned z afterwards, as for :func:`energy`.
    """
    if transformed():
        n = squared_norm(z)
        return z, _denominator(tau, gain, n, alpha), n
    result: tuple[Tensor, Tensor, Tensor] = apply(_Activate, z, tau, gain, alpha)
    return result


def activate_and_dehomogenize(
    z: Tensor,
    tau: Tensor,
    gain: Tensor,
    rho: Scalar,
    alpha: Tensor | None = None,
    alive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply :func:`activate` and :func:`dehomogenize` at once: ``ρ z / (τ + gain·‖z‖²)`` and ``‖z‖²``."""
    if not isinstance(rho, Tensor):
        rho = torch.full((), rho, dtype=tau.dtype, device=tau.device)
    if transformed():
        n = squared_norm(z)
        return scale_samples(z, rho * guarded_inverse(_denominator(tau, gain, n, alpha))), n
    result: tuple[Tensor, Tensor] = apply(_ActivateAndDehomogenize, z, tau, gain, rho, alpha, alive)
    return result


def unity(alpha: Tensor) -> Tensor:
    """Return α/α = 1 with the gradient of the numerator."""
    return alpha / alpha.detach()


def _denominator(tau: Tensor, gain: Tensor, n: Tensor, alpha: Tensor | None) -> Tensor:
    if alpha is None:
        return tau + gain * n
    return tau * unity(alpha) + gain * n / unity(alpha)


def scale_samples(z: Tensor, factor: Tensor) -> Tensor:
    """Multiply each sample of z (B, ...) by its factor (B,), in the dtype of z."""
    factor = factor.view(-1, *[1] * (z.dim() - 1))
    if _narrow(z):
        return (z.float() * factor.float()).to(z.dtype)
    return z * factor.to(z.dtype)


def guarded_ratio(n: Scalar, tau: Tensor) -> Tensor:
    """Return ``n / τ``, and 0 where τ = 0, since a zero sample has no energy."""
    return n * guarded_inverse(tau)


def advance(
    step: Callable[[Tensor, Scalar, Tensor], Tensor], tau: Tensor, m: Scalar, n: Tensor
) -> Tensor:
    """Return the next τ of an activation by its step (τ, m, n) → τ; where τ is 0 it stays 0."""
    zero = tau == 0
    return torch.where(zero, tau, step(torch.where(zero, 1.0, tau), m, n))


def transformed(g: Tensor | None = None) -> bool:
    """Check whether a torch.func transform (vmap, grad, jacrev, …) or forward mode is active.

    With a gradient g, also detect ``torch.autograd.grad(is_grads_batched=True)``.
    """
    if torch.compiler.is_compiling():
        return False  # the compiler cannot trace the query
    active: Any = torch._C._functorch.peek_interpreter_stack()
    return (
        active is not None
        or torch.autograd.forward_ad._current_level >= 0
        or (g is not None and bool(torch._C._functorch.is_legacy_batchedtensor(g)))
    )


def is_plain_gradient(g: Tensor) -> bool:
    """Check that a gradient is not differentiated again, not compiled, and no batch of gradients."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed(g))


def autocasts(x: Tensor) -> bool:
    """Check whether autocast is enabled for the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast, for computations of the denominator."""
    if autocasts(x):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, or float32 if it is narrower."""
    return torch.promote_types(dtype, torch.float32)


def _narrow(z: Tensor) -> bool:
    return z.dtype in (torch.float16, torch.bfloat16)


def _features(z: Tensor) -> tuple[int, ...]:
    return tuple(range(1, z.dim()))


def guarded_inverse(t: Tensor, alive: bool = False) -> Tensor:
    """Return 1/t, and 0 with zero gradient where t = 0; NaN stays NaN. ``alive`` if no t is 0."""
    if alive:
        return t.reciprocal()
    zero = t == 0
    return ~zero / (t + zero)


def _combine(g: Tensor, p: Tensor | None, z: Tensor, q: Tensor) -> Tensor:
    """Return ``p·g + q·z`` with per-sample factors p (None: 1) and q, in the dtype of z."""
    dtype = at_least_float32(z.dtype)
    g = g.to(dtype) if p is None else g.to(dtype) * _per_sample(p, z)
    return torch.addcmul(g, z.to(dtype), _per_sample(q, z)).to(z.dtype)


def _per_sample(q: Tensor, z: Tensor) -> Tensor:
    """Return factors (B,) in the dtype of computations with z, broadcast over its features."""
    return q.to(at_least_float32(z.dtype)).view(-1, *[1] * (z.dim() - 1))


class _Activate(torch.autograd.Function):
    """(z, τ, gain, α) ↦ (z, r·τ + gain·‖z‖²/r, ‖z‖²) with r = α/α.

    Forward and backward take one pass over z each, where autograd would take three backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor, tau: Tensor, gain: Tensor, alpha: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = norm(z).square()
        return z.view_as(z), torch.addcmul(tau, gain, n), n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[2])

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, g_tau: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        z, tau, gain, alpha, n = ctx.saved_tensors
        if g_tau is None:
            return g, None, None, None
        if torch.is_grad_enabled():
            n = squared_norm(z)  # with its derivative
        tau, gain = _scaled(tau, gain, alpha)
        g = torch.zeros_like(z) if g is None else g
        g_z = _combine(g, None, z, 2 * g_tau * gain)
        return g_z, *_gradients(g_tau, tau, gain, n, alpha, ctx.needs_input_grad[2])


def _scaled(tau: Tensor, gain: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return r·τ and gain/r; only a second derivative needs r = α/α = 1."""
    if alpha is None or not torch.is_grad_enabled():
        return tau, gain
    return tau * unity(alpha), gain / unity(alpha)


def _gradients(
    g: Tensor, tau: Tensor, gain: Tensor, n: Tensor, alpha: Tensor | None, of_gain: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of τ, gain and α in ``r·τ + gain·n/r``, given :func:`_scaled` τ and gain."""
    g_tau, g_gain = _scaled(g, g * n if of_gain else g, alpha)
    g_alpha = None if alpha is None else (g * (tau - gain * n)).sum() / alpha
    return g_tau, g_gain if of_gain else None, g_alpha


class _Dehomogenize(torch.autograd.Function):
    """(z, τ, ρ) ↦ ρ z / τ, and 0 where τ = 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, tau: Tensor, rho: float, alive: bool) -> Tensor:
        return scale_samples(z, rho * guarded_inverse(tau, alive))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.rho, ctx.alive = inputs[2:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        y, tau = ctx.saved_tensors
        inverse = guarded_inverse(tau, ctx.alive)
        g_tau = -_inner(g, y).to(tau.dtype) * inverse if ctx.needs_input_grad[1] else None
        return scale_samples(g, ctx.rho * inverse), g_tau, None, None


def _inner(g: Tensor, y: Tensor) -> Tensor:
    """Return the inner product of each sample of g and y, shape (B,)."""
    return (g * y).sum(_features(y), dtype=at_least_float32(y.dtype))


class _ActivateAndDehomogenize(torch.autograd.Function):
    """(z, τ, gain, ρ, α) ↦ (ρ z / D, ‖z‖²) with D = r·τ + gain·‖z‖²/r, r = α/α; 0 where D = 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor, tau: Tensor, gain: Tensor, rho: Tensor, alpha: Tensor | None, alive: bool
    ) -> tuple[Tensor, Tensor]:
        n = norm(z).square()
        return scale_samples(z, rho * guarded_inverse(torch.addcmul(tau, gain, n), alive)), n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # Save y instead of z: the next layer saves y anyway, so z can be freed.
        ctx.save_for_backward(output[0], *inputs[1:5], output[1])
        ctx.alive = inputs[5]

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_n: Tensor) -> tuple[Tensor | None, ...]:
        y, tau, gain, rho, alpha, n = ctx.saved_tensors
        tau, gain = _scaled(tau, gain, alpha)
        inverse = guarded_inverse(tau + gain * n, ctx.alive)
        factor = rho * inverse  # y = factor · z
        # With s = g·y: dD/dz = 2·gain·z, so g_z = factor·g - s/D·2·gain·z + 2·g_n·z, and z = y/factor.
        # Per sample that is factor·g + (slope·s + offset)·y.
        back = guarded_inverse(factor)
        slope, offset = -2 * gain * inverse * back, 2 * g_n * back
        if is_plain_gradient(g) and not _narrow(y):
            g_z, s = _combine_in_chunks(g, factor, y, slope, offset)
        else:
            s = _inner(g, y).to(tau.dtype)
            g_z = _combine(g, factor, y, slope * s + offset)
        g_d = -s * inverse
        g_rho = s.sum() * guarded_inverse(rho) if ctx.needs_input_grad[3] else None
        g_tau, g_gain, g_alpha = _gradients(g_d, tau, gain, n, alpha, ctx.needs_input_grad[2])
        return g_z, g_tau, g_gain, g_rho, g_alpha, None


def _combine_in_chunks(
    g: Tensor, p: Tensor, y: Tensor, slope: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``p·g + (slope·s + offset)·y`` and ``s = g·y``, a chunk of samples at a time.

    The second read of a chunk hits the cache, and the products of the first are kept in the result.
    """
    size = max(1, _CHUNK // max(1, y[:1].numel()))
    result, dots = torch.empty_like(y), torch.empty_like(p)
    factor = _per_sample(p, y)
    for start in range(0, y.shape[0], size):
        chunk = slice(start, start + size)
        g_part, y_part, part = g[chunk], y[chunk], result[chunk]
        dots[chunk] = torch.mul(g_part, y_part, out=part).sum(_features(y))
        q = _per_sample(torch.addcmul(offset[chunk], slope[chunk], dots[chunk]), y)
        torch.mul(g_part, factor[chunk], out=part).addcmul_(y_part, q)
    return result, dots


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a custom autograd function, without the overhead of ``Function.apply`` outside transforms.

    ``Function.apply`` binds the arguments to names, which takes longer than a small operation.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest ``‖actual − expected‖ / ‖expected‖`` over the samples.

    Where ``expected`` is 0, the error is 0 if ``actual`` is 0 as well, and infinite otherwise.
    """
    if actual.shape != expected.shape:
        raise refusal("relative_error", f"{tuple(expected.shape)}", f"{tuple(actual.shape)}", "")
    if not len(expected):
        return 0.0
    expected = expected.double().flatten(1)
    difference = torch.linalg.vector_norm(actual.double().flatten(1) - expected, dim=1)
    size = torch.linalg.vector_norm(expected, dim=1)
    error = torch.where(difference == 0, torch.zeros_like(size), difference / size)
    return float(error.detach().max())
