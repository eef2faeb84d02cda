"""Recipe → M and Q of a fold of one radial stage, whatever its strategy.

The operations between the embedding and the division are linear in x, their energies are quadratic. Impulses
that run through them in float64 give the columns of M, and half the gradients of an energy the columns of its Q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import refusal
from ..functional import wide_dtype
from ..recipe.operation import Shape
from ..recipe.point_operations import Advance, Divide, Normalize, Rebase, Rescale
from ..recipe.torch.module import RecipeModule, placed
from .forms import COLUMN_BYTES, ENTRIES, too_many_entries
from .operators import impulses

_LINEAR = 1e-9  # relative difference of f(x + y) and f(x) + f(y) in float64


def explicit_matrix(folded: RecipeModule) -> Tensor:
    """Return M of a fold of one stage, (d_out, d_in), in float64."""
    with torch.inference_mode(False), torch.no_grad():
        stage = _single(folded, "matrix")
        _refuse_large("matrix", too_many_entries(*map(math.prod, stage.shapes)))
        columns = [stage.run(x)[0] for x in stage.impulses(copies=1)]
        return torch.cat(columns).T.contiguous() * stage.divide.scale


def explicit_forms(folded: RecipeModule) -> Tensor:
    """Return every Q of a fold of one stage, (forms, d_in, d_in), in float64."""
    with torch.inference_mode(False):
        stage = _single(folded, "forms")
        size, count = math.prod(stage.shapes[0]), len(stage.advances)
        reason = too_many_entries(size, 1)
        if reason is None and count * size**2 > ENTRIES:
            reason = f"{count} forms have {count * size**2} entries, at most {ENTRIES} fit"
        _refuse_large("forms", reason)
        if not count:
            return stage.exact.anchor.new_zeros(0, size, size)
        rows = []
        for point in stage.impulses(copies=3):  # autograd keeps three times the values
            x = point.requires_grad_()
            with torch.enable_grad():
                halves = [energies.sum() / 2 for energies in stage.run(x)[1]]
            # The gradient of xᵀQx/2 at an impulse is a column of Q.
            slopes = [torch.autograd.grad(half, x, retain_graph=True)[0] for half in halves]
            rows.append(torch.stack([slope.flatten(1) for slope in slopes]))
        forms = torch.cat(rows, 1)
        return (forms + forms.transpose(1, 2)) / 2


@dataclass(frozen=True)
class _Span:
    """The operations of a fold in float64 between its embedding and its division."""

    exact: RecipeModule
    embed: Normalize
    divide: Divide

    @cached_property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes of the z that enters and of the z that leaves."""
        shapes = self.exact.recipe.shapes()
        return shapes[self.embed.outputs[0]], shapes[self.divide.inputs[0]]

    @cached_property
    def advances(self) -> list[Advance]:
        """The recurrence of the coordinate, one step for each form."""
        return [op for op in self.exact.recipe.operations if isinstance(op, Advance)]

    def run(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run points with m = τ = 1; return the image and the energy of each form."""
        operations = self.exact.recipe.operations
        span = slice(operations.index(self.embed) + 1, operations.index(self.divide))
        ones = torch.ones(len(x), dtype=x.dtype, device=x.device)
        given = dict.fromkeys(self.embed.outputs, ones) | {self.embed.outputs[0]: x}
        values = self.exact.evaluate(given, keep=True, operations=span)
        energies = [
            torch.stack([values[name] for name in op.inputs[2:]]).sum(0) for op in self.advances
        ]
        return values[self.divide.inputs[0]].flatten(1), energies

    def impulses(self, copies: int) -> Iterator[Tensor]:
        """Yield the identity in batches whose values, ``copies`` times, fit into a chunk of memory."""
        elements = sum(map(math.prod, self.exact.recipe.shapes().values()))
        chunk = max(1, min(256, COLUMN_BYTES // (8 * copies * elements)))
        return impulses(self.shapes[0], chunk, self.exact.anchor.device)

    def is_linear(self) -> bool:
        """Compare the image of a sum with the sum of images, for one random pair."""
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(2, 1, *self.shapes[0], generator=generator, dtype=torch.float64).to(
            self.exact.anchor.device
        )
        both, one, other = (self.run(x)[0] for x in (a + b, a, b))
        return bool((both - one - other).norm() <= _LINEAR * (one.norm() + other.norm()))


def _single(folded: RecipeModule, name: str) -> _Span:
    """Return the operations of a fold of one stage; refuse any other fold."""
    where, expected = f"Folded.{name}()", "a fold that is M x / D"
    remedy = "cl.inspect(model, input_shape).parts has templates and forms for each stage."
    operations = folded.recipe.operations
    embeds = [op for op in operations if isinstance(op, Normalize)]
    divides = [op for op in operations if isinstance(op, Divide)]
    if len(embeds) != 1:
        raise refusal(where, expected, f"{len(embeds)} folded parts", remedy)
    if any(isinstance(op, Rescale) for op in operations):
        got, remedy = "layers that are rescaled on the way", 'Fold with strategy="dense".'
        raise refusal(where, expected, got, remedy)
    device = folded.anchor.device
    device = device if wide_dtype(device) == torch.float64 else torch.device("cpu")
    exact = RecipeModule(placed(folded.recipe, torch.float64, device), torch.float64).eval()
    rebased = any(isinstance(op, Rebase) for op in operations)
    span = None if rebased or not divides else _Span(exact, embeds[0], divides[0])
    if span is None or not span.is_linear():
        got = "biases, branches or homogeneous maps inside the ConformalLayers"
        head = "A bias behind the last activation can be that of an nn.Linear head"
        raise refusal(where, expected, got, f"{head}; {remedy}")
    return span


def _refuse_large(name: str, reason: str | None) -> None:
    if reason is not None:
        remedy = "Run the fold instead, or fold for smaller inputs."
        raise refusal(f"Folded.{name}()", "arrays that can be written out", reason, remedy)
