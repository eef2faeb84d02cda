"""Trace → Program: the balanced recurrence of a network, with every scalar a float64 number.

z₀ = x̂        z_l = factor_l · U_l z_{l-1}        n_l = weight_l · ‖z_l‖²
τ ← τ + m·n_l  (published)        τ ← τ + n_l/τ  (projective)        y = scale · V z_k / τ + bias

A bias adds ``τ·b`` to z. Pushed through the layers behind it, it is a constant part of every later z
with the coordinate of its time as coefficient; see ``recurrence.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..errors import shape_text
from ..functional import Scaling
from ..nn.activations import PUBLISHED, RadialActivation, Rule
from ..registry.bounds import Shape
from .certificate import ErrorBudget
from .forms import Forms, dense_forms, dense_matrix
from .forms_by_row import Stage
from .operators import Operator, adjoint, merged, operator_of
from .recurrence import Key, Recurrence, Site
from .trace import Source, Trace


@dataclass(frozen=True)
class Segment:
    """The linear operators up to one activation, and what the activation adds to τ."""

    operators: tuple[Operator, ...]
    factor: float
    weight: float
    rule: Rule
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
    source: Source | None = None

    @property
    def births(self) -> tuple[int, ...]:
        """The numbers of activations that biases stand behind: their coordinate is needed."""
        parts = [*(segment.operators for segment in self.segments), self.trailing]
        return tuple(
            index for index, part in enumerate(parts) if any(op.bias is not None for op in part)
        )

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Segments that share one quadratic form: those of a rule that collapses, up to a bias."""
        groups: list[tuple[int, ...]] = []
        births = self.births
        for index, segment in enumerate(self.segments):
            joins = index > 0 and segment.rule == self.segments[index - 1].rule
            if joins and segment.rule.collapses and index not in births:
                groups[-1] += (index,)
            else:
                groups.append((index,))
        return tuple(groups)

    @property
    def provable(self) -> bool:
        """Whether a bound of a simplified form is one of the denominator."""
        return not self.births and all(rule.provable for rule in self.rules)

    @property
    def scale_free(self) -> bool:
        """Whether the denominator is one form beside ‖x‖², whatever the norm of the input."""
        return len(self.rules) == 1 and self.rules[0].on_points

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
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each group."""
        return tuple(self.segments[group[0]].rule for group in self.groups)

    @cached_property
    def growths(self) -> tuple[float, ...]:
        """A bound of ``‖z_l‖/‖x̂‖`` at each activation; may be infinite."""
        steps = (s.factor * math.prod(op.norm for op in s.operators) for s in self.segments)
        return tuple(accumulate(steps, lambda a, b: a * b))

    @property
    def growth(self) -> float:
        """The largest of them, also behind the last activation, and 1 at least."""
        last = self.growths[-1] if self.growths else 1.0
        return max(1.0, *self.growths, last * math.prod(op.norm for op in self.trailing))

    @cached_property
    def recurrence(self) -> Recurrence | None:
        """The scalars of a program with biases; None where there are none."""
        return _recurrence(self) if self.births else None

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        inner = tuple(op for segment in self.segments for op in segment.operators)
        return inner + self.trailing

    def __str__(self) -> str:
        lines = [f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"]
        for s in self.segments:
            lines.append(f"  {s.path}: {s.rule.name}, factor {s.factor:.4g}, weight {s.weight:.4g}")
        lines.append(f"  scale {self.scale:.4g}" + (", bias" if self.bias is not None else ""))
        return "\n".join(lines)


def program_of(trace: Trace) -> Program:
    """Choose the factors that keep every z and τ of a chain inside float range."""
    segments: list[Segment] = []
    pending: tuple[Operator, ...] = ()
    scaling = Scaling()
    for step in trace.steps:
        if step.alpha is None or not isinstance(step.module, RadialActivation):
            operator = operator_of(step.module, step.input_shape, step.output_shape)
            if operator.bias is not None:  # the point is ρ·z/τ
                operator = replace(operator, bias=operator.bias / float(scaling.rho))
            pending = joined((*pending, operator))
            continue
        rule = step.module.rule
        weight = float(scaling.activate(step.alpha, rule.on_points, step.module.slope))
        factor = float(scaling.take() or 1.0)
        segments.append(Segment(pending, factor, weight / (factor * factor), rule, step.path))
        pending = ()
    shapes = trace.input_shape, trace.output_shape
    return Program(*shapes, tuple(segments), pending, float(scaling.rho))


def joined(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Merge operators that torch has one layer for."""
    found: list[Operator] = []
    for operator in operators:
        while found and (one := merged(found[-1], operator)) is not None:
            found.pop()
            operator = one
        found.append(operator)
    return tuple(found)


