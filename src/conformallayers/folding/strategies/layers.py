"""Strategy "layers": the layers themselves, every α resolved, every factor merged into a weight.

Where great depth could take numbers out of range, the recipe rescales values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ..lower import Lowering
from ..operators import Operator
from ..stages import ActivationSite
from .base import Cost, Evaluation, PointValues, Problem, Strategy, layer_cost


class Layers(Strategy):
    """Run the layers and sum the energies that share a form."""

    name = "layers"
    exact_cost = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse nothing."""
        return None

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the layers as they are, and a pass over each map whose energy is taken."""
        stage, item = problem.stage, problem.itemsize
        shapes = (s.operators[-1].output_shape if s.operators else () for s in stage.segments)
        energies = Cost(stream=sum(map(math.prod, shapes)), calls=3 * len(stage.segments))
        return sum((layer_cost(operator, item) for operator in stage.operators), energies)

    def effort(self, problem: Problem) -> float:
        """Nothing is built."""
        return 0.0

    def lower(self, problem: Problem, builder: RecipeBuilder, start: PointValues) -> PointValues:
        """Append the layers, rescaled where bounds do not keep them in range."""
        if problem.keeps_range():
            return super().lower(problem, builder, start)
        points = start
        for layer in problem.stage.layers:
            if isinstance(layer, ActivationSite):
                # Bounds say nothing of numbers that are too small.
                points = replace(points, bound=math.inf).activate(builder, layer)
            else:
                points = add_layer(builder, layer, points)
        return points

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append the layers and the energy behind each segment."""
        stage, z = problem.stage, x
        energies: list[list[str]] = [[] for _ in stage.groups]
        for segment in stage.segments:
            z = add_operators(builder, z, segment.operators, segment.factor)
            n = builder.add(point.SumSquares, z, name="n", weight=segment.weight)
            energies[segment.group].append(n)
        image = add_operators(builder, z, stage.trailing, 1.0)
        return Evaluation(image, tuple(map(tuple, energies)))


def add_operators(
    builder: RecipeBuilder, z: str, operators: Sequence[Operator], factor: float
) -> str:
    """Append operators, and a factor behind the last weight, into which the merge pass puts it."""
    to, last = Lowering(builder), len(operators)
    last = max((i for i, op in enumerate(operators, 1) if op.has_tensors), default=last)
    for operator in operators[:last]:
        z = to.module(z, operator.module, operator.output_shape)
    z = z if factor == 1.0 else to.multiply(z, factor)
    for operator in operators[last:]:
        z = to.module(z, operator.module, operator.output_shape)
    return z


def add_layer(builder: RecipeBuilder, operator: Operator, before: PointValues) -> PointValues:
    """Append a layer without its bias, and the pending factor of z."""
    scaling = before.scaling.copy()
    # A layer without a weight leaves the factor to a later layer, which merges it for free.
    factor = (scaling.take() or 1.0) if operator.has_tensors else 1.0
    norm = operator.simple_bound
    z = add_operators(builder, before.z, (operator,), factor)
    bound, size = before.bound * norm * factor, before.size * norm
    return replace(before, z=z, scaling=scaling, bound=bound, size=size)
