"""The strategies by name. A new one is a class in a file of its own and a row here."""

from __future__ import annotations

from .base import Layers, Strategy
from .conv import ComposedConv
from .matrices import Banded, Dense

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (Dense(), Banded(), ComposedConv(), Layers())
}

__all__ = ["STRATEGIES", "Strategy"]