def with_prefix(
    program: Program,
    modules: tuple[nn.Module, ...],
    operators: tuple[Operator, ...],
    norm_factor: float,
) -> Program:
    """Put modules before a program that multiply the norm of every sample with ``norm_factor``.

    The coordinate ``‖U x‖ = norm_factor·‖x‖`` is divided by the norm_factor, and so is what is added to it.
    """
    segments = list(program.segments)
    for index, segment in enumerate(segments):
        power = 1 if segment.rule == PUBLISHED else 2
        biased = tuple(_stretched(op, norm_factor) for op in segment.operators)
        segments[index] = replace(
            segment, operators=biased, weight=segment.weight / norm_factor**power
        )
    trailing = tuple(_stretched(op, norm_factor) for op in program.trailing)
    if segments:
        segments[0] = replace(segments[0], operators=joined(operators + segments[0].operators))
    else:
        trailing = joined(operators + trailing)
    return replace(
        program,
        input_shape=operators[0].input_shape,
        segments=tuple(segments),
        trailing=trailing,
        scale=program.scale / norm_factor,
        source=None if program.source is None else replace(program.source, before=modules),
    )


def _stretched(operator: Operator, norm_factor: float) -> Operator:
    return (
        operator if operator.bias is None else replace(operator, bias=norm_factor * operator.bias)
    )


def absorb(program: Program, module: nn.Module, output_shape: Shape) -> Program:
    """Append an affine module to a program: its bias is added after the division.

    Args:
        program: ends with the input of the module.
        module: a frozen module; the affine part is what it gives for a zero input.
        output_shape: of one sample.
    """
    operator = operator_of(module, program.output_shape, output_shape)
    bias = operator.bias
    if program.bias is not None:
        with torch.no_grad():
            pushed: Tensor = operator.apply(program.bias.unsqueeze(0))[0]
        bias = pushed if bias is None else pushed + bias
    return replace(
        program,
        output_shape=output_shape,
        trailing=(*program.trailing, replace(operator, bias=None)),
        bias=bias if bias is not None and bool(bias.any()) else None,
        source=with_behind(program.source, module),
    )


def with_behind(source: Source | None, module: nn.Module) -> Source | None:
    """Add a module behind."""
    return None if source is None else replace(source, behind=(*source.behind, module))


def _recurrence(program: Program) -> Recurrence:
    """Push the biases of a program through the layers behind them."""
    groups, births = program.groups, program.births
    first = {members[0]: group for group, members in enumerate(groups)}
    first[len(program.segments)] = len(groups)
    constants: dict[int, Tensor] = {}  # by the site that they were born before
    sites: list[Site] = []
    chain: list[Operator] = []
    scale, d_in = 1.0, math.prod(program.input_shape)
    with torch.no_grad():
        for group, members in enumerate(groups):
            size = len([birth for birth in births if birth <= members[0]])
            rows = torch.zeros(size, d_in, dtype=torch.float64, device=program.device)
            gram = torch.zeros(size, size, dtype=torch.float64, device=program.device)
            for index in members:
                segment = program.segments[index]
                chain.extend(segment.operators)
                _push(constants, segment.operators, first.get(index, group), segment.factor)
                scale *= segment.factor
                if constants:
                    c = torch.stack(list(constants.values()))
                    flat = c.flatten(1)
                    gram += segment.weight * flat @ flat.T
                    rows += segment.weight * scale * adjoint(chain, c).flatten(1)
            keys = tuple(tuple(range(born, group)) for born in constants)
            before = tuple(range(group))
            sites.append(Site(program.rules[group], (before,), keys, rows, gram, before))
        _push(constants, program.trailing, len(groups), 1.0)
    every: Key = tuple(range(len(groups)))
    keys = tuple(tuple(range(born, len(groups))) for born in constants)
    shape = len(constants), *program.output_shape
    vectors = torch.stack(list(constants.values())) if constants else torch.zeros(shape)
    return Recurrence(tuple(sites), (every,), keys, vectors.double())


def _push(
    constants: dict[int, Tensor], operators: tuple[Operator, ...], born: int, factor: float
) -> None:
    """Let constant parts pass a segment, where more of them may be born."""
    for operator in operators:
        for site, value in constants.items():
            constants[site] = operator.apply(value.unsqueeze(0))[0]
        if operator.bias is not None:
            known = constants.get(born)
            constants[born] = operator.bias if known is None else known + operator.bias
    for site in constants:
        constants[site] = constants[site] * factor


def matrix_of(program: Program) -> Tensor:
    """Return M of a program in float64, (d_out, d_in)."""
    shapes = program.input_shape, program.output_shape
    return dense_matrix(*shapes, program.stages, program.trailing, program.device)


def forms_of(program: Program, slack: ErrorBudget) -> Forms:
    """Return every Q of a program in float64, as deep as the slack asks for."""
    return dense_forms(program.input_shape, program.stages, program.device, slack)
