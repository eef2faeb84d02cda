"""Request → Plan: what each strategy would take, which one is chosen, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ._text import count, size, table
from .certificate import Certificate
from .errors import refusal
from .machine import machine
from .strategies import STRATEGIES, Cost, Request
from .strategies.paths import WebRequest

MEMORY_LIMIT = 2**30  # bytes of constants that "auto" will not exceed
# How much slower float64 is, which folds with biases or branches take; layers run as they are.
_WIDE = {"layers": 1.0, "dense": 2.0, "conv": 4.0}
_WORTH_IT = 0.9  # a fold must promise to take less than this share of the layers' time


@dataclass(frozen=True)
class Candidate:
    """One strategy: its cost and expected time, or why it does not apply."""

    name: str
    cost: Cost | None
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The candidates and the choice; prints as a table with its reason."""

    strategy: str
    reason: str
    candidates: tuple[Candidate, ...]
    absorbed: int = 0
    certificate: Certificate | None = None
    growth: str = ""  # what biases and branches add

    @property
    def chosen(self) -> Candidate:
        """The candidate that was taken."""
        return next(c for c in self.candidates if c.name == self.strategy)

    def __str__(self) -> str:
        rows = []
        for item in sorted(self.candidates, key=lambda c: c.seconds):
            mark = "→ " if item.name == self.strategy else "  "
            if item.cost is None:
                rows.append((mark + item.name, "", "", "", item.note))
                continue
            figures = count(item.cost.multiply_adds), size(item.cost.bytes)
            rows.append((mark + item.name, *figures, f"{1e3 * item.seconds:.3g} ms", item.note))
        header = ("  strategy", "multiply-adds", "constants", "batch of 64", "note")
        lines = [table(header, rows), f"{self.strategy}: {self.reason}"]
        if self.absorbed:
            lines.append(f"head: {self.absorbed} following layers absorbed into the matrix")
        if self.growth:
            lines.append(self.growth)
        if self.certificate is not None:
            lines.append(f"denominator: {self.certificate}")
        return "\n".join(lines)

    __repr__ = __str__


def make_plan(request: Request | WebRequest, strategy: str, effort: float = math.inf) -> Plan:
    """Choose a strategy for a request, or check the one that was asked for.

    Arrays are built only if some fold could be faster than the layers at its most optimistic.

    Args:
        request: what to fold.
        strategy: a name, or "auto".
        effort: multiply-adds that "auto" may spend on building.
    """
    if isinstance(request, WebRequest):
        return _plan_web(request, strategy, effort)
    return replace(_plan_chain(request, strategy, effort), growth=_biases(request))


def _biases(request: Request) -> str:
    recurrence = request.program.recurrence
    if recurrence is None:
        return ""
    constant, dots = len(recurrence.shifts), recurrence.dots
    return f"biases: {constant} constant parts, {dots} more dot products of the input's size"


def _plan_web(request: WebRequest, strategy: str, effort: float) -> Plan:
    """Choose between all paths written out and the layers one by one."""
    web, reason = request.web, request.refuses()
    growth = f"branches: up to {web.paths} paths meet, {web.forms} quadratic forms"
    candidates = _web_candidates(request)
    if strategy not in ("auto", "dense", "layers"):
        expected, remedy = "a chain of layers", 'Use strategy="auto".'
        got = "branches that pass activations"
        raise refusal(f'fold(strategy="{strategy}")', expected, got, remedy)
    if strategy == "dense" and reason is not None:
        remedy = 'Raise max_paths if that is the reason, or use strategy="layers".'
        raise refusal('fold(strategy="dense")', "paths that can be written out", reason, remedy)
    if strategy != "auto":
        return Plan(strategy, "asked for by name", candidates, growth=growth)
    layers, best = next(c for c in candidates if c.name == "layers"), _best(candidates)
    if best.seconds >= _WORTH_IT * layers.seconds:
        why = "no folded form would be faster by a tenth"
        return Plan("layers", why, candidates, growth=growth)
    if request.effort() > effort:
        why = f"a fold would take {count(request.effort())} multiply-adds to build; call cl.fold"
        return Plan("layers", why, candidates, growth=growth)
    return replace(_faster(best, layers, candidates), growth=growth)


