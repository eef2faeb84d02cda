"""The strategies by name. A new one is a class in a file of its own and a row here."""

from __future__ import annotations

from ..plan import STRATEGIES, Layers
from .conv import ComposedConv
from .matrices import Banded, Dense

STRATEGIES |= {
    strategy.name: strategy for strategy in (Dense(), Banded(), ComposedConv(), Layers())
}

__all__ = ["STRATEGIES"]
