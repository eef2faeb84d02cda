"""Check a folded network against its model: the matrix, every form, and the certificate's proof."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._text import table
from .certificate import Slack, holds, rounding_slack
from .errors import refusal
from .fold import Program, forms_of, matrix_of
from .graph import programs_of
from .runtime import Conformal, Folded
from .strategies.dense import too_large


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
                "no proof" if finding.margin is None else f"proven, margin {finding.margin:.0%}",
            )
            for finding in self
        ]
        return table(("part", "error of M", "epsilon", "denominator"), rows)

    __repr__ = __str__


def verify(folded: Folded, model: nn.Module) -> Verification:
    """Prove again, from the model itself, what a fold's certificate says.

    M and every Q are computed anew from the model in float64; those of the fold are read back from
    its own arithmetic. Entries that agree to the rounding of the dtype count as equal. For the
    rest, ``ε(Q + I/R) ± (Q̂ − Q) ⪰ 0`` is tested.

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
        raise refusal("verify(folded)", "a Folded", type(folded).__name__, "Pass cl.fold's result.")
    parts = [module for module in folded.modules() if isinstance(module, Conformal)]
    with torch.inference_mode(False), torch.no_grad():
        programs = programs_of(model, folded.input_shape)
        if len(programs) != len(parts):
            raise refusal(
                "verify(model)",
                f"a model with {len(parts)} ConformalLayers",
                f"one with {len(programs)}",
                "Pass the model that was folded.",
            )
        findings = [
            _check(path, part, candidates)
            for part, (path, candidates) in zip(parts, programs.items(), strict=True)
        ]
    return Verification(findings)


def _check(path: str, part: Conformal, candidates: list[Program]) -> Finding:
    matching = [p for p in candidates if p.output_shape == part.output_shape]
    if part.input_shape != candidates[0].input_shape or not matching:
        raise refusal(
            f"verify({path or 'model'})",
            f"a part {part.input_shape} → {part.output_shape}",
            f"{candidates[0].input_shape} → {candidates[-1].output_shape}",
            "Pass the model that was folded.",
        )
    program = matching[-1]
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
    slack = rounding_slack(torch.float32)
    if certificate is not None:
        slack = Slack(certificate.epsilon, certificate.max_norm)
    matrix = matrix_of(program) * program.scale
    error = _distance(core.dense_matrix(program.input_shape) * part.scale, matrix)
    margins: list[float | None] = []
    exact = forms_of(program, Slack(0.0)).values
    for form, approximate in zip(exact, core.dense_forms(program.input_shape), strict=True):
        rounding = 8 * torch.finfo(dtype).eps * form.abs().max()
        close = torch.where((approximate - form).abs() <= rounding, form, approximate)
        margins.append(holds(form, close, slack) if bool((close != form).any()) else 1.0)
    allowed = 64 * torch.finfo(dtype).eps
    failed = error > allowed or any(margin is None for margin in margins)
    margin = None if failed else min((m for m in margins if m is not None), default=1.0)
    return Finding(path, error, slack.epsilon, margin)


def _distance(actual: Tensor, expected: Tensor) -> float:
    peak = float(expected.abs().max())
    return float((actual - expected).abs().max()) / (peak or 1.0)
