"""Problem → Plan: the cost of each strategy, the choice, and its reason."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import refusal
from ..utils.text import Block, Printed, Table, count, size, suggest
from .strategies import STRATEGIES, Strategy
from .strategies.base import Problem

EVAL_EFFORT = 4e9  # multiply-adds that the first call in eval() may spend on folding: half a second
MEMORY_LIMIT = 2**30  # bytes of constants that "auto" will not exceed
_WORTH_IT = 0.9  # a fold must promise to take less than this share of the layers' time
_INACCURATE = "not accurate enough"


@dataclass(frozen=True)
class Settings:
    """The settings of a fold."""

    dtype: torch.dtype  # of the result
    device: torch.device
    strategy: str = "auto"  # or the name of the strategy to use wherever it applies
    effort: float = math.inf  # multiply-adds that "auto" may spend on building a stage


@dataclass(frozen=True)
class Candidate:
    """One strategy: its cost for one sample and the time of a batch of 64, or why it does not apply.

    Attributes:
        name: of the strategy.
        multiply_adds, bytes: of one sample, and of all constants; None where it does not apply.
        seconds: expected for a batch of 64; infinite where it does not apply.
        note: why it does not apply, or why "auto" leaves it out.
    """

    name: str
    multiply_adds: float | None = None
    bytes: int | None = None
    seconds: float = math.inf
    note: str = ""


@dataclass(frozen=True, repr=False)
class Plan(Printed):
    """The candidates and the choice; prints as a table with its reason.

    Attributes:
        strategy: the name of the chosen strategy.
        reason: of the choice.
        candidates: all strategies.
        absorbed: the number of following layers that are part of the matrix.
    """

    strategy: str
    reason: str
    candidates: tuple[Candidate, ...]
    absorbed: int = 0

    def _blocks(self) -> Iterator[Block]:
        rows = []
        for item in sorted(self.candidates, key=lambda c: c.seconds):
            mark = "→ " if item.name == self.strategy else "  "
            if item.multiply_adds is None or item.bytes is None:
                rows.append((mark + item.name, "", "", "", item.note))
                continue
            figures = count(item.multiply_adds), size(item.bytes)
            rows.append((mark + item.name, *figures, f"{1e3 * item.seconds:.3g} ms", item.note))
        header = ("  strategy", "multiply-adds", "constants", "estimate for 64", "note")
        yield Table(header, rows)
        lines = [f"{self.strategy}: {self.reason}"]
        if self.absorbed:
            layers = "layer" if self.absorbed == 1 else "layers"
            lines.append(f"head: {self.absorbed} following {layers} absorbed into the matrix")
        yield "\n".join(lines)


def make_plan(
    problem: Problem, settings: Settings, *, absorbed: int = 0, inaccurate: Collection[str] = ()
) -> Plan:
    """Choose a strategy for a problem: the requested one, or the fastest that is not ``inaccurate``.

    Where the requested strategy does not apply, the layers stay. Arrays are built only if the optimistic cost of
    some fold is below that of the layers.
    """
    candidates = _candidates(problem, inaccurate)
    if settings.strategy == "auto":
        strategy, reason, candidates = _choice(problem, settings.effort, candidates, inaccurate)
    else:
        note = STRATEGIES[settings.strategy].refuses(problem)
        strategy, reason = settings.strategy, "asked for by name"
        if note is not None:
            strategy, reason = "layers", f"{settings.strategy} does not apply: {note}"
    return Plan(strategy, reason, candidates, absorbed)


def _choice(
    problem: Problem,
    effort: float,
    candidates: tuple[Candidate, ...],
    inaccurate: Collection[str],
) -> tuple[str, str, tuple[Candidate, ...]]:
    """Return the name of the fastest strategy, the reason, and all candidates as they are known then."""
    layers, best = _find(candidates, "layers"), _best(candidates)
    if inaccurate:
        return best.name, f"{', '.join(sorted(inaccurate))} is {_INACCURATE}", candidates
    if best.seconds >= _WORTH_IT * layers.seconds:
        return "layers", "no folded form would be faster by a tenth", candidates
    chosen = STRATEGIES[best.name]
    if chosen.effort(problem) > effort:
        work = count(chosen.effort(problem))
        reason = f"a fold would take {work} multiply-adds to build; call cl.fold"
        return "layers", reason, candidates
    # If its cost is exact while all others are optimistic, building could not change the choice.
    if not chosen.exact_cost:
        candidates = _candidates(problem, built=True)
        best = _best(candidates)
        if best.seconds >= _WORTH_IT * layers.seconds:
            return "layers", "no folded form turned out faster by a tenth", candidates
    ratio = layers.seconds / best.seconds
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return best.name, f"expected {times} times as fast as the layers", candidates


def checked_strategy(strategy: object) -> str:
    """Return the name of a strategy, or refuse it with the list of all names."""
    names = ("auto", *STRATEGIES)
    if not isinstance(strategy, str) or strategy not in names:
        listed = ", ".join(f'"{name}"' for name in names)
        remedy = f'Try "auto".{suggest(str(strategy), names)}'
        raise refusal("fold(strategy=...)", f"one of {listed}", repr(strategy), remedy)
    return strategy


def _candidates(
    problem: Problem, inaccurate: Collection[str] = (), *, built: bool = False
) -> tuple[Candidate, ...]:
    """Return every strategy with its cost or refusal."""
    return tuple(
        _candidate(strategy, problem, built, _INACCURATE if strategy.name in inaccurate else "")
        for strategy in STRATEGIES.values()
    )


def _candidate(strategy: Strategy, problem: Problem, built: bool, note: str) -> Candidate:
    reason = strategy.refuses(problem)
    if reason is not None:
        return Candidate(strategy.name, None, None, math.inf, reason)
    cost = strategy.cost(problem, built=built)
    if strategy.name != "layers" and cost.bytes > MEMORY_LIMIT:
        note = "too large for auto"
    return Candidate(strategy.name, cost.multiply_adds, cost.bytes, cost.seconds(), note)


def _find(candidates: Sequence[Candidate], name: str) -> Candidate:
    return next(c for c in candidates if c.name == name)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate that "auto" may take; the layers if there is none."""
    allowed = [c for c in candidates if not c.note]
    return min(allowed or [_find(candidates, "layers")], key=lambda c: c.seconds)
