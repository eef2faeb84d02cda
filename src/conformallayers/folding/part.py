"""StageGraph → Recipe: embed the input, lower stage by stage, divide at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..errors import ConformalError, refusal
from ..functional import wide_dtype
from ..recipe import layer_operations as layer
from ..recipe import point_operations as point
from ..recipe.recipe import INPUT, Recipe, RecipeBuilder
from ..recipe.torch.module import RecipeModule
from ..scaling import Scaling
from .advice import advice_for
from .lower import Lowering
from .plan import Plan, alternatives, make_plan
from .problem import SQUARED, Conditions, Problem
from .split import HomogeneousMap, StageGraph
from .stages import Stage
from .strategies import STRATEGIES
from .strategies.base import Points
from .strategies.layers import join_points

# Relative errors that a fold may have; cl.testing publishes them.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 1e-2,
}
_SAMPLES = 2  # random inputs of the check of a choice
_CHECKED = 2e8  # multiply-adds of the layers for one sample, up to which a choice is checked
_Choose = Callable[[Problem], Plan]
_LAYERS = Plan("layers", "", ())


def lower_part(
    graph: StageGraph, conditions: Conditions, problem: Problem | None = None
) -> tuple[Recipe, tuple[Plan, ...]]:
    """Return the recipe of a network in the dtype of the fold, and the plan of every stage.

    The ``problem`` of a network of one stage may hold arrays that are built already.
    """
    lowering = _PartLowering(graph, conditions, problem)
    recipe, plans = lowering.lower(make_plan)
    if plans and all(plan.strategy != conditions.strategy != "auto" for plan in plans):
        raise refusal(
            f'fold(strategy="{conditions.strategy}")',
            "a stage that this strategy can express",
            f"stages where {plans[0].chosen.note or plans[0].reason}",
            'Use strategy="auto".',
        )
    return recipe, plans


def lower_checked(
    graph: StageGraph, conditions: Conditions, problem: Problem | None = None
) -> tuple[Recipe, tuple[Plan, ...]]:
    """Lower with the fastest strategy that is accurate; keep the fastest one if none is.

    The error is measured on random samples against the layers in float64.
    """
    lowering = _PartLowering(graph, conditions, problem)
    work = sum(stage.multiply_adds for stage in graph.stages)
    checked = conditions.dtype != torch.float64 and work <= _CHECKED
    reference = _reference(graph, conditions) if checked else None
    first = lowering.lower(make_plan)
    if reference is None or _accurate(first[0], conditions, *reference):
        return first
    for name in lowering.alternatives():
        try:
            found = lowering.lower(partial(_with_strategy, name))
        except ConformalError:  # its constants leave the range of the dtype
            continue
        if _accurate(found[0], conditions, *reference):
            return found
    return first


class _PartLowering:
    """Lower a graph with the strategies that a function chooses."""

    def __init__(
        self, graph: StageGraph, conditions: Conditions, problem: Problem | None = None
    ) -> None:
        self.graph, single = graph, graph.single
        self.conditions = replace(conditions, staged=single is None)
        # None for a network of several stages.
        self.problem = problem or (None if single is None else Problem(single, self.conditions))
        self.plans: list[Plan] = []

    def lower(self, choose: _Choose) -> tuple[Recipe, tuple[Plan, ...]]:
        """Return the recipe and the plan of every stage."""
        conditions = self.conditions
        builder = RecipeBuilder(self.graph.input_shape)
        self.plans = []
        if self.problem is None:
            last = self._append_stages(builder, choose)
        else:
            last = self._append_single(builder, self.problem, choose)
        output = _add_division(builder, last, self.graph.bias)
        recipe = placed(builder.recipe(output), conditions.dtype, conditions.device)
        for name, array in recipe.constants.items():
            if not bool(array.isfinite().all()):
                used = "+".join(plan.strategy for plan in self.plans)
                got, remedy = f"NaN or infinity in {name}", 'Use strategy="layers".'
                raise refusal(f'fold(strategy="{used}")', "numbers within range", got, remedy)
        return recipe, tuple(self.plans)

    def alternatives(self) -> list[str]:
        """Return the other strategies to try: those of a single stage by speed, the layers of several."""
        return ["layers"] if self.problem is None else alternatives(make_plan(self.problem))

    def _append_single(self, builder: RecipeBuilder, problem: Problem, choose: _Choose) -> Points:
        """Append a network of one stage; return the points that leave it."""
        plan = choose(problem)
        start = _add_embedding(builder, self.graph)
        last = STRATEGIES[plan.strategy].lower(problem, builder, start)
        self.plans.append(plan)
        return last

    def _append_stages(self, builder: RecipeBuilder, choose: _Choose) -> Points:
        """Append several stages with the maps and joins between them; return the same points."""
        graph = self.graph
        start = _add_embedding(builder, graph)
        values: list[Points] = []
        for index, node in enumerate(graph.nodes):
            sources = [start if source < 0 else values[source] for source in node.sources]
            action = node.action
            if isinstance(action, HomogeneousMap):
                values.append(_add_map(builder, action, sources[0]))
            elif isinstance(action, Stage):
                entering = sources[0]
                if not action.direct:
                    entering = entering.for_squares(builder, action.sites)
                stage = replace(action, start=entering.scaling, entry=entering.bound)
                last = index == len(graph.nodes) - 1
                problem = Problem(stage, self.conditions, embedded=entering is start, last=last)
                plan = _LAYERS if stage.moves_only else choose(problem)
                first = len(builder.operations)
                values.append(STRATEGIES[plan.strategy].lower(problem, builder, entering))
                if not stage.moves_only:  # nothing was planned for slices and reshapes
                    advice = advice_for(graph, index, plan.strategy)
                    span = first, len(builder.operations)
                    self.plans.append(replace(plan, advice=advice, operations=span))
            else:
                values.append(join_points(builder, action, sources))
        return values[-1] if values else start


def _add_embedding(builder: RecipeBuilder, graph: StageGraph) -> Points:
    """Append the embedding of the input."""
    factor, offset = graph.embedding.norm_factor, graph.embedding.offset
    names = "unit", "peak", "tau"
    unit, peak, tau = builder.add_many(point.Normalize, INPUT, names=names, offset=offset / factor)
    return Points(unit, peak, tau, Scaling(factor), 1.0, 1 / factor)


def _add_map(builder: RecipeBuilder, action: HomogeneousMap, before: Points) -> Points:
    """Append a homogeneous map of z; LPPool squares its windows, so a large z is rescaled first."""
    points = before
    if before.bound > SQUARED:
        points = replace(before.rescale(builder)[0], rebased=before.rebased)
    z = Lowering(builder).module(points.z, action.module, action.output_shape)
    bound, size = points.bound * action.bound, points.size * action.bound
    return replace(points, z=z, bound=bound, size=size)


def _add_division(builder: RecipeBuilder, last: Points, bias: Tensor | None) -> str:
    """Append the division, and the bias of an absorbed head."""
    scale = float(last.scaling.rho)
    y = builder.add(point.Divide, last.z, last.tau, last.peak, name="y", scale=scale)
    if bias is None:
        return y
    return builder.add(layer.AddConstant, y, name="y", value=builder.constant("bias", bias))


# -- checks of a choice -----------------------------------------------------------------------------


def _with_strategy(name: str, problem: Problem) -> Plan:
    """Replace the strategy of a plan that is not accurate enough."""
    plan = make_plan(problem)
    if plan.strategy == name:
        return plan
    return replace(plan, strategy=name, reason=f"{plan.strategy} is not accurate enough")


def placed(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Recipe:
    """Move a recipe to a device and cast it; wide constants get the widest dtype of the device."""

    def convert(name: str, array: Tensor) -> Tensor:
        if not array.is_floating_point():  # indices
            return array.to(device)
        return array.to(device, wide_dtype(device) if name in recipe.wide else dtype)

    modules = {
        name: copy.deepcopy(module).to(dtype=dtype, device=device)
        for name, module in recipe.modules.items()
    }
    return replace(recipe.with_constants(convert), modules=modules)


def _reference(graph: StageGraph, conditions: Conditions) -> tuple[Tensor, Tensor]:
    """Return random samples, and the outputs of the layers for them in float64, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shape = _SAMPLES, *graph.input_shape
    x = torch.rand(shape, generator=generator, dtype=torch.float64).to(conditions.dtype)
    wide = Conditions(torch.float64, torch.device("cpu"))
    recipe, _ = _PartLowering(graph, wide).lower(lambda _: _LAYERS)
    return x.to(conditions.device), RecipeModule(recipe, torch.float64)(x.double())


def _accurate(recipe: Recipe, conditions: Conditions, x: Tensor, expected: Tensor) -> bool:
    """Check the outputs of a recipe against the tolerance of its dtype."""
    y = RecipeModule(recipe, conditions.dtype)(x).double().cpu()
    error = torch.linalg.vector_norm((y - expected).flatten(1), dim=1)
    size = torch.linalg.vector_norm(expected.flatten(1), dim=1)
    return bool((error <= TOLERANCES.get(conditions.dtype, 1.0) * size).all())
