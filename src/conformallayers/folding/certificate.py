"""Proofs that a simplified denominator is close to the exact one.

With E = Q̂ − Q, ``|xᵀEx| ≤ ε·(‖x‖ + xᵀQx)`` holds for every ‖x‖ ≤ R if ``ε(Q + I/R) ± E ⪰ 0``:
then ``|xᵀEx| ≤ ε(xᵀQx + ‖x‖²/R) ≤ ε(xᵀQx + ‖x‖)``. Two tests are used: one Cholesky factorisation
of each sign, and the cheaper ``‖E‖ ≤ ε(λ_min(Q) + 1/R)`` with Schur's bound of ‖E‖.

Half of a requested ε is for what is left out, and half for rounding: see :class:`Rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ..utils.html import Block, Printed


@dataclass(frozen=True)
class ErrorBudget:
    """The allowed relative error of a denominator: ``epsilon`` for ‖x‖ ≤ ``radius``.

    ``requested`` is true for a tolerance of the user, false for the rounding of the dtype.
    """

    epsilon: float
    radius: float = math.inf
    requested: bool = False

    @property
    def inverse_radius(self) -> float:
        """1/R, also where R is infinite."""
        return 1 / self.radius


@dataclass(frozen=True)
class Certificate(Printed):
    """A proven bound: ``|D̂ − D| ≤ epsilon·D`` for every input with ‖x‖ ≤ ``max_norm``.

    ``margin`` is the share of epsilon that the proof did not need. Rounding is covered where epsilon was
    requested; without a tolerance, D̂ is the denominator before rounding.
    """

    epsilon: float
    max_norm: float
    margin: float

    def stored(self) -> dict[str, float | str]:
        """Return it as JSON values: any norm is ``"inf"``."""
        return asdict(self) | ({"max_norm": "inf"} if math.isinf(self.max_norm) else {})

    def _blocks(self) -> Iterator[Block]:
        radius = "any input" if math.isinf(self.max_norm) else f"‖x‖ ≤ {self.max_norm:g}"
        yield f"|D̂ − D| ≤ {self.epsilon:.3g}·D for {radius} (margin {self.margin:.0%})"


def weakest(proofs: Sequence[Certificate]) -> Certificate | None:
    """Return the certificate that holds for all parts with a proof; None without any."""
    if not proofs:
        return None
    return Certificate(
        max(proof.epsilon for proof in proofs),
        min(proof.max_norm for proof in proofs),
        min(proof.margin for proof in proofs),
    )


def rounding_budget(dtype: torch.dtype) -> ErrorBudget:
    """Return the unit roundoff of float32 as a budget, for shorter dtypes too; 0 for float64, that of proofs."""
    if dtype == torch.float64:
        return ErrorBudget(0.0)
    return ErrorBudget(torch.finfo(torch.float32).eps / 2)


@dataclass(frozen=True)
class Rounding:
    """A bound of the rounding errors of energies that are computed as ``‖z‖²`` or as ``xᵀQx``.

    With z off by ``vector·‖x‖``, its energy is off by at most ``2√n·vector·‖x‖ + vector²·‖x‖²``. Where
    n ≥ λ‖x‖² and ‖x‖ ≤ R, that is at most ``2a + a²`` of ``n + ‖x‖²/R`` with ``a = vector/√(λ + 1/R)``. A
    form loses up to ``form·‖x‖²``. Several energies add their errors.
    """

    vector: float = 0.0
    form: float = 0.0

    def share(self, floor: float) -> float:
        """Return the relative error of a denominator, with ``floor = λ + 1/R``."""
        if floor == 0:
            return math.inf if self.vector or self.form else 0.0
        return 2 * self.vector / math.sqrt(floor) + (self.vector * self.vector + self.form) / floor

    def least_floor(self, share: float) -> float:
        """Return the smallest ``λ + 1/R`` for which the relative error is at most ``share``."""
        squares = self.vector * self.vector + self.form
        if squares == 0:
            return 0.0
        # With y = 1/√floor: squares·y² + 2·vector·y = share.
        root = (self.vector + math.sqrt(self.vector * self.vector + squares * share)) / share
        return math.inf if math.isnan(root) else root * root


def rounding_of_sum(terms: float, dtype: torch.dtype) -> float:
    """Bound the relative rounding error of a sum of products, with its constants rounded as well.

    Single errors are taken as independent: their sum is far below 4√n roundings, while n is the worst case.
    """
    return 4 * math.sqrt(max(terms, 1.0)) * torch.finfo(dtype).eps / 2


def triangular_factor(form: Tensor) -> tuple[Tensor, float]:
    """Return L, upper triangular, with ``LᵀL = Q + shift·I`` to a few roundings of float64, and the shift.

    The shift is 0, or for a singular form the first of a few multiples of I with which the factorisation
    succeeds.
    """
    size, peak = len(form), float(form.diagonal().abs().max())
    if peak == 0:
        return torch.zeros_like(form), 0.0
    # Rounding makes zero eigenvalues negative by a few roundings of the largest entry, by n(n + 1) at worst.
    for roundings in (0, 1, 30, 1000, size * (size + 1)):
        shift = roundings * torch.finfo(form.dtype).eps * peak
        found = torch.linalg.cholesky_ex(_shifted(form, shift) if shift else form, upper=True)
        if int(found.info) == 0:
            return found.L, shift
    return torch.full_like(form, math.nan), math.nan


def smallest_eigenvalue(form: Tensor) -> float:
    """Return a proven lower bound of the smallest eigenvalue of a positive semidefinite form.

    Inverse iteration estimates it; a Cholesky factorisation of ``Q − μI`` proves the estimate.
    """
    size = form.shape[0]
    guard = _guard(form)
    factor, info = torch.linalg.cholesky_ex(form)
    if int(info) != 0:
        return 0.0
    vector = torch.ones(size, 1, dtype=form.dtype, device=form.device)
    value = 0.0
    for _ in range(30):
        # Two solutions take a tenth of the time of cholesky_solve, which copies the factor.
        half = torch.linalg.solve_triangular(factor, vector, upper=False)
        image = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        length = float(torch.linalg.vector_norm(image))
        if not math.isfinite(length) or length == 0:
            return 0.0
        before, value = value, float(torch.linalg.vector_norm(vector)) / length
        vector = image / length
        if abs(value - before) < 1e-3 * value:
            break
    for share in (0.9, 0.5, 0.1):
        guess = share * value - guard
        if guess > 0 and positive_definite(_shifted(form, -guess)):
            return guess
    return 0.0


def positive_definite(form: Tensor) -> bool:
    """Prove that a symmetric matrix is positive definite, rounding included."""
    return int(torch.linalg.cholesky_ex(_shifted(form, -_guard(form)))[1]) == 0


def _shifted(form: Tensor, value: float) -> Tensor:
    """Return ``Q + value·I``."""
    result = form.clone()
    result.diagonal().add_(value)
    return result


def _guard(form: Tensor) -> float:
    """Bound the backward error of a Cholesky factorisation in norm: (n + 4)u·trace.

    The error of RᵀR is at most (n + 1)u times |R|ᵀ|R|, whose norm is at most the trace (Rump, "Verification of positive
    definiteness", 2006). The rest is for the rounding of the shift.
    """
    size, unit = form.shape[0], torch.finfo(form.dtype).eps / 2
    return (size + 4) * unit * float(form.diagonal().abs().sum())


def holds(
    exact: Tensor, approximate: Tensor, budget: ErrorBudget, missing: float = 0.0
) -> float | None:
    """Prove ``ε(Q + I/R) ± (Q̂ − Q) ⪰ 0``; return the margin, or None where the proof fails.

    Args:
        exact: Q in float64, or Q without a positive semidefinite rest.
        approximate: Q̂ in float64.
        budget: ε and R.
        missing: a bound of the norm of the rest.
    """
    # The proof is tried with the whole budget and with half of it: the margin is 0 or one half.
    for share in (1.0, 0.5):
        part = replace(budget, epsilon=share * budget.epsilon)
        if not proven(exact, approximate, part, missing):
            return None if share == 1.0 else 0.0
    return 0.5


def proven(exact: Tensor, approximate: Tensor, budget: ErrorBudget, missing: float = 0.0) -> bool:
    """Tell whether ``ε(Q + I/R) ± (Q̂ − Q) ⪰ 0`` can be proven; see :func:`holds`."""
    # The rest is positive semidefinite, so ε times the known part is at most ε·Q. The error of
    # leaving the rest out is at most ``missing`` in norm.
    room = budget.epsilon * exact
    room.diagonal().add_(budget.epsilon * budget.inverse_radius - missing)
    error = approximate - exact
    return positive_definite(room + error) and positive_definite(room - error)
