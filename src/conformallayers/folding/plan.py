"""Request → Plan: what each strategy would take, which one is chosen, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import refusal
from ..utils.text import count, size, table
from .certificate import Certificate
from .machine import machine
from .strategies import STRATEGIES, Core, Cost, Request
from .strategies.base import out_of_range
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


@dataclass(frozen=True)
class _Offer:
    """What a strategy says of a request.

    Args:
        refuses: why it does not apply, or None if it does.
        cost: what a sample takes; with True, after a look at the arrays.
        effort: the multiply-adds that building takes at most.
        caution: why "auto" should not take it though it applies.
        foreseen: whether the cost is known before anything is built.
        slower: how many times slower it is than its cost says.
    """

    refuses: str | None
    cost: Callable[[bool], Cost]
    effort: Callable[[], float]
    caution: str = ""
    foreseen: bool = True
    slower: float = 1.0


def _offers(request: Request | WebRequest) -> dict[str, _Offer]:
    if isinstance(request, WebRequest):
        return {name: _offer_of_paths(name, request) for name in STRATEGIES}
    return {name: _offer_of_core(core, request) for name, core in STRATEGIES.items()}


def _offer_of_core(core: type[Core], request: Request) -> _Offer:
    refuses = core.refuses(request.program) or out_of_range(core, request)
    return _Offer(
        refuses,
        lambda built: core.cost(request, built=built),
        lambda: core.effort(request),
        core.caution(request) if refuses is None else "",
        core.foreseen,
        1.0 if request.program.recurrence is None else _WIDE.get(core.name, 2.0),
    )


def _offer_of_paths(name: str, request: WebRequest) -> _Offer:
    if name == "layers":
        return _Offer(None, lambda _: request.cost_of_layers(), lambda: 0.0)
    refuses = request.refuses() if name == "dense" else "branches pass activations"
    return _Offer(refuses, lambda _: request.cost(), request.effort, slower=_WIDE["dense"])


def make_plan(request: Request | WebRequest, strategy: str, effort: float = math.inf) -> Plan:
    """Choose a strategy for a request, or check the one that was asked for.

    Arrays are built only if some fold could be faster than the layers at its most optimistic.

    Args:
        request: what to fold.
        strategy: a name, or "auto".
        effort: multiply-adds that "auto" may spend on building.
    """
    offers = _offers(request)
    plan = _choice(offers, effort) if strategy == "auto" else _named(offers, strategy)
    return replace(plan, growth=_growth(request))


def _growth(request: Request | WebRequest) -> str:
    """Tell what branches or biases add."""
    if isinstance(request, WebRequest):
        web = request.web
        return f"branches: up to {web.paths} paths meet, {web.forms} quadratic forms"
    recurrence = request.program.recurrence
    if recurrence is None:
        return ""
    constant, dots = len(recurrence.shifts), recurrence.dots
    return f"biases: {constant} constant parts, {dots} more dot products of the input's size"


def _named(offers: dict[str, _Offer], strategy: str) -> Plan:
    reason = offers[strategy].refuses
    if reason is not None:
        raise refusal(
            f'fold(strategy="{strategy}")',
            "a network that this strategy can express",
            f"one where {reason}",
            'Raise max_paths, or use strategy="auto".'
            if "max_paths" in reason
            else 'Use strategy="auto".',
        )
    return Plan(strategy, "asked for by name", _candidates(offers, built=False))


def _choice(offers: dict[str, _Offer], effort: float) -> Plan:
    candidates = _candidates(offers, built=False)
    layers, best = _layers(candidates), _best(candidates)
    if best.seconds >= _WORTH_IT * layers.seconds:
        return Plan("layers", "no folded form would be faster by a tenth", candidates)
    chosen = offers[best.name]
    if chosen.effort() > effort:
        reason = f"a fold would take {count(chosen.effort())} multiply-adds to build; call cl.fold"
        return Plan("layers", reason, candidates)
    if not chosen.foreseen:  # else costs of the others are at most optimistic
        candidates = _candidates(offers, built=True)
        best = _best(candidates)
        if best.seconds >= _WORTH_IT * layers.seconds:
            return Plan("layers", "no folded form turned out faster by a tenth", candidates)
    ratio = layers.seconds / best.seconds
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return Plan(best.name, f"expected {times} times as fast as the layers", candidates)


def outlook(request: Request | WebRequest, strategy: str) -> float:
    """Return the seconds that a strategy would take at its most optimistic; infinity if refused."""
    candidates = _candidates(_offers(request), built=False)
    if strategy == "auto":
        return min(_best(candidates).seconds, _layers(candidates).seconds)
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


def _candidates(offers: dict[str, _Offer], *, built: bool) -> tuple[Candidate, ...]:
    found = []
    for name, offer in offers.items():
        if offer.refuses is not None:
            found.append(Candidate(name, None, math.inf, offer.refuses))
            continue
        cost, note = offer.cost(built), offer.caution
        if name != "layers" and cost.bytes > MEMORY_LIMIT:
            note = "too large for auto"
        found.append(Candidate(name, cost, offer.slower * cost.seconds(machine()), note))
    return tuple(found)


def _layers(candidates: tuple[Candidate, ...]) -> Candidate:
    return next(c for c in candidates if c.name == "layers")


def _best(candidates: tuple[Candidate, ...]) -> Candidate:
    allowed = [c for c in candidates if c.cost is not None and not c.note and c.name != "layers"]
    return min(allowed or [_layers(candidates)], key=lambda c: c.seconds)
