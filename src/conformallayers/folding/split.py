"""Trace → StageGraph: cut a ConformalLayers into stages at its maps, joins and biases behind activations.

A homogeneous map acts on x and leaves t alone, so a point passes it as it is. The layers between two cuts are
a stage: they fold into one linear map and a recurrence of quadratic forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..errors import shape_text
from ..functional import norm_unit
from ..graph.trace import Step, Trace
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Join
from ..nn.registry import is_homogeneous
from ..scaling import Scaling
from .operators import Operator, merged, operator_of, push_constant
from .stages import ActivationSite, Node, Stage, shape_at


@dataclass(frozen=True)
class Embedding:
    """How the coordinate starts: ``t = √((norm_factor·‖x‖)² + offset²)``."""

    norm_factor: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class HomogeneousMap:
    """A frozen homogeneous module between samples of fixed shapes, and a bound of its norm."""

    module: nn.Module
    input_shape: Shape
    output_shape: Shape
    bound: float
    path: str


GraphNode = Node[Stage | HomogeneousMap | Join]


@dataclass(frozen=True)
class StageGraph:
    """The stages of one ConformalLayers and the maps and joins between them; the last node is the output."""

    input_shape: Shape  # of one sample
    output_shape: Shape
    nodes: tuple[GraphNode, ...]  # every source comes first
    embedding: Embedding = field(default_factory=Embedding)
    bias: Tensor | None = None  # float64 (*output_shape), of a head; added after the division

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in order."""
        return tuple(node.action for node in self.nodes if isinstance(node.action, Stage))

    @property
    def single(self) -> Stage | None:
        """The only stage of a network that is not cut, else None."""
        actions = [node.action for node in self.nodes]
        alone = len(actions) == 1 and isinstance(actions[0], Stage)
        return self.stages[0] if alone else None

    @property
    def last(self) -> Stage | None:
        """The stage that ends the network, if a stage does."""
        action = self.nodes[-1].action if self.nodes else None
        return action if isinstance(action, Stage) else None

    def __str__(self) -> str:
        if self.single is not None:
            return str(self.single)
        lines = [f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"]
        for index, node in enumerate(self.nodes):
            action = node.action
            sources = "" if node.sources == (index - 1,) else f"  from {node.sources}"
            if isinstance(action, Stage):
                lines.append(f"{index}: stage {action}{sources}".replace("\n", "\n  "))
            else:
                module = action.module if isinstance(action, HomogeneousMap) else action
                lines.append(f"{index}: {module!r}{sources}")
        return "\n".join(lines)

    __repr__ = __str__


def stages_of(trace: Trace) -> StageGraph:
    """Turn the steps of a trace, whose modules are frozen in float64, into stages and maps."""
    factor = 1 / norm_unit(trace.input_shape, trace.unit == "rms")
    embedding = Embedding(factor, trace.offset)
    nodes = _split(_steps(trace), trace.input_shape)
    if len(nodes) == 1 and isinstance(nodes[0].action, Stage):
        nodes = (replace(nodes[0], action=replace(nodes[0].action, start=Scaling(factor))),)
    return StageGraph(trace.input_shape, trace.output_shape, nodes, embedding)


def _steps(trace: Trace) -> list[Node[Any]]:
    """Return the operators, activations, joins and maps of a trace.

    Consecutive operators are merged where one torch layer computes both: a batch normalisation and a
    margin of zeros go into the convolution beside them.
    """
    users = Counter(source for step in trace.steps for source in step.sources)
    steps: list[Node[Any]] = []
    place = {-1: -1}  # step of the trace → node
    shared: set[int] = set()  # nodes that several branches read
    sites = 0
    for index, step in enumerate(trace.steps):
        action, sources = _action(trace, step, sites), tuple(place[s] for s in step.sources)
        sites += isinstance(action, ActivationSite)
        _append_merged(steps, action, sources, shared)
        place[index] = len(steps) - 1
        if users[index] > 1:
            shared.add(place[index])
    return steps


def _action(
    trace: Trace, step: Step, sites: int
) -> Operator | ActivationSite | Join | HomogeneousMap:
    """Return what a step of a trace does, with the number of activations before it."""
    module, shapes = step.module, (step.input_shape, step.output_shape)
    if isinstance(module, RadialActivation) and step.alpha is not None:
        unit = norm_unit(step.input_shape, trace.unit == "rms")
        return ActivationSite(module, step.alpha * unit, sites, step.path, unit)
    if isinstance(module, Join):
        return module
    if is_homogeneous(module):
        return HomogeneousMap(module, *shapes, step.bound, step.path)
    return operator_of(module, *shapes)


def _append_merged(
    steps: list[Node[Any]], action: Any, sources: tuple[int, ...], shared: Collection[int] = ()
) -> None:
    """Append an action; operators at the end of ``steps`` that merge with it are removed."""
    while steps and sources == (len(steps) - 1,) and sources[0] not in shared:
        before = steps[-1].action
        both = isinstance(before, Operator) and isinstance(action, Operator)
        one = merged(before, action) if both else None
        if one is None:
            break
        action, sources = one, steps.pop().sources
    steps.append(Node(action, sources))


# -- stages between maps and joins ----------------------------------------------------------------------------

_Action = Operator | ActivationSite


def _split(steps: Sequence[Node[Any]], input_shape: Shape) -> tuple[GraphNode, ...]:
    """Collect the longest chains of operators and activations between maps and joins, as stages."""
    users = Counter(source for step in steps for source in step.sources)
    chains: list[list[_Action] | HomogeneousMap | Join] = []
    sources: list[tuple[int, ...]] = []
    place = {-1: -1}  # step → chain
    for index, step in enumerate(steps):
        feeds = tuple(place[source] for source in step.sources)
        action = step.action
        before = chains[feeds[0]] if feeds[0] >= 0 else None
        if isinstance(action, (HomogeneousMap, Join)):
            chains.append(action)
        elif isinstance(before, list) and users[step.sources[0]] == 1:
            before.append(action)
            place[index] = feeds[0]
            continue
        else:
            chains.append([action])
        sources.append(feeds)
        place[index] = len(chains) - 1
    # A chain with biases becomes several stages, so chains and nodes are numbered differently.
    nodes: list[GraphNode] = []
    ends = {-1: -1}  # chain → the last of its nodes
    for index, (chain, feeds) in enumerate(zip(chains, sources, strict=True)):
        entered = tuple(ends[feed] for feed in feeds)
        if not isinstance(chain, list):
            nodes.append(GraphNode(chain, entered))
        else:
            for part in _direct_parts(chain):
                shape = shape_at(nodes, entered[0], input_shape)
                nodes.append(GraphNode(_chain_stage(shape, part), entered))
                entered = (len(nodes) - 1,)
        ends[index] = len(nodes) - 1
    return tuple(nodes[: ends[place[len(steps) - 1]] + 1])


def _direct_parts(chain: list[_Action]) -> Iterator[list[_Action]]:
    """Cut a chain so that a part with biases has at most one activation, at its end.

    A bias is multiplied by the coordinate, which needs the energies of all activations before it.
    """
    part: list[_Action] = []
    biased = False
    for action in chain:
        if isinstance(action, Operator) and action.bias is not None and not biased:
            biased = True
            last = max((i for i, a in enumerate(part) if isinstance(a, ActivationSite)), default=-1)
            if last >= 0:
                yield part[: last + 1]
                part = part[last + 1 :]
        part.append(action)
        if biased and isinstance(action, ActivationSite):
            yield part
            part, biased = [], False
    if part:
        yield part


def _chain_stage(shape: Shape, actions: Sequence[_Action]) -> Stage:
    """Return the stage of actions in a row: a direct one if an operator has a bias."""
    output, numbered, sites = shape, [], 0
    for index, action in enumerate(actions):
        if isinstance(action, ActivationSite):
            action, sites = replace(action, number=sites), sites + 1
        else:
            output = action.output_shape
        numbered.append(Node(action, (index - 1,)))
    biased = any(isinstance(a, Operator) and a.bias is not None for a in actions)
    return Stage(shape, output, tuple(numbered), direct=biased)


# -- the layers around a ConformalLayers ------------------------------------------------------------


def with_prefix(
    graph: StageGraph, operators: tuple[Operator, ...], norm_factor: float
) -> StageGraph:
    """Prefix a network with operators that multiply the norm of every sample by ``norm_factor``."""
    first = graph.nodes[0].action
    if not isinstance(first, Stage):
        raise TypeError("a network that does not start with a stage takes no prefix")
    steps: list[Node[Any]] = []
    for action in (*operators, *(node.action for node in first.nodes)):
        _append_merged(steps, action, (len(steps) - 1,))
    shape, factor = operators[0].input_shape, graph.embedding.norm_factor * norm_factor
    stage = replace(first, input_shape=shape, nodes=tuple(steps))
    if graph.single is not None:
        stage = replace(stage, start=Scaling(factor))
    return replace(
        graph,
        input_shape=shape,
        nodes=(GraphNode(stage, (-1,)), *graph.nodes[1:]),
        embedding=replace(graph.embedding, norm_factor=factor),
    )


def takes_prefix(graph: StageGraph) -> bool:
    """Tell whether the input enters one stage, a chain, and nothing else."""
    first = graph.nodes[0].action
    readers = [node for node in graph.nodes if -1 in node.sources]
    return isinstance(first, Stage) and len(readers) == 1


def with_head(graph: StageGraph, module: nn.Module, output_shape: Shape) -> StageGraph:
    """Append an affine module in float64: its bias is added after the division, also where x = 0."""
    operator = operator_of(module, graph.output_shape, output_shape)
    bias = push_constant((operator,), graph.bias)
    if bias is not None and not bool(bias.any()):
        bias = None
    operator = replace(operator, bias=None)
    last, nodes = graph.last, graph.nodes
    if last is None or (last.direct and last.sites):
        stage = Stage(graph.output_shape, output_shape, (Node(operator, (-1,)),))
        nodes = (*nodes, GraphNode(stage, (len(nodes) - 1,)))
    else:
        longer = (*last.nodes, Node(operator, (len(last.nodes) - 1,)))
        stage = replace(last, output_shape=output_shape, nodes=longer)
        nodes = (*nodes[:-1], replace(nodes[-1], action=stage))
    return replace(graph, output_shape=output_shape, nodes=nodes, bias=bias)
