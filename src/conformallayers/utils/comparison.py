"""How far one batch of outputs is from another."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import refusal


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
