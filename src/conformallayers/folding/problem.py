"""Stage → Problem: add an error budget and a dtype, and build the arrays that strategies share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import refusal
from .certificate import Certificate, ErrorBudget, Rounding, rounding_of_sum
from .forms import Forms, forms_of, matrix_of, stacked_layers
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

    budget: ErrorBudget  # of the denominator
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
        self.requested = budget = conditions.budget if embedded else ErrorBudget(0.0)
        scale_free = stage.chain.scale_free
        self.provable = not stage.direct and stage.chain.provable
        self.max_norm = math.inf if scale_free else budget.radius
        # ‖x‖ + xᵀQx/‖x‖ and √(‖x‖² + xᵀQx) are proportional to ‖x‖: a proof at R = 1 holds at any norm.
        on_points = any(site.rule.on_points for site in stage.sites)
        radius = 1.0 if scale_free else max(budget.radius, 1.0 if on_points else 0.0)
        # Half of a requested tolerance is for rounding.
        share = 0.5 if budget.requested else 1.0
        epsilon = share * budget.epsilon if self.provable else 0.0
        self.budget = replace(budget, radius=radius, epsilon=epsilon)
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
        return self.once("forms", lambda: forms_of(chain, device, self.budget))

    def factor(self, group: int) -> Tensor | None:
        """Return L with ``LᵀL = Q`` of a chain from the rows of its layers; None where Q must be summed up.

        Q has the square of the condition number of the rows, so summing it up loses digits. Rows are stacked
        where they are few, or where no terms may be left out and a QR factorisation is quick.
        """
        rows, columns = self.stage.chain.rows_of(group), math.prod(self.stage.input_shape)
        exact = self.dtype == torch.float64 and self.budget.epsilon == 0
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

    def certificate(
        self,
        terms: float,
        *,
        squares: bool = True,
        norms: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        shift: float | None = None,
        margin: float | None = None,
    ) -> Certificate | None:
        """Return the proof of the denominator; refuse a tolerance that rounding does not keep.

        None where nothing can be proven, and without a tolerance where nothing was left out.

        Args:
            terms: the number of products that are summed up for one entry.
            squares: whether each energy is the sum of the squares of a linear image, or a form.
            norms: the norm of each form; by default bounds from the norms of the layers.
            dtype: of the computation; by default that of the fold.
            shift: what factorisations of the forms have added to their eigenvalues; None where no form is factored.
            margin: the share of the budget that is left; by default all but the deep terms left out.
        """
        epsilon = self.budget.epsilon
        if margin is None:
            margin = 1.0
            if "forms" in self._built and self.forms.missing:
                allowed = epsilon * (self.forms.smallest + self.budget.inverse_radius)
                margin -= self.forms.missing / allowed
        if not self.budget.requested:
            lossless = margin == 1.0
            return None if lossless or not epsilon else Certificate(epsilon, self.max_norm, margin)
        if not self.provable:
            return None
        relative = rounding_of_sum(terms, dtype or self.dtype)
        found = self._norm_bounds() if norms is None else norms
        if not squares:
            return self._proof(Rounding(form=relative * sum(found)), margin)
        # Forms are built and factored in float64, which loses digits near their null space.
        lost = 0.0
        if shift is not None:
            size = math.prod(self.stage.input_shape)
            lost = size * torch.finfo(torch.float64).eps * sum(found) + shift
        return self._proof(Rounding(relative * sum(map(math.sqrt, found)), lost), margin)

    def _proof(self, rounding: Rounding, margin: float) -> Certificate:
        requested, epsilon = self.requested.epsilon, self.budget.epsilon
        scalars = 16 * torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps
        # Errors of several forms add up, each relative to a denominator that is off itself.
        allowed = epsilon * (1 - requested) ** self.form_count - scalars
        needed = rounding.least_floor(allowed) if allowed > 0 else math.inf
        smallest = 0.0
        built = "forms" in self._built and self.form_count == 1
        if needed > self.budget.inverse_radius and built:
            smallest = self.forms.smallest
        floor, max_norm = self.budget.inverse_radius + smallest, self.max_norm
        if needed > floor:
            # Without a max_norm, the proof holds up to the norm at which rounding uses up its half.
            largest = 1 / (needed - smallest)
            if self.budget.inverse_radius > 0 or largest == 0:
                raise refusal(
                    f"fold(tolerance={requested:g})",
                    f"a denominator that {self.dtype} computes so closely",
                    f"rounding that keeps it for ‖x‖ ≤ {largest:.2g} only",
                    "Use dtype=torch.float64, a larger tolerance or a smaller max_norm.",
                )
            floor, max_norm = needed, largest
        used = (1 - margin) * epsilon + rounding.share(floor) + scalars
        return Certificate(requested, max_norm, 1 - used / requested)

    def _norm_bounds(self) -> list[float]:
        """Bound the norm of each form by the norms of the layers."""
        chain = self.stage.chain
        norms = [0.0] * len(chain.groups)
        for segment, bound in zip(chain.segments, chain.bounds, strict=True):
            norms[segment.group] += segment.weight * bound * bound
        return norms

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
