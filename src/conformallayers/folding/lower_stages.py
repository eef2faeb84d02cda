"""StageGraph → Recipe: embed the input, lower stage by stage, divide at the end.

Affine stages are lowered layer by layer: the merge pass composes their layers. The plan of a radial stage says which
strategy lowers it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..errors import refusal
from ..nn.branches import Join
from ..recipe import point_operations as point
from ..recipe.recipe import INPUT, Recipe, RecipeBuilder
from ..scaling import Scaling
from .lower import Lowering, add_join
from .operators import Operator, same_in_channels
from .plan import Plan, Settings, make_plan
from .stages import ActivationSite, AffineStage, HomogeneousMap, StageGraph
from .strategies import STRATEGIES
from .strategies.base import SQUARED, PointValues, Problem, size_behind
from .strategies.layers import add_layer


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
    unit, peak, tau = builder.add_many(point.Normalize, INPUT, names=names, offset=offset)
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
    if bias is not None and same_in_channels(bias):
        bias = bias[(slice(None), *[slice(0, 1)] * (bias.dim() - 1))]
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
