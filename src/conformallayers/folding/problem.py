"""Stage → Problem: add an error budget and a dtype, and build the arrays that strategies share."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..functional import wide_dtype
from .affine import PathArrays, Paths, Recurrence, chain_recurrence, paths_of, write_out_paths
from .certificate import Certificate, ErrorBudget
from .forms import Forms, forms_of, matrix_of
from .stages import Stage

MAX_PATHS = 16
SQUARED = 1e15  # numbers whose square fits into float32 with room
LARGEST_SQUARED = 1e140  # the same for float64, summed over layers


class Problem:
    """A stage to fold.

    Args:
        stage: the computation to fold.
        budget: the allowed error of the denominator.
        dtype, device: of the result.
        max_paths: the largest number of paths of a stage with branches that may be written out.
    """

    def __init__(
        self,
        stage: Stage,
        budget: ErrorBudget,
        dtype: torch.dtype,
        device: torch.device,
        max_paths: int = MAX_PATHS,
    ) -> None:
        self.stage, self.dtype, self.device, self.max_paths = stage, dtype, device, max_paths
        self.requested = budget
        scale_free = not stage.branched and stage.chain.scale_free
        provable = not stage.branched and stage.chain.provable
        self.max_norm = math.inf if scale_free else budget.radius
        # ‖x‖ + xᵀQx/‖x‖ and √(‖x‖² + xᵀQx) are proportional to ‖x‖: a proof at R = 1 holds at any norm.
        radius = 1.0 if scale_free else budget.radius
        epsilon = budget.epsilon if provable else 0.0
        self.budget = replace(budget, radius=radius, epsilon=epsilon)
        self._forms: list[Forms] = []
        self.memo: dict[Any, Any] = {}  # results that strategies keep: routes, widths of bands

    def with_stage(self, stage: Stage) -> Problem:
        """Return the problem of a stage that differs behind the last activation only.

        The quadratic forms are the same, so both problems share them.
        """
        other = Problem(stage, self.requested, self.dtype, self.device, self.max_paths)
        other._forms, other.memo = self._forms, self.memo
        return other

    @property
    def inverse_radius(self) -> float:
        """1/R of the proof."""
        return 1 / self.budget.radius

    @property
    def array_dtype(self) -> torch.dtype:
        """The dtype of matrices and forms: with several parts, energies are small differences."""
        return wide_dtype(self.device) if self.stage.affine else self.dtype

    @property
    def itemsize(self) -> int:
        """The bytes of one entry of a matrix or a form."""
        return self.array_dtype.itemsize

    @cached_property
    def paths(self) -> Paths:
        """The paths through a stage with branches."""
        return paths_of(self.stage)

    @cached_property
    def path_arrays(self) -> PathArrays:
        """The matrix and forms of a stage with branches; built at first use."""
        return write_out_paths(self.stage)

    @cached_property
    def recurrence(self) -> Recurrence | None:
        """The recurrence of a stage with biases or branches; None for any other stage."""
        if not self.stage.affine:
            return None
        if self.stage.branched:
            return self.path_arrays.recurrence
        return chain_recurrence(self.stage.chain, self.stage.device)

    @cached_property
    def matrix(self) -> Tensor:
        """M in float64, (parts · d_out, d_in); built at first use."""
        if self.stage.branched:
            return self.path_arrays.matrix
        return matrix_of(self.stage.chain, self.stage.device)

    @property
    def forms(self) -> Forms:
        """Every Q in float64; built at first use."""
        if not self._forms:
            if self.stage.branched:
                self._forms.append(Forms(self.path_arrays.forms, 0.0, 0))
            else:
                self._forms.append(forms_of(self.stage.chain, self.stage.device, self.budget))
        return self._forms[0]

    @property
    def form_count(self) -> int:
        """The number of quadratic forms."""
        return self.paths.forms if self.stage.branched else len(self.stage.chain.groups)

    @property
    def output_parts(self) -> int:
        """The number of linear parts of the output."""
        return len(self.paths.output) if self.stage.branched else 1

    def certificate(self, margin: float | None = None) -> Certificate | None:
        """Return the certificate of the forms, or of a simplification that was proven with ``margin``.

        None where nothing was left out and no tolerance was requested.
        """
        budget = self.budget
        lost = self._forms[0].missing if self._forms else 0.0
        if margin is None:
            if lost == 0:
                return self.exact_certificate()
            allowed = budget.epsilon * (self.forms.smallest + self.inverse_radius)
            margin = 1 - lost / allowed
        return Certificate(budget.epsilon, self.max_norm, margin)

    def exact_certificate(self) -> Certificate | None:
        """Return the certificate of a strategy that leaves nothing out; None without a tolerance."""
        if not self.budget.requested:
            return None
        max_norm = math.inf if self.stage.branched else self.max_norm
        return Certificate(self.budget.epsilon, max_norm, 1.0)

    def keeps_range(self) -> bool:
        """Tell whether bounds prove that feature maps and their squares stay in the range of the dtype."""
        limit = {torch.float16: 1e3, torch.float64: LARGEST_SQUARED}.get(self.dtype, SQUARED)
        return self.stage.growth <= limit

    # -- the work of building -------------------------------------------------------------------

    def effort(self) -> float:
        """Bound the multiply-adds of building M and the forms."""
        inputs = math.prod(self.stage.input_shape)
        if self.stage.branched:
            return 2 * self._once() * self.paths.most * (1 + self.paths.forms) * inputs
        return self._once() * 2 * inputs + self.effort_of_matrix()

    def effort_of_matrix(self) -> float:
        """Bound the multiply-adds of building M."""
        sizes = math.prod(self.stage.input_shape), math.prod(self.stage.output_shape)
        return 2 * self._once() * min(sizes)  # there and back

    def _once(self) -> float:
        return float(sum(operator.multiply_adds() for operator in self.stage.operators))
