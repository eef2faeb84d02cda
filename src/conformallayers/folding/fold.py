"""Fold a model: the public functions, from their arguments to the module that runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import checked_shape, refusal
from ..graph.capture import capture
from ..graph.graph import Graph, Part
from ..nn.bounds import Shape
from ..utils.fingerprint import fingerprint
from .absorb import stages_at, with_followers
from .cost import Cost
from .folded import Folded
from .lower_graph import LoweredPart, lower_graph
from .merge import merge
from .part import lower_checked, lower_part, placed
from .plan import checked_strategy, optimistic_seconds
from .problem import Conditions, Problem
from .split import StageGraph


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
        strategy: ``"auto"`` takes the fastest accurate one, by a cost model of this machine. By name:
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
    conditions = Conditions(dtype, device, strategy)
    with torch.inference_mode(False), torch.no_grad():
        return _folded(model, shape, conditions)


def _folded(model: nn.Module, shape: Shape, conditions: Conditions) -> Folded:
    """Fold every ConformalLayers of a model, and lower the layers around them."""
    graph = capture(model, shape)
    parts: dict[int, LoweredPart] = {}
    for part in graph.parts:
        found = _largest_part(graph, part, conditions)
        lower = lower_checked if conditions.strategy == "auto" else lower_part
        recipe, chosen = lower(found.stages, conditions, found.problem)
        labels = [part.label]
        if found.stages.single is None:
            labels = [f"{part.label} stage {i + 1}".strip() for i in range(len(chosen))]
        plans = dict(zip(labels, chosen, strict=True))
        if plans:
            plans[labels[-1]] = replace(chosen[-1], absorbed=found.absorbed)
        parts[found.end] = LoweredPart(recipe, found.feed, plans)
    recipe, plans = lower_graph(graph, parts)
    dtype, device = conditions.dtype, conditions.device
    merged, regions = merge(recipe, dtype)
    return Folded(placed(merged, dtype, device), dtype, plans, fingerprint(model), regions)


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


@dataclass(frozen=True)
class _Part:
    """A ConformalLayers with its prefix and its absorbed layers: the nodes that fold together."""

    stages: StageGraph
    problem: Problem | None  # of the only stage, if there is one
    feed: int
    end: int
    absorbed: int


def _largest_part(graph: Graph, part: Part, conditions: Conditions) -> _Part:
    """Choose how many following layers to absorb, by predicted costs: building each would take too long."""
    stages, feed = stages_at(graph, part)
    candidates = with_followers(graph, part, stages)
    problems: list[Problem | None] = []  # of the last stage, with none, one, … layers absorbed
    seconds: list[float] = []  # of that stage and of the layers that are not absorbed
    for end, longer in candidates:
        last = graph.readers[end] == (len(graph.nodes),)
        problem = problems[0] if problems and longer.single else None
        if problem is not None and longer.last is not None:
            problem = problem.with_stage(longer.last, last)
        elif longer.last is not None:
            single = longer.single is not None
            own = replace(conditions, staged=not single)
            problem = Problem(longer.last, own, embedded=single, last=last)
        if problems and longer.last is not None:
            # The candidates before this one run its last layer separately.
            work = longer.last.operators[-1].multiply_adds()
            alone = Cost(gemm=work, calls=2).seconds()
            seconds = [before + alone for before in seconds]
        problems.append(problem)
        seconds.append(0.0 if problem is None else optimistic_seconds(problem))
    best = min(range(len(seconds)), key=lambda i: (seconds[i], -i))
    end, chosen = candidates[best]
    return _Part(chosen, problems[best] if chosen.single else None, feed, end, best)


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
