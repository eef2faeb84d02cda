"""Graph → Recipe: splice the folded parts between the operations of all other layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..graph.freeze import frozen_wide
from ..graph.graph import INPUT, Graph, Node, between
from ..nn.branches import Join
from ..nn.registry import find_spec
from ..recipe import layer_operations as layer
from ..recipe import recipe as recipes
from ..recipe.recipe import Recipe, RecipeBuilder
from .lower import Lowering, add_join, by_sample, find_lowering
from .plan import Plan

_LONGEST = 200  # characters of a call that an error shows


@dataclass(frozen=True)
class LoweredPart:
    """The recipe of a folded part, the node that feeds it, and the plans of its stages by label."""

    recipe: Recipe
    feed: int
    plans: Mapping[str, Plan]


def lower_graph(graph: Graph, parts: Mapping[int, LoweredPart]) -> tuple[Recipe, dict[str, Plan]]:
    """Return the recipe of a model, and the plans of its parts.

    ``parts`` are the folded parts by their last node.
    """
    builder = RecipeBuilder(graph.input_shape)
    values, plans = {INPUT: recipes.INPUT}, dict[str, Plan]()
    inside = {number for end, part in parts.items() for number in between(graph, part.feed, end)}
    for number, node in enumerate(graph.nodes):
        if number in parts:
            part = parts[number]
            plans |= part.plans
            values[number] = builder.splice(part.recipe, values[part.feed])
        elif number not in inside:
            sources = [values[source] for source in node.sources]
            values[number] = _lower(builder, graph, node, sources)
    return builder.recipe(values[graph.output]), plans


def _lower(builder: RecipeBuilder, graph: Graph, node: Node, sources: list[str]) -> str:
    """Append a node as an operation, or as a call of its module."""
    module, before = node.module, graph.shape(node.sources[0])
    if isinstance(module, Join):
        return add_join(builder, sources, module)
    apart = node.shape is not None and before is not None and by_sample(module)
    spec = find_spec(module)
    fits = spec is None or before is None or spec.takes(before)
    if apart and fits and node.shape is not None and find_lowering(module) is not None:
        weighted = isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
        wide = module if weighted else frozen_wide(module)  # weights are cast once, by the merge
        return Lowering(builder).module(sources[0], wide, node.shape)
    return builder.add(
        layer.Call,
        *sources,
        module=builder.module("module", module),
        what=node.call[:_LONGEST],
        result=node.row,
        by_sample=apart and fits,
    )
