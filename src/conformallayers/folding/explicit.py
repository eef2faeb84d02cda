"""Recipe → M and Q of a fold, whatever its strategy.

The operations between the embedding and the division are linear in x, their energies are quadratic. Impulses
that run through them in float64 give the columns of M, and half the gradients of an energy the columns of its Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import refusal
from ..formula import parse
from ..functional import wide_dtype
from ..recipe.operation import Shape
from ..recipe.point_operations import Advance, Divide, Normalize, Rebase, Rescale
from ..recipe.recipe import Recipe
from ..recipe.torch.module import RecipeModule
from .forms import COLUMN_BYTES
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

    def shapes(self, recipe: Recipe) -> tuple[Shape, Shape]:
        """Return the shapes of the z that enters and of the z that leaves."""
        shapes = recipe.shapes()
        return shapes[self.given[0]], shapes[self.left]

    def forms(self) -> list[list[Advance]]:
        """Group the advances by form: consecutive activations of a formula that collapses share one."""
        groups: list[list[Advance]] = []
        for advance in self.advances:
            if groups and groups[-1][0].formula == advance.formula and _collapses(advance.formula):
                groups[-1].append(advance)
            else:
                groups.append([advance])
        return groups

    def run(self, exact: RecipeModule, x: Tensor) -> Values:
        """Run the operations on points with m = τ = 1; return the image and the energy of each form."""
        ones = torch.ones(len(x), dtype=x.dtype, device=x.device)
        values = dict.fromkeys(self.given, ones) | {self.given[0]: x}
        values = exact.evaluate(values, keep=True, operations=self.operations)
        energies = [
            torch.stack([values[name] for op in group for name in op.inputs[2:]]).sum(0)
            for group in self.forms()
        ]
        return values[self.left].flatten(1), energies


def _collapses(text: str) -> bool:
    """Check on a few numbers that two activations need only the sum of their energies."""

    def step(tau: float, n: float) -> float:
        found: float = parse(text).evaluate({"tau": tau, "m": 0.75, "n": n}, vars(math))
        return found

    pairs = (0.5, 0.25), (3.0, 0.125), (0.75, 40.0)
    return all(math.isclose(step(step(1.5, a), b), step(1.5, a + b)) for a, b in pairs)


def spans_of(recipe: Recipe) -> list[StageOperations | None]:
    """Return the operations of each ConformalLayers; None where values are rescaled or rebased."""
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
        elif isinstance(operation, Divide) and start >= 0:
            part = None
            if readable:
                given, span = recipe.operations[start].outputs, slice(start + 1, index)
                part = StageOperations(
                    span, given, operation.inputs[0], tuple(advances), operation.scale
                )
            found.append(part)
            start = -1
    return found


def forms_of_energies(run: Run, points: Iterable[Tensor]) -> Tensor:
    """Return the forms of the energies, (forms, d_in, d_in): half their gradients at the impulses."""
    rows = []
    for point in points:
        x = point.requires_grad_()
        with torch.enable_grad():
            halves = [energies.sum() / 2 for energies in run(x)[1]]
        # The gradient of xᵀQx/2 at an impulse is a column of Q.
        slopes = [torch.autograd.grad(half, x, retain_graph=True)[0] for half in halves]
        rows.append(torch.stack([slope.flatten(1) for slope in slopes]))
    forms = torch.cat(rows, 1)
    return (forms + forms.transpose(1, 2)) / 2


# -- folds of one stage -----------------------------------------------------------------------------


def explicit_matrix(folded: RecipeModule, plans: Collection[Plan]) -> Tensor:
    """Return M of a fold of one stage, (d_out, d_in), in float64."""
    span = _single(folded, plans, "matrix")
    d_in, d_out = map(math.prod, span.shapes(folded.recipe))
    _refuse_large("matrix", too_many_entries(d_in, d_out))
    with torch.inference_mode(False), torch.no_grad():
        exact = in_float64(folded)
        columns = [span.run(exact, x)[0] for x in _impulses(exact, span, copies=1)]
        return torch.cat(columns).T.contiguous() * span.scale


def explicit_forms(folded: RecipeModule, plans: Collection[Plan]) -> Tensor:
    """Return every Q of a fold of one stage, (forms, d_in, d_in), in float64."""
    span = _single(folded, plans, "forms")
    size, count = math.prod(span.shapes(folded.recipe)[0]), len(span.advances)
    reason = too_many_entries(size, 1)
    if reason is None and count * size**2 > ENTRIES:
        reason = f"{count} forms have {count * size**2} entries, at most {ENTRIES} fit"
    _refuse_large("forms", reason)
    with torch.inference_mode(False):
        exact = in_float64(folded)
        if not count:
            return exact.anchor.new_zeros(0, size, size)
        # Autograd keeps about three times the values.
        return forms_of_energies(partial(span.run, exact), _impulses(exact, span, copies=3))


def in_float64(folded: RecipeModule) -> RecipeModule:
    """Return a fold in float64, on the CPU if its device has no float64."""
    device = folded.anchor.device
    device = device if wide_dtype(device) == torch.float64 else torch.device("cpu")
    return RecipeModule(placed(folded.recipe, torch.float64, device), torch.float64).eval()


def _single(folded: RecipeModule, plans: Collection[Plan], name: str) -> StageOperations:
    """Return the operations of a fold of one stage; refuse any other fold."""
    where, expected = f"Folded.{name}()", "a fold of one stage"
    spans = spans_of(folded.recipe)
    remedy = "cl.inspect(model, input_shape).parts has templates and forms for each."
    if len(spans) != 1:
        raise refusal(where, expected, f"{len(spans)} folded parts", remedy)
    if len(plans) != 1 or any(plan.operations is not None for plan in plans):
        leave = "Leave out biases and homogeneous maps inside the ConformalLayers"
        head = "one behind the last activation can be that of an nn.Linear head"
        raise refusal(where, expected, f"{len(plans)} stages", f"{leave}; {head}, or: {remedy}")
    span = spans[0]
    if span is None:
        got, remedy = "layers that are rescaled on the way", 'Fold with strategy="dense".'
        if any(isinstance(operation, Rebase) for operation in folded.recipe.operations):
            got, remedy = "a bias inside the ConformalLayers", "Leave it out."
        raise refusal(where, f"{expected} that is M x / D", got, remedy)
    return span


def _impulses(exact: RecipeModule, span: StageOperations, copies: int) -> Iterator[Tensor]:
    """Yield the identity in batches whose values, ``copies`` times, fit into a chunk of memory."""
    shapes = exact.recipe.shapes()
    elements = sum(map(math.prod, shapes.values()))
    chunk = max(1, min(256, COLUMN_BYTES // (8 * copies * elements)))
    return impulses(shapes[span.given[0]], chunk, exact.anchor.device)


def _refuse_large(name: str, reason: str | None) -> None:
    if reason is not None:
        remedy = "Run the fold instead, or fold for smaller inputs."
        raise refusal(f"Folded.{name}()", "arrays that can be written out", reason, remedy)
