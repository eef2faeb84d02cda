"""The module that ``cl.fold`` returns: a recipe that runs, with the plans of its parts and other spatial sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import ConformalError, channels_last, first_line, refusal, shape_text, wrong_shape
from ..nn.registry import on_meta
from ..recipe import layer_operations as layer
from ..recipe.recipe import INPUT, OPERATIONS, Operation, Recipe, Shape, expect
from ..recipe.torch.module import RecipeModule
from ..recipe.torch.operations import RUN
from ..utils.text import Block, Printed, Table, count, size
from .chains import MergeCost, Region
from .plan import Plan


@dataclass(frozen=True, repr=False)
class Quantization(Printed):
    """Errors and sizes of a fold in int8; prints as a table.

    Attributes:
        images: the number of images for calibration and measurement.
        mean_error, largest_error: relative errors of the outputs against those of the fold in floats.
        agreement: share of images with the same largest output.
        float_bytes, int8_bytes: of all constants.
    """

    images: int
    mean_error: float
    largest_error: float
    agreement: float
    float_bytes: int
    int8_bytes: int

    def _blocks(self) -> Iterator[Block]:
        errors = f"{self.mean_error:.2g}", f"{self.largest_error:.2g}"
        rows = [
            ["float", size(self.float_bytes), "0", "0", "100.00 %"],
            ["int8", size(self.int8_bytes), *errors, f"{100 * self.agreement:.2f} %"],
        ]
        yield Table(["fold", "constants", "mean error", "largest error", "same class"], rows)
        yield f"relative errors of the outputs of the {self.images} images that set the scales"


# Operations of points and of integers hold bounds and scales of one size.
_ANY_SIZE = tuple(kind for kind in OPERATIONS.values() if kind.__module__ == layer.__name__)
_FIXED = "forward reads the size, or a constant map has it"


def _check_size(op: Operation, before: Shape, given: Shape) -> None:
    """Raise ValueError for an operation that is exact for samples of the shape before only."""
    if isinstance(op, layer.Reshape) and op.shape == before != given:  # only there to hold the size
        raise ValueError(_FIXED)
    fixed = isinstance(op, layer.Reshape) or (isinstance(op, layer.Slice) and op.axis > 0)
    if isinstance(op, (layer.AdaptiveAvgPool, layer.AdaptiveMaxPool)):
        # An axis that keeps its size may do so for every size: output_size=(None, 2).
        fixed = any(n == kept for n, kept in zip(op.size, before[1:], strict=True))
    known = isinstance(op, _ANY_SIZE) and not (fixed and before != given)
    expect(known, f"{op.kind} reads samples of shape {shape_text(before)}")


def _run_resized(recipe: Recipe, holder: Any, x: Tensor) -> Tensor:
    """Run a recipe on samples of another size; raise ValueError for an operation that is exact for one only."""
    shapes, values = recipe.shapes(), {INPUT: x}
    for op, dropped in zip(recipe.operations, recipe.last_uses(), strict=True):
        if not isinstance(op, layer.Call):  # what a call reads may be a size
            given = [tuple(values[name].shape[1:]) for name in op.inputs]
            _check_size(op, shapes[op.inputs[0]], given[0])
            try:
                op.shapes(given, recipe.constant_shape)
            except ValueError as error:
                raise ValueError(_FIXED if isinstance(op, layer.AddConstant) else error) from error
        RUN.step(op, holder, values)
        for name in dropped:
            del values[name]
    return values[recipe.output]


class Explanation(Printed, dict[str, Plan]):
    """The plan of each stage by its path, and the operations of each region of affine layers before and after.

    Prints one line for each stage and region; ``details`` adds all candidates, all reasons and regions of a
    single operation.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        regions: Sequence[Region],
        sizes: str,
        details: bool,
        calls: tuple[str, ...],
    ) -> None:
        super().__init__(plans)
        self.regions, self.sizes, self.details, self.calls = tuple(regions), sizes, details, calls

    def _blocks(self) -> Iterator[Block]:
        if self.details or len(self) == 1:
            for index, (path, plan) in enumerate(self.items()):
                yield from [""] * (index > 0) + [path] * bool(path)
                yield from plan._blocks()
        elif self:
            header = ["stage", "strategy", "multiply-adds", "constants", "reason"]
            yield Table(header, [_plan_row(path, plan) for path, plan in self.items()])
        shown = [r for r in self.regions if self.details or len(r.before) > 1]
        if self and shown:
            yield ""
        if shown:
            header = ["region", "from", "output", "multiply-adds", "weights", "not merged further"]
            yield Table(header, [_region_row(region, self.details) for region in shown])
            yield _totals(self.regions, len(self.regions) - len(shown))
        if self.calls:
            names = ", ".join(self.calls)
            yield f"Runs in torch only; files, ONNX, C and int8 refuse: {names}."
        if shown or not self:
            yield self.sizes


def _plan_row(path: str, plan: Plan) -> list[str]:
    (chosen,) = (c for c in plan.candidates if c.name == plan.strategy)
    work, held = chosen.multiply_adds or 0, chosen.bytes or 0
    return [path, plan.strategy, count(work), size(held), plan.reason]


def _region_row(region: Region, details: bool) -> list[str]:
    before, after = (
        ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in Counter(kinds).items())
        for kinds in (region.before, region.after)
    )
    reasons = region.reasons if details else region.reasons[:1]
    more = len(region.reasons) - len(reasons)
    return [
        before if before == after else f"{before} → {after or 'nothing'}",
        region.start,
        shape_text(region.output_shape),
        _change(region.cost_before.work, region.cost_after.work),
        _change(region.cost_before.stored, region.cost_after.stored),
        "; ".join(reasons) + (f"; {more} more" if more else ""),
    ]


