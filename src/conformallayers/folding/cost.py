"""Predict the time of a recipe from counts of work, with fixed rates: the same choice on every machine."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from torch import nn

from .operators import CONVOLUTIONS, Operator, is_plain

BATCH = 64  # the batch size that costs are compared at
LANES = 16  # output channels that a convolution computes at a time


@dataclass(frozen=True)
class Rates:
    """Work per second at float32.

    ``gemm``, ``blocks`` and ``conv`` are multiply-adds a second in one large product, in many small ones
    and in a convolution; ``stream`` is elements a second in a pass over memory; ``call`` is seconds for any
    call at all.
    """

    gemm: float
    blocks: float
    conv: float
    stream: float
    call: float


RATES = Rates(57e9, 60e9, 85e9, 10e9, 3e-6)  # measured on two cores of a server CPU


@dataclass(frozen=True)
class Cost:
    """The work of one sample by kind, and the bytes of all constants."""

    gemm: float = 0  # multiply-adds in large products
    blocks: float = 0  # multiply-adds in many small products
    conv: float = 0  # multiply-adds in convolutions and poolings
    idle: float = 0  # multiply-adds of lanes that a convolution has no channels for
    stream: float = 0  # elements that a pass over memory touches
    calls: int = 0  # per batch
    bytes: int = 0

    @property
    def multiply_adds(self) -> float:
        """All multiply-adds of one sample."""
        return self.gemm + self.blocks + self.conv

    def seconds(self, rates: Rates = RATES) -> float:
        """Return the expected time of one batch of 64."""
        names = "gemm", "blocks", "conv", "stream"
        work: float = sum(getattr(self, name) / getattr(rates, name) for name in names)
        work += self.idle / rates.conv
        return BATCH * work + self.calls * rates.call

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))


def layer_cost(operator: Operator, itemsize: int) -> Cost:
    """Return what a layer takes as it is."""
    work = operator.multiply_adds()
    stream = math.prod(operator.output_shape)
    size = sum(t.numel() * itemsize for t in operator.module.buffers())
    if isinstance(operator.module, nn.Linear):
        return Cost(gemm=work, stream=stream, calls=2, bytes=size)
    if is_plain(operator.module, CONVOLUTIONS):
        channels = operator.output_shape[0]
        idle = work / channels * (-channels % LANES)
        return Cost(conv=work, idle=idle, stream=2 * stream, calls=2, bytes=size)
    return Cost(conv=work, stream=2 * stream, calls=2, bytes=size)
