"""The check of every automatic choice: its recipe against the layers in float64, on random samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..recipe.recipe import Recipe
from ..recipe.torch.module import RecipeModule, placed
from .lower_stages import lower_stages
from .merge import merge
from .plan import Plan, Settings
from .stages import StageGraph

# Relative errors that a fold may have; cl.testing publishes them.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 1e-2,
}
_SAMPLES = 2  # random inputs
_CHECKED = 2e8  # multiply-adds of the layers for one sample, up to which a choice is checked


def lower_accurately(
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
