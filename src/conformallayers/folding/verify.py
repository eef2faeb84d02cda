"""Check a folded network against its model: the matrix, every form, and the certificate's proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..functional import scale_samples
from ..recipe.operation import Operation
from ..recipe.point_operations import Advance, Normalize, Rebase
from ..recipe.recipe import Recipe
from ..scaling import Scaling
from ..testing import fold_error
from ..utils.html import Block, Printed, Table
from .certificate import ErrorBudget, holds, rounding_budget
from .explicit import Run, StageOperations, Values, forms_of_energies, in_float64, spans_of
from .fold import stages_by_part
from .folded import Folded
from .forms import forms_of
from .operators import apply_all, impulses
from .part import TOLERANCES
from .plan import Plan
from .split import StageGraph
from .stages import Chain, Stage
from .strategies.dense import stage_too_large

_OUTPUT = "output"  # the path of the finding that compares outputs of the whole model
_REMEDY = "Pass the model that was folded."
_RANDOM = 16  # points to compare a stage on that is too large to be written out


@dataclass(frozen=True)
class Finding:
    """The result of checking one folded part."""

    path: str
    matrix_error: float  # relative to the largest entry of M
    epsilon: float
    margin: float | None  # None: the proof failed
    note: str = ""  # why there is no proof, and what was compared instead

    @property
    def ok(self) -> bool:
        """Whether the matrix is right and the proof holds."""
        return self.margin is not None

    @property
    def verdict(self) -> str:
        """The last column of the table; outputs are compared, not proven."""
        measured = self.path == _OUTPUT
        if self.margin is None:
            return "too far" if measured or self.note else "no proof"
        if self.note:
            return f"close {self.note}" if math.isfinite(self.matrix_error) else self.note
        return "close" if measured else f"proven, margin {self.margin:.0%}"


class Verification(Printed, tuple[Finding, ...]):
    """The findings of all parts; true if all are ok, prints as a table."""

    def __bool__(self) -> bool:
        return all(finding.ok for finding in self)

    def _blocks(self) -> Iterator[Block]:
        rows = [
            (
                finding.path or "model",
                f"{finding.matrix_error:.2g}",
                f"{finding.epsilon:.2g}",
                finding.verdict,
            )
            for finding in self
        ]
        yield Table(("part", "error of M", "epsilon", "denominator"), rows)


def verify(folded: nn.Module, model: nn.Module) -> Verification:
    """Prove again, from the model itself, what a fold's certificate says.

    M and every Q are computed anew from the model in float64; those of the fold are read back from
    its own constants, and ``ε(Q + I/R) ± (Q̂ − Q) ⪰ 0`` is tested. Without a tolerance, entries that agree
    to the rounding of the dtype count as equal. A network with homogeneous maps is checked stage by stage, each up to
    a factor that the stages behind it make up for. Layers around the folded parts, and parts whose forms
    cannot be written out, are checked by comparing outputs on random inputs; the findings say so.

    Args:
        folded: the result of :func:`conformallayers.fold`.
        model: the model it was made from, unchanged.

    Returns:
        A :class:`~conformallayers.folding.verify.Verification`: true if everything holds; prints as a table.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro(), cl.Conv2d(2, 2, 3), cl.ReSPro())
        >>> bool(cl.verify(cl.fold(model, (1, 8, 8), strategy="banded", tolerance=1e-2), model))
        True
    """
    if not isinstance(folded, Folded):
        remedy = "The order is verify(folded, model)."
        raise refusal("verify(folded, model)", "a Folded first", type(folded).__name__, remedy)
    with torch.inference_mode(False), torch.no_grad():
        stages = stages_by_part(model, folded.input_shape)
        parts = spans_of(folded.recipe)
        if len(stages) != len(parts):
            expected = f"a model with {len(parts)} ConformalLayers"
            raise refusal("verify(model)", expected, f"one with {len(stages)}", _REMEDY)
        checker = _Checker(folded)
        findings: list[Finding] = []
        for part, (path, candidates) in zip(parts, stages.items(), strict=True):
            findings += checker.part(path, part, candidates)
        findings.append(_check_output(folded, model))
    return Verification(findings)


# -- what a fold computes ---------------------------------------------------------------------------


def _stage_span(recipe: Recipe, operations: tuple[int, int] | None) -> StageOperations | None:
    """Return the operations of one of several stages; None unless exactly one z leaves them."""
    first, end = operations or (0, 0)
    inside, behind = recipe.operations[first:end], recipe.operations[end:]
    written = {name for operation in inside for name in operation.outputs}
    outside = [name for op in inside for name in op.inputs if name not in written]
    read = {name for operation in behind for name in operation.inputs} | {recipe.output}
    shapes = recipe.shapes()
    left = [name for name in written & read if shapes[name]]
    if not inside or len(left) != 1:
        return None
    advances = tuple(op for op in inside if isinstance(op, Advance))
    return StageOperations(slice(first, end), tuple(dict.fromkeys(outside)), left[0], advances)


def _sampled(run: Run, points: Iterable[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the images (points, d_out) and, for each form, the energies (points,)."""
    images, energies = zip(*map(run, points), strict=True)
    return torch.cat(images), [torch.cat(parts) for parts in zip(*energies, strict=True)]


