"""Scalars that keep the numbers of a point in the range of floats."""

from __future__ import annotations


class Scaling:
    """The scalars of ``x = m·κ·z`` and ``t = m·σ·τ``, chosen so that z and τ stay in range.

    ``balance = κ²/σ`` and ``rho = κ/σ``. A published activation keeps the balance at 1 (z = x/√s);
    one that acts on points keeps rho at 1 (z/τ is the point). :meth:`take` returns the factor of z
    that restores this. It is deferred so that the next layer can apply it to its weights.
    """

    def __init__(self, norm_factor: float = 1.0) -> None:
        # t starts as norm_factor·‖x‖, so κ = 1 and σ = norm_factor.
        self._balance: float = 1.0 / norm_factor
        self._rho: float = 1.0 / norm_factor
        # slope/α of the last activation and whether it acts on points, until :meth:`take`.
        self._last: tuple[float, bool] | None = None

    @property
    def rho(self) -> float:
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
    def sigma(self) -> float:
        """The factor of the coordinate ``m · sigma · τ``."""
        balance, rho = self._balance, self._rho
        if self._last is not None:
            balance, rho = balance * self._last[0], rho * self._last[0]
        return balance / (rho * rho)  # rho**2 of a float raises on overflow

    def activate(self, alpha: float, on_points: bool, slope: float = 2.0) -> float:
        """Pass an activation; return the weight of ``‖z‖²`` in τ, for the current z."""
        if self._last is not None:  # no layer has applied the previous factor
            before = self._last[0]
            self._balance, self._rho = self._balance * before, self._rho * before
        self._last = slope / alpha, on_points
        return (self._rho * self._rho if on_points else self._balance) / (alpha * alpha)

    def take(self) -> float | None:
        """Return the pending factor of z, or None."""
        if self._last is None:
            return None
        (ratio, on_points), self._last = self._last, None
        balance, rho = self._balance * ratio, self._rho * ratio
        # z ← factor·z divides κ by the factor, so κ/σ by it and κ²/σ by its square.
        factor = rho if on_points else balance**0.5
        if on_points:
            self._balance, self._rho = balance / factor**2, 1.0
        else:
            self._balance, self._rho = 1.0, rho / factor
        return factor
