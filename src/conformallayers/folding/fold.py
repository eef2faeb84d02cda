"""Fold a model: from the arguments of the public functions to the module that runs, checked against its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import checked_shape, refusal
from ..graph.capture import capture
from ..graph.trace import Trace
from ..nn.bounds import Shape
from ..recipe.recipe import Recipe
from ..recipe.torch.module import RecipeModule, placed
from ..utils.fingerprint import fingerprint
from .folded import Folded
from .lower_graph import LoweredPart, lower_graph, lower_stages, stages_at, with_followers
from .merge import merge
from .plan import Plan, Settings, checked_strategy, optimistic_seconds
from .scaling import Scaling
from .stages import RadialStage, StageGraph, stages_of
from .strategies.base import Cost, Problem

# Relative errors that a fold may have; cl.testing publishes them.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 1e-2,
}
_SAMPLES = 2  # random inputs
_CHECKED = 2e8  # multiply-adds of the layers for one sample, up to which a choice is checked


def fold(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    strategy: str = "auto",
    dtype: torch.dtype | None = None,
) -> Folded:
    """Fold a model into a new module for inference; the model is not changed.

    Runs of affine layers and branches merge into the cheapest exact convolution or product. Each
    ConformalLayers becomes one linear map and one quadratic form, and the linear layers right behind it are
    absorbed while that makes it cheaper. Whatever the mode of the model, the fold has evaluation
    semantics: dropout is the identity.

    Args:
        model: any module that torch.fx can trace.
        input_shape: of one sample, without the batch axis.
        strategy: ``"auto"`` takes the fastest accurate one, by counts of work. By name, where it applies:
            ``"dense"``, ``"banded"`` (image rows as blocks), ``"conv"`` (composed kernels along the cheapest route),
            ``"layers"`` (no folding, only α and factors resolved).
        dtype: of the result; None takes that of the model's first parameter.

    Returns:
        A :class:`Folded` module. ``print(folded.explain())`` tells what was chosen and why,
        ``print(folded.recipe)`` what runs.

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
    dtype, device = _dtype_and_device(model, dtype)
    settings = Settings(dtype, device, strategy)
    with torch.inference_mode(False), torch.no_grad():
        return _folded(model, shape, settings)


def _folded(model: nn.Module, shape: Shape, settings: Settings) -> Folded:
    """Fold every ConformalLayers of a model, and lower the layers around them."""
    graph = capture(model, shape)
    parts: dict[int, LoweredPart] = {}
    for part in graph.parts:
        stages, feed = stages_at(graph, part)
        candidates = with_followers(graph, part, stages)
        absorbed = _absorbed([longer for _, longer in candidates], settings)
        end, stages = candidates[absorbed]
        recipe, plans = _lower_accurately(stages, settings, part.label, absorbed)
        _refuse_overflow(recipe, settings)
        parts[end] = LoweredPart(recipe, feed, plans)
    recipe, plans = lower_graph(graph, parts)
    merged, regions = merge(recipe, settings.dtype)
    merged = placed(merged, settings.dtype, settings.device)
    return Folded(merged, settings.dtype, plans, fingerprint(model), regions)


def fold_layers(trace: Trace, settings: Settings) -> Recipe:
    """Fold the layers of one ConformalLayers; their modules are frozen in float64."""
    recipe, _ = lower_stages(stages_of(trace), settings)
    _refuse_overflow(recipe, settings)
    return placed(merge(recipe, settings.dtype)[0], settings.dtype, settings.device)


def _refuse_overflow(recipe: Recipe, settings: Settings) -> None:
    """Refuse constants that leave the range of the dtype."""
    for name, array in recipe.constants.items():
        if not bool((array.abs() <= torch.finfo(settings.dtype).max).all()):
            where, got = f'fold(strategy="{settings.strategy}")', f"NaN or infinity in {name}"
            raise refusal(where, "numbers within range", got, 'Use strategy="layers".')