def _chain_run(chain: Chain, x: Tensor) -> Values:
    """Run the layers of a chain: the image, and the energy of each form."""
    energies = [x.new_zeros(len(x)) for _ in chain.groups]
    for segment in chain.segments:
        x = segment.apply(x)
        n = segment.weight * x.flatten(1).square().sum(1)
        energies[segment.group] = energies[segment.group] + n
    return apply_all(chain.trailing, x).flatten(1), energies


# -- parts and stages of a fold ---------------------------------------------------------------------


class _Checker:
    """Compare the parts of a fold with the layers of its model."""

    def __init__(self, folded: Folded) -> None:
        self.recipe, self.plans = folded.recipe, folded.plans
        self.exact = in_float64(folded)
        self.eps = torch.finfo(folded.dtype).eps

    def part(
        self, path: str, span: StageOperations | None, candidates: Sequence[StageGraph]
    ) -> Iterator[Finding]:
        """Check a ConformalLayers; ``candidates`` absorb none, one, … of the layers behind it."""
        labels = [path]
        if candidates[0].single is None:
            labels = [f"{path} stage {i + 1}".strip() for i in range(len(self.plans))]
        plans = {label: self.plans[label] for label in labels if label in self.plans}
        absorbed = max((plan.absorbed for plan in plans.values()), default=0)
        graph = candidates[min(absorbed, len(candidates) - 1)]
        if graph.single is None:
            yield from self._stages(path, plans, graph)
        else:
            yield self._single(path, span, graph.single)

    def _single(self, path: str, span: StageOperations | None, stage: Stage) -> Finding:
        """Check a network of one stage; with biases, branches or rescaled layers only outputs are compared."""
        if span is None:
            why = "biases inside" if stage.direct else "its layers are rescaled"
            return Finding(path, math.nan, 0.0, 1.0, f"by its output: {why}")
        _expect_shapes(path, self.recipe, span, stage)
        return self._chain(path, span, stage, span.scale / stage.chain.scale)[0]

    def _stages(self, path: str, plans: Mapping[str, Plan], graph: StageGraph) -> Iterator[Finding]:
        stages = [stage for stage in graph.stages if not stage.moves_only]
        if len(stages) != len(plans):
            expected, got = f"{len(plans)} stages in {path or 'the model'}", f"{len(stages)}"
            raise refusal("verify(model)", expected, got, _REMEDY)
        writers = {name: op for op in self.recipe.operations for name in op.outputs}
        left: dict[str, Scaling] = {}  # of the points that leave each stage, by the name of their z
        for (label, plan), stage in zip(plans.items(), stages, strict=True):
            span = _stage_span(self.recipe, plan.operations)
            if span is None:
                yield Finding(label, math.nan, 0.0, None)
                continue
            _expect_shapes(label, self.recipe, span, stage)
            start = _scaling_at(span.given[0], writers, left, Scaling(graph.embedding.norm_factor))
            stage = replace(stage, start=start)
            if stage.direct:
                finding, left[span.left] = self._direct(label, span, stage)
            else:
                finding, gain = self._chain(label, span, stage)
                left[span.left] = stage.chain.end.lacking(gain)
            yield finding

    def _chain(
        self, path: str, span: StageOperations, stage: Stage, gain: float | None = None
    ) -> tuple[Finding, float]:
        """Compare the matrix and the forms of a stage without biases; return also the factor of its output.

        A stage that is too large to be written out is compared on random points. Without a ``gain``, the factor
        that fits best is taken: the stages behind make up for it.
        """
        chain = stage.chain
        if [group[0].rule for group in span.forms(self.exact)] != [r.name for r in chain.rules]:
            return Finding(path, math.nan, 0.0, None), 1.0
        points, note = self._points(stage)
        fold = partial(span.run, self.exact)
        image, energies = _sampled(fold, points())
        expected, wanted = _sampled(partial(_chain_run, chain), points())
        gain = _factor(image, expected) if gain is None else gain
        error = _distance(image * gain, expected)
        budget = self._budget(path, chain)
        margins: list[float | None] = []
        if note:
            relative = 64 * self.eps + budget.epsilon
            for found, true in zip(energies, wanted, strict=True):
                close = (found - true).abs() <= relative * (true + budget.inverse_radius)
                margins.append(1.0 if bool(close.all()) else None)
        elif chain.rules:
            forms = forms_of(chain, stage.device, ErrorBudget(0.0)).values
            pairs = zip(forms, forms_of_energies(fold, points()), strict=True)
            margins = [_margin(form, found, budget, self.eps) for form, found in pairs]
        proven = [margin for margin in margins if margin is not None]
        failed = error > 64 * self.eps or len(proven) < len(margins) or math.isnan(error)
        margin = None if failed else min([1.0, *proven])
        return Finding(path, error, budget.epsilon, margin, note), gain

    def _direct(self, path: str, span: StageOperations, stage: Stage) -> tuple[Finding, Scaling]:
        """Compare the matrix, the bias and the energy of a stage with biases."""
        start, rebase = stage.start, self.recipe.operations[span.operations][0]
        rules = [site.rule.name for site in stage.sites]
        if not isinstance(rebase, Rebase) or [advance.rule for advance in span.advances] != rules:
            return Finding(path, math.nan, 0.0, None), Scaling()
        points, note = self._points(stage)

        def fold(point: Tensor) -> Values:
            return span.run(self.exact, point / float(start.rho))

        image, energies = _sampled(fold, points())
        expected, _ = _sampled(partial(_chain_run, stage.chain), points())
        zero = torch.zeros(1, *stage.input_shape).to(image)
        bias, wanted = fold(zero)[0], torch.zeros_like(image[:1])
        if stage.constant is not None:
            wanted = stage.constant.view(1, -1)
        # One factor must fit matrix and bias together: the stages behind can undo no other difference.
        gain = _factor(torch.cat([image - bias, bias]), torch.cat([expected, wanted]))
        scaling = Scaling().lacking(gain)
        squares = [site.activate(scaling) * image.square().sum(1) for site in stage.sites]
        errors = [
            _distance((image - bias) * gain, expected),
            _distance(bias * gain, wanted),
            abs(rebase.coordinate / float(start.sigma) - 1),
            *(_distance(n, square) for n, square in zip(energies, squares, strict=True)),
        ]
        error = math.nan if any(map(math.isnan, errors)) else max(errors)
        return Finding(path, error, 0.0, 1.0 if error <= 64 * self.eps else None, note), scaling

    def _points(self, stage: Stage) -> tuple[Callable[[], Iterable[Tensor]], str]:
        """Return the points to compare a stage on: every impulse, or random points and the reason for them."""
        device = self.exact.anchor.device
        reason = stage_too_large(stage)
        if reason is None:
            return lambda: impulses(stage.input_shape, 256, device), ""
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(_RANDOM, *stage.input_shape, generator=generator, dtype=torch.float64)
        points = scale_samples(points, 1 / torch.linalg.vector_norm(points.flatten(1), dim=1))
        return lambda: points.to(device).split(1), f"at {_RANDOM} points: {reason}"

    def _budget(self, path: str, chain: Chain) -> ErrorBudget:
        """Return the allowed error of a part: that of its certificate, or rounding."""
        certificate = self.plans[path].certificate if path in self.plans else None
        budget = rounding_budget(torch.float32)
        if certificate is not None:
            requested = certificate.epsilon > budget.epsilon
            budget = ErrorBudget(certificate.epsilon, certificate.max_norm, requested)
        # A proof at R = 1 holds at any norm, see Problem.
        return replace(budget, radius=1.0) if chain.scale_free else budget


