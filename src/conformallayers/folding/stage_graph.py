"""Graph → StageGraph: the stages of a ConformalLayers with the layers around it that they absorb, and the maps and joins between them.

A homogeneous map acts on x and leaves t alone, so a point passes it as it is. The layers between two of them are
a stage. Layers before a ConformalLayers that only scale the norm, and affine layers after it, become part of its stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..functional import norm_unit
from ..graph.capture import capture_parts
from ..graph.graph import INPUT, Graph, Node, Part, frozen_wide
from ..graph.trace import Step, Trace, trace_part
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Join
from ..nn.layers import Centre, Rescale
from ..nn.registry import find_spec, is_homogeneous
from .stages import (
    ActivationSite,
    AffineStage,
    Layer,
    Operator,
    RadialStage,
    Stage,
    has_bias,
    operator_of,
    push_constant,
    stage_of,
)

_SHRINKS = 4  # a head that leaves fewer outputs than one in four is absorbed; the division then costs a pass more


@dataclass(frozen=True)
class HomogeneousMap:
    """A frozen homogeneous module, the shape of its output samples, and a bound of its norm."""

    module: nn.Module
    output_shape: Shape
    bound: float


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
            if isinstance(node.action, Stage) and (len(self.nodes) == 1 or _computes(node.action))
        )

    @property
    def last(self) -> AffineStage | RadialStage | None:
        """The stage that ends the network, if a stage does."""
        action = self.nodes[-1].action if self.nodes else None
        return action if isinstance(action, Stage) else None

    def label(self, stage: AffineStage | RadialStage) -> str:
        """Return the name of a stage: the path of the network if it is all of it, else with its number."""
        if len(self.nodes) == 1:
            return self.path
        return f"{self.path} stage {1 + self.stages.index(stage)}".strip()

    def with_prefix(self, operators: tuple[Operator, ...], norm_factor: float) -> StageGraph:
        """Return the network after operators that multiply the norm of every sample by ``norm_factor``."""
        first, *others = self.nodes
        if not isinstance(first.action, Stage):
            raise TypeError("a network that does not start with a stage takes no prefix")
        shape = operators[0].input_shape
        stage = stage_of(shape, (*operators, *first.action.layers))
        nodes = GraphNode(stage, (-1,)), *others
        factor = self.norm_factor * norm_factor
        return replace(self, input_shape=shape, nodes=nodes, norm_factor=factor)

    def with_head(self, module: nn.Module, output_shape: Shape) -> StageGraph:
        """Return the network with an affine module after it, in float64; the bias of that is added after the division."""
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
    """Return the action of a step of a trace."""
    module, shapes = step.module, (step.input_shape, step.output_shape)
    if isinstance(module, RadialActivation) and step.alpha is not None:
        unit = norm_unit(step.input_shape, trace.unit == "rms")
        return ActivationSite(module, step.alpha * unit, step.path, unit)
    if isinstance(module, Join):
        return module
    if is_homogeneous(module):
        return HomogeneousMap(module, step.output_shape, step.bound)
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
    biased = any(map(has_bias, (*run, layer)))
    return last + 1 if biased and last >= 0 else None


# -- the layers around a ConformalLayers -----------------------------------------------------------


def stages_by_part(model: nn.Module, input_shape: Shape) -> list[StageGraph]:
    """Return the stages of each ConformalLayers with all linear layers after it, and the layers before it that fold away."""
    graph = capture_parts(model, input_shape, where="inspect")
    found = []
    for part in graph.parts:
        _, stages = with_prefix(graph, part, stages_of(trace_part(graph, part), part.label))
        found.append(with_heads(graph, part, stages)[-1][1])
    return found


def with_prefix(graph: Graph, part: Part, stages: StageGraph) -> tuple[int, StageGraph]:
    """Prefix stages with the layers before them that only scale the norm; return the node that feeds them, too.

    A margin of zeros or repeated channels multiply the norm of every sample by one number, so they
    fold away.
    """
    (feed,) = graph.nodes[part.embed].sources
    operators: list[Operator] = []
    norm_factor, first = 1.0, feed
    readers = [node.action for node in stages.nodes if -1 in node.sources]
    enters = len(readers) == 1 and isinstance(readers[0], Stage)  # one stage and nothing else
    while enters and first != INPUT and len(graph.readers[first]) == 1:
        node = graph.nodes[first]
        factor = _norm_factor(graph, node)
        if factor is None:
            break
        before = node.sources[0]
        shapes = graph.shape(before) or (), node.shape or ()
        operators.insert(0, operator_of(frozen_wide(node.module), *shapes))
        norm_factor, first = norm_factor * factor, before
    number = first
    while number != INPUT and isinstance(graph.nodes[number].module, (Centre, Rescale)):
        number = graph.nodes[number].sources[0]
    if not operators or number != INPUT:  # after another part, which absorbs them
        return feed, stages
    return first, stages.with_prefix(tuple(operators), norm_factor)


def _norm_factor(graph: Graph, node: Node) -> float | None:
    """Return the number by which a node multiplies the norm of every sample, or None."""
    spec, shape = find_spec(node.module), graph.shape(node.sources[0])
    if node.kind != "affine" or spec is None or spec.norm_factor is None or shape is None:
        return None
    return spec.norm_factor(node.module, shape)


def with_heads(graph: Graph, part: Part, stages: StageGraph) -> list[tuple[int, StageGraph]]:
    """Return stages with none, one, … following affine layers absorbed, and their last node."""
    found, number = [(part.leave, stages)], part.leave
    while len(graph.readers[number]) == 1 and graph.readers[number][0] < len(graph.nodes):
        number = graph.readers[number][0]
        node = graph.nodes[number]
        # A layer with NaN stays outside: its outputs are NaN, as in the model, and not those of the whole part.
        finite = all(bool(tensor.isfinite().all()) for tensor in node.module.buffers())
        if node.kind != "affine" or len(node.sources) > 1 or not finite or node.shape is None:
            break
        found.append((number, found[-1][1].with_head(frozen_wide(node.module), node.shape)))
    return found


def shortest(candidates: list[tuple[int, StageGraph]]) -> tuple[int, StageGraph]:
    """Return the stages with the fewest outputs, the longest if several; after a radial stage only if they are few."""
    _, alone = candidates[0]
    best = min(reversed(candidates), key=lambda pair: math.prod(pair[1].output_shape))
    small = _SHRINKS * math.prod(best[1].output_shape) <= math.prod(alone.output_shape)
    return best if small or not isinstance(alone.last, RadialStage) else candidates[0]