def stages_by_part(
    model: nn.Module, input_shape: Shape, *, prefix: bool = True
) -> dict[str, list[StageGraph]]:
    """Return, for each ConformalLayers, its stages with none, one, … following layers absorbed.

    ``prefix`` includes the layers before the ConformalLayers that fold away.
    """
    graph = capture(model, input_shape)
    found = {}
    for part in graph.parts:
        stages, _ = stages_at(graph, part, prefix=prefix)
        found[part.label] = [longer for _, longer in with_followers(graph, part, stages)]
    if not found:
        expected = "a cl.ConformalLayers, or a module with some inside"
        raise refusal("model", expected, type(model).__name__, "Only their stages have forms.")
    return found


def _absorbed(candidates: Sequence[StageGraph], settings: Settings) -> int:
    """Choose how many following layers to absorb, given the stages with none, one, … of them.

    An affine stage takes all: the merge pass composes them. A radial stage takes as many as predicted costs say.
    """
    seconds: list[float] = []  # of the last stage and of the layers that are not absorbed
    for graph in candidates:
        stage = graph.last
        if len(candidates) == 1 or not isinstance(stage, RadialStage):
            return len(candidates) - 1
        if seconds:  # the candidates before this one run its last layer separately
            alone = Cost(gemm=stage.operators[-1].multiply_adds(), calls=2).seconds()
            seconds = [before + alone for before in seconds]
        problem = Problem(stage.entered(Scaling(graph.norm_factor)), settings.dtype)
        seconds.append(optimistic_seconds(problem, settings.strategy))
    return min(range(len(seconds)), key=lambda i: (seconds[i], -i))


def _dtype_and_device(
    model: nn.Module, dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.device]:
    parameter = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
    if dtype is None:
        dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise refusal(
            "fold(dtype=...)", "a floating-point torch.dtype", repr(dtype), "Try torch.float32."
        )
    return dtype, torch.device("cpu") if parameter is None else parameter.device


def _lower_accurately(
    graph: StageGraph, settings: Settings, path: str = "", absorbed: int = 0
) -> tuple[Recipe, dict[str, Plan]]:
    """Lower with the fastest strategies that are accurate; keep the fastest ones if none are.

    A strategy that was asked for by name is not checked.
    """
    first = found = lower_stages(graph, settings, path, absorbed=absorbed)
    work = sum(stage.multiply_adds for stage in graph.stages)
    exact = settings.dtype == torch.float64 or settings.strategy != "auto"
    if not found[1] or exact or work > _CHECKED:
        return first
    x, expected = _reference(graph, settings)
    inaccurate: set[str] = set()
    while not _accurate(found[0], settings, x, expected):
        tried = {plan.strategy for plan in found[1].values()}
        if tried <= inaccurate:
            return first
        inaccurate |= tried
        found = lower_stages(graph, settings, path, absorbed=absorbed, inaccurate=inaccurate)
    return found


def _reference(graph: StageGraph, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return random samples, and the outputs of the layers for them in float64, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shape = _SAMPLES, *graph.input_shape
    x = torch.rand(shape, generator=generator, dtype=torch.float64).to(settings.dtype)
    wide = Settings(torch.float64, torch.device("cpu"), "layers")
    recipe, _ = lower_stages(graph, wide)
    module = RecipeModule(placed(recipe, wide.dtype, wide.device), wide.dtype)
    return x.to(settings.device), module(x.double())


def _accurate(recipe: Recipe, settings: Settings, x: Tensor, expected: Tensor) -> bool:
    """Compare the outputs of a recipe with the expected ones, by the tolerance of its dtype."""
    merged = placed(merge(recipe, settings.dtype)[0], settings.dtype, settings.device)
    y = RecipeModule(merged, settings.dtype)(x).double().cpu()
    error = torch.linalg.vector_norm((y - expected).flatten(1), dim=1)
    size = torch.linalg.vector_norm(expected.flatten(1), dim=1)
    return bool((error <= TOLERANCES.get(settings.dtype, 1.0) * size).all())