def _margin(form: Tensor, approximate: Tensor, budget: ErrorBudget, eps: float) -> float | None:
    """Prove that a form is close enough; None where it is not."""
    # The proof is computed in float64 itself; without a tolerance the rounding of the fold does not matter.
    ignored = torch.finfo(torch.float64).eps if budget.requested else eps
    equal = (approximate - form).abs() <= 8 * ignored * form.abs().max()
    approximate = torch.where(equal, form, approximate)
    return holds(form, approximate, budget) if bool((approximate != form).any()) else 1.0


def _scaling_at(
    z: str, writers: Mapping[str, Operation], left: Mapping[str, Scaling], embedded: Scaling
) -> Scaling:
    """Return the scaling of the points with value ``z``: maps and joins between stages keep it."""
    while z not in left:
        writer = writers[z]
        if isinstance(writer, (Normalize, Rebase)):
            return embedded if isinstance(writer, Normalize) else Scaling()
        z = writer.inputs[0]
    return left[z]


def _expect_shapes(path: str, recipe: Recipe, span: StageOperations, stage: Stage) -> None:
    actual = span.shapes(recipe)
    if actual != (stage.input_shape, stage.output_shape):
        expected = f"a part {actual[0]} → {actual[1]}"
        got = f"{stage.input_shape} → {stage.output_shape}"
        raise refusal(f"verify({path or 'model'})", expected, got, _REMEDY)


def _check_output(folded: Folded, model: nn.Module) -> Finding:
    """Compare the outputs of fold and model on random inputs; only this checks layers around the parts."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, *folded.input_shape, generator=generator).to(folded.anchor)
    certificate = folded.certificate
    if certificate is not None and math.isfinite(certificate.max_norm):
        x = x / torch.linalg.vector_norm(x.flatten(1), dim=1).max() * certificate.max_norm
    epsilon = TOLERANCES[folded.dtype] + (0 if certificate is None else 4 * certificate.epsilon)
    error = fold_error(model, folded, x)
    return Finding(_OUTPUT, error, epsilon, 1 - error / epsilon if error <= epsilon else None)


def _factor(actual: Tensor, expected: Tensor) -> float:
    """Return the factor of ``actual`` that fits ``expected`` best in least squares; 1 for zeros."""
    squares = float(actual.square().sum())
    return float((actual * expected).sum()) / squares if squares else 1.0


def _distance(actual: Tensor, expected: Tensor) -> float:
    peak = float(expected.abs().max())
    return float((actual - expected).abs().max()) / (peak or 1.0)
