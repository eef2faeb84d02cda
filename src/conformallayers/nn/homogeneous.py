"""Positively homogeneous maps, ``h(λx) = λ·h(x)`` for λ > 0: they act on x and leave t alone.

``nn.ReLU``, ``nn.MaxPool2d``, ``nn.LPPool2d(2, ...)`` and their relatives are torch.nn's own. This file adds
the maps that torch.nn lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from torch import Tensor, nn

from ..errors import is_whole, refusal
from .branches import Composite, Flow, Join, below, checked_module

T = TypeVar("T")


class Abs(nn.Module):
    """Take the absolute value of every coefficient.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> import torch
        >>> Abs()(torch.tensor([[-2.0, 3.0]]))
        tensor([[2., 3.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``|input|``."""
        return input.abs()


class Channels(nn.Module):
    """Keep the channels from ``start`` to before ``stop``: the first step of a group of :class:`Split`.

    Args:
        start, stop: the range of channels.
        channels: how many channels the input has.

    Shape:
        (B, C, ...) → (B, stop − start, ...)
    """

    def __init__(self, start: int, stop: int, channels: int) -> None:
        super().__init__()
        self.start, self.stop, self.channels = start, stop, channels

    def forward(self, input: Tensor) -> Tensor:
        """Return some of the channels."""
        return input[:, self.start : self.stop]

    def extra_repr(self) -> str:
        """Return the range and the number of channels."""
        return f"{self.start}, {self.stop}, channels={self.channels}"


class Split(Composite):
    """Pass groups of channels through modules of their own, and concatenate the results.

    The result has the coordinate of the first group.

    Args:
        sizes: the number of channels of each group; together all channels of the input.
        modules: one for each group: a layer, a map, a composite, or an ``nn.Sequential`` of them.

    Shape:
        (B, C, ...) → (B, C', ...)

    Examples:
        >>> import torch
        >>> import conformallayers as cl
        >>> pool = cl.Split([4, 12], [cl.AvgPool2d(2), torch.nn.LPPool2d(2, 2)])
        >>> cl.ConformalLayers(cl.Conv2d(3, 16, 3), cl.ReSPro(), pool)(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 16, 3, 3])
    """

    def __init__(self, sizes: Sequence[int], modules: Iterable[nn.Module]) -> None:
        super().__init__()
        many = isinstance(sizes, Sequence) and len(sizes) > 0
        if not many or not all(is_whole(n) and n > 0 for n in sizes):
            remedy = "Give the number of channels of each group."
            raise refusal("Split(sizes=...)", "whole numbers > 0", repr(sizes), remedy)
        self.sizes = tuple(sizes)
        self.groups = nn.ModuleList(checked_module("Split", module) for module in modules)
        if len(self.groups) != len(self.sizes):
            expected, got = f"{len(self.sizes)} modules, one a group", str(len(self.groups))
            raise refusal("Split(modules=...)", expected, got, "Use cl.Identity to keep a group.")
        self.join = Join("concatenate", disjoint=True)

    @property
    def channels(self) -> list[Channels]:
        """The modules that slice the groups from the input."""
        return list(_channels(self.sizes))

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Pass the groups through their modules and concatenate the results."""
        parts = zip(through.split(path, self.channels, value), self.groups, strict=True)
        values = [
            through.run(below(path, f"groups.{index}"), module, part)
            for index, (part, module) in enumerate(parts)
        ]
        return through.join(path, values, self.join)

    def extra_repr(self) -> str:
        """Return the sizes of the groups."""
        return f"sizes={list(self.sizes)}"


@lru_cache(maxsize=128)
def _channels(sizes: tuple[int, ...]) -> tuple[Channels, ...]:
    stops = list(accumulate(sizes))
    ranges = zip([0, *stops], stops, strict=False)
    return tuple(Channels(start, stop, stops[-1]) for start, stop in ranges)
