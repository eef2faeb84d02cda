"""The module that ``cl.fold`` returns: a recipe that runs, with the plans of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import ConformalError, refusal, shape_text
from ..recipe.recipe import Recipe
from ..recipe.torch.module import RecipeModule
from ..utils.html import Block, Printed, Table
from ..utils.text import count
from .explicit import explicit_forms, explicit_matrix
from .merge import Region
from .plan import Plan
from .quantization_report import Quantization, read_quantization

Self = TypeVar("Self", bound="Folded")


class Explanation(Printed, dict[str, Plan]):
    """The plan of each folded part by its path, and the regions of plain layers that were merged.

    Prints as tables.
    """

    def __init__(self, plans: Mapping[str, Plan], regions: Sequence[Region] = ()) -> None:
        super().__init__(plans)
        self.regions = tuple(regions)

    def _blocks(self) -> Iterator[Block]:
        for index, (path, plan) in enumerate(self.items()):
            if index:
                yield ""
            if path:
                yield path
            yield from plan._blocks()
        if self.regions:
            if self:
                yield ""
            header = ["merged operations", "into", "output", "multiply-adds"]
            yield Table(header, [_region_row(region) for region in self.regions])


def _region_row(region: Region) -> list[str]:
    before, after = (
        ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in Counter(kinds).items())
        for kinds in (region.before, region.after)
    )
    return [before, after, shape_text(region.output_shape), count(region.multiply_adds)]


class Folded(RecipeModule):
    """A folded network. Made by :func:`conformallayers.fold`, not by hand.

    It is for inference: its arrays are buffers, ``train()`` changes nothing, and it cannot be
    fine-tuned, because one matrix and one form do not determine the layers they came from. Train the
    original and fold again. Gradients with respect to the input do flow.

    Attributes:
        recipe: the operations that run; prints as a list.
        input_shape: of one sample.
        output_shape: of one sample.
        strategy: the name of the strategy of each part, joined with "+".
        origin: the fingerprint of the weights that were folded.
        quantization: errors and sizes of a fold in int8; None for one in floats.
        labels, about: the names of the outputs and other notes from a file; None without.

    Shape:
        (B, *input_shape) → (B, *output_shape)

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Linear(4, 2), cl.ReSPro(alpha=1.0))
        >>> folded = cl.fold(model, (4,), strategy="layers")
        >>> folded(torch.rand(5, 4)).shape
        torch.Size([5, 2])
        >>> print(folded.recipe)
        x: (4,) → (2,)
          unit, peak, tau = normalize(x)                                (4,)
          z               = matmul(unit; weight (2, 4))                 (2,)
          n               = sum_squares(z; weight 0.5)
          tau_2           = advance(tau, peak, n; formula tau + m * n)
          y               = divide(z, tau_2, peak; scale 1.414)         (2,)
        return y
    """

    labels: tuple[str, ...] | None = None
    about: dict[str, Any] | None = None

    def __init__(
        self,
        recipe: Recipe,
        dtype: torch.dtype,
        plans: dict[str, Plan],
        origin: str | None = None,
        regions: Sequence[Region] = (),
    ) -> None:
        super().__init__(recipe, dtype)
        self.plans = dict(plans)
        self.origin = origin
        self.regions = tuple(regions)
        self.eval()

    @property
    def strategy(self) -> str:
        """The chosen strategy; several parts are joined with "+"."""
        return "+".join(plan.strategy for plan in self.plans.values())

    @property
    def quantization(self) -> Quantization | None:
        """What :func:`conformallayers.quantize` has measured; None for a fold in floats."""
        return read_quantization(self.about)

    def explain(self) -> Explanation:
        """Return the candidates with their costs and estimated times, and the reason for the choice; prints as a table."""
        return Explanation(self.plans, self.regions)

    def matrix(self) -> Tensor:
        """Return M of ``y = M x / D``, (d_out, d_in) in float64, for a fold of one stage.

        Rows belong to the coefficients of an output and columns to those of an input:
        ``folded.matrix().view(-1, *folded.input_shape)`` are the rows as inputs. M is that of the folded part with
        the layers that it has absorbed. What the recipe runs before it (a mean image) and behind its division
        (the bias of the head, a ReLU and all that follows) is not in it.

        Raises:
            ConformalError: several stages or parts, biases in the ConformalLayers (the head behind it may have one),
                branches that pass activations, or a matrix of more than 2 GiB.

        Examples:
            >>> import conformallayers as cl
            >>> model = cl.ConformalLayers(cl.Linear(4, 2), cl.ReSPro(), cl.Linear(2, 3), cl.ReSPro())
            >>> folded = cl.fold(model.double(), (4,))
            >>> x = torch.rand(5, 4, dtype=torch.float64)
            >>> m, (q,) = folded.matrix(), folded.forms()
            >>> d = x.norm(dim=1) + (x @ q * x).sum(1)
            >>> torch.allclose(x @ m.T / d[:, None], folded(x), rtol=1e-12, atol=0)
            True
        """
        return explicit_matrix(self, self.plans.values())

    def forms(self) -> Tensor:
        """Return every Q of the denominator D, (forms, d_in, d_in) in float64, for a fold of one stage.

        A published network has one: ``D = ‖x‖ + xᵀQx``. A network of another activation has one for each
        of them, which D meets in order, starting from ‖x‖: ``D ← D + xᵀQx/D`` if it is projective,
        ``D ← D·growth(xᵀQx/D²)`` else. Consecutive activations that are published or gnomonic share a form. With an
        offset c, D starts as ``√(‖x‖² + c²)``, where c is the offset of ``normalize`` in the recipe. The names of the
        rules are those of its ``advance`` operations.

        Raises:
            ConformalError: as in :meth:`matrix`; samples of more than 8192 coefficients, or forms of more than 4 GiB.
        """
        return explicit_forms(self, self.plans.values())

    def forward(self, x: Tensor) -> Tensor:
        """Run the folded network on a batch."""
        if not isinstance(x, Tensor):
            raise refusal("Folded", "a tensor", type(x).__name__, "Use torch.as_tensor(x).")
        if tuple(x.shape[1:]) != self._bare.input_shape:
            raise self._wrong_shape(x)
        anchor = self.anchor
        if x.device != anchor.device:
            got, remedy = f"one on {x.device}", "Move one of them with .to(device)."
            raise refusal("Folded", f"an input on {anchor.device}", got, remedy)
        if x.dtype != anchor.dtype:
            other = f", or fold with dtype={x.dtype}" if x.is_floating_point() else ""
            remedy = f"Convert the input with x.to({anchor.dtype}){other}."
            raise refusal("Folded", f"an input of dtype {anchor.dtype}", f"{x.dtype}", remedy)
        return super().forward(x)

    def train(self: Self, mode: bool = True) -> Self:
        """Stay in evaluation mode: a folded network has nothing to train."""
        return super().train(False)

    def extra_repr(self) -> str:
        """Show the shapes, the dtype and the strategy."""
        shapes = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        return f"{shapes}, dtype={self.anchor.dtype}, strategy={self.strategy!r}"

    def _wrong_shape(self, x: Tensor) -> ConformalError:
        expected = f"a batch of shape (B, {', '.join(map(str, self.input_shape))})"
        got, remedy = "an input", "Fold again for this shape: a fold is made for one."
        if tuple(x.shape) == self.input_shape:
            got, remedy = "an unbatched input", "Add the batch axis with x.unsqueeze(0)."
        return refusal("Folded", expected, f"{got} of shape {tuple(x.shape)}", remedy)