def _web_candidates(request: WebRequest) -> tuple[Candidate, ...]:
    reason, cost, layers = request.refuses(), request.cost(), request.cost_of_layers()
    dense = Candidate("dense", None, math.inf, reason or "")
    if reason is None:
        note = "too large for auto" if cost.bytes > MEMORY_LIMIT else ""
        dense = Candidate("dense", cost, _WIDE["dense"] * cost.seconds(machine()), note)
    return dense, Candidate("layers", layers, layers.seconds(machine()))


def _plan_chain(request: Request, strategy: str, effort: float) -> Plan:
    if strategy != "auto":
        reason = STRATEGIES[strategy].refuses(request.program)
        if reason is not None:
            raise refusal(
                f'fold(strategy="{strategy}")',
                "a network that this strategy can express",
                f"one where {reason}",
                'Use strategy="auto".',
            )
        return Plan(strategy, "asked for by name", _candidates(request, built=False))
    candidates = _candidates(request, built=False)
    layers = next(c for c in candidates if c.name == "layers")
    if _best(candidates).seconds >= _WORTH_IT * layers.seconds:
        return Plan("layers", "no folded form would be faster by a tenth", candidates)
    chosen = STRATEGIES[_best(candidates).name]
    if chosen.effort(request) > effort:
        needed = count(chosen.effort(request))
        reason = f"a fold would take {needed} multiply-adds to build; call cl.fold"
        return Plan("layers", reason, candidates)
    if chosen.foreseen:  # costs of the others are at most optimistic
        return _faster(_best(candidates), layers, candidates)
    candidates = _candidates(request, built=True)
    best = _best(candidates)
    if best.seconds >= _WORTH_IT * layers.seconds:
        return Plan("layers", "no folded form turned out faster by a tenth", candidates)
    return _faster(best, layers, candidates)


def _faster(best: Candidate, layers: Candidate, candidates: tuple[Candidate, ...]) -> Plan:
    ratio = layers.seconds / best.seconds
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return Plan(best.name, f"expected {times} times as fast as the layers", candidates)


def outlook(request: Request | WebRequest, strategy: str) -> float:
    """Return the seconds that a strategy would take at its most optimistic; infinity if refused."""
    if isinstance(request, WebRequest):
        candidates = _web_candidates(request)
        if strategy not in ("auto", "dense", "layers"):
            return math.inf
    else:
        candidates = _candidates(request, built=False)
    if strategy == "auto":
        layers = next(c for c in candidates if c.name == "layers")
        return min(_best(candidates).seconds, layers.seconds)
    return next(c.seconds for c in candidates if c.name == strategy)


def with_outcome(plan: Plan, certificate: Certificate | None, absorbed: int) -> Plan:
    """Add to a plan what is known once its core is built."""
    return replace(plan, absorbed=absorbed, certificate=certificate)


def checked_strategy(strategy: object) -> str:
    """Return the name of a strategy, or refuse it with the list of those there are."""
    names = ("auto", *STRATEGIES)
    if not isinstance(strategy, str) or strategy not in names:
        listed = ", ".join(f'"{name}"' for name in names)
        raise refusal("fold(strategy=...)", f"one of {listed}", repr(strategy), 'Try "auto".')
    return strategy


def _candidates(request: Request, *, built: bool) -> tuple[Candidate, ...]:
    found = []
    for name, core in STRATEGIES.items():
        reason = core.refuses(request.program)
        if reason is not None:
            found.append(Candidate(name, None, float("inf"), reason))
            continue
        cost = core.cost(request, built=built)
        slower = 1.0 if request.program.recurrence is None else _WIDE.get(name, 2.0)
        note = core.caution(request)
        if name != "layers" and cost.bytes > MEMORY_LIMIT:
            note = "too large for auto"
        found.append(Candidate(name, cost, slower * cost.seconds(machine()), note))
    return tuple(found)


def _best(candidates: tuple[Candidate, ...]) -> Candidate:
    allowed = [c for c in candidates if c.cost is not None and not c.note and c.name != "layers"]
    layers = [c for c in candidates if c.name == "layers"]
    return min(allowed or layers, key=lambda c: c.seconds)
