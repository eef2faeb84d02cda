"""Pure tensor functions on the pair (x, t), without modules.

``embed``, ``respro`` and ``project`` follow the formulas of the paper literally; the others serve layers and folds.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import refusal

SHORT = 2048  # elements; a longer sum of squares loses digits
_BLOCK = 512  # elements of a block of a longer sum
Scalar = float | Tensor  # a Python number or a 0-dim tensor
_norm: Callable[..., Tensor] = torch.linalg.vector_norm
_AVG_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


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
    n = squared_norm(x).to(torch.promote_types(t.dtype, at_least_float32(x.dtype)))
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


def length(x: Tensor, offset: Scalar) -> Tensor:
    """Return ``√(‖x‖² + c²)`` of each sample with an offset c ≥ 0, shape (B,), in the wide dtype."""
    if not isinstance(offset, Tensor) and offset == 0:
        return norm(x)
    return guarded_root(squared_norm(x) + offset * offset)


def may_look(x: Tensor) -> bool:
    """Check whether Python code may read the values of x: eager, on the CPU, no transform active."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.is_cpu:
        return False
    return not (torch._C._get_tracing_state() or transformed())


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
    if transformed() or torch.compiler.is_compiling():  # which cannot have or see custom functions
        return z.to(wide_dtype(z.device)).square().sum(_features(z))
    result: Tensor = _SquaredNorm.apply(z)  # type: ignore[no-untyped-call]
    return result


class _SquaredNorm(torch.autograd.Function):
    """z ↦ ‖z‖² with its gradient in one pass: autograd keeps a wide copy, or takes four for the norm."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        n, high = norm(z).square(), torch.finfo(z.dtype).max ** 0.6
        if may_look(z) and len(n):
            least, most = torch.aminmax(n)
            if 1 / high < float(least) and float(most) < high:
                return n
        wide = z.to(n.dtype).square().sum(_features(z))
        return torch.where((1 / high < n) & (n < high), n, wide)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return scale_samples(ctx.saved_tensors[0], 2 * g)


def guarded_root(n: Tensor) -> Tensor:
    """Return √n, with gradient 0 where n = 0."""
    zero = n == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, n).sqrt())


def positive(alpha: Scalar) -> Scalar:
    """Replace a bound of 0 (zero weights) by 1; the output is 0 either way."""
    return alpha + (alpha == 0)


def scale_samples(z: Tensor, factor: Tensor) -> Tensor:
    """Multiply each sample of z (B, ...) by its factor (B,), in the dtype of z."""
    factor = factor.view(-1, *[1] * (z.dim() - 1))
    if z.dtype in (torch.float16, torch.bfloat16):
        return (z.float() * factor.float()).to(z.dtype)
    return z * factor.to(z.dtype)


def norm_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], ceil_mode: bool = False
) -> Tensor:
    """Return the Euclidean norm of every window of x (B, C, ...), as ``nn.LPPool*d`` with p = 2.

    The gradient is 0 where a window is 0. kernel and stride have one number per spatial axis.

    Examples:
        >>> norm_pool(torch.tensor([[[3.0, 4.0, 0.0, 0.0]]]), (2,), (2,))
        tensor([[[5., 0.]]])
    """
    squares = x.to(at_least_float32(x.dtype)).square()
    return guarded_root(window_sums(squares, kernel, stride, ceil_mode)).to(x.dtype)


def window_sums(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], ceil_mode: bool = False
) -> Tensor:
    """Return the sum of every window of x (B, C, ...), or of what the border leaves of it times its share."""
    if ceil_mode or max(kernel) > 2 or x.stride(-1) != 1:
        means: Tensor = _AVG_POOL[len(kernel)](x, kernel, stride, 0, ceil_mode)
        return means * math.prod(kernel)
    # Slices take less than half the time of torch's average pooling, gradients included.
    for axis, (size, step) in enumerate(zip(kernel, stride, strict=True), 2):
        before, span = (slice(None),) * axis, x.shape[axis] - size + 1
        parts = [x[(*before, slice(start, start + span, step))] for start in range(size)]
        x = functools.reduce(torch.add, parts)
    return x


def guarded_ratio(n: Scalar, tau: Tensor) -> Tensor:
    """Return ``n / τ``, and 0 where τ = 0, since a zero sample has no energy."""
    return n * guarded_inverse(tau)


def advance(
    step: Callable[[Tensor, Scalar, Tensor], Tensor], tau: Tensor, m: Scalar, n: Tensor
) -> Tensor:
    """Return the next τ of an activation by its step (τ, m, n) → τ; where τ is 0 it stays 0."""
    zero = tau == 0
    return torch.where(zero, tau, step(torch.where(zero, 1.0, tau), m, n))


def transformed() -> bool:
    """Check whether a torch.func transform (vmap, grad, jacrev, …) or forward mode is active."""
    if torch.compiler.is_compiling():
        return False  # the compiler cannot trace the query
    active: Any = torch._C._functorch.peek_interpreter_stack()
    return active is not None or torch.autograd.forward_ad._current_level >= 0


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


def _features(z: Tensor) -> tuple[int, ...]:
    return tuple(range(1, z.dim()))


def guarded_inverse(t: Tensor) -> Tensor:
    """Return 1/t, and 0 with zero gradient where t = 0; NaN stays NaN."""
    zero = t == 0
    return ~zero / (t + zero)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest ``‖actual − expected‖ / ‖expected‖`` over the samples.

    Where ``expected`` is 0, the error is 0 if ``actual`` is 0 as well, and infinite otherwise.
    """
    if actual.shape != expected.shape:
        shape, remedy = f"shape {tuple(expected.shape)}", "Compare outputs of the same batch."
        raise refusal("relative_error", shape, f"shape {tuple(actual.shape)}", remedy)
    if not len(expected):
        return 0.0
    expected = expected.double().flatten(1)
    difference = torch.linalg.vector_norm(actual.double().flatten(1) - expected, dim=1)
    size = torch.linalg.vector_norm(expected, dim=1)
    error = torch.where(difference == 0, torch.zeros_like(size), difference / size)
    return float(error.detach().max())