def _change(before: int, after: int) -> str:
    return count(before) if before == after else f"{count(before)} → {count(after)}"


def _totals(regions: Sequence[Region], alone: int) -> str:
    kept = f", {alone} of them a single operation" if alone else ""
    before, after = (
        reduce(MergeCost.plus, costs)
        for costs in zip(*((r.cost_before, r.cost_after) for r in regions), strict=True)
    )
    work, weights = _change(before.work, after.work), _change(before.stored, after.stored)
    return f"{len(regions)} region{'s' * (len(regions) > 1)}{kept}: {work} multiply-adds, {weights} weights"


class Folded(RecipeModule):
    """A folded network. Made by :func:`conformallayers.fold`, not by hand.

    It is for inference: its arrays are buffers, ``train()`` changes nothing, and it cannot be
    fine-tuned, because one matrix and one form do not determine the layers they came from. Train the
    original and fold again. Gradients with respect to the input do flow.

    Attributes:
        recipe: the operations that run; prints as a list.
        input_shape: of one sample.
        output_shape: of one sample.
        strategy: the strategies of its stages, joined with "+"; "merged" without stages.
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
        regions: Sequence[Region] | None = None,
    ) -> None:
        super().__init__(recipe, dtype)
        self.plans = dict(plans)
        self.origin = origin
        self.regions = regions
        self.eval()

    @property
    def strategy(self) -> str:
        """The strategies of the stages, each once, joined with "+"; "merged" without stages."""
        return "+".join(dict.fromkeys(plan.strategy for plan in self.plans.values())) or "merged"

    @property
    def quantization(self) -> Quantization | None:
        """What :func:`conformallayers.quantize` has measured; None for a fold in floats."""
        stored = (self.about or {}).get("quantization")
        names = {item.name for item in fields(Quantization)}
        if not isinstance(stored, Mapping) or set(stored) != names:
            return None
        numbers = all(isinstance(value, (int, float)) for value in stored.values())
        return Quantization(**stored) if numbers else None

    def explain(self, details: bool = False) -> Explanation:
        """Return what became of every stage and region, with costs and reasons; prints as tables.

        Args:
            details: print all candidates of every stage, every reason, and regions of a single operation too.
        """
        sizes = self._size_sentence()
        operations = self.recipe.operations
        calls = dict.fromkeys(op.what for op in operations if isinstance(op, layer.Call))
        if self.regions is None:
            sizes += " A loaded or quantized fold does not record its affine regions."
        elif not self.plans and not any(len(region.before) > 1 for region in self.regions):
            sizes = f"No affine layers are adjacent: nothing merges. {sizes}"
        return Explanation(self.plans, self.regions or (), sizes, details, tuple(calls))

    def forward(self, x: Tensor) -> Tensor:
        """Run the folded network on a batch."""
        if not isinstance(x, Tensor):
            raise refusal("Folded", "a tensor", type(x).__name__, "Use torch.as_tensor(x).")
        anchor, same = self.anchor, tuple(x.shape[1:]) == self._bare.input_shape
        if not same and not self.resizes(tuple(x.shape)):
            raise self._wrong_shape(x)
        if x.device != anchor.device:
            got, remedy = f"one on {x.device}", "Move one of them with .to(device)."
            raise refusal("Folded", f"an input on {anchor.device}", got, remedy)
        if x.dtype != anchor.dtype:
            other = f", or fold with dtype={x.dtype}" if x.is_floating_point() else ""
            remedy = f"Convert the input with x.to({anchor.dtype}){other}."
            if x.dtype == torch.uint8:
                remedy = "Scale the bytes as in training, such as x.float() / 255."
            raise refusal("Folded", f"an input of dtype {anchor.dtype}", f"{x.dtype}", remedy)
        if same:
            return super().forward(x)
        try:
            return _run_resized(self.recipe, self, x)
        except Exception as error:  # code of the user, in calls
            raise self._wrong_shape(x, first_line(error)) from error

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: a folded network has nothing to train."""
        return super().train(False)

    def extra_repr(self) -> str:
        """Show the shapes, the dtype and the strategy."""
        shapes = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        return f"{shapes}, dtype={self.anchor.dtype}, strategy={self.strategy!r}"

    def resizes(self, batch: Shape) -> bool:
        """Check whether the shape of a batch has other spatial sizes, but the channels and axes of the fold."""
        shape = self.input_shape
        spatial = len(batch) == len(shape) + 1 and len(shape) > 1 and 0 not in batch
        return spatial and batch[1] == shape[0] and not channels_last(batch[1:], shape)

    def _size_sentence(self) -> str:
        """Say whether the fold takes other spatial sizes, or what fixes the size, by running it at twice the size."""
        shape = self.input_shape
        only = f"Takes {shape_text(shape)} only"
        if len(shape) < 2:
            return f"{only}."
        try:
            with torch.device("meta"), torch.no_grad():
                x = torch.empty(1, *shape[:1], *(2 * n for n in shape[1:]), dtype=self.dtype)
                _run_resized(self.recipe, on_meta(self), x)
        except Exception as error:  # code of the user, in calls
            return f"{only}: {first_line(error).rstrip('.')}."
        return "Takes other spatial sizes as well, if the model does."

    def _wrong_shape(self, x: Tensor, why: str = "") -> ConformalError:
        remedy = "Give samples of that shape, or fold for this one if the model takes it."
        if why:
            remedy = f"Fold again for this shape: {why}."
        return wrong_shape("Folded", x.shape, self.input_shape, remedy)
