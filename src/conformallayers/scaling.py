"""Scalars that keep the numbers of a point in the range of floats."""

from __future__ import annotations

from torch import Tensor

from .functional import Scalar, may_look

_USUAL = 1e30  # numbers whose powers do not overflow


class Scaling:
    """The scalars of ``x = m·κ·z`` and ``t = m·σ·τ``, chosen so that z and τ stay in range.

    ``balance = κ²/σ`` and ``rho = κ/σ``. A published activation keeps the balance at 1 (z = x/√s);
    one that acts on points keeps rho at 1 (z/τ is the point). :meth:`take` returns the factor of z
    that restores this. It is deferred so that the next layer can apply it to its weights.
    """

    def __init__(self, norm_factor: float = 1.0) -> None:
        # t starts as norm_factor·‖x‖, so κ = 1 and σ = norm_factor.
        self._balance: Scalar = 1.0 / norm_factor
        self._rho: Scalar = 1.0 / norm_factor
        # slope/α of the last activation and whether it acts on points, until :meth:`take`.
        self._last: tuple[Scalar, bool] | None = None

    @property
    def rho(self) -> Scalar:
        """The factor of the point ``rho · z / τ``, for the current z."""
        return self._rho if self._last is None else self._rho * self._last[0]

    def copy(self) -> Scaling:
        """Return an independent copy for a branch."""
        other = Scaling()
        other._balance, other._rho, other._last = self._balance, self._rho, self._last
        return other

    def lacking(self, gain: float) -> Scaling:
        """Return the scalars of ``z / gain``."""
        other = self.copy()
        other._balance, other._rho = self._balance * gain * gain, self._rho * gain
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaling) and vars(self) == vars(other)

    @property
    def pending(self) -> bool:
        """Whether a factor of z is still to be taken."""
        return self._last is not None

    @property
    def sigma(self) -> Scalar:
        """The factor of the coordinate ``m · sigma · τ``."""
        balance, rho = self._balance, self._rho
        if self._last is not None:
            balance, rho = balance * self._last[0], rho * self._last[0]
        return balance / (rho * rho)  # rho**2 of a float raises on overflow

    def activate(self, alpha: Scalar, on_points: bool, slope: float = 2.0) -> Scalar:
        """Pass an activation; return the weight of ``‖z‖²`` in τ, for the current z."""
        if self._last is not None:  # no layer has applied the previous factor
            before = self._last[0]
            self._balance, self._rho = self._balance * before, self._rho * before
        self._last = slope / alpha, on_points
        return product(self._rho * self._rho if on_points else self._balance, 1 / (alpha * alpha))

    def take(self) -> Scalar | None:
        """Return the pending factor of z, or None."""
        if self._last is None:
            return None
        (ratio, on_points), self._last = self._last, None
        balance, rho = product(self._balance, ratio), product(self._rho, ratio)
        # z ← factor·z divides κ by the factor, so κ/σ by it and κ²/σ by its square.
        factor = rho if on_points else balance**0.5
        if on_points:
            self._balance, self._rho = balance / factor**2, 1.0
        else:
            self._balance, self._rho = 1.0, rho / factor
        return factor


def positive(alpha: Scalar) -> Scalar:
    """Replace a bound of 0 (zero weights) by 1; the output is 0 either way.

    Examples:
        >>> import torch
        >>> positive(0.0), positive(torch.tensor(0.0)), positive(torch.tensor(2.0))
        (1.0, tensor(1.), tensor(2.))
    """
    if not isinstance(alpha, Tensor):
        return alpha or 1.0
    if may_look(alpha):
        return alpha if alpha.item() != 0 else alpha + 1
    return alpha + (alpha == 0)


def constant(alpha: Scalar) -> Scalar:
    """Return the value of a scalar without its gradient: a number where values may be read and are usual.

    Examples:
        >>> import torch
        >>> constant(torch.tensor(2.0, requires_grad=True))
        2.0
    """
    if not isinstance(alpha, Tensor):
        return alpha
    if may_look(alpha) and 1 / _USUAL < (value := alpha.item()) < _USUAL:
        return value
    return alpha.detach()  # divisions by 0 and overflow are no errors of tensors


def product(a: Scalar, b: Scalar) -> Scalar:
    """Return ``a · b``, without an operation on tensors if one of them is the plain number 1.

    Examples:
        >>> product(2.0, 3.0), product(2.5, 1.0)
        (6.0, 2.5)
    """
    if isinstance(a, float) and a == 1.0:
        return b
    return a if isinstance(b, float) and b == 1.0 else a * b
