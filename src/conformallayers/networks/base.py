"""The base class of the networks, checks of arguments, and heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ..errors import is_real, missing_extra, refusal
from ..utils.text import suggest

IMAGE_SHAPE = (3, 32, 32)


def _missing(*args: Any, **kwargs: Any) -> Any:
    raise missing_extra("huggingface_hub", "hub", "the Hugging Face Hub")


class _NotInstalled:
    """Name the extra that is not installed."""

    save_pretrained = push_to_hub = from_pretrained = staticmethod(_missing)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()


if TYPE_CHECKING:
    _Hub = _NotInstalled
else:
    try:
        from huggingface_hub import PyTorchModelHubMixin as _Hub
    except ImportError:
        _Hub = _NotInstalled


class Network(
    nn.Module,
    _Hub,
    library_name="conformallayers",
    license="apache-2.0",
    pipeline_tag="image-classification",
    tags=["geometric-algebra", "re-parameterization"],
    repo_url="https://github.com/conformallayers/conformallayers",
    docs_url="https://conformallayers.github.io/conformallayers",
):
    """Compute features, flatten them, and apply a head.

    ``save_pretrained``, ``push_to_hub`` and ``from_pretrained`` are those of ``huggingface_hub.PyTorchModelHubMixin``.

    Attributes:
        arguments: those of the constructor, defaults included, without ``device`` and ``dtype``.
    """

    arguments: dict[str, Any]
    _hub_mixin_config: dict[str, Any]  # what huggingface_hub writes to config.json

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Store the arguments, which rebuild the network after ``save_pretrained``."""
        network = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        try:
            bound = signature.bind_partial(network, *args, **kwargs)
        except TypeError:  # __init__ raises it again, in its own words
            return network
        bound.apply_defaults()
        for option in bound.arguments.get("factory", {}).keys() - {"device", "dtype"}:
            expected = "an argument of the network, device or dtype"
            remedy = f"help({cls.__name__}) lists them.{suggest(option, signature.parameters)}"
            raise refusal(cls.__name__, expected, repr(option), remedy)
        network.arguments = {
            name: tuple(value) if isinstance(value, list) else value  # JSON has no tuples
            for name, value in list(bound.arguments.items())[1:]
            if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD
        }
        network._hub_mixin_config = network.arguments
        return network

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, input: Tensor) -> Tensor:
        """Return class scores, (B, 3, 32, 32) → (B, num_classes)."""
        scores: Tensor = self.head(torch.flatten(self.features(input), 1))
        return scores


def check_share(name: str, value: object, remedy: str) -> None:
    """Refuse a value that is not a number from 0 to below 1."""
    if not is_real(value) or not 0 <= value < 1:
        raise refusal(name, "a number from 0 to below 1", repr(value), remedy)


def make_head(
    widths: Sequence[int | None], factory: dict[str, Any], *between: Callable[[], nn.Module]
) -> nn.Module:
    """Return linear layers from each width to the next, with modules between two of them.

    A width of None is left out: no such hidden layer.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(width for width in widths if width is not None):
        layers += [build() for build in between if layers]
        layers.append(nn.Linear(before, after, **factory))
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)
