"""A problem: a stage to fold, how far a fold may be from it, and the arrays that strategies share."""

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
        stage: what to compute.
        budget: how far a denominator may be from the exact one.
        dtype, device: of the result.
        max_paths: write out at most so many paths of a stage with branches.
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
        # ‖x‖ + xᵀQx/‖x‖ and √(‖x‖² + xᵀQx) are bounded as for R = 1, at any norm.
        radius = 1.0 if scale_free else budget.radius
        epsilon = budget.epsilon if provable else 0.0
        self.budget = replace(budget, radius=radius, epsilon=epsilon)
        self._forms: list[Forms] = []
        self.memo: dict[Any, Any] = {}  # what strategies found out about the forms

    def with_stage(self, stage: Stage) -> Problem:
        """Return the problem of the same stage with other layers behind its last activation.

        The quadratic forms are the same, and are shared.
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
        """The linear parts of a stage with branches."""
        return paths_of(self.stage)

    @cached_property
    def path_arrays(self) -> PathArrays:
        """A stage with branches written out; built when it is first asked for."""
        return write_out_paths(self.stage)

    @cached_property
    def recurrence(self) -> Recurrence | None:
        """The scalars of a stage with biases or branches; None where there are none."""
        if not self.stage.affine:
            return None
        if self.stage.branched:
            return self.path_arrays.recurrence
        return chain_recurrence(self.stage.chain, self.stage.device)

    @cached_property
    def matrix(self) -> Tensor:
        """M in float64, (parts · d_out, d_in); built when it is first asked for."""
        if self.stage.branched:
            return self.path_arrays.matrix
        return matrix_of(self.stage.chain, self.stage.device)

    @property
    def forms(self) -> Forms:
        """Every Q in float64; built when it is first asked for."""
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
        """State what is proven of the forms, or of something proven closer to them by ``margin``.

        None where nothing was left out and no tolerance was asked for.
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
        """State that nothing is left out, whatever other strategies have built."""
        if not self.budget.requested:
            return None
        max_norm = math.inf if self.stage.branched else self.max_norm
        return Certificate(self.budget.epsilon, max_norm, 1.0)

    def keeps_range(self) -> bool:
        """Tell whether feature maps, and squares of them, stay in range without a look at values."""
        limit = {torch.float16: 1e3, torch.float64: LARGEST_SQUARED}.get(self.dtype, SQUARED)
        return self.stage.growth <= limit

    # -- the work of building -------------------------------------------------------------------

    def effort(self) -> float:
        """Count the multiply-adds that building M and the forms takes at most."""
        inputs = math.prod(self.stage.input_shape)
        if self.stage.branched:
            return 2 * self._once() * self.paths.most * (1 + self.paths.forms) * inputs
        return self._once() * 2 * inputs + self.effort_of_matrix()

    def effort_of_matrix(self) -> float:
        """Count the multiply-adds that building M takes at most."""
        sizes = math.prod(self.stage.input_shape), math.prod(self.stage.output_shape)
        return 2 * self._once() * min(sizes)  # there and back

    def _once(self) -> float:
        return float(sum(operator.multiply_adds() for operator in self.stage.operators))
