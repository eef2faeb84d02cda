"""Plan → Recipe: lower one ConformalLayers by the strategy that was chosen for it."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ConformalError, refusal
from ..functional import wide_dtype
from ..recipe.recipe import INPUT, Recipe, RecipeBuilder
from ..recipe.torch.module import RecipeModule
from .plan import Plan, alternatives
from .problem import Problem
from .strategies import STRATEGIES

# Relative errors that a fold may have; cl.testing publishes them.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 1e-2,
}
_SAMPLES = 2  # on which a choice is checked
_CHECKED = 2e8  # largest network that is checked, in multiply-adds of its layers for one sample


def lower_part(problem: Problem, plan: Plan) -> tuple[Recipe, Plan]:
    """Return the recipe of a plan, in the dtype of the problem, and the plan with its certificate."""
    builder = RecipeBuilder(problem.stage.input_shape)
    output, certificate = STRATEGIES[plan.strategy].lower(problem, builder, INPUT)
    recipe = placed(builder.recipe(output), problem.dtype, problem.device)
    for name, array in recipe.constants.items():
        if not bool(array.isfinite().all()):
            got, remedy = f"NaN or infinity in {name}", 'Use strategy="layers".'
            raise refusal(f'fold(strategy="{plan.strategy}")', "numbers within range", got, remedy)
    return recipe, replace(plan, certificate=certificate)


def lower_checked(problem: Problem, plan: Plan) -> tuple[Recipe, Plan]:
    """Return the recipe of an automatic choice, or of the next strategy if it is not accurate.

    The error is measured on a few random samples against the layers in float64. If no strategy is
    accurate enough, the first choice is kept.
    """
    first = recipe, plan = _lower_certified(problem, plan)
    layers = next(c for c in plan.candidates if c.name == "layers")
    if problem.dtype == torch.float64 or (layers.multiply_adds or 0) > _CHECKED:
        return first
    x, expected = _reference(problem)
    if _error(recipe, problem, x, expected) <= TOLERANCES.get(problem.dtype, 1.0):
        return first
    for name in alternatives(plan):
        other = replace(plan, strategy=name, reason=f"{plan.strategy} is not accurate enough")
        recipe, other = lower_part(problem, other)
        if _error(recipe, problem, x, expected) <= TOLERANCES.get(problem.dtype, 1.0):
            return recipe, other
    return first


def _lower_certified(problem: Problem, plan: Plan) -> tuple[Recipe, Plan]:
    """Return the recipe of a choice, or of the next strategy whose rounding keeps the tolerance."""
    try:
        return lower_part(problem, plan)
    except ConformalError:
        for name in alternatives(plan) if problem.requested.requested else ():
            other = replace(plan, strategy=name, reason=f"{plan.strategy} loses too many digits")
            with contextlib.suppress(ConformalError):
                return lower_part(problem, other)
        raise


def placed(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Recipe:
    """Cast the constants and modules of a recipe, wide ones to the widest dtype of the device."""

    def convert(name: str, array: Tensor) -> Tensor:
        if not array.is_floating_point():  # indices
            return array.to(device)
        return array.to(device, wide_dtype(device) if name in recipe.wide else dtype)

    modules = {
        name: copy.deepcopy(module).to(dtype=dtype, device=device)
        for name, module in recipe.modules.items()
    }
    return replace(recipe.with_constants(convert), modules=modules)


def _reference(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return random samples, and the outputs of the layers for them in float64."""
    generator = torch.Generator().manual_seed(0)
    shape = _SAMPLES, *problem.stage.input_shape
    x = torch.rand(shape, generator=generator, dtype=torch.float64).to(problem.dtype)
    builder = RecipeBuilder(problem.stage.input_shape)
    output, _ = STRATEGIES["layers"].lower(problem, builder, INPUT)
    cpu = torch.device("cpu")
    exact = RecipeModule(placed(builder.recipe(output), torch.float64, cpu), torch.float64)
    return x.to(problem.device), exact(x.double())


def _error(recipe: Recipe, problem: Problem, x: Tensor, expected: Tensor) -> float:
    y = RecipeModule(recipe, problem.dtype)(x).double().cpu().flatten(1)
    expected = expected.flatten(1)
    size = torch.linalg.vector_norm(expected, dim=1)
    return float((torch.linalg.vector_norm(y - expected, dim=1) / size).max())
