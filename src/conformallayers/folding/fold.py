"""Fold a model: Graph → Recipe, checked against the layers where the choice of a strategy was automatic.

Layers before a ConformalLayers that only scale the norm, and affine layers after it, become part of its stages.
Affine stages are lowered layer by layer: the merge pass composes their layers. The plan of a radial stage says which
strategy lowers it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import checked_shape, refusal
from ..graph.capture import capture
from ..graph.graph import INPUT, Graph, Node, between, frozen_wide
from ..graph.trace import Trace, trace_part
from ..nn.bounds import Shape
from ..nn.branches import Join
from ..nn.layers import Product
from ..nn.registry import find_spec, held_tensors
from ..recipe import layer_operations as layer
from ..recipe import point_operations as point
from ..recipe import recipe as recipes
from ..recipe.integer_operations import integer_values
from ..recipe.recipe import Recipe, RecipeBuilder
from ..recipe.torch.module import RecipeModule, placed
from .folded import Folded
from .lower import (
    Lowering,
    PointValues,
    add_join,
    add_layer,
    by_sample,
    find_lowering,
    size_after,
)
from .merge import merge
from .plan import Plan, Problem, Settings, checked_strategy, make_plan
from .stage_graph import HomogeneousMap, StageGraph, shortest, stages_of, with_heads, with_prefix
from .stages import ActivationSite, AffineStage, Scaling
from .strategies import STRATEGIES

# Relative errors that a fold may have; cl.testing publishes them.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 1e-2,
}
_SAMPLES = 2  # random inputs
_CHECKED = 2e8  # multiply-adds of the layers for one sample, up to which a choice is checked
_LONGEST = 200  # characters of a call that an error shows


def fold(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    strategy: str = "auto",
    dtype: torch.dtype | None = None,
) -> Folded:
    """Fold a model into a new module for inference; the model is not changed.

    Runs of affine layers and branches merge into the cheapest exact convolution or product. Each
    ConformalLayers becomes one linear map and one quadratic form, and the linear layers right after it are
    absorbed while that makes it cheaper. Whatever the mode of the model, the fold has evaluation
    semantics: dropout is the identity.

    Args:
        model: any module that torch.fx can trace.
        input_shape: of one sample, without the batch axis.
        strategy: ``"auto"`` takes the accurate one of the lowest estimated cost. By name, where it applies:
            ``"dense"``, ``"banded"`` (image rows as blocks), ``"conv"`` (composed kernels along the cheapest route),
            ``"layers"`` (one by one, with all factors merged into weights).
        dtype: of the result; None takes that of the model's first parameter.

    Returns:
        A :class:`Folded` module. ``print(folded.explain())`` shows what merged and why the rest did not,
        ``print(folded.recipe)`` the operations that run.

    Examples:
        >>> import conformallayers as cl
        >>> model = torch.nn.Sequential(
        ...     cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(), cl.Conv2d(8, 8, 3), cl.ReSPro()),
        ...     torch.nn.Flatten(),
        ...     torch.nn.Linear(128, 10),
        ... )
        >>> folded = cl.fold(model, (1, 8, 8))
        >>> x = torch.rand(5, 1, 8, 8)
        >>> torch.allclose(folded(x), model.eval()(x), atol=1e-6)
        True
    """
    shape = checked_shape(input_shape, "fold(input_shape=...)")
    strategy = checked_strategy(strategy)
    parameter = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    if dtype is None:
        dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        expected, remedy = "a floating-point torch.dtype", "Try torch.float32."
        raise refusal("fold(dtype=...)", expected, repr(dtype), remedy)
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type == "meta":
        expected, remedy = "a model with values", "Load its weights before the fold."
        raise refusal("fold(model)", expected, "one on meta", remedy)
    settings = Settings(dtype, device, strategy)
    with torch.inference_mode(False), torch.no_grad():
        return _folded(model, shape, settings)


def _folded(model: nn.Module, shape: Shape, settings: Settings) -> Folded:
    """Fold every ConformalLayers of a model, and lower the layers around them."""
    graph = capture(model, shape, share=True)
    builder, plans = RecipeBuilder(shape), dict[str, Plan]()
    values, paths = {INPUT: recipes.INPUT}, dict[str, str]()
    if graph.fixed:  # a reshape does not let samples of another size pass
        values[INPUT] = builder.add(layer.Reshape, recipes.INPUT, shape=shape)
    # By the last node of each ConformalLayers: the node that feeds it, and its stages.
    parts: dict[int, tuple[int, StageGraph]] = {}
    for part in graph.parts:
        start, stages = with_prefix(graph, part, stages_of(trace_part(graph, part), part.label))
        end, stages = shortest(with_heads(graph, part, stages))
        parts[end] = start, stages
    inside = {number for end, (start, _) in parts.items() for number in between(graph, start, end)}
    for number, node in enumerate(graph.nodes):
        start = len(builder.operations)
        if number in parts:
            source, stages = parts[number]
            recipe, own = _lower_accurately(stages, settings)
            _refuse_overflow(recipe, settings, stages.path)
            values[number] = builder.splice(recipe, values[source])
            plans |= own
        elif number not in inside:
            sources = [values[source] for source in node.sources]
            module: Any = node.module
            fits = isinstance(module, Folded) and module.input_shape == graph.shape(node.sources[0])
            if fits and not integer_values(module.recipe.operations):
                values[number] = builder.splice(module.recipe, sources[0])
                plans |= {f"{node.name} {name}".strip(): p for name, p in module.plans.items()}
            else:
                values[number] = _lower_node(builder, graph, node, sources)
        added = (name for op in builder.operations[start:] for name in op.outputs)
        paths |= dict.fromkeys(added, stages.path if number in parts else node.name)
    merged, regions = merge(builder.recipe(values[graph.output]), settings.dtype)
    regions = tuple(replace(region, start=paths.get(region.start, "input")) for region in regions)
    merged = _apart(placed(merged, settings.dtype, settings.device), model)
    return Folded(merged, settings.dtype, plans, fingerprint(model), regions)


def _apart(recipe: Recipe, model: nn.Module) -> Recipe:
    """Copy the constants that lie in the memory of a model."""
    held = {tensor.untyped_storage().data_ptr() for tensor in held_tensors(model)}

    def own(name: str, array: Tensor) -> Tensor:
        return array.clone() if array.untyped_storage().data_ptr() in held else array

    return recipe.with_constants(own)


def fold_layers(trace: Trace, settings: Settings) -> Recipe:
    """Fold the layers of one ConformalLayers; their modules are frozen in float64."""
    recipe, _ = lower_stages(stages_of(trace), settings)
    _refuse_overflow(recipe, settings)
    return placed(merge(recipe, settings.dtype)[0], settings.dtype, settings.device)


def fingerprint(model: nn.Module) -> str | None:
    """Return the SHA-256 of a model's state: names, dtypes, shapes and bytes; None on "meta".

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> before = fingerprint(layer)
        >>> _ = nn.init.zeros_(layer.weight)
        >>> fingerprint(layer) == before
        False
    """
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    if any(tensor.is_meta for tensor in state.values()):
        return None
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.cpu().contiguous().reshape(-1)
        flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _refuse_overflow(recipe: Recipe, settings: Settings, path: str = "") -> None:
    """Refuse constants that leave the range of the dtype."""
    for name, array in recipe.constants.items():
        if not bool((array.abs() <= torch.finfo(settings.dtype).max).all()):
            where, got = (
                "ConformalLayers" + f" at {path}" * bool(path),
                f"NaN or infinity in {name}",
            )
            remedy = 'Check its weights; if they are finite, fold with strategy="layers".'
            raise refusal(where, f"a fold that {settings.dtype} can hold", got, remedy)


def _lower_accurately(graph: StageGraph, settings: Settings) -> tuple[Recipe, dict[str, Plan]]:
    """Lower with the fastest strategies that are accurate; keep the fastest ones if none are.

    A strategy that was asked for by name is not checked.
    """
    first = found = lower_stages(graph, settings)
    work = sum(stage.multiply_adds for stage in graph.stages)
    exact = settings.dtype == torch.float64 or settings.strategy != "auto"
    if not found[1] or exact or work > _CHECKED:
        return first
    generator = torch.Generator().manual_seed(0)
    shape = _SAMPLES, *graph.input_shape
    x = torch.rand(shape, generator=generator, dtype=torch.float64).to(settings.dtype)
    wide = Settings(torch.float64, torch.device("cpu"), "layers")
    expected = _placed(lower_stages(graph, wide)[0], wide)(x.double())
    inaccurate: set[str] = set()
    while not _accurate(found[0], settings, x, expected):
        tried = {plan.strategy for plan in found[1].values()}
        if tried <= inaccurate:
            return first
        inaccurate |= tried
        found = lower_stages(graph, settings, inaccurate)
    return found


def _placed(recipe: Recipe, settings: Settings) -> RecipeModule:
    return RecipeModule(placed(recipe, settings.dtype, settings.device), settings.dtype)


def _accurate(recipe: Recipe, settings: Settings, x: Tensor, expected: Tensor) -> bool:
    """Compare the outputs of a recipe with the expected ones, by the tolerance of its dtype."""
    merged, _ = merge(recipe, settings.dtype)
    y = _placed(merged, settings)(x.to(settings.device)).double().cpu()
    error = torch.linalg.vector_norm((y - expected).flatten(1), dim=1)
    size = torch.linalg.vector_norm(expected.flatten(1), dim=1)
    return bool((error <= TOLERANCES.get(settings.dtype, 1.0) * size).all())


# -- stages ------------------------------------------------------------------------------------------


def lower_stages(
    graph: StageGraph,
    settings: Settings,
    inaccurate: Collection[str] = (),
) -> tuple[Recipe, dict[str, Plan]]:
    """Return the recipe of a network in float64, and the plan of every radial stage by its name.

    Args:
        graph: the network.
        settings: of the fold.
        inaccurate: strategies that "auto" must not take.
    """
    builder = RecipeBuilder(graph.input_shape)
    names, factor = ("unit", "peak", "tau"), graph.norm_factor
    offset = graph.offset / factor
    unit, peak, tau = builder.add_many(point.Normalize, recipes.INPUT, names=names, offset=offset)
    start = PointValues(unit, peak, tau, Scaling(factor), 1.0, 1 / factor)
    values: list[PointValues] = []
    plans: dict[str, Plan] = {}
    for node in graph.nodes:
        sources = [start if source < 0 else values[source] for source in node.sources]
        action, points = node.action, sources[0]
        if isinstance(action, HomogeneousMap):
            points = points.in_range(builder)  # LPPool squares its windows
            z = Lowering(builder).module(points.z, action.module, action.output_shape)
            bound, size = points.bound * action.bound, points.size * action.bound
            values.append(replace(points, z=z, bound=bound, size=size))
        elif isinstance(action, Join):
            values.append(_add_join(builder, action, sources))
        elif isinstance(action, AffineStage):
            values.append(_add_affine(builder, action, points))
        else:
            stage = action.entered(points.scaling, points.bound, float(points is start))
            problem = Problem(stage, settings.dtype)
            own = graph.absorbed if node is graph.nodes[-1] else 0
            plan = make_plan(problem, settings, absorbed=own, inaccurate=inaccurate)
            plans[graph.label(action)] = plan
            values.append(STRATEGIES[plan.strategy].lower(problem, builder, points))
    if plans and all(plan.strategy != settings.strategy != "auto" for plan in plans.values()):
        where, expected = (
            f'fold(strategy="{settings.strategy}")',
            "a model that the strategy can fold",
        )
        candidates = next(iter(plans.values())).candidates
        note = next(c.note for c in candidates if c.name == settings.strategy)
        raise refusal(where, expected, f"one where {note}", 'Use strategy="auto".')
    output = _add_division(builder, graph, values[-1] if values else start)
    return builder.recipe(output), plans


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
            to, bias = Lowering(builder), action.bias
            first = bias[(slice(None), *[slice(0, 1)] * (bias.dim() - 1))]
            # one number per channel, up to the rounding of float64
            alike = bool(((bias - first).abs() <= 1e-14 * bias.abs().max()).all())
            z = to.module(points.z, action.module, action.output_shape)
            z, size = to.shift(z, first if alike else bias), size_after((action,), points.size)
            points = replace(points, z=z, bound=size, size=size)
    return points


def _add_division(builder: RecipeBuilder, graph: StageGraph, last: PointValues) -> str:
    """Append the division, unless z is the point already, and the bias of an absorbed head."""
    scale = float(last.scaling.rho)
    ones = any(isinstance(op, point.Rebase) and last.tau in op.outputs for op in builder.operations)
    y = last.z
    if not (ones and scale == 1 and graph.offset > 0):  # without an offset, τ may be 0
        y = builder.add(point.Divide, y, last.tau, last.peak, name="y", scale=scale)
    return y if graph.bias is None else Lowering(builder).shift(y, graph.bias)


def _lower_node(builder: RecipeBuilder, graph: Graph, node: Node, sources: list[str]) -> str:
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
        what=node.call[:_LONGEST] + f" at {node.path}" * bool(node.path),
        result=node.row,
        by_sample=apart and fits,
    )
