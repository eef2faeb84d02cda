"""Checks for users: how far a fold is from its layers, as a number and as an assert.

Tolerances come from one table per dtype and are relative to the norm of each output sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .container import layer_by_layer
from .errors import checked_shape, refusal
from .folding.fold import TOLERANCES, fold
from .folding.folded import Folded
from .functional import relative_error
from .nn.registry import find_spec

__all__ = [
    "TOLERANCES",
    "assert_folds",
    "assert_homogeneous",
    "assert_linear",
    "fold_error",
    "reference",
    "relative_error",
]


def reference(model: nn.Module, x: Tensor) -> Tensor:
    """Run a float64 copy of the model layer by layer in evaluation mode."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad(), layer_by_layer():
        result: Tensor = exact(x.double())
    return result


def fold_error(model: nn.Module, folded: Folded, x: Tensor) -> float:
    """Return the largest relative error of a fold over a batch.

    Args:
        model: the model that was folded.
        folded: the result of :func:`conformallayers.fold`.
        x: a batch (B, *input_shape) in the dtype of the fold.

    Returns:
        ``max ‖folded(x) − y‖ / ‖y‖`` with y computed layer by layer by a float64 copy of the model.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro())
        >>> fold_error(model, cl.fold(model, (1, 8, 8)), torch.rand(3, 1, 8, 8)) < 5e-6
        True
    """
    if isinstance(model, Folded):
        remedy = "The order is fold_error(model, folded, x)."
        raise refusal("fold_error(model, folded, x)", "the model first", "a Folded", remedy)
    with torch.no_grad():
        y = folded(x)
    if not isinstance(y, Tensor):
        remedy = "Compare each output by itself: torch.testing.assert_close."
        raise refusal("fold_error(...)", "a fold with one output", type(y).__name__, remedy)
    return relative_error(y, reference(model, x))


def assert_folds(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    strategy: str = "auto",
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32),
    batch: int = 5,
    seed: int = 0,
) -> None:
    """Assert that a model and its fold agree in each dtype.

    Args:
        model: a ConformalLayers, or a traceable module that contains some.
        input_shape: the shape of one sample.
        strategy: as in :func:`conformallayers.fold`.
        dtypes: to check; tolerances come from ``TOLERANCES``.
        batch: the number of random samples; the first sample is zero.
        seed: of the random samples.

    Raises:
        AssertionError: if an error exceeds the tolerance.

    Examples:
        >>> import conformallayers as cl
        >>> assert_folds(cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro()), (1, 8, 8))
    """
    shape = checked_shape(input_shape, "assert_folds(input_shape=...)")
    x = _samples(torch.rand, (batch, *shape), seed)
    x[0] = 0
    for dtype in dtypes:
        typed: nn.Module = copy.deepcopy(model).to(dtype)
        folded = fold(typed, shape, strategy=strategy, dtype=dtype)
        error = fold_error(typed, folded, x.to(dtype))
        if not error <= TOLERANCES[dtype]:
            raise AssertionError(
                f"{type(model).__name__} folded by {folded.strategy!r} in {dtype}: "
                f"relative error {error:.3g}, allowed {TOLERANCES[dtype]:.3g}"
            )


def assert_linear(module: nn.Module, input_shape: tuple[int, ...], *, seed: int = 0) -> None:
    """Assert that a module is linear, has no bias and does not mix samples.

    Use it before :func:`conformallayers.register_linear` on a module of your own.

    Args:
        module: the module; a float64 copy in evaluation mode is checked.
        input_shape: the shape of one sample.
        seed: of the random samples.

    Raises:
        AssertionError: if a property does not hold; the message names it.

    Examples:
        >>> assert_linear(torch.nn.Conv1d(1, 2, 3, bias=False), (1, 8))
    """
    shape = checked_shape(input_shape, "assert_linear(input_shape=...)")
    exact: Any = copy.deepcopy(module).double().eval()
    a, b = _samples(torch.randn, (2, 3, *shape), seed)
    with torch.no_grad():
        images = exact(a), exact(b)
        checks = {
            "f(0) = 0": (exact(torch.zeros_like(a)), torch.zeros_like(images[0])),
            "f(a + b) = f(a) + f(b)": (exact(a + b), images[0] + images[1]),
            "f(c·a) = c·f(a)": (exact(-2.5 * a), -2.5 * images[0]),
            "samples are independent": (exact(a[:1]), images[0][:1]),
        }
    for name, (actual, expected) in checks.items():
        if not _equals(actual, expected):
            raise AssertionError(f"{type(module).__name__}: {name} does not hold")


