"""Check a folded network against its model: the matrix, every form, and the certificate's proof."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..recipe.point_operations import Advance, Combine, Divide, Normalize, Rebase, Rescale
from ..recipe.recipe import Recipe
from ..testing.checks import fold_error
from ..utils.text import table
from .certificate import ErrorBudget, holds, rounding_budget
from .fold import stages_by_part
from .folded import Folded
from .forms import forms_of, matrix_of
from .operators import impulses
from .part import TOLERANCES
from .problem import Problem
from .stages import Stage
from .strategies.dense import too_large

_OUTPUT = "output"  # the path of the finding that compares outputs of the whole model


@dataclass(frozen=True)
class Finding:
    """The result of checking one folded part."""

    path: str
    matrix_error: float  # relative to the largest entry of M
    epsilon: float
    margin: float | None  # None: the proof failed

    @property
    def ok(self) -> bool:
        """Whether the matrix is right and the proof holds."""
        return self.margin is not None

    @property
    def verdict(self) -> str:
        """The last column of the table; outputs are compared, not proven."""
        measured = self.path == _OUTPUT
        if self.margin is None:
            return "too far" if measured else "no proof"
        return "close" if measured else f"proven, margin {self.margin:.0%}"


class Verification(tuple[Finding, ...]):
    """The findings of all parts; true if all of them are right, prints as a table."""

    def __bool__(self) -> bool:
        return all(finding.ok for finding in self)

    def __str__(self) -> str:
        rows = [
            (
                finding.path or "model",
                f"{finding.matrix_error:.2g}",
                f"{finding.epsilon:.2g}",
                finding.verdict,
            )
            for finding in self
        ]
        return table(("part", "error of M", "epsilon", "denominator"), rows)

    __repr__ = __str__


def verify(folded: nn.Module, model: nn.Module) -> Verification:
    """Prove again, from the model itself, what a fold's certificate says.

    M and every Q are computed anew from the model in float64; those of the fold are read back from
    its own constants, and ``ε(Q + I/R) ± (Q̂ − Q) ⪰ 0`` is tested. Without a tolerance, entries that agree
    to the rounding of the dtype count as equal. Layers around the folded parts are checked by
    comparing outputs on random inputs.

    Args:
        folded: the result of :func:`conformallayers.fold`.
        model: the model it was made from, unchanged.

    Returns:
        A :class:`Verification`: true if everything holds; prints as a table.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro(), cl.Conv2d(2, 2, 3), cl.ReSPro())
        >>> bool(cl.verify(cl.fold(model, (1, 8, 8), strategy="banded", tolerance=1e-2), model))
        True
    """
    if not isinstance(folded, Folded):
        remedy = "The order is verify(folded, model)."
        raise refusal("verify(folded, model)", "a Folded first", type(folded).__name__, remedy)
    parts = _parts(folded.recipe)
    with torch.inference_mode(False), torch.no_grad():
        stages = stages_by_part(model, folded.input_shape)
        if len(stages) != len(parts):
            raise refusal(
                "verify(model)",
                f"a model with {len(parts)} ConformalLayers",
                f"one with {len(stages)}",
                "Pass the model that was folded.",
            )
        exact = copy.deepcopy(folded).double()
        findings = []
        for part, (path, candidates) in zip(parts, stages.items(), strict=True):
            absorbed = folded.plans[path].absorbed if path in folded.plans else 0
            stage = candidates[min(absorbed, len(candidates) - 1)].single
            # Of maps, branches, biases and rescaled layers only the outputs are compared.
            if part is not None and stage is not None and not stage.affine:
                findings.append(_check(path, folded, exact, part, stage))
        findings.append(_check_output(folded, model))
    return Verification(findings)


@dataclass(frozen=True)
class _Part:
    """The operations of one ConformalLayers that make its matrix and its forms."""

    embedding: Normalize
    advances: tuple[Advance, ...]
    end: Divide


def _parts(recipe: Recipe) -> list[_Part | None]:
    """Return the parts of a recipe; None for one whose forms cannot be read off."""
    found: list[_Part | None] = []
    embedding: Normalize | None = None
    advances: list[Advance] = []
    readable = True
    for operation in recipe.operations:
        if isinstance(operation, Normalize):
            embedding, advances, readable = operation, [], True
        elif isinstance(operation, Advance):
            advances.append(operation)
        elif isinstance(operation, (Rescale, Rebase)):
            readable = False
        elif isinstance(operation, (Divide, Combine)) and embedding is not None:
            part = None
            if readable and isinstance(operation, Divide):
                part = _Part(embedding, tuple(advances), operation)
            found.append(part)
            embedding = None
    return found


def _check(path: str, folded: Folded, exact: Folded, part: _Part, stage: Stage) -> Finding:
    shapes = {**folded.recipe.shapes()}
    actual = shapes[part.embedding.inputs[0]], shapes[part.end.outputs[0]]
    if actual != (stage.input_shape, stage.output_shape):
        raise refusal(
            f"verify({path or 'model'})",
            f"a part {actual[0]} → {actual[1]}",
            f"{stage.input_shape} → {stage.output_shape}",
            "Pass the model that was folded.",
        )
    chain = stage.chain
    if [advance.rule for advance in part.advances] != [rule.name for rule in chain.rules]:
        return Finding(path, math.nan, 0.0, None)
    reason = too_large(Problem(stage, ErrorBudget(0.0), folded.dtype, stage.device))
    if reason is not None:
        raise refusal(
            f"verify({path or 'model'})",
            "forms that can be written out",
            reason,
            "Compare outputs.",
        )
    certificate = folded.plans[path].certificate if path in folded.plans else None
    budget = rounding_budget(torch.float32)
    if certificate is not None:
        requested = certificate.epsilon > budget.epsilon
        budget = ErrorBudget(certificate.epsilon, certificate.max_norm, requested)
    if chain.scale_free:
        budget = replace(budget, radius=1.0)  # at any norm, see Problem
    matrix, forms = _written_out(exact, part, stage)
    error = _distance(matrix * part.end.scale, matrix_of(chain, stage.device) * chain.scale)
    margins: list[float | None] = []
    expected = forms_of(chain, stage.device, ErrorBudget(0.0)).values
    eps = torch.finfo(folded.dtype).eps
    # The proof is computed in float64 itself; without a tolerance the rounding of the fold is no matter.
    ignored = torch.finfo(torch.float64).eps if budget.requested else eps
    for form, approximate in zip(expected, forms, strict=True):
        equal = (approximate - form).abs() <= 8 * ignored * form.abs().max()
        approximate = torch.where(equal, form, approximate)
        margins.append(
            holds(form, approximate, budget) if bool((approximate != form).any()) else 1.0
        )
    failed = error > 64 * eps or any(margin is None for margin in margins)
    margin = None if failed else min((m for m in margins if m is not None), default=1.0)
    return Finding(path, error, budget.epsilon, margin)


def _written_out(exact: Folded, part: _Part, stage: Stage) -> tuple[Tensor, Tensor]:
    """Return M / gain and the forms as a fold computes them: (d_out, d_in), (forms, d_in, d_in)."""
    unit, peak, tau = part.embedding.outputs
    columns, rows = [], []
    like = torch.empty(0, dtype=torch.float64, device=exact.anchor.device)
    for batch in impulses(stage.input_shape, 256, like):
        x = batch.requires_grad_()
        ones = torch.ones(len(x), dtype=torch.float64, device=x.device)
        with torch.enable_grad():
            values = exact.evaluate({unit: x, peak: ones, tau: ones}, keep=True)
            halves = [
                sum(values[name].sum() for name in advance.inputs[2:]) / 2
                for advance in part.advances
            ]
        columns.append(values[part.end.inputs[0]].detach().flatten(1))
        gradients = [torch.autograd.grad(half, x, retain_graph=True)[0] for half in halves]
        if gradients:
            rows.append(torch.stack(gradients).flatten(2))
    size = math.prod(stage.input_shape)
    forms = torch.cat(rows, 1) if rows else like.new_zeros(0, size, size)
    return torch.cat(columns).T, (forms + forms.transpose(1, 2)) / 2


def _check_output(folded: Folded, model: nn.Module) -> Finding:
    """Compare the whole models on random inputs; only this checks the layers around the parts."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, *folded.input_shape, generator=generator).to(folded.anchor)
    certificate = folded.certificate
    if certificate is not None and math.isfinite(certificate.max_norm):
        x = x / torch.linalg.vector_norm(x.flatten(1), dim=1).max() * certificate.max_norm
    epsilon = TOLERANCES[folded.dtype] + (0 if certificate is None else 4 * certificate.epsilon)
    error = fold_error(model, folded, x)
    return Finding(_OUTPUT, error, epsilon, 1 - error / epsilon if error <= epsilon else None)


def _distance(actual: Tensor, expected: Tensor) -> float:
    peak = float(expected.abs().max())
    return float((actual - expected).abs().max()) / (peak or 1.0)
