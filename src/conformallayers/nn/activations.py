"""Activations that change only the coordinate: ReSPro of the paper, others, and a base for more."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..functional import (
    Scalar,
    energy,
    may_look,
    positive,
    rescaled,
    scale_samples,
    squares_fit,
    wide_dtype,
)
from .rules import GNOMONIC, PROJECTIVE, PUBLISHED, Rule

_MODES = ("young", "spectral", "learned")


class RadialActivation(nn.Module):
    """The base of activations that move a point along its ray: ``p ← (slope/α)·p / growth(q)``.

    ``q = ‖p‖²/α²`` is the squared length of the point in units of the radius α. Inside a
    :class:`ConformalLayers` only the homogeneous coordinate changes, so that what follows still
    folds. Derive from it, set ``slope`` and define :meth:`growth`: a positive, smooth function of q
    that is 1 at q = 0. Then a stack of them folds to one quadratic form for each and a scalar
    recurrence over them. ``rule.collapses`` tells whether several in a row need only one form.

    Args:
        alpha: how to get α.

            - ``None`` or ``"young"``: the product of the norm bounds of the layers since the last
              activation (Young's inequality), as in the paper; gradients flow through it.
            - ``"spectral"``: the norm of those layers as one map, by one step of power iteration
              per training forward. It nears the norm from below. Kept in the buffer ``norm``.
            - ``"learned"``: Young's bound times a trained positive factor that starts at 1.
            - a number > 0: that number.
        device, dtype: where and how the factor and the norm are kept.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> class Cauchy(RadialActivation):
        ...     def growth(self, q):
        ...         return 1 + q / 4
        >>> Cauchy(alpha=1.0)(torch.tensor([[2.0, 0.0]]))
        tensor([[1., 0.]])
    """

    slope: ClassVar[float] = 1.0
    norm: Tensor
    vector: Tensor | None

    def __init__(
        self,
        alpha: str | float | None = None,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.alpha: str | float = _checked_alpha(type(self).__name__, alpha)
        if self.alpha == "learned":
            self.log_factor = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        if self.alpha == "spectral":
            self.register_buffer("norm", torch.empty((), device=device, dtype=dtype))
            self.register_buffer("vector", None, persistent=False)
        self.reset_parameters()

    def growth(self, q: Tensor) -> Tensor:
        """Return what the coordinate is multiplied with, of the shape of q."""
        raise NotImplementedError(f"{type(self).__name__} does not define growth(q)")

    @property
    def rule(self) -> Rule:
        """How the coordinate changes; by default with :meth:`growth`, and without collapsing."""
        return Rule(type(self).__name__, self.growth)

    def fault(self) -> str | None:
        """Try slope and growth at a few places; return what is wrong with them, or None."""
        slope: object = self.slope
        if not isinstance(slope, (int, float)) or not 0 < slope < math.inf:
            return f"slope={slope!r}"
        held = next((tensor for tensor in (*self.parameters(), *self.buffers())), None)
        if held is not None and held.is_meta:
            return None
        q = torch.tensor([0.0, 1e-3, 1.0, 100.0], device=None if held is None else held.device)
        try:
            with torch.no_grad():
                found: object = self.growth(q)
                if not isinstance(found, Tensor) or found.shape != q.shape:
                    return "a growth of another shape than q"
                alone = torch.cat([self.growth(one) for one in q.split(1)])
        except Exception as error:
            return f"{type(error).__name__} in growth: {str(error).splitlines()[0]}"
        if not torch.allclose(found, alone, equal_nan=True):
            return "a growth that mixes samples"
        if not bool((found > 0).all()) or abs(float(found[0]) - 1) > 1e-3:
            return f"growth {[round(value, 4) for value in found.tolist()]} at q = 0, 0.001, 1, 100"
        return None

    def reset_parameters(self) -> None:
        """Set the learned factor to 1, and forget the spectral norm."""
        if self.alpha == "learned":
            nn.init.zeros_(self.log_factor)
        if self.alpha == "spectral":
            nn.init.zeros_(self.norm)
            self.vector = None

    def resolve(self, bound: Scalar, base: Scalar = 1.0) -> Scalar:
        """Return α, given the bound of the layers since the last activation; never 0.

        Behind joined branches ``base`` is the bound of what enters the layers behind the join.
        """
        if isinstance(self.alpha, float):
            return self.alpha
        if self.alpha == "learned":
            return positive(bound) * _wide(self.log_factor).exp()
        if self.alpha == "spectral":
            norm = _wide(self.norm)
            fallback = torch.as_tensor(positive(bound), dtype=norm.dtype, device=norm.device)
            return torch.where(norm > 0, norm * base, fallback)
        return positive(bound)

    def forward(self, input: Tensor) -> Tensor:
        """Map points; needs α as a number."""
        where = f"{type(self).__name__} called on its own"
        if not isinstance(self.alpha, float):
            raise refusal(
                where,
                "alpha as a number",
                f'alpha="{self.alpha}"',
                "Put it into cl.ConformalLayers after the layers that bound it, or give a number.",
            )
        if not input.is_floating_point() or input.dim() < 2:
            raise refusal(
                where,
                "a batch of points as a floating-point tensor",
                f"{input.dtype} of shape {tuple(input.shape)}",
                "Add the batch axis with x.unsqueeze(0), or convert it with x.float().",
            )
        input, n = energy(input)
        if may_look(input) and not squares_fit(input, n, n):
            input, factor = rescaled(input)
            input, n = energy(input)
            growth = self.rule.growth(n / (factor * self.alpha).square())
            return scale_samples(input, self.slope / (self.alpha * growth * factor))
        growth = self.rule.growth(n / self.alpha**2)
        return scale_samples(input, self.slope / (self.alpha * growth))

    def extra_repr(self) -> str:
        """Show alpha if it is not the default."""
        if isinstance(self.alpha, float):
            return f"alpha={self.alpha:g}"
        return "" if self.alpha == "young" else f"alpha={self.alpha!r}"


class ReSPro(RadialActivation):
    """Reflect in a sphere of radius α, scale by 2/α, project back: the activation of the paper.

    Inside a :class:`ConformalLayers` it changes only the homogeneous coordinate:
    ``t ← (α/2)·t + ‖x‖²/(2α)`` as published, ``t ← (α/2)·t + ‖x‖²/(2α·t)`` in the projective form.
    Called on its own it maps points (t = 1, where the forms agree): ``y = 2αx/(α² + ‖x‖²)``.

    The published form collapses to one quadratic form, the projective one to a recurrence.

    Args:
        alpha: how to get α, see :class:`RadialActivation`.
        projective: take the projective form, invariant to the scale of the input and bounded by 1.
        device, dtype: where and how a learned factor or a spectral norm are kept.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> respro = ReSPro(alpha=3.0)
        >>> respro(torch.tensor([[3.0, 0.0], [0.0, 1.5]]))
        tensor([[1.0000, 0.0000],
                [0.0000, 0.8000]])
    """

    slope = 2.0

    def __init__(
        self,
        alpha: str | float | None = None,
        *,
        projective: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(alpha, device=device, dtype=dtype)
        if not isinstance(projective, bool):
            raise refusal("ReSPro(projective=...)", "True or False", repr(projective), "Give one.")
        self.projective = projective

    @property
    def rule(self) -> Rule:
        """The published or the projective one."""
        return PROJECTIVE if self.projective else PUBLISHED

    def extra_repr(self) -> str:
        """Show the arguments that are not the default."""
        shown = super().extra_repr(), "projective=True" * self.projective
        return ", ".join(part for part in shown if part)


class Gnomonic(RadialActivation):
    """Project the point from the plane onto the unit hemisphere: ``p ← (p/α) / √(1 + ‖p‖²/α²)``.

    Invariant to the scale of the input and bounded by 1, as the projective ReSPro is, and yet any
    number of them collapses to one quadratic form: ``t² ← t² + ‖x‖²/α²`` is a sum.

    Args:
        alpha, device, dtype: see :class:`RadialActivation`.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Gnomonic(alpha=1.0)(torch.tensor([[0.75, 0.0]]))
        tensor([[0.6000, 0.0000]])
    """

    @property
    def rule(self) -> Rule:
        """The one of sums of squares."""
        return GNOMONIC


class RadialTanh(RadialActivation):
    """Give the length of the point a hyperbolic tangent: ``‖p‖ ← tanh(‖p‖/α)``.

    Closer to the identity than the others for short points, and bounded by 1. It folds to one
    quadratic form for each activation and a recurrence over them.

    Args:
        alpha, device, dtype: see :class:`RadialActivation`.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> RadialTanh(alpha=2.0)(torch.tensor([[2.0, 0.0]]))
        tensor([[0.7616, 0.0000]])
    """

    def growth(self, q: Tensor) -> Tensor:
        """Return u / tanh(u) for u = √q."""
        short = q < 1e-4  # the series is exact to rounding there, and the root has a derivative
        u = torch.where(short, 1.0, q).sqrt()
        return torch.where(short, 1 + q / 3 - q**2 / 45, u / u.tanh())


def _wide(scalar: Tensor) -> Tensor:
    return scalar.to(wide_dtype(scalar.device))


def _checked_alpha(name: str, alpha: Any) -> str | float:
    if alpha is None:
        return "young"
    if isinstance(alpha, str) and alpha in _MODES:
        return alpha
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not number or not math.isfinite(alpha) or alpha <= 0:
        raise refusal(
            f"{name}(alpha=...)",
            'None, "young", "spectral", "learned" or a finite number > 0',
            repr(alpha),
            "Leave alpha out to use the bound of the layers before it.",
        )
    return float(alpha)
