"""Check a folded network against its model: the matrix, every form, and the certificate's proof."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..testing import TOLERANCES, fold_error
from ..utils.text import table
from .certificate import ErrorBudget, holds, rounding_budget
from .fold import programs_of
from .folded import Conformal, Folded, Part
from .stages import Program, forms_of, matrix_of
from .strategies.dense import too_large

_OUTPUT = "output"  # in the place of a part: the whole model on random inputs


@dataclass(frozen=True)
class Finding:
    """What the check of one folded part found."""

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
    its own arithmetic. Entries that agree to the rounding of the dtype count as equal. For the
    rest, ``ε(Q + I/R) ± (Q̂ − Q) ⪰ 0`` is tested. What is kept behind the folded parts is compared
    on random inputs.

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
    parts = [module for module in folded.modules() if isinstance(module, Part)]
    with torch.inference_mode(False), torch.no_grad():
        programs = programs_of(model, folded.input_shape)
        if len(programs) != len(parts):
            raise refusal(
                "verify(model)",
                f"a model with {len(parts)} ConformalLayers",
                f"one with {len(programs)}",
                "Pass the model that was folded.",
            )
        absorbed = [plan.absorbed for plan in folded.plans.values()]
        findings = []
        for part, (path, candidates), depth in zip(parts, programs.items(), absorbed, strict=True):
            program = candidates[min(depth, len(candidates) - 1)]
            # Of branches and biases only the outputs are compared.
            if isinstance(program, Program) and isinstance(part, Conformal):
                findings.append(_check(path, part, program))
        findings.append(_check_output(folded, model))
    return Verification(findings)


def _check(path: str, part: Conformal, program: Program) -> Finding:
    shapes = program.input_shape, program.output_shape
    if (part.input_shape, part.output_shape) != shapes:
        raise refusal(
            f"verify({path or 'model'})",
            f"a part {part.input_shape} → {part.output_shape}",
            f"{program.input_shape} → {program.output_shape}",
            "Pass the model that was folded.",
        )
    if part.rules != program.rules:
        return Finding(path, math.nan, 0.0, None)
    reason = too_large(program)
    if reason is not None:
        raise refusal(
            f"verify({path or 'model'})",
            "forms that can be written out",
            reason,
            "Compare outputs.",
        )
    core = part.core
    dtype = next((b.dtype for b in core.buffers() if b.is_floating_point()), torch.float32)
    certificate = core.certificate
    slack = rounding_budget(torch.float32)
    if certificate is not None:
        slack = ErrorBudget(certificate.epsilon, certificate.max_norm)
    if program.scale_free:
        slack = replace(slack, radius=1.0)  # at any norm, see Request.room
    matrix = matrix_of(program) * program.scale
    error = _distance(core.dense_matrix(program.input_shape) * part.scale, matrix)
    margins: list[float | None] = []
    exact = forms_of(program, ErrorBudget(0.0)).values
    for form, approximate in zip(exact, core.dense_forms(program.input_shape), strict=True):
        rounding = 8 * torch.finfo(dtype).eps * form.abs().max()
        close = torch.where((approximate - form).abs() <= rounding, form, approximate)
        margins.append(holds(form, close, slack) if bool((close != form).any()) else 1.0)
    allowed = 64 * torch.finfo(dtype).eps
    failed = error > allowed or any(margin is None for margin in margins)
    failed = failed or not _same_bias(part, program, allowed)
    margin = None if failed else min((m for m in margins if m is not None), default=1.0)
    return Finding(path, error, slack.epsilon, margin)


def _same_bias(part: Conformal, program: Program, allowed: float) -> bool:
    if part.bias is None or program.bias is None:
        return part.bias is None and program.bias is None
    return _distance(part.bias.double(), program.bias) <= allowed


def _check_output(folded: Folded, model: nn.Module) -> Finding:
    """Compare the whole models on random inputs: what is kept behind the parts is seen here only."""
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
