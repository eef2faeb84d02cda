"""Leave out of a form what its certificate has room for, and prove that the room is enough."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..folding.certificate import Certificate, positive_definite
from ..nn.activations import Rule

_STEPS = 10, 7  # of the search in small and in large forms; each takes two factorisations
_LARGE = 1536


def room_left(certificate: Certificate | None) -> float:
    """Return the relative error that may still be added to a denominator.

    With D̂ within ``(1 − margin)·ε`` of D, another form within ε′ of D̂ is within
    ``(1 − margin)·ε + ε′·(1 + (1 − margin)·ε)`` of D.

    Examples:
        >>> room_left(Certificate(1e-2, math.inf, 1.0)), room_left(None)
        (0.01, 0.0)
    """
    if certificate is None or certificate.epsilon <= torch.finfo(torch.float32).eps:
        return 0.0
    used = (1 - certificate.margin) * certificate.epsilon
    return (certificate.epsilon - used) / (1 + used)


def room_each(room: float, forms: int) -> float:
    """Return what each of several forms may be off by, for the last coordinate to be off by ``room``.

    With τ off by δ and a form by ``ε′·(n + ‖x̂‖²)``, the projective ``τ + n/τ`` is off by at most
    ``(δ + ε′)/(1 − δ)``, because τ is never smaller than ‖x̂‖. The other rules are off by less.

    Examples:
        >>> room_each(1e-2, 1), 0.0049 < room_each(1e-2, 2) < 0.005
        (0.01, True)
    """
    low, high = 0.0, room
    for _ in range(60):
        each = (low + high) / 2 if forms > 1 else room
        off = 0.0
        for _ in range(forms):
            off = (off + each) / (1 - off) if off < 1 else math.inf
        low, high = (each, high) if off <= room else (low, each)
    return low


def radius_of(certificate: Certificate, rule: Rule) -> float:
    """Return R of the proof: rules on points are bounded as for R = 1, at any norm."""
    return 1.0 if rule.on_points else certificate.max_norm


def proven(form: Tensor, other: Tensor, epsilon: float, radius: float) -> bool:
    """Prove ``ε(Q + I/R) ± (Q̂ − Q) ⪰ 0``.

    Args:
        form: Q in float64, (n, n).
        other: Q̂.
        epsilon: relative error that is allowed.
        radius: the largest norm of an input; may be infinite.
    """
    room = epsilon * form
    room.diagonal().add_(0.0 if math.isinf(radius) else epsilon / radius)
    error = other - form
    return positive_definite(room + error) and positive_definite(room - error)


def needed(form: Tensor, epsilon: float, radius: float) -> Tensor:
    """Return which entries of a form (n, n) have to stay, a mask; the diagonal always does."""
    stays = torch.eye(len(form), dtype=torch.bool)
    found = (form != 0) | stays
    if epsilon <= 0:
        return found
    size = form.diagonal() + (0.0 if math.isinf(radius) else 1 / radius)
    scale = size.clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    score = form.abs() * scale[:, None] * scale  # a correlation, so that edges count as the middle
    scores = score[found & ~stays].sort().values
    least = found
    low, high = 0, len(scores) + 1  # so many of the smallest may go; so many may not
    for _ in range(_STEPS[len(form) > _LARGE]):
        middle = (low + high) // 2
        if middle == low:
            break
        mask = (found & (score > scores[middle - 1])) | stays
        if proven(form, form.where(mask, 0.0), epsilon, radius):
            low, least = middle, mask
        else:
            high = middle
    return least
