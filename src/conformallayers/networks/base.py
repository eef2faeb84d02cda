"""The base class of the networks, and checks of their arguments."""

from __future__ import annotations

import inspect
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..hub.mixin import Published

IMAGE_SHAPE = (3, 32, 32)


class Network(nn.Module, Published):
    """Compute features, flatten them, and apply a head.

    Attributes:
        arguments: those of the constructor, defaults included, without ``device`` and ``dtype``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Store the arguments, which rebuild the network after ``save_pretrained``."""
        network = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        try:
            bound = signature.bind_partial(network, *args, **kwargs)
        except TypeError:  # __init__ raises it again, in its own words
            return network
        bound.apply_defaults()
        network.arguments = {
            name: tuple(value) if isinstance(value, list) else value  # JSON has no tuples
            for name, value in list(bound.arguments.items())[1:]
            if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD
        }
        return network

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, input: Tensor) -> Tensor:
        """Return class scores, (B, 3, 32, 32) → (B, num_classes)."""
        scores: Tensor = self.head(torch.flatten(self.features(input), 1))
        return scores


def check_count(name: str, value: object, remedy: str, most: int | None = None) -> None:
    """Refuse a value that is not a whole number > 0, or above the most."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refusal(name, "a whole number > 0", repr(value), remedy)
    if most is not None and value > most:
        raise refusal(name, f"{most} at most", repr(value), remedy)


def check_share(name: str, value: object, remedy: str) -> None:
    """Refuse a value that is not a number from 0 to below 1."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < 1:  # type: ignore[operator]
        raise refusal(name, "a number from 0 to below 1", repr(value), remedy)


def make_head(
    features: int, hidden: int | None, num_classes: int, factory: dict[str, Any]
) -> nn.Module:
    """Return a linear layer, or two with a ReLU between them if there is a hidden width."""
    if hidden is None:
        return nn.Linear(features, num_classes, **factory)
    return nn.Sequential(
        nn.Linear(features, hidden, **factory),
        nn.ReLU(),
        nn.Linear(hidden, num_classes, **factory),
    )
