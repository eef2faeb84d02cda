"""Graph → Recipe: fold the stages of each ConformalLayers, and lower all other layers around them.

Layers before a ConformalLayers that only scale the norm, and affine layers behind it, become part of its stages.
Affine stages are lowered layer by layer: the merge pass composes their layers. The plan of a radial stage says which
strategy lowers it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from ..errors import refusal
from ..graph.freeze import frozen_wide
from ..graph.graph import INPUT, Graph, Node, Part, between
from ..graph.trace import trace_part
from ..nn.branches import Join
from ..nn.extra_layers import Centre, Product, Rescale
from ..nn.registry import find_spec
from ..recipe import layer_operations as layer
from ..recipe import point_operations as point
from ..recipe import recipe as recipes
from ..recipe.recipe import Recipe, RecipeBuilder
from .lower import Lowering, add_join, by_sample, find_lowering
from .operators import Operator, operator_of
from .plan import Plan, Settings, make_plan
from .scaling import Scaling
from .stages import (
    ActivationSite,
    AffineStage,
    HomogeneousMap,
    StageGraph,
    stages_of,
    takes_prefix,
    with_head,
    with_prefix,
)
from .strategies import STRATEGIES
from .strategies.base import SQUARED, PointValues, Problem, size_behind
from .strategies.layers import add_layer


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


def lower_stages(
    graph: StageGraph,
    settings: Settings,
    path: str = "",
    *,
    absorbed: int = 0,
    inaccurate: Collection[str] = (),
) -> tuple[Recipe, dict[str, Plan]]:
    """Return the recipe of a network in float64, and the plan of every radial stage by its name.

    Args:
        graph: the network.
        settings: of the fold.
        path: of the network in its model.
        absorbed: the number of following layers that its last stage contains.
        inaccurate: strategies that "auto" must not take.
    """
    builder = RecipeBuilder(graph.input_shape)
    start = _add_embedding(builder, graph)
    values: list[PointValues] = []
    plans: dict[str, Plan] = {}
    for node in graph.nodes:
        sources = [start if source < 0 else values[source] for source in node.sources]
        action, points = node.action, sources[0]
        if isinstance(action, HomogeneousMap):
            values.append(_add_map(builder, action, points))
        elif isinstance(action, Join):
            values.append(_add_join(builder, action, sources))
        elif isinstance(action, AffineStage):
            values.append(_add_affine(builder, action, points))
        else:
            stage = action.entered(points.scaling, points.bound, float(points is start))
            problem = Problem(stage, settings.dtype)
            own = absorbed if node is graph.nodes[-1] else 0
            plan = make_plan(problem, settings, absorbed=own, inaccurate=inaccurate)
            plans[graph.label(path, action)] = plan
            values.append(STRATEGIES[plan.strategy].lower(problem, builder, points))
    _refuse_unused(settings.strategy, list(plans.values()))
    output = _add_division(builder, graph, values[-1] if values else start)
    return builder.recipe(output), plans


def _refuse_unused(strategy: str, plans: list[Plan]) -> None:
    """Refuse the name of a strategy that no radial stage can take."""
    if plans and all(plan.strategy != strategy != "auto" for plan in plans):
        note = next(c.note for c in plans[0].candidates if c.name == strategy)
        where, remedy = f'fold(strategy="{strategy}")', 'Use strategy="auto".'
        raise refusal(
            where, "a network that this strategy can express", f"one where {note}", remedy
        )


def _add_embedding(builder: RecipeBuilder, graph: StageGraph) -> PointValues:
    """Append the embedding of the input."""
    names, factor = ("unit", "peak", "tau"), graph.norm_factor
    offset = graph.offset / factor
    unit, peak, tau = builder.add_many(point.Normalize, recipes.INPUT, names=names, offset=offset)
    return PointValues(unit, peak, tau, Scaling(factor), 1.0, 1 / factor)


def _add_map(builder: RecipeBuilder, action: HomogeneousMap, before: PointValues) -> PointValues:
    """Append a homogeneous map of z; LPPool squares its windows, so a large z is rescaled first."""
    points = before if before.bound <= SQUARED else before.rescale(builder)[0]
    z = Lowering(builder).module(points.z, action.module, action.output_shape)
    bound, size = points.bound * action.bound, points.size * action.bound
    return replace(points, z=z, bound=bound, size=size)


def _add_join(builder: RecipeBuilder, join: Join, sources: list[PointValues]) -> PointValues:
    """Append a sum or a concatenation of points; the coordinate is that of the first.

    Points with the same coordinate, which no activation has changed, are joined as they are.
    """
    first = sources[0]
    alike = all(
        (p.peak, p.tau, p.scaling) == (first.peak, first.tau, first.scaling) for p in sources
    )
    points = sources if alike else [source.rebase(builder) for source in sources]
    z = add_join(builder, [point.z for point in points], join)
    bound, size = sum(p.bound for p in points), sum(p.size for p in points)
    return replace(points[0], z=z, bound=bound, size=size)


def _add_affine(builder: RecipeBuilder, stage: AffineStage, before: PointValues) -> PointValues:
    """Append the layers of an affine stage; their biases are added to points, where t = 1."""
    points = before.rebase(builder) if stage.biased else before
    for action in stage.layers:
        if isinstance(action, ActivationSite):
            points = points.activate(builder, action)
        elif action.bias is None:
            points = add_layer(builder, action, points)
        else:
            z, size = _add_biased(builder, action, points.z), size_behind((action,), points.size)
            points = replace(points, z=z, bound=size, size=size)
    return points


def _add_biased(builder: RecipeBuilder, operator: Operator, z: str) -> str:
    to, bias = Lowering(builder), operator.bias
    if bias is not None:
        first = bias[(slice(None), *[slice(0, 1)] * (bias.dim() - 1))]
        # one number per channel, up to the rounding of float64
        alike = bool(((bias - first).abs() <= 1e-14 * bias.abs().max()).all())
        bias = first if alike else bias
    z = to.module(z, operator.module, operator.output_shape)
    return z if bias is None else to.shift(z, bias)


def _add_division(builder: RecipeBuilder, graph: StageGraph, last: PointValues) -> str:
    """Append the division, unless z is the point already, and the bias of an absorbed head."""
    scale = float(last.scaling.rho)
    ones = any(isinstance(op, point.Rebase) and last.tau in op.outputs for op in builder.operations)
    y = last.z
    if not (ones and scale == 1 and graph.offset > 0):  # without an offset, τ may be 0
        y = builder.add(point.Divide, y, last.tau, last.peak, name="y", scale=scale)
    return y if graph.bias is None else Lowering(builder).shift(y, graph.bias)


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
    if graph.fixed:  # a reshape does not let samples of another size pass
        values[INPUT] = builder.add(layer.Reshape, recipes.INPUT, shape=graph.input_shape)
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
    if isinstance(module, Product):
        return builder.add(layer.Product, *sources)
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
