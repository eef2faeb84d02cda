"""Stage → Problem: add the settings of a fold, and build the arrays that strategies share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .forms import Forms, forms_of, matrix_of, stacked_layers
from .negligible import rounding
from .stages import Stage

T = TypeVar("T")
_FACTOR_EFFORT = 2**31  # multiply-adds of a QR factorisation: about a second
SQUARED = 1e15  # numbers whose square fits into float32 with room
LARGEST_SQUARED = 1e140  # the same for float64, summed over layers


# Multiply-adds that the first call in eval() may spend on folding: about half a second.
EVAL_EFFORT = 4e9


@dataclass(frozen=True)
class Conditions:
    """The settings of a fold."""

    dtype: torch.dtype  # of the result
    device: torch.device
    strategy: str = "auto"  # or the name of the strategy to use wherever it applies
    effort: float = math.inf  # multiply-adds that "auto" may spend on building a stage
    staged: bool = False  # several stages: those that a named strategy refuses keep their layers


class Problem:
    """A stage to fold.

    Args:
        stage: the computation to fold.
        conditions: of the fold.
        embedded: whether the stage is right behind the embedding. Terms are left out only there: t is at
            least the norm of the input, which the proofs use.
        last: whether nothing follows the stage that may amplify its rounding errors.
    """

    def __init__(
        self, stage: Stage, conditions: Conditions, *, embedded: bool = True, last: bool = False
    ) -> None:
        self.stage, self.conditions, self.last = stage, conditions, last
        self.dtype, self.device = conditions.dtype, conditions.device
        self.embedded = embedded
        provable = embedded and not stage.direct and stage.chain.provable
        # What changes the denominator by less than this, relatively, may be left out.
        self.epsilon = rounding(conditions.dtype) if provable else 0.0
        self._built: dict[object, Any] = {}

    def with_stage(self, stage: Stage, last: bool) -> Problem:
        """Return the problem of a stage that differs behind the last activation only.

        The quadratic forms are the same, so both problems share them.
        """
        other = Problem(stage, self.conditions, embedded=self.embedded, last=last)
        other._built = self._built
        return other

    def once(self, key: object, build: Callable[[], T]) -> T:
        """Return the value of a key, built at first use: forms, factors, routes, widths of bands.

        Problems by :meth:`with_stage` share it; a key names the stage where its value depends on the end.
        """
        if key not in self._built:
            self._built[key] = build()
        return cast(T, self._built[key])

    @property
    def itemsize(self) -> int:
        """The bytes of one entry of M or Q."""
        return self.dtype.itemsize

    @cached_property
    def matrix(self) -> Tensor:
        """M in float64, (d_out, d_in); built at first use."""
        return matrix_of(self.stage.chain, self.stage.device)

    @property
    def forms(self) -> Forms:
        """Every Q in float64; built at first use."""
        chain, device = self.stage.chain, self.stage.device
        return self.once("forms", lambda: forms_of(chain, device, self.epsilon))

    def factor(self, group: int) -> Tensor | None:
        """Return L with ``LᵀL = Q`` of a chain from the rows of its layers; None where Q must be summed up.

        Q has the square of the condition number of the rows, so summing it up loses digits. Rows are stacked
        where they are few, or where no terms may be left out and a QR factorisation is quick.
        """
        rows, columns = self.stage.chain.rows_of(group), math.prod(self.stage.input_shape)
        exact = self.dtype == torch.float64
        if rows > columns and not (exact and rows * columns * columns <= _FACTOR_EFFORT):
            return None

        def build() -> Tensor:
            stack = stacked_layers(self.stage.chain, group, self.stage.device)
            return stack if rows <= columns else torch.linalg.qr(stack, mode="r").R

        return self.once(("factor", group), build)

    @property
    def form_count(self) -> int:
        """The number of quadratic forms."""
        return len(self.stage.chain.groups)

    def keeps_range(self) -> bool:
        """Tell whether bounds prove that feature maps and their squares stay in the range of the dtype."""
        limit = {torch.float16: 1e3, torch.float64: LARGEST_SQUARED}.get(self.dtype, SQUARED)
        return self.stage.bound <= limit

    # -- the work of building -------------------------------------------------------------------

    def effort(self) -> float:
        """Bound the multiply-adds of building M and the forms."""
        inputs = math.prod(self.stage.input_shape)
        return self.stage.multiply_adds * 2 * inputs + self.effort_of_matrix()

    def effort_of_matrix(self) -> float:
        """Bound the multiply-adds of building M."""
        sizes = math.prod(self.stage.input_shape), math.prod(self.stage.output_shape)
        return 2.0 * self.stage.multiply_adds * min(sizes)  # there and back