def assert_homogeneous(module: nn.Module, input_shape: tuple[int, ...], *, seed: int = 0) -> None:
    """Assert that a module is positively homogeneous and does not mix samples, and that its bound holds.

    Use it before :func:`conformallayers.register_homogeneous` on a map of your own, and after it to
    check the bound too.

    Args:
        module: the module; a float64 copy in evaluation mode is checked.
        input_shape: the shape of one sample.
        seed: of the random samples.

    Raises:
        AssertionError: if a property does not hold; the message names it.

    Examples:
        >>> assert_homogeneous(torch.nn.MaxPool1d(2), (1, 8))
        >>> assert_homogeneous(torch.nn.Tanh(), (4,))
        Traceback (most recent call last):
        ...
        AssertionError: Tanh: h(λx) = λ·h(x) does not hold for λ = 0.001
    """
    shape = checked_shape(input_shape, "assert_homogeneous(input_shape=...)")
    name, exact = type(module).__name__, copy.deepcopy(module).double().eval()
    x = _samples(torch.randn, (4, *shape), seed)
    x[-1] = x[-1].abs()
    with torch.no_grad():
        image: Tensor = exact(x.clone())
        for factor in (0.0, 1e-3, 0.7, 3.0, 1e4):
            if not _equals(exact(factor * x), factor * image, factor):
                raise AssertionError(f"{name}: h(λx) = λ·h(x) does not hold for λ = {factor:g}")
        if not _equals(exact(x[:1].clone()), image[:1]):
            raise AssertionError(f"{name}: samples are not independent")
    spec = find_spec(module)
    if spec is None or not spec.homogeneous:
        return
    bound, found = float(spec.bound(exact, shape)), _largest_ratio(exact, shape, x)
    if not found <= bound * (1 + 1e-9):
        raise AssertionError(
            f"{name}: ‖h(x)‖ = {found:.6g}·‖x‖ for some x, and its bound is {bound:.6g}"
        )


def _samples(draw: Callable[..., Tensor], shape: tuple[int, ...], seed: int) -> Tensor:
    return draw(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _equals(actual: Tensor, expected: Tensor, factor: float = 1.0) -> bool:
    close = actual.shape == expected.shape
    return close and torch.allclose(actual, expected, 1e-9, 1e-12 * factor)


def _largest_ratio(module: Any, shape: tuple[int, ...], x: Tensor) -> float:
    """Return the largest ``‖h(x)‖/‖x‖`` found: random samples, single pixels, constants, and ascent."""
    size = x[0].numel()
    pixels = torch.eye(size, dtype=x.dtype)[:: max(1, size // 256)].view(-1, *shape)
    starts = torch.cat([x, pixels, -pixels, torch.ones_like(x[:1]), -torch.ones_like(x[:1])])
    for _ in range(20):
        starts = (starts / _norms(starts)).detach().requires_grad_()
        # Power iteration: where h is linear near x, h(x) = J x, the gradient of ‖h(x)‖ is JᵀJ x / ‖h(x)‖.
        with torch.enable_grad():
            ratios = _norms(module(starts.clone())).flatten()
            if not ratios.requires_grad:
                break
            (ascent,) = torch.autograd.grad(ratios.sum(), starts)
        best = ratios.detach()
        ascent = torch.where(ascent.isfinite(), ascent, 0.0)
        starts = torch.where(
            (best > 0).view(-1, *[1] * len(shape)) & (_norms(ascent) > 0), ascent, starts
        )
    with torch.no_grad():
        return float((_norms(module(starts)) / _norms(starts)).max())


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms.view(-1, *[1] * (x.dim() - 1))
