"""The strategies by name. A new one is a class in a file of its own and a row here."""

from __future__ import annotations

from .banded import BandedCore
from .base import Core, Cost, Request
from .composed import ComposedCore
from .dense import DenseCore
from .layers import LayersCore
from .sparse import SparseCore
from .torus import SpectralCore

STRATEGIES: dict[str, type[Core]] = {
    core.name: core
    for core in (DenseCore, BandedCore, SparseCore, ComposedCore, SpectralCore, LayersCore)
}

__all__ = ["STRATEGIES", "Core", "Cost", "Request"]
