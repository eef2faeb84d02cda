"""Recipe → M and Q: write out what the operations of a fold compute, whatever its strategy.

The operations between the embedding and the division are linear in x, their energies are quadratic. Impulses
that run through them in float64 give the columns of M, and half the gradients of an energy the columns of its Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import ConformalError, refusal
from ..functional import wide_dtype
from ..recipe.point_operations import Advance, Combine, Divide, Normalize, Rebase, Rescale
from ..recipe.recipe import Recipe
from ..recipe.torch.module import RecipeModule
from .forms import CHUNK_BYTES
from .operators import impulses
from .part import placed
from .plan import Plan
from .strategies.dense import ENTRIES, too_many_entries

Values = tuple[Tensor, list[Tensor]]  # the z that leaves a stage, and its energies
Run = Callable[[Tensor], Values]


@dataclass(frozen=True)
class StageOperations:
    """The operations of a recipe from the z that enters a stage to the z that leaves it.

    ``given`` is the z, the m and the τ that enter; m and τ may be missing.
    """

    operations: slice
    given: tuple[str, ...]
    left: str
    advances: tuple[Advance, ...]
    scale: float = 1.0  # of the division behind it

    def run(
        self, exact: RecipeModule, x: Tensor, groups: Sequence[Sequence[int]] | None = None
    ) -> Values:
        """Run the operations on points with m = τ = 1; ``groups`` are the energies that add up to each form."""
        ones = torch.ones(len(x), dtype=x.dtype, device=x.device)
        values = dict.fromkeys(self.given, ones) | {self.given[0]: x}
        values = exact.evaluate(values, keep=True, operations=self.operations)
        energies = [
            torch.stack([values[name] for name in op.inputs[2:]]).sum(0) for op in self.advances
        ]
        if groups is not None:
            energies = [torch.stack([energies[i] for i in group]).sum(0) for group in groups]
        return values[self.left].flatten(1), energies


def spans_of(recipe: Recipe) -> list[StageOperations | None]:
    """Return the ConformalLayers of a recipe; None for one whose forms cannot be read off."""
    found: list[StageOperations | None] = []
    advances: list[Advance] = []
    start, readable = -1, True
    for index, operation in enumerate(recipe.operations):
        if isinstance(operation, Normalize):
            start, advances, readable = index, [], True
        elif isinstance(operation, Advance):
            advances.append(operation)
        elif isinstance(operation, (Rescale, Rebase)):
            readable = False
        elif isinstance(operation, (Divide, Combine)) and start >= 0:
            part = None
            if readable and isinstance(operation, Divide):
                given, span = recipe.operations[start].outputs, slice(start + 1, index)
                part = StageOperations(
                    span, given, operation.inputs[0], tuple(advances), operation.scale
                )
            found.append(part)
            start = -1
    return found


def forms_of_energies(run: Run, points: Iterable[Tensor]) -> Tensor:
    """Return the forms whose energies a fold computes, (forms, d_in, d_in): half of their gradients."""
    rows = []
    for point in points:
        x = point.requires_grad_()
        with torch.enable_grad():
            halves = [energies.sum() / 2 for energies in run(x)[1]]
        slopes = [torch.autograd.grad(half, x, retain_graph=True)[0] for half in halves]
        rows.append(torch.stack([slope.flatten(1) for slope in slopes]))
    forms = torch.cat(rows, 1)
    return (forms + forms.transpose(1, 2)) / 2


# -- folds of one stage -----------------------------------------------------------------------------


def explicit_matrix(folded: RecipeModule, plans: Collection[Plan]) -> Tensor:
    """Return M of a fold of one stage, (d_out, d_in), in float64."""
    exact, span, shapes = _single(folded, plans, "matrix")
    sizes = math.prod(shapes[0]), math.prod(shapes[1])
    reason = too_many_entries(*sizes)
    if reason is not None:
        raise _too_large("matrix", reason)
    points = impulses(shapes[0], _chunk(exact, 1), exact.anchor.device)
    with torch.inference_mode(False), torch.no_grad():
        columns = [span.run(exact, x)[0] for x in points]
        return torch.cat(columns).T.contiguous() * span.scale


def explicit_forms(folded: RecipeModule, plans: Collection[Plan]) -> Tensor:
    """Return every Q of a fold of one stage, (forms, d_in, d_in), in float64."""
    exact, span, shapes = _single(folded, plans, "forms")
    size, groups = math.prod(shapes[0]), _groups(exact, span)
    reason = too_many_entries(size, 1)
    if reason is None and len(span.advances) * size**2 > ENTRIES:
        count = len(span.advances) * size**2
        reason = f"{len(span.advances)} forms have {count} entries, at most {ENTRIES} fit"
    if reason is not None:
        raise _too_large("forms", reason)
    device = exact.anchor.device
    if not groups:
        return torch.zeros(0, size, size, dtype=torch.float64, device=device)
    with torch.inference_mode(False):
        # Gradients keep more than the values.
        points = impulses(shapes[0], _chunk(exact, 3), device)
        return forms_of_energies(partial(span.run, exact, groups=groups), points)


def _single(
    folded: RecipeModule, plans: Collection[Plan], name: str
) -> tuple[RecipeModule, StageOperations, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return a fold of one stage in float64, its operations, and the shapes at their ends; refuse any other."""
    where, expected = f"Folded.{name}()", "a fold of one stage"
    recipe = folded.recipe
    spans = spans_of(recipe)
    remedy = "cl.inspect(model, input_shape).parts has templates and forms for each."
    if len(spans) != 1:
        raise refusal(where, expected, f"{len(spans)} folded parts", remedy)
    if len(plans) != 1 or any(plan.operations is not None for plan in plans):
        got = f"homogeneous maps and {len(plans)} stages around them"
        raise refusal(where, expected, got, remedy)
    span = spans[0]
    if span is None:
        kinds = {type(operation) for operation in recipe.operations}
        got = "biases or branches inside the ConformalLayers"
        remedy = (
            "Leave them out; a bias behind the last activation can be that of an nn.Linear head."
        )
        if Rescale in kinds and Rebase not in kinds:
            got, remedy = "layers that are rescaled on the way", 'Fold with strategy="dense".'
        raise refusal(where, f"{expected} that is M x / D", got, remedy)
    device = folded.anchor.device
    device = device if wide_dtype(device) == torch.float64 else torch.device("cpu")
    shapes = recipe.shapes()
    exact = RecipeModule(placed(recipe, torch.float64, device), torch.float64).eval()
    return exact, span, (shapes[span.given[0]], shapes[span.left])


def _groups(exact: RecipeModule, span: StageOperations) -> list[list[int]]:
    """Number the energies of each form: consecutive activations of a rule that collapses share one."""
    groups: list[list[int]] = []
    for index, advance in enumerate(span.advances):
        rule = exact.rule(advance)
        if index and rule.collapses and rule == exact.rule(span.advances[index - 1]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _chunk(exact: RecipeModule, copies: int) -> int:
    """Return how many impulses run at a time: all values on the way are kept."""
    elements = sum(math.prod(shape) for shape in exact.recipe.shapes().values())
    return max(1, min(256, CHUNK_BYTES // (8 * copies * elements)))


def _too_large(name: str, reason: str) -> ConformalError:
    remedy = "Run the fold instead, or fold for smaller inputs."
    return refusal(f"Folded.{name}()", "arrays that can be written out", reason, remedy)
