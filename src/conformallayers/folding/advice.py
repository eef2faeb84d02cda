"""Advice for ``explain()``: changes of a model that make a stage cheaper."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import dropwhile

from torch import nn

from ..nn.bounds import conv_pads
from .operators import Operator, same_in_channels
from .split import StageGraph
from .stages import ActivationSite, Stage

_MATRICES = "dense", "banded"  # strategies that write a stage out, whatever its layers


def advice_for(graph: StageGraph, index: int, strategy: str) -> tuple[str, ...]:
    """Return advice on the stage at a node, given the strategy that was chosen for it."""
    stage = graph.nodes[index].action
    if not isinstance(stage, Stage):
        return ()
    return (*_of_stage(stage, strategy), *_of_end(graph, index, stage))


def _of_stage(stage: Stage, strategy: str) -> Iterator[str]:
    convolutions = [op for op in stage.operators if isinstance(op.module, nn.modules.conv._ConvNd)]
    zeros = all(getattr(op.module, "padding_mode", "") == "zeros" for op in convolutions)
    padded = any(any(map(any, conv_pads(op.module))) for op in convolutions[1:])
    if strategy not in _MATRICES and zeros and padded:
        become = f"its {len(convolutions)} convolutions become one"
        yield f"padding inside the stage: pad once at its start and {become}"
    if _inner_activations(stage):
        yield (
            "an activation between layers needs an energy of its own: "
            "at the end of the stage it is free"
        )
    if strategy not in (*_MATRICES, "layers") and _bias_is_image(stage):
        yield (
            "a bias before a padded convolution makes the bias an image: "
            "put it behind the convolution"
        )


def _of_end(graph: StageGraph, index: int, stage: Stage) -> Iterator[str]:
    """Advise against a bias that separates this stage from the next.

    Without a map between them, only a bias does. A next stage without weights and activations is free.
    """
    readers = [node.action for node in graph.nodes if index in node.sources]
    if len(readers) == 1 and isinstance(readers[0], Stage) and stage.sites:
        if readers[0].moves_only:
            return
        if readers[0].direct:
            yield "a bias behind an activation ends the stage there: without that bias this stage and the next are one"
        elif stage.direct:
            yield "an activation behind a bias ends the stage there: without that bias this stage and the next are one"


def _inner_activations(stage: Stage) -> bool:
    """Tell whether a layer with weights follows an activation."""
    actions = (node.action for node in stage.nodes)
    behind = dropwhile(lambda action: not isinstance(action, ActivationSite), actions)
    return any(isinstance(action, Operator) and action.has_tensors for action in behind)


def _bias_is_image(stage: Stage) -> bool:
    """Tell whether the constant of a direct stage differs from pixel to pixel, and is no shift of its input."""
    constant = stage.constant if stage.direct else None
    if constant is None or same_in_channels(constant):
        return False
    return stage.entry_bias is None
