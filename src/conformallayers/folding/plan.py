"""Problem → Plan: the cost of each strategy, the choice, and its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import refusal
from ..utils.html import Block, Printed, Table
from ..utils.text import count, size, suggest
from .problem import Problem
from .strategies import STRATEGIES, Strategy

MEMORY_LIMIT = 2**30  # bytes of constants that "auto" will not exceed
_FEW = 1e5  # multiply-adds of a stage that do not matter
_WORTH_IT = 0.9  # a fold must promise to take less than this share of the layers' time


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

    @property
    def applies(self) -> bool:
        """Whether the strategy can express the problem."""
        return self.multiply_adds is not None


@dataclass(frozen=True, repr=False)
class Plan(Printed):
    """The candidates and the choice; prints as a table with its reason.

    Attributes:
        strategy: the name of the chosen strategy.
        reason: of the choice.
        candidates: all strategies.
        absorbed: the number of following layers that are part of the matrix.
        advice: what would make a stage cheaper.
        operations: the first operation of a stage in the recipe, and the one behind its last; None for
            a network of one stage.
    """

    strategy: str
    reason: str
    candidates: tuple[Candidate, ...]
    absorbed: int = 0
    advice: tuple[str, ...] = ()
    operations: tuple[int, int] | None = None

    @property
    def chosen(self) -> Candidate:
        """The candidate of the chosen strategy."""
        return _find(self.candidates, self.strategy)

    def moved(self, count: int) -> Plan:
        """Return the plan for a recipe with ``count`` more operations before its own."""
        if self.operations is None:
            return self
        first, end = self.operations
        return replace(self, operations=(first + count, end + count))

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
        lines += [f"cheaper: {sentence}" for sentence in self.advice]
        yield "\n".join(lines)


def make_plan(problem: Problem) -> Plan:
    """Choose a strategy for a problem, or check the requested one.

    Arrays are built only if the optimistic cost of some fold is below that of the layers.
    """
    automatic = problem.conditions.strategy == "auto"
    return _automatic_plan(problem) if automatic else _requested_plan(problem)


def _requested_plan(problem: Problem) -> Plan:
    strategy = problem.conditions.strategy
    reason = STRATEGIES[strategy].refuses(problem)
    if reason is not None and problem.conditions.staged:
        reason = f"{strategy} does not apply: {reason}"
        return Plan("layers", reason, _candidates(problem, built=False))
    if reason is not None:
        raise refusal(
            f'fold(strategy="{strategy}")',
            "a network that this strategy can express",
            f"one where {reason}",
            'Use strategy="auto".',
        )
    return Plan(strategy, "asked for by name", _candidates(problem, built=False))


def _automatic_plan(problem: Problem) -> Plan:
    candidates = _candidates(problem, built=False)
    layers, best = _find(candidates, "layers"), _best(candidates)
    if best.seconds >= _WORTH_IT * layers.seconds:
        return Plan("layers", "no folded form would be faster by a tenth", candidates)
    chosen = STRATEGIES[best.name]
    if chosen.effort(problem) > problem.conditions.effort:
        work = count(chosen.effort(problem))
        reason = f"a fold would take {work} multiply-adds to build; call cl.fold"
        return Plan("layers", reason, candidates)
    # If its cost is exact while all others are optimistic, building could not change the choice.
    if not chosen.exact_cost:
        candidates = _candidates(problem, built=True)
        best = _best(candidates)
        if best.seconds >= _WORTH_IT * layers.seconds:
            return Plan("layers", "no folded form turned out faster by a tenth", candidates)
    ratio = layers.seconds / best.seconds
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return Plan(best.name, f"expected {times} times as fast as the layers", candidates)


def alternatives(plan: Plan) -> list[str]:
    """Return the other strategies that "auto" may choose, fastest first."""
    allowed = [c for c in plan.candidates if c.applies and (not c.note or c.name == "layers")]
    return [c.name for c in sorted(allowed, key=lambda c: c.seconds) if c.name != plan.strategy]


def optimistic_seconds(problem: Problem) -> float:
    """Return the optimistic time of the strategy in seconds; infinity if it is refused."""
    candidates, strategy = _candidates(problem, built=False), problem.conditions.strategy
    if strategy == "auto":
        return min(_best(candidates).seconds, _find(candidates, "layers").seconds)
    return _find(candidates, strategy).seconds


def checked_strategy(strategy: object) -> str:
    """Return the name of a strategy, or refuse it with the list of all names."""
    names = ("auto", *STRATEGIES)
    if not isinstance(strategy, str) or strategy not in names:
        listed = ", ".join(f'"{name}"' for name in names)
        remedy = f'Try "auto".{suggest(str(strategy), names)}'
        raise refusal("fold(strategy=...)", f"one of {listed}", repr(strategy), remedy)
    return strategy


def _candidates(problem: Problem, *, built: bool) -> tuple[Candidate, ...]:
    """Return every strategy with its cost or refusal; kept: optimistic_seconds and the plan both need them."""

    def build() -> tuple[Candidate, ...]:
        found = [_candidate(strategy, problem, built) for strategy in STRATEGIES.values()]
        return tuple(_lean(found) if problem.conditions.staged else found)

    stage = problem.stage
    key = "candidates", built, stage.output_shape, len(stage.nodes)
    return problem.once(key, build)


def _lean(candidates: list[Candidate]) -> list[Candidate]:
    """Leave out strategies that take more work than convolutions: matrices, except small ones.

    Matrices may be faster on this machine, but networks of several stages are made for small devices.
    """
    use = {c.name: STRATEGIES[c.name].in_stages for c in candidates}
    counts = [c.multiply_adds for c in candidates if use[c.name] == "always"]
    least = max(_FEW, min(known for known in counts if known is not None))
    found = []
    for item in candidates:
        small = use[item.name] == "if small" and (item.multiply_adds or 0) <= least
        lean = small or use[item.name] == "always"
        found.append(item if lean else replace(item, note=item.note or "in stages only by name"))
    return found


def _candidate(strategy: Strategy, problem: Problem, built: bool) -> Candidate:
    reason = strategy.refuses(problem)
    if reason is not None:
        return Candidate(strategy.name, None, None, math.inf, reason)
    cost, note = strategy.cost(problem, built=built), strategy.caution(problem)
    if strategy.name != "layers" and cost.bytes > MEMORY_LIMIT:
        note = "too large for auto"
    seconds = cost.seconds()
    return Candidate(strategy.name, cost.multiply_adds, cost.bytes, seconds, note)


def _find(candidates: Sequence[Candidate], name: str) -> Candidate:
    return next(c for c in candidates if c.name == name)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    allowed = [c for c in candidates if c.applies and not c.note and c.name != "layers"]
    return min(allowed or [_find(candidates, "layers")], key=lambda c: c.seconds)
