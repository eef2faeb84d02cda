"""Checks for users: how far a fold is from its layers, as numbers and as asserts."""

from ..folding.part import TOLERANCES
from .cases import ALPHAS, HOMOGENEOUS_CASES, LINEAR_CASES, Case
from .checks import (
    assert_folds,
    assert_homogeneous,
    assert_linear,
    fold_error,
    reference,
    relative_error,
)

__all__ = [
    "ALPHAS",
    "HOMOGENEOUS_CASES",
    "LINEAR_CASES",
    "TOLERANCES",
    "Case",
    "assert_folds",
    "assert_homogeneous",
    "assert_linear",
    "fold_error",
    "reference",
    "relative_error",
]
