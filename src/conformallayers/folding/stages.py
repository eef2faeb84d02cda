"""Trace → Stage: one ConformalLayers as a graph of linear operators and activations.

A stage without branches is a chain. Its balanced recurrence keeps every number inside float range:

    z₀ = x̂        z_l = factor_l · U_l z_{l-1}        n_l = weight_l · ‖z_l‖²
    τ ← τ + m·n_l  (published)        τ ← τ + n_l/τ  (projective)        y = scale · V z_k / τ + bias

A bias adds ``τ·b`` to z. The layers behind it turn it into a constant part of every later z, multiplied
by the coordinate that the sample had at the bias; see ``affine.py``.
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
from ..nn.activations import RadialActivation, Rule
from ..nn.branches import Join
from ..registry.bounds import Shape
from .operators import Operator, merged, operator_of
from .trace import Trace

_CollapsedGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ActivationSite:
    """An activation with its α resolved; ``number`` counts the activations before it."""

    module: RadialActivation
    alpha: float
    number: int
    path: str

    @property
    def rule(self) -> Rule:
        """The rule by which the coordinate changes."""
        return self.module.rule

    @property
    def slope(self) -> float:
        """α times the derivative at the origin: a short point is multiplied by slope/α."""
        return self.module.slope


@dataclass(frozen=True)
class Node:
    """One step of a stage: an action on the values of its sources; -1 is the input."""

    action: Operator | ActivationSite | Join
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Linear operators, activations and joins from an input to an output; the last node is the output.

    Args:
        input_shape, output_shape: of one sample.
        nodes: in an order in which every source comes first.
        bias: float64, of the output's shape; the bias of an absorbed head, added after the division.
        norm_factor: the factor by which operators before the embedding multiply the norm of every
            sample: ``t = norm_factor·‖x‖``.
    """

    input_shape: Shape
    output_shape: Shape
    nodes: tuple[Node, ...]
    bias: Tensor | None = None
    norm_factor: float = 1.0

    @property
    def branched(self) -> bool:
        """Whether some node is fed by another node than the previous one."""
        return any(node.sources != (index - 1,) for index, node in enumerate(self.nodes))

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        return tuple(n.action for n in self.nodes if isinstance(n.action, Operator))

    @property
    def sites(self) -> tuple[ActivationSite, ...]:
        """All activations in order."""
        return tuple(n.action for n in self.nodes if isinstance(n.action, ActivationSite))

    @property
    def device(self) -> torch.device:
        """The device of the operators."""
        buffers = (b for operator in self.operators for b in operator.module.buffers())
        return next((buffer.device for buffer in buffers), torch.device("cpu"))

    @property
    def affine(self) -> bool:
        """Whether biases or branches make a point a sum of several parts."""
        return self.branched or any(op.bias is not None for op in self.operators)

    @cached_property
    def chain(self) -> Chain:
        """The balanced recurrence of a stage without branches."""
        return _chain_of(self)

    @cached_property
    def bound(self) -> float:
        """A bound of the norm of every value on the way, for an input of norm 1; at least 1."""
        if not self.branched:
            return self.chain.bound
        bounds: list[float] = []
        for node in self.nodes:
            sources = [1.0 if source < 0 else bounds[source] for source in node.sources]
            if isinstance(node.action, Operator):
                bounds.append(sources[0] * node.action.norm)
            elif isinstance(node.action, ActivationSite):
                bounds.append(sources[0] * node.action.slope / node.action.alpha)
            else:
                bounds.append(sum(sources))
        return max(1.0, *bounds)

    def shape_at(self, source: int) -> Shape:
        """Return the shape of the value of a node."""
        if source < 0:
            return self.input_shape
        node = self.nodes[source]
        if isinstance(node.action, Operator):
            return node.action.output_shape
        shapes = [self.shape_at(before) for before in node.sources]
        return node.action.shape(shapes) if isinstance(node.action, Join) else shapes[0]

    def __str__(self) -> str:
        lines = [f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"]
        for index, node in enumerate(self.nodes):
            action = node.action
            if isinstance(action, ActivationSite):
                what = f"{action.path}: {action.rule.name}, α {action.alpha:.4g}"
            else:
                what = repr(action.module if isinstance(action, Operator) else action)
            sources = "" if node.sources == (index - 1,) else f"  from {node.sources}"
            lines.append(f"  {index}: {what}{sources}")
        return "\n".join(lines)

    __repr__ = __str__


def stage_of(trace: Trace) -> Stage:
    """Turn the steps of a trace, whose modules are frozen in float64, into a stage.

    Consecutive operators are merged where one torch layer computes both: a batch normalisation and a
    margin of zeros go into the convolution beside them.
    """
    users = [source for step in trace.steps for source in step.sources]
    nodes: list[Node] = []
    place = {-1: -1}  # step → node
    sites = 0
    for index, step in enumerate(trace.steps):
        sources = tuple(place[source] for source in step.sources)
        action: Operator | ActivationSite | Join
        if isinstance(step.module, RadialActivation) and step.alpha is not None:
            action = ActivationSite(step.module, step.alpha, sites, step.path)
            sites += 1
        elif isinstance(step.module, Join):
            action = step.module
        else:
            action = operator_of(step.module, step.input_shape, step.output_shape)
            alone = len(step.sources) == 1 and users.count(step.sources[0]) == 1
            if alone and sources[0] == len(nodes) - 1:
                action, sources = _merge_into(nodes, action, sources)
        nodes.append(Node(action, sources))
        place[index] = len(nodes) - 1
    return Stage(trace.input_shape, trace.output_shape, tuple(nodes))


def _merge_into(
    nodes: list[Node], operator: Operator, sources: tuple[int, ...]
) -> tuple[Operator, tuple[int, ...]]:
    """Merge an operator with the operators at the end of ``nodes``, and remove these."""
    while nodes and sources == (len(nodes) - 1,) and isinstance(nodes[-1].action, Operator):
        one = merged(nodes[-1].action, operator)
        if one is None:
            break
        operator, sources = one, nodes.pop().sources
    return operator, sources


def with_prefix(stage: Stage, operators: tuple[Operator, ...], norm_factor: float) -> Stage:
    """Prefix a chain with operators that multiply the norm of every sample by ``norm_factor``."""
    nodes: list[Node] = []
    for action in (*operators, *(node.action for node in stage.nodes)):
        sources: tuple[int, ...] = (len(nodes) - 1,)
        if isinstance(action, Operator):
            action, sources = _merge_into(nodes, action, sources)
        nodes.append(Node(action, sources))
    factor = stage.norm_factor * norm_factor
    shape = operators[0].input_shape
    return replace(stage, input_shape=shape, nodes=tuple(nodes), norm_factor=factor)


def with_head(stage: Stage, module: nn.Module, output_shape: Shape) -> Stage:
    """Append an affine module in float64: its bias is added after the division, also where x = 0."""
    operator = operator_of(module, stage.output_shape, output_shape)
    bias = operator.bias
    if stage.bias is not None:
        with torch.no_grad():
            pushed = operator.apply(stage.bias.unsqueeze(0))[0]
        bias = pushed if bias is None else pushed + bias
    if bias is not None and not bool(bias.any()):
        bias = None
    node = Node(replace(operator, bias=None), (len(stage.nodes) - 1,))
    return replace(stage, output_shape=output_shape, nodes=(*stage.nodes, node), bias=bias)


@dataclass(frozen=True)
class Segment:
    """The operators up to one activation, ``z ← factor·U z``, and the weight of ``‖z‖²`` in τ.

    ``group`` is the number of the quadratic form that the energy belongs to.
    """

    operators: tuple[Operator, ...]
    factor: float
    weight: float
    site: ActivationSite
    group: int = 0

    @property
    def rule(self) -> Rule:
        """The rule by which the activation changes τ."""
        return self.site.rule

    def apply(self, z: Tensor) -> Tensor:
        """Return ``factor·U z``."""
        for operator in self.operators:
            z = operator.apply(z)
        return z * self.factor


@dataclass(frozen=True)
class Chain:
    """A stage without branches as one linear map and a recurrence of quadratic forms."""

    input_shape: Shape
    output_shape: Shape
    segments: tuple[Segment, ...]
    trailing: tuple[Operator, ...]  # behind the last activation
    scale: float

    def rows_of(self, group: int) -> int:
        """Count the outputs of all layers that a form sums up."""
        rows, shape = 0, self.input_shape
        for segment in self.segments:
            shape = segment.operators[-1].output_shape if segment.operators else shape
            rows += math.prod(shape) if segment.group == group else 0
        return rows

    @property
    def bias_segments(self) -> tuple[int, ...]:
        """The numbers of the segments with biases, which need the coordinate before them."""
        parts = [*(segment.operators for segment in self.segments), self.trailing]
        return tuple(
            index for index, part in enumerate(parts) if any(op.bias is not None for op in part)
        )

    @property
    def groups(self) -> _CollapsedGroups:
        """The segments of each quadratic form."""
        count = 1 + max((segment.group for segment in self.segments), default=-1)
        found: list[list[int]] = [[] for _ in range(count)]
        for index, segment in enumerate(self.segments):
            found[segment.group].append(index)
        return tuple(tuple(group) for group in found)

    @property
    def sites(self) -> tuple[ActivationSite, ...]:
        """The first activation of each group; the others of the group have the same rule."""
        return tuple(self.segments[group[0]].site for group in self.groups)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each group."""
        return tuple(site.rule for site in self.sites)

    @property
    def provable(self) -> bool:
        """Whether an error bound of a simplified form is an error bound of the denominator."""
        return not self.bias_segments and all(rule.provable for rule in self.rules)

    @property
    def scale_free(self) -> bool:
        """Whether the denominator is proportional to the norm of the input."""
        return bool(self.rules) and all(rule.on_points for rule in self.rules)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        inner = tuple(op for segment in self.segments for op in segment.operators)
        return inner + self.trailing

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """A bound of ``‖z_l‖/‖x̂‖`` at each activation; may be infinite."""
        steps = (s.factor * math.prod(op.norm for op in s.operators) for s in self.segments)
        return tuple(accumulate(steps, lambda a, b: a * b))

    @property
    def bound(self) -> float:
        """A bound of ``‖z‖/‖x̂‖`` anywhere in the chain, at least 1."""
        last = self.bounds[-1] if self.bounds else 1.0
        return max(1.0, *self.bounds, last * math.prod(op.norm for op in self.trailing))


def _chain_of(stage: Stage) -> Chain:
    """Choose the factors that keep every z and τ of a chain inside float range."""
    if stage.branched:
        raise TypeError("a stage with branches is no chain")
    segments: list[Segment] = []
    pending: tuple[Operator, ...] = ()
    scaling = Scaling(stage.norm_factor)
    for node in stage.nodes:
        action = node.action
        if isinstance(action, Operator):
            if action.bias is not None:  # the point is ρ·z/τ
                action = replace(action, bias=action.bias / float(scaling.rho))
            pending = (*pending, action)
        elif isinstance(action, ActivationSite):
            # The factor goes into the weights of this segment, so its z comes out scaled already, and
            # the weight of ‖z‖² is divided by factor².
            weight = float(scaling.activate(action.alpha, action.rule.on_points, action.slope))
            factor = float(scaling.take() or 1.0)
            segments.append(Segment(pending, factor, weight / (factor * factor), action))
            pending = ()
    shapes = stage.input_shape, stage.output_shape
    return _grouped(Chain(*shapes, tuple(segments), pending, float(scaling.rho)))


def _grouped(chain: Chain) -> Chain:
    """Number the quadratic forms: consecutive activations of a rule that collapses share one.

    A bias ends a form: it needs the coordinate, and so the sum of all energies before it.
    """
    segments: list[Segment] = []
    for index, segment in enumerate(chain.segments):
        group = segments[-1].group + 1 if segments else 0
        joins = index > 0 and segment.rule == segments[-1].rule and segment.rule.collapses
        if joins and index not in chain.bias_segments:
            group -= 1
        segments.append(replace(segment, group=group))
    return replace(chain, segments=tuple(segments))
