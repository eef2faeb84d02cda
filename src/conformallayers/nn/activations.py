"""Radial activations, which change only the coordinate t: one class with one formula each.

With ``q = ‖p‖²/α²``, the squared length of the point in units of α, an activation multiplies t by a
growth: ``1 + t·q`` for the published ReSPro, ``1 + q`` for the projective one, ``√(1 + q)`` for
Gnomonic. Layers compute it with tensors; folds trace it once and hold the formula.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import first_line, is_real, refusal
from ..functional import Scalar, positive, scale_samples, squared_norm, wide_dtype
from .formula import FUNCTIONS, Formula

_MODES = ("young", "spectral", "learned")
ALPHA_LIMITS = 1e-150, 1e150  # numbers whose squares and their inverses are in the range of float64

_LARGEST = 1e300  # coordinates are cut here, so that they stay finite


class RadialActivation(nn.Module):
    """Base class of activations that scale a point: ``p ← (slope/α)·p / growth(q)``.

    ``q = ‖p‖²/α²`` is the squared length of the point in units of the radius α. Inside a
    :class:`ConformalLayers` only the homogeneous coordinate changes, so the network still folds.
    A subclass sets ``slope`` and defines :meth:`growth`: a positive, smooth function of q that is 1
    at q = 0, made of + − × ÷, powers, sqrt, exp, log and tanh. Folds hold it as a formula, which every
    runtime evaluates. A stack folds to one quadratic form for each activation and a scalar recurrence.

    Folds rely on the other class attributes: leave each False unless it is proved.

    Attributes:
        slope: the factor of a short point, in units of 1/α.
        collapses: whether consecutive activations need only the sum of their energies, which is one
            quadratic form.
        provable: whether an error bound of a simplified form bounds the relative error of t.
        bounded: whether the activation returns points of norm 1 at most.

    Args:
        alpha: the radius α.

            - ``None`` or ``"young"``: the product of the norm bounds of the layers since the last
              activation (Young's inequality), as in the paper; gradients flow through it.
            - ``"spectral"``: the operator norm of those layers together, estimated from below by one
              step of power iteration per training forward and stored in the buffer ``norm``.
            - ``"learned"``: Young's bound times a learned positive factor, initially 1.
            - a number > 0: that number.
        device, dtype: of the learned factor and the stored norm.

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
    collapses: bool = False
    provable: ClassVar[bool] = False
    bounded: bool = False
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

    def growth(self, q: Any) -> Any:
        """Return the factor of the coordinate for a tensor q.

        A fold calls it with a :class:`~conformallayers.nn.formula.Formula`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define growth(q)")

    def step(self, tau: Any, m: Any, n: Any) -> Any:
        """Return the next τ > 0, given the energy ``n = q·τ²`` and the coordinate m of the input."""
        return tau * self.growth(n / tau / tau)

    @property
    def formula(self) -> Formula:
        """The next τ as a formula in tau, m and n."""
        found: Formula = self.step(Formula("tau"), Formula("m"), Formula("n"))
        return found

    @property
    def on_points(self) -> bool:
        """Whether :meth:`step` does not depend on the scale of the input, and so not on m."""
        return True

    def fault(self) -> str | None:
        """Evaluate slope and growth at a few values of q; return what is wrong, or None."""
        slope: object = self.slope
        if not isinstance(slope, (int, float)) or not 0 < slope < math.inf:
            return f"slope={slope!r}"
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            return None
        functions = {name: getattr(torch, name) for name in FUNCTIONS}
        q = torch.tensor([0.0, 1e-3, 1.0, 100.0], dtype=torch.float64, device="cpu")
        try:
            found: object = self.growth(Formula("q"))
            if not isinstance(found, Formula):
                return f"a growth that gives {found!r:.60}"
            values = (found.evaluate({"q": q}, functions) + 0 * q).tolist()
        except Exception as error:
            return f"{type(error).__name__} in growth: {first_line(error)}"
        if not all(value > 0 for value in values) or abs(values[0] - 1) > 1e-3:
            return f"growth {[round(value, 4) for value in values]} at q = 0, 0.001, 1, 100"
        return None

    def reset_parameters(self) -> None:
        """Set the learned factor to 1 and clear the spectral norm."""
        if self.alpha == "learned":
            nn.init.zeros_(self.log_factor)
        if self.alpha == "spectral":
            nn.init.zeros_(self.norm)
            self.vector = None

    def resolve(self, bound: Scalar, base: Scalar = 1.0) -> Scalar:
        """Return α > 0, given the bound of the layers since the last activation.

        After a join, ``base`` is the bound of the joined value that enters the layers.
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

    def activate(self, q: Tensor, t: Tensor, alpha: Scalar) -> tuple[Tensor, Tensor]:
        """Return the factors (B,) by which points with q = ‖p‖²/α² are multiplied, and their next t."""
        factor = self.slope / (alpha * self.step(torch.ones_like(t), t, q))
        return factor, (t / factor).clamp_max(_LARGEST)

    def forward(self, input: Tensor) -> Tensor:
        """Map a batch of points; alpha must be a number."""
        where = f"{type(self).__name__} called on its own"
        if not isinstance(self.alpha, float):
            remedy = (
                "Put it into cl.ConformalLayers after the layers that bound it, or give a number."
            )
            raise refusal(where, "alpha as a number", f'alpha="{self.alpha}"', remedy)
        if not input.is_floating_point() or input.dim() < 2:
            expected = "a batch of points as a floating-point tensor"
            got = f"{input.dtype} of shape {tuple(input.shape)}"
            remedy = "Add the batch axis with x.unsqueeze(0), or convert it with x.float()."
            raise refusal(where, expected, got, remedy)
        one = input.new_ones(input.shape[0], dtype=wide_dtype(input.device))
        q = squared_norm(input) / self.alpha**2
        return scale_samples(input, self.activate(q, one, self.alpha)[0])

    def extra_repr(self) -> str:
        """Return alpha if it is not the default."""
        if isinstance(self.alpha, float):
            return f"alpha={self.alpha:g}"
        return "" if self.alpha == "young" else f"alpha={self.alpha!r}"


class ReSPro(RadialActivation):
    """Reflect in a sphere of radius α, scale by 2/α and project back: the paper's activation.

    Inside a :class:`ConformalLayers` it changes only the homogeneous coordinate:
    ``t ← (α/2)·t + ‖x‖²/(2α)`` as published, ``t ← (α/2)·t + ‖x‖²/(2α·t)`` in the projective form.
    Called on its own it maps points (t = 1, where the forms agree): ``y = 2αx/(α² + ‖x‖²)``.

    A stack folds to one quadratic form in the published form, and to one form for each activation
    and a scalar recurrence in the projective form.

    Args:
        alpha: see :class:`RadialActivation`.
        projective: use the projective form, invariant to the scale of the input and bounded by 1.
        device, dtype: of a learned factor or a spectral norm.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> respro = ReSPro(alpha=3.0)
        >>> respro(torch.tensor([[3.0, 0.0], [0.0, 1.5]]))
        tensor([[1.0000, 0.0000],
                [0.0000, 0.8000]])
    """

    slope = 2.0
    provable = True

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
            raise refusal(
                "ReSPro(projective=...)", "True or False", repr(projective), "The default is False."
            )
        self.projective = projective

    def growth(self, q: Any) -> Any:
        """Return ``1 + q``."""
        return 1 + q

    def step(self, tau: Any, m: Any, n: Any) -> Any:
        """Return ``τ + m·n`` as published, ``τ + n/τ`` in the projective form."""
        return tau + n / tau if self.projective else tau + m * n

    @property
    def on_points(self) -> bool:
        """Whether the form is projective."""
        return self.projective

    @property
    def collapses(self) -> bool:  # type: ignore[override]
        """Whether the form is published."""
        return not self.projective

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        """Whether the form is projective."""
        return self.projective

    def extra_repr(self) -> str:
        """Return the arguments that are not the default."""
        shown = super().extra_repr(), "projective=True" * self.projective
        return ", ".join(part for part in shown if part)


class Gnomonic(RadialActivation):
    """Project the point from the plane onto the unit hemisphere: ``p ← (p/α) / √(1 + ‖p‖²/α²)``.

    Invariant to the scale of the input and bounded by 1, like the projective ReSPro. A stack of any
    depth still folds to one quadratic form, because ``t² ← t² + ‖x‖²/α²`` is a sum.

    Args:
        alpha, device, dtype: see :class:`RadialActivation`.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> Gnomonic(alpha=1.0)(torch.tensor([[0.75, 0.0]]))
        tensor([[0.6000, 0.0000]])
    """

    collapses = provable = bounded = True

    def growth(self, q: Any) -> Any:
        """Return ``√(1 + q)``."""
        return (1 + q).sqrt()


def _wide(scalar: Tensor) -> Tensor:
    return scalar.to(wide_dtype(scalar.device))


def _checked_alpha(name: str, alpha: Any) -> str | float:
    if alpha is None:
        return "young"
    if isinstance(alpha, str) and alpha in _MODES:
        return alpha
    if not is_real(alpha) or not ALPHA_LIMITS[0] <= alpha <= ALPHA_LIMITS[1]:
        limits = f"a number in [{ALPHA_LIMITS[0]:g}, {ALPHA_LIMITS[1]:g}]"
        expected = f'None, "young", "spectral", "learned" or {limits}'
        remedy = "Leave alpha out to use the bound of the layers before it."
        raise refusal(f"{name}(alpha=...)", expected, repr(alpha), remedy)
    return float(alpha)
