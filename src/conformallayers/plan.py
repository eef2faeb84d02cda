"""Program → Plan: what each strategy would cost, which one is taken, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._text import count, size, table
from .cores import STRATEGIES, Cost
from .errors import refusal
from .fold import Program

MEMORY_LIMIT = 2**30  # bytes of constants that "auto" will not exceed


@dataclass(frozen=True)
class Plan:
    """The candidates and the choice; prints as a table with its reason."""

    strategy: str
    reason: str
    candidates: tuple[tuple[str, Cost], ...]
    absorbed: int = 0

    @property
    def cost(self) -> Cost:
        """The cost of the chosen strategy."""
        return dict(self.candidates)[self.strategy]

    def __str__(self) -> str:
        rows = [
            (
                ("→ " if name == self.strategy else "  ") + name,
                count(cost.multiply_adds),
                str(cost.calls),
                size(cost.bytes),
            )
            for name, cost in sorted(self.candidates, key=lambda item: item[1].work)
        ]
        header = ("  strategy", "multiply-adds", "calls", "constants")
        absorbed = f"; {self.absorbed} layers of the head absorbed" if self.absorbed else ""
        return f"{table(header, rows)}\n{self.strategy}: {self.reason}{absorbed}"

    __repr__ = __str__


def make_plan(program: Program, strategy: str, dtype: torch.dtype) -> Plan:
    """Pick the strategy with the least work, or check the one that was asked for."""
    candidates = tuple((name, core.cost(program, dtype)) for name, core in STRATEGIES.items())
    if strategy != "auto":
        return Plan(strategy, "asked for by name", candidates)
    layers = dict(candidates)["layers"]
    small = [item for item in candidates if item[1].bytes <= max(MEMORY_LIMIT, layers.bytes)]
    name, cost = min(small, key=lambda item: item[1].work)
    if name == "layers":
        return Plan(name, "every folded form would cost more than the layers", candidates)
    ratio = layers.work / cost.work
    return Plan(name, f"{ratio:.3g} times less work than the layers", candidates)


def checked_strategy(strategy: object) -> str:
    """Return the name of a strategy, or refuse it with the list of those there are."""
    names = ("auto", *STRATEGIES)
    if not isinstance(strategy, str) or strategy not in names:
        listed = ", ".join(f'"{name}"' for name in names)
        raise refusal("fold(strategy=...)", f"one of {listed}", repr(strategy), 'Try "auto".')
    return strategy
