"""Strategy "layers": the layers themselves, every α resolved, every factor merged into a weight.

Where great depth could take numbers out of range, the recipe rescales values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...nn.branches import Join
from ...nn.registry import find_spec
from ...nn.specs import scale_output
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ..cost import Cost
from ..lower import Lowering, add_join
from ..operators import Operator
from ..problem import Problem
from .base import Evaluation, Points, Strategy, Values, add_activation
from .routes import layer_cost


class Layers(Strategy):
    """Run the layers and sum the energies that share a form."""

    name = "layers"
    in_stages = "always"
    exact_cost = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse nothing."""
        return None

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the layers as they are, and a pass over each map whose energy is taken."""
        stage, item = problem.stage, problem.dtype.itemsize
        segments = stage.chain.segments
        shapes = (s.operators[-1].output_shape if s.operators else () for s in segments)
        energies = Cost(stream=sum(map(math.prod, shapes)), calls=3 * len(segments))
        return sum((layer_cost(operator, item) for operator in stage.operators), energies)

    def effort(self, problem: Problem) -> float:
        """Nothing is built."""
        return 0.0

    def lower(self, problem: Problem, builder: RecipeBuilder, start: Points) -> Points:
        """Append the layers, rescaled where bounds do not keep them in range."""
        stage = problem.stage
        if stage.direct or problem.keeps_range():
            return super().lower(problem, builder, start)
        return _lower_rescaled(problem, builder, start)

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the layers and the energy behind each segment."""
        stage, to = problem.stage, Lowering(values.builder)
        z = values.unit
        if stage.direct:
            values.take_bias(1.0)  # each layer adds its own
            for operator in stage.operators:
                z = to.module(z, operator.module, operator.output_shape, bias=operator.bias)
            return Evaluation(z, (), 1.0)
        chain = stage.chain
        energies: list[list[str]] = [[] for _ in chain.groups]
        for segment in chain.segments:
            z = add_operators(to, z, segment.operators, segment.factor)
            weight = segment.weight
            n = values.builder.add(point.SumSquares, z, name="n", weight=weight)
            energies[segment.group].append(n)
        image = add_operators(to, z, chain.trailing, 1.0)
        return Evaluation(image, tuple(map(tuple, energies)), 1.0)


def add_operators(
    to: Lowering, z: str, operators: Sequence[Operator], factor: float, bias: Tensor | None = None
) -> str:
    """Append operators one after the other, with the factor on the last weight, and a bias."""
    takes = [index for index, operator in enumerate(operators) if _has_weight(operator)]
    last = takes[-1] if takes else len(operators) - 1
    for index, operator in enumerate(operators):
        own = factor if index == last else 1.0
        added = bias if index == len(operators) - 1 else None
        z = to.module(z, operator.module, operator.output_shape, own, added)
    if not operators:
        z = Lowering(to.builder, factor, bias).finish(z)
    return z


def _has_weight(operator: Operator) -> bool:
    spec = find_spec(operator.module)
    return spec is not None and spec.scaled not in (None, scale_output)


def _lower_rescaled(problem: Problem, builder: RecipeBuilder, start: Points) -> Points:
    """Append the nodes of a stage one by one."""
    to, points = Lowering(builder), start
    for node in problem.stage.nodes:
        if isinstance(node.action, Operator):
            points = _add_layer(to, node.action, points)
        else:
            # Bounds say nothing of numbers that are too small.
            points = add_activation(builder, node.action, replace(points, bound=math.inf))
    return points


def _add_layer(to: Lowering, operator: Operator, before: Points) -> Points:
    """Append a layer with the pending factor of z."""
    spec, shape = find_spec(operator.module), operator.output_shape
    scaling = before.scaling.copy()
    # A layer without a weight leaves the factor to a later layer, which merges it for free.
    factor = scaling.take() if spec is not None and spec.scaled is not None else None
    z = to.module(before.z, operator.module, shape, 1.0 if factor is None else float(factor))
    return Points(z, before.peak, before.tau, scaling)


def join_points(builder: RecipeBuilder, join: Join, sources: list[Points]) -> Points:
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
