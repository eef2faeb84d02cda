"""The layers around a ConformalLayers that fold into it: a prefix that scales the norm, and an affine head."""

from __future__ import annotations

from ..graph.freeze import frozen_wide
from ..graph.graph import INPUT, Graph, Node, Part
from ..graph.trace import trace_part
from ..nn.extra_layers import Centre, Rescale
from ..nn.registry import find_spec
from .operators import Operator, operator_of
from .stages import StageGraph, stages_of, takes_prefix, with_head, with_prefix


def stages_at(graph: Graph, part: Part, *, prefix: bool = True) -> tuple[StageGraph, int]:
    """Return the stages of a ConformalLayers, prefixed with the layers that only scale the norm.

    A margin of zeros or repeated channels multiply the norm of every sample by one number, so they
    fold away. Returns the stages and the node that feeds them.
    """
    stages, (feed,) = stages_of(trace_part(graph, part)), graph.nodes[part.embed].sources
    if not prefix or not takes_prefix(stages):
        return stages, feed
    operators: list[Operator] = []
    norm_factor, first = 1.0, feed
    while first != INPUT and len(graph.readers[first]) == 1:
        node = graph.nodes[first]
        factor = _norm_factor(graph, node)
        if factor is None:
            break
        before = node.sources[0]
        shapes = graph.shape(before) or (), node.shape or ()
        operators.insert(0, operator_of(frozen_wide(node.module), *shapes))
        norm_factor, first = norm_factor * factor, before
    if not operators or not _is_input(graph, first):  # behind another part, that part absorbs them
        return stages, feed
    return with_prefix(stages, tuple(operators), norm_factor), first


def _norm_factor(graph: Graph, node: Node) -> float | None:
    """Return the number by which a node multiplies the norm of every sample, or None."""
    spec, shape = find_spec(node.module), graph.shape(node.sources[0])
    if node.kind != "affine" or spec is None or spec.norm_factor is None or shape is None:
        return None
    return spec.norm_factor(node.module, shape)


def _is_input(graph: Graph, number: int) -> bool:
    """Tell whether a value is the input of the model, possibly minus a mean image."""
    while number != INPUT and isinstance(graph.nodes[number].module, (Centre, Rescale)):
        number = graph.nodes[number].sources[0]
    return number == INPUT


def with_followers(graph: Graph, part: Part, stages: StageGraph) -> list[tuple[int, StageGraph]]:
    """Return stages with none, one, … following affine layers absorbed, and their last node."""
    found, number = [(part.leave, stages)], part.leave
    while len(graph.readers[number]) == 1 and graph.readers[number][0] < len(graph.nodes):
        number = graph.readers[number][0]
        node = graph.nodes[number]
        # A layer with NaN stays outside: its outputs are NaN, as in the model, and not those of the whole part.
        finite = all(bool(tensor.isfinite().all()) for tensor in node.module.buffers())
        if node.kind != "affine" or len(node.sources) > 1 or not finite or node.shape is None:
            break
        found.append((number, with_head(found[-1][1], frozen_wide(node.module), node.shape)))
    return found
