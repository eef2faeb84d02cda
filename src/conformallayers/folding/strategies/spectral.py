"""Strategy "spectral": Fourier transforms, for convolutions of stride 1."""

from __future__ import annotations

from ..cost import Cost
from ..problem import Problem
from .base import Evaluation, Strategy, Values
from .circular import Circular
from .torus import Torus


class Spectral(Strategy):
    """Dispatch to Circular or Torus."""

    name = "spectral"
    foreseen = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse a problem that neither of them can express."""
        circular, torus = Circular().refuses(problem), Torus().refuses(problem)
        if circular is None or torus is None:
            return None
        modes = (getattr(op.module, "padding_mode", "") for op in problem.stage.operators)
        return circular if "circular" in modes else torus

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Return the cost of the variant that applies."""
        return _applying(problem).cost(problem, built=built)

    def caution(self, problem: Problem) -> str:
        """Return the caution of the variant that applies."""
        return _applying(problem).caution(problem)

    def effort(self, problem: Problem) -> float:
        """Return the effort of the variant that applies."""
        return _applying(problem).effort(problem)

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the operations of the variant that applies."""
        return _applying(problem).evaluate(problem, values)


def _applying(problem: Problem) -> Strategy:
    circular = Circular()
    return circular if circular.refuses(problem) is None else Torus()
