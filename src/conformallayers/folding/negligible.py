"""Prove that parts of a quadratic form are below the rounding of the dtype.

With an error E of Q, ``|xᵀEx| ≤ ε·(‖x‖ + xᵀQx)`` holds for every x if ``εQ ± E ⪰ 0``. Where the denominator is
``‖x‖ + xᵀQx/‖x‖`` or ``√(‖x‖² + xᵀQx)``, ``ε(Q + I) ± E ⪰ 0`` is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error of a denominator that the dtype rounds away.

    It is the unit roundoff of float32, for shorter dtypes too, and 0 for float64, the dtype of the proofs.
    """
    return 0.0 if dtype == torch.float64 else torch.finfo(torch.float32).eps / 2


def is_negligible(
    form: Tensor, epsilon: float, unit: float, *, norm: float = 0.0, error: Tensor | None = None
) -> bool:
    """Prove ``ε(Q + unit·I) − norm·I ± E ⪰ 0``.

    Args:
        form: Q in float64.
        epsilon: the error to keep below, relative to the denominator.
        unit: 1 where the denominator is proportional to ‖x‖, else 0.
        norm: a bound of the norm of terms that Q lacks.
        error: E in float64.
    """
    room = epsilon * form
    room.diagonal().add_(epsilon * unit - norm)
    if error is None:
        return _positive_definite(room)
    return _positive_definite(room + error) and _positive_definite(room - error)


def _positive_definite(form: Tensor) -> bool:
    """Prove that a symmetric matrix is positive definite, rounding included.

    The backward error of a Cholesky factorisation is at most the trace times (n + 1) roundings (Rump,
    "Verification of positive definiteness", 2006); three more cover the shift.
    """
    size, unit = len(form), torch.finfo(form.dtype).eps / 2
    guard = (size + 4) * unit * float(form.diagonal().abs().sum())
    shifted = form.clone()
    shifted.diagonal().sub_(guard)
    return int(torch.linalg.cholesky_ex(shifted).info) == 0
