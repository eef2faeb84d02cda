"""Trace → StageGraph: the stages of a ConformalLayers, and the maps and joins between them.

A homogeneous map acts on x and leaves t alone, so a point passes it as it is. The layers between two of them are
a stage, of one of two kinds:

- An affine stage has biases, or no activation. A bias is multiplied by the coordinate t, which activations change:
  a bias behind an activation starts a new stage, and an activation ends a stage with biases.
- A radial stage is a chain of linear layers and activations: one linear map, and quadratic forms. Its balanced
  recurrence keeps every number in float range:

    z₀ = x̂        z_l = factor_l · U_l z_{l-1}        n_l = weight_l · ‖z_l‖²
    τ ← τ + m·n_l  (published)        τ ← τ + n_l/τ  (projective)        y = scale · V z_k / τ + bias
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import norm_unit
from ..graph.graph import device_of
from ..graph.trace import Step, Trace
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Join
from ..nn.registry import is_homogeneous
from .operators import Operator, apply_all, operator_of, push_constant

_SIMPLE = 1e3  # a bound that is small enough in every dtype: no closer one is needed


class Scaling:
    """The scalars of ``x = m·κ·z`` and ``t = m·σ·τ``, chosen so that z and τ stay in range.

    ``balance = κ²/σ`` and ``rho = κ/σ``. A published activation keeps the balance at 1 (z = x/√s);
    one that acts on points keeps rho at 1 (z/τ is the point). :meth:`take` returns the factor of z
    that restores this. It is deferred so that the next layer can apply it to its weights.
    """

    def __init__(self, norm_factor: float = 1.0) -> None:
        # t starts as norm_factor·‖x‖, so κ = 1 and σ = norm_factor.
        self._balance: float = 1.0 / norm_factor
        self._rho: float = 1.0 / norm_factor
        # slope/α of the last activation and whether it acts on points, until :meth:`take`.
        self._last: tuple[float, bool] | None = None

    @property
    def rho(self) -> float:
        """The factor of the point ``rho · z / τ``, for the current z."""
        return self._rho if self._last is None else self._rho * self._last[0]

    def copy(self) -> Scaling:
        """Return an independent copy for a branch."""
        other = Scaling()
        other._balance, other._rho, other._last = self._balance, self._rho, self._last
        return other

    def lacking(self, gain: float) -> Scaling:
        """Return the scalars of ``z / gain``."""
        other = self.copy()
        other._balance, other._rho = self._balance * gain * gain, self._rho * gain
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaling) and vars(self) == vars(other)

    @property
    def sigma(self) -> float:
        """The factor of the coordinate ``m · sigma · τ``."""
        balance, rho = self._balance, self._rho
        if self._last is not None:
            balance, rho = balance * self._last[0], rho * self._last[0]
        return balance / (rho * rho)  # rho**2 of a float raises on overflow

    def activate(self, alpha: float, on_points: bool, slope: float = 2.0) -> float:
        """Pass an activation; return the weight of ``‖z‖²`` in τ, for the current z."""
        if self._last is not None:  # no layer has applied the previous factor
            before = self._last[0]
            self._balance, self._rho = self._balance * before, self._rho * before
        self._last = slope / alpha, on_points
        return (self._rho * self._rho if on_points else self._balance) / (alpha * alpha)

    def take(self) -> float | None:
        """Return the pending factor of z, or None."""
        if self._last is None:
            return None
        (ratio, on_points), self._last = self._last, None
        balance, rho = self._balance * ratio, self._rho * ratio
        # z ← factor·z divides κ by the factor, so κ/σ by it and κ²/σ by its square.
        factor = rho if on_points else balance**0.5
        if on_points:
            self._balance, self._rho = balance / factor**2, 1.0
        else:
            self._balance, self._rho = 1.0, rho / factor
        return factor


@dataclass(frozen=True)
class ActivationSite:
    """An activation with its α resolved.

    ``unit`` is √d where norms are root mean squares over the d coefficients here, else 1. Then q is
    ``‖p‖²/(α·unit)²``, which is an activation of radius α·unit and slope·unit.
    """

    module: RadialActivation
    alpha: float  # in units of the Euclidean norm
    path: str
    unit: float = 1.0

    @property
    def slope(self) -> float:
        """α times the derivative at the origin: a short point is multiplied by slope/α."""
        return self.module.slope * self.unit

    def activate(self, scaling: Scaling) -> float:
        """Advance the scaling past the activation; return the weight of ``‖z‖²`` in τ, for the current z."""
        return float(scaling.activate(self.alpha, self.module.on_points, self.slope))

    def bound_behind(self, size: float) -> float:
        """Bound the norm of a point behind the activation, given a bound of its norm before."""
        limit = self.unit if self.module.bounded else math.inf
        return min(limit, size * self.slope / self.alpha)

    def __str__(self) -> str:
        return f"{self.path}: {type(self.module).__name__}, α {self.alpha / self.unit:.4g}"


Layer = Operator | ActivationSite


@dataclass(frozen=True, eq=False)
class _Stage:
    """Layers in a row on samples of a fixed shape."""

    input_shape: Shape
    layers: tuple[Layer, ...]

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, Operator))

    @property
    def sites(self) -> tuple[ActivationSite, ...]:
        """All activations in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, ActivationSite))

    @property
    def output_shape(self) -> Shape:
        """The shape of one output sample."""
        return self.operators[-1].output_shape if self.operators else self.input_shape

    @property
    def device(self) -> torch.device:
        """The device of the operators."""
        return device_of(operator.module for operator in self.operators)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of its operators for one sample."""
        return sum(operator.multiply_adds() for operator in self.operators)


class AffineStage(_Stage):
    """Layers with biases and at most one activation, at their end; or layers without an activation."""

    @property
    def biased(self) -> bool:
        """Whether some layer has a bias."""
        return any(operator.bias is not None for operator in self.operators)


@dataclass(frozen=True)
class Segment:
    """The operators up to one activation, ``z ← factor·U z``, and the weight of ``‖z‖²`` in τ.

    ``group`` is the number of the quadratic form that the energy belongs to.
    """

    operators: tuple[Operator, ...]
    factor: float
    weight: float
    site: ActivationSite
    group: int

    def apply(self, z: Tensor) -> Tensor:
        """Return ``factor·U z``."""
        return apply_all(self.operators, z) * self.factor


@dataclass(frozen=True, eq=False, repr=False)
class RadialStage(_Stage):
    """Linear layers and activations: one linear map, and a recurrence of quadratic forms."""

    start: Scaling = field(default_factory=Scaling)  # of the points that enter
    entry: float = 1.0  # a bound of the norm of the z that enters, in units of the network's input
    least: float = 0.0  # a lower bound of τ/‖z‖ where it starts: 1 behind the embedding

    def entered(self, start: Scaling, entry: float = 1.0, least: float = 0.0) -> RadialStage:
        """Return the stage behind other points."""
        return RadialStage(self.input_shape, self.layers, start, entry, least)

    @cached_property
    def _recurrence(self) -> tuple[tuple[Segment, ...], tuple[Operator, ...], Scaling]:
        segments: list[Segment] = []
        pending: tuple[Operator, ...] = ()
        group, scaling = -1, self.start.copy()
        for layer in self.layers:
            if isinstance(layer, Operator):
                pending = (*pending, layer)
                continue
            # The factor goes into the weights of this segment, so its z comes out scaled already, and
            # the weight of ‖z‖² is divided by factor².
            weight = layer.activate(scaling)
            factor = float(scaling.take() or 1.0)
            weight /= factor * factor
            # Consecutive activations of a formula that collapses share a form.
            formula = layer.module.formula
            alike = bool(segments) and segments[-1].site.module.formula == formula
            group += not (alike and layer.module.collapses)
            segments.append(Segment(pending, factor, weight, layer, group))
            pending = ()
        return tuple(segments), pending, scaling

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers up to each activation."""
        return self._recurrence[0]

    @property
    def trailing(self) -> tuple[Operator, ...]:
        """The operators behind the last activation."""
        return self._recurrence[1]

    @property
    def end(self) -> Scaling:
        """The scaling of the points that leave."""
        return self._recurrence[2]

    @property
    def groups(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each quadratic form; their activations have the same formula."""
        return tuple(
            tuple(members) for _, members in groupby(self.segments, lambda segment: segment.group)
        )

    def rows_of(self, group: int) -> int:
        """Count the outputs of all layers that a form sums up."""
        rows, shape = 0, self.input_shape
        for segment in self.segments:
            shape = segment.operators[-1].output_shape if segment.operators else shape
            rows += math.prod(shape) if segment.group == group else 0
        return rows

    @property
    def provable(self) -> bool:
        """Whether an error bound of a simplified form is an error bound of the denominator."""
        return all(site.module.provable for site in self.sites)

    @property
    def unit(self) -> float:
        """1 if the denominator is proportional to the norm of the input, else 0; see ``forms.py``."""
        return self.least * all(site.module.on_points for site in self.sites)

    @cached_property
    def _bounds(self) -> tuple[float, ...]:
        """Bounds of the norm of z behind each segment and at the end; may be infinite."""
        found = self._bounds_by("simple_bound")
        return found if max(found) <= _SIMPLE else self._bounds_by("norm")

    def _bounds_by(self, name: str) -> tuple[float, ...]:
        parts = [*((s.factor, s.operators) for s in self.segments), (1.0, self.trailing)]
        steps = (factor * math.prod(getattr(op, name) for op in ops) for factor, ops in parts)
        return tuple(accumulate(steps, mul, initial=self.entry))

    @property
    def bound(self) -> float:
        """A bound of the norm of every z on the way, in units of the input of the network."""
        return max(self._bounds)

    @property
    def exit(self) -> float:
        """The same bound for the z that leaves."""
        return self._bounds[-1]


def stage_of(input_shape: Shape, layers: Sequence[Layer]) -> AffineStage | RadialStage:
    """Return the stage of layers in a row."""
    activates = any(isinstance(layer, ActivationSite) for layer in layers)
    radial = activates and not any(map(_has_bias, layers))
    return (RadialStage if radial else AffineStage)(input_shape, tuple(layers))


def _has_bias(layer: Layer) -> bool:
    return isinstance(layer, Operator) and layer.bias is not None


# -- graphs of stages -------------------------------------------------------------------------------


@dataclass(frozen=True)
class HomogeneousMap:
    """A frozen homogeneous module between samples of fixed shapes, and a bound of its norm."""

    module: nn.Module
    input_shape: Shape
    output_shape: Shape
    bound: float
    path: str


@dataclass(frozen=True)
class GraphNode:
    """A step of a graph: an action on the values of its sources; -1 is the input."""

    action: AffineStage | RadialStage | HomogeneousMap | Join
    sources: tuple[int, ...]


@dataclass(frozen=True)
class StageGraph:
    """The stages of one ConformalLayers and the maps and joins between them; the last node is the output.

    The coordinate starts as ``t = √((norm_factor·‖x‖)² + offset²)``.
    """

    input_shape: Shape  # of one sample
    output_shape: Shape
    nodes: tuple[GraphNode, ...]  # every source comes first
    norm_factor: float = 1.0
    offset: float = 0.0
    bias: Tensor | None = None  # float64 (*output_shape), of a head; added after the division
    path: str = ""  # of the ConformalLayers in its model
    absorbed: int = 0  # following layers that the last stage contains

    @property
    def stages(self) -> tuple[AffineStage | RadialStage, ...]:
        """The stages that do more than move numbers: those with activations, weights or biases."""
        return tuple(
            node.action
            for node in self.nodes
            if isinstance(node.action, (AffineStage, RadialStage))
            and (len(self.nodes) == 1 or _computes(node.action))
        )

    @property
    def last(self) -> AffineStage | RadialStage | None:
        """The stage that ends the network, if a stage does."""
        action = self.nodes[-1].action if self.nodes else None
        return action if isinstance(action, (AffineStage, RadialStage)) else None

    def label(self, stage: AffineStage | RadialStage) -> str:
        """Return the name of a stage: the path of the network if it is all of it, else with its number."""
        if len(self.nodes) == 1:
            return self.path
        return f"{self.path} stage {1 + self.stages.index(stage)}".strip()

    @property
    def takes_prefix(self) -> bool:
        """Whether the input enters one stage and nothing else."""
        readers = [node for node in self.nodes if -1 in node.sources]
        return len(readers) == 1 and isinstance(readers[0].action, _Stage)

    def with_prefix(self, operators: tuple[Operator, ...], norm_factor: float) -> StageGraph:
        """Return the network behind operators that multiply the norm of every sample by ``norm_factor``."""
        first, *others = self.nodes
        if not isinstance(first.action, _Stage):
            raise TypeError("a network that does not start with a stage takes no prefix")
        shape = operators[0].input_shape
        stage = stage_of(shape, (*operators, *first.action.layers))
        nodes = GraphNode(stage, (-1,)), *others
        factor = self.norm_factor * norm_factor
        return replace(self, input_shape=shape, nodes=nodes, norm_factor=factor)

    def with_head(self, module: nn.Module, output_shape: Shape) -> StageGraph:
        """Return the network with an affine module behind it, in float64; its bias is added after the division."""
        operator = operator_of(module, self.output_shape, output_shape)
        bias = push_constant((operator,), self.bias)
        if bias is not None and not bool(bias.any()):
            bias = None
        operator = replace(operator, bias=None)
        last, nodes = self.last, self.nodes
        if last is None or _cut(last.layers, operator) is not None:
            stage = stage_of(self.output_shape, [operator])
            nodes = (*nodes, GraphNode(stage, (len(nodes) - 1,)))
        else:
            stage = stage_of(last.input_shape, (*last.layers, operator))
            nodes = (*nodes[:-1], GraphNode(stage, nodes[-1].sources))
        count = self.absorbed + 1
        return replace(self, output_shape=output_shape, nodes=nodes, bias=bias, absorbed=count)


def _computes(stage: AffineStage | RadialStage) -> bool:
    weights = any(op.has_tensors or op.bias is not None for op in stage.operators)
    return weights or bool(stage.sites)


def stages_of(trace: Trace, path: str = "") -> StageGraph:
    """Turn the steps of a trace, whose modules are frozen in float64, into stages and maps."""
    factor = 1 / norm_unit(trace.input_shape, trace.unit == "rms")
    steps = [(_action(trace, step), step.sources) for step in trace.steps]
    nodes = tuple(_nodes(steps, trace.input_shape))
    shapes = trace.input_shape, trace.output_shape
    return StageGraph(*shapes, nodes, factor, trace.offset, path=path)


_Step = tuple[Any, tuple[int, ...]]  # a layer, a join or a map, and its sources


def _action(trace: Trace, step: Step) -> Layer | Join | HomogeneousMap:
    """Return what a step of a trace does."""
    module, shapes = step.module, (step.input_shape, step.output_shape)
    if isinstance(module, RadialActivation) and step.alpha is not None:
        unit = norm_unit(step.input_shape, trace.unit == "rms")
        return ActivationSite(module, step.alpha * unit, step.path, unit)
    if isinstance(module, Join):
        return module
    if is_homogeneous(module):
        return HomogeneousMap(module, *shapes, step.bound, step.path)
    return operator_of(module, *shapes)


def _nodes(steps: Sequence[_Step], input_shape: Shape) -> Iterator[GraphNode]:
    """Collect the longest runs of layers between maps and joins, as stages."""
    users = Counter(source for _, sources in steps for source in sources)
    found: list[_Step] = []  # runs of layers as lists
    place = {-1: -1}  # step → node
    for index, (action, sources) in enumerate(steps):
        feeds = tuple(place[source] for source in sources)
        run = found[feeds[0]][0] if feeds[0] >= 0 and users[sources[0]] == 1 else None
        if isinstance(action, (HomogeneousMap, Join)):
            found.append((action, feeds))
        elif not isinstance(run, list):
            found.append(([action], feeds))
        elif (cut := _cut(run, action)) is None:
            run.append(action)
            place[index] = feeds[0]
            continue
        else:
            found.append(([*run[cut:], action], feeds))
            del run[cut:]
        place[index] = len(found) - 1
    shapes = [input_shape]  # of the input, and of every node
    for action, feeds in found[: place[len(steps) - 1] + 1]:
        entering = [shapes[feed + 1] for feed in feeds]
        node = stage_of(entering[0], action) if isinstance(action, list) else action
        shapes.append(node.shape(entering) if isinstance(node, Join) else node.output_shape)
        yield GraphNode(node, feeds)


def _cut(run: Sequence[Layer], layer: Layer) -> int | None:
    """Return where a run is cut if a layer follows it; None if the layer belongs to it.

    A stage with a bias has at most one activation, at its end.
    """
    last = max((i for i, a in enumerate(run) if isinstance(a, ActivationSite)), default=-1)
    biased = any(map(_has_bias, (*run, layer)))
    return last + 1 if biased and last >= 0 else None
