"""Trace → Program: the balanced recurrence of a network, with every scalar a float64 number.

z₀ = x̂        z_l = factor_l · U_l z_{l-1}        n_l = weight_l · ‖z_l‖²
τ ← τ + m·n_l  (published)        τ ← τ + n_l/τ  (projective)        y = scale · V z_k / τ + bias
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .bounds import Shape
from .certificate import Slack
from .errors import shape_text
from .functional import Scaling
from .operators import Operator, freeze
from .quadratic import Forms, dense_forms, dense_matrix
from .rowwise import Stage
from .trace import Step, Trace


@dataclass(frozen=True)
class Segment:
    """The linear operators up to one activation, and what the activation adds to τ."""

    operators: tuple[Operator, ...]
    factor: float
    weight: float
    projective: bool
    path: str  # of the activation


@dataclass(frozen=True)
class Program:
    """A network as one linear map and a recurrence of quadratic forms."""

    input_shape: Shape
    output_shape: Shape
    segments: tuple[Segment, ...]
    trailing: tuple[Operator, ...]
    scale: float
    bias: Tensor | None = None  # float64, of the output's shape; added after the division

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Segments that share one quadratic form: runs of published ones, each projective alone."""
        groups: list[tuple[int, ...]] = []
        for index, segment in enumerate(self.segments):
            if groups and not segment.projective and not self.segments[index - 1].projective:
                groups[-1] += (index,)
            else:
                groups.append((index,))
        return tuple(groups)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The segments with the number of their group."""
        group_of = {i: g for g, members in enumerate(self.groups) for i in members}
        return tuple(
            Stage(s.operators, s.factor, s.weight, group_of[i]) for i, s in enumerate(self.segments)
        )

    @property
    def device(self) -> torch.device:
        """Where the operators are."""
        for operator in self.operators:
            for tensor in operator.module.buffers():
                return tensor.device
        return torch.device("cpu")

    @property
    def projective(self) -> tuple[bool, ...]:
        """The form of each group's step of the recurrence."""
        return tuple(self.segments[group[0]].projective for group in self.groups)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        inner = tuple(op for segment in self.segments for op in segment.operators)
        return inner + self.trailing

    def __str__(self) -> str:
        lines = [f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"]
        for s in self.segments:
            kind = "projective" if s.projective else "published"
            lines.append(f"  {s.path}: {kind}, factor {s.factor:.4g}, weight {s.weight:.4g}")
        lines.append(f"  scale {self.scale:.4g}" + (", bias" if self.bias is not None else ""))
        return "\n".join(lines)


def program_of(trace: Trace) -> Program:
    """Choose the factors that keep every z and τ of a trace inside float range."""
    segments: list[Segment] = []
    pending: list[Operator] = []
    scaling = Scaling()
    for step in trace.steps:
        if step.alpha is None:
            pending.append(_operator(step))
            continue
        weight = float(scaling.activate(step.alpha, step.projective))
        factor = float(scaling.take() or 1.0)
        segments.append(
            Segment(tuple(pending), factor, weight / factor**2, step.projective, step.path)
        )
        pending = []
    shapes = trace.input_shape, trace.output_shape
    return Program(*shapes, tuple(segments), tuple(pending), float(scaling.rho))


def absorb(program: Program, module: nn.Module, output_shape: Shape) -> Program:
    """Append an affine module to a program: its bias is added after the division.

    Args:
        program: ends with the input of the module.
        module: a frozen module; the affine part is what it gives for a zero input.
        output_shape: of one sample.
    """
    module = freeze(module, torch.float64)
    zero = torch.zeros(1, *program.output_shape, dtype=torch.float64, device=program.device)
    shift = program.bias if program.bias is not None else zero[0]
    with torch.no_grad():
        bias: Tensor = module(shift.unsqueeze(0))[0]
    if module._buffers.get("bias") is not None:
        module._buffers["bias"] = None
    operator = Operator(module, program.output_shape, output_shape)
    return replace(
        program,
        output_shape=output_shape,
        trailing=(*program.trailing, operator),
        bias=bias if bool(bias.any()) else None,
    )


def _operator(step: Step) -> Operator:
    return Operator(freeze(step.module, torch.float64), step.input_shape, step.output_shape)


def matrix_of(program: Program) -> Tensor:
    """Return M of a program in float64, (d_out, d_in)."""
    shapes = program.input_shape, program.output_shape
    return dense_matrix(*shapes, program.stages, program.trailing, program.device)


def forms_of(program: Program, slack: Slack) -> Forms:
    """Return every Q of a program in float64, as deep as the slack asks for."""
    return dense_forms(program.input_shape, program.stages, program.device, slack)
