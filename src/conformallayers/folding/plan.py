"""Problem → Plan: what strategies are, what each costs, the choice, and its reason.

A strategy takes the points that enter a radial stage to those that leave it. Costs are predicted from counts of work
with fixed rates, so that every machine makes the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..recipe import point_operations as point
from ..recipe.recipe import RecipeBuilder
from ..utils.text import Block, Printed, Table, count, size, suggest
from .forms import forms_of, matrix_of, stacked_layers
from .lower import SQUARED, PointValues, add_layer, add_operators, add_reshape, size_after
from .stages import CONVOLUTIONS, ActivationSite, Operator, RadialStage, is_plain

T = TypeVar("T")
BATCH = 64  # the batch size that costs are compared at
LANES = 16  # output channels that a convolution computes at a time
# Work per second at float32, measured on two cores of a server CPU; the kinds are those of ``Cost``.
RATES = {"gemm": 57e9, "blocks": 60e9, "conv": 85e9, "idle": 85e9, "stream": 10e9}
CALL = 3e-6  # seconds of any call at all
LARGEST_SQUARED = 1e140  # numbers whose squares, summed over layers, fit into float64
# The share of the rounding error that omitted terms may take; the rest is for a narrow band.
TERMS = 0.25
_FACTOR_EFFORT = 2**31  # multiply-adds of a QR factorization: about a second
MOST_COEFFICIENTS = 8192  # coefficients of a sample; building a larger Q would not fit into memory
EVAL_EFFORT = 4e9  # multiply-adds that the first call in eval() may spend on folding: half a second
MEMORY_LIMIT = 2**30  # bytes of constants that "auto" will not exceed
_WORTH_IT = 0.9  # a fold must promise to take less than this share of the layers' time
_INACCURATE = "not accurate enough"


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

    def seconds(self) -> float:
        """Return the expected time of one batch of 64."""
        work: float = sum(getattr(self, name) / rate for name, rate in RATES.items())
        return BATCH * work + self.calls * CALL

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Cost(*(a + b for a, b in pairs))


def layer_cost(operator: Operator, itemsize: int) -> Cost:
    """Return the cost of a layer that stays as it is."""
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


def too_many_entries(d_in: int, d_out: int) -> str | None:
    """Return why a form (d_in, d_in) and a matrix (d_out, d_in) cannot be written out, or None."""
    if d_in > MOST_COEFFICIENTS:
        return f"a sample has {d_in} coefficients, a written-out form at most {MOST_COEFFICIENTS}"
    if d_in * d_out > MOST_COEFFICIENTS * 4 * MOST_COEFFICIENTS:
        return f"M would have {d_out} × {d_in} entries"
    return None


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error of a denominator that the dtype rounds away.

    It is the unit roundoff of float32, for shorter dtypes too, and 0 for float64, the dtype of the proofs.
    """
    return 0.0 if dtype == torch.float64 else torch.finfo(torch.float32).eps / 2


class Problem:
    """A radial stage, and the dtype to fold it to; arrays are built at first use."""

    def __init__(self, stage: RadialStage, dtype: torch.dtype) -> None:
        self.stage, self.dtype = stage, dtype
        # Terms below this share of the denominator may be left out.
        self.epsilon = rounding(dtype) if stage.provable else 0.0
        self._built: dict[object, Any] = {}

    def once(self, key: object, build: Callable[[], T]) -> T:
        """Return the value of a key, built at first use."""
        if key not in self._built:
            self._built[key] = build()
        return cast(T, self._built[key])

    @property
    def itemsize(self) -> int:
        """The bytes of one entry of M or Q."""
        return self.dtype.itemsize

    @property
    def proves_terms(self) -> bool:
        """Whether terms below the rounding may be left out: the proof covers a denominator with a single form."""
        return self.epsilon > 0 and self.form_count == 1

    @property
    def form_count(self) -> int:
        """The number of quadratic forms."""
        return len(self.stage.groups)

    @cached_property
    def matrix(self) -> Tensor:
        """M in float64, (d_out, d_in)."""
        return matrix_of(self.stage)

    @cached_property
    def forms(self) -> Tensor:
        """Every Q in float64, (groups, d_in, d_in)."""
        return forms_of(self.stage, TERMS * self.epsilon)

    def factor(self, group: int) -> Tensor | None:
        """Return L with ``LᵀL = Q`` of a form from the rows of its layers; None where Q must be summed up.

        Q has the square of the condition number of the rows, so summing it up loses digits. Rows are stacked
        where they are few, or where no terms may be left out and a QR factorization is quick.
        """
        rows, columns = self.stage.rows_of(group), math.prod(self.stage.input_shape)
        exact = self.dtype == torch.float64
        if rows > columns and not (exact and rows * columns * columns <= _FACTOR_EFFORT):
            return None

        def build() -> Tensor:
            stack = stacked_layers(self.stage, group)
            return stack if rows <= columns else torch.linalg.qr(stack, mode="r").R

        return self.once(("factor", group), build)

    def keeps_range(self) -> bool:
        """Check whether bounds prove that feature maps and their squares stay in the range of the dtype."""
        limit = {torch.float16: 1e3, torch.float64: LARGEST_SQUARED}.get(self.dtype, SQUARED)
        return self.stage.bound <= limit

    def cannot_write_out(self) -> str | None:
        """Return why M and the forms cannot be written out, or None if they can."""
        if self.stage.bound > LARGEST_SQUARED:
            return "its forms could leave the range of float64"
        return too_many_entries(
            math.prod(self.stage.input_shape), math.prod(self.stage.output_shape)
        )

    def effort_of_matrix(self) -> float:
        """Bound the multiply-adds of building M: there and back."""
        sizes = math.prod(self.stage.input_shape), math.prod(self.stage.output_shape)
        return 2.0 * self.stage.multiply_adds * min(sizes)

    def matrix_cost(self) -> Cost:
        """Return the cost of M as one product."""
        size = math.prod(self.stage.input_shape) * math.prod(self.stage.output_shape)
        return Cost(gemm=size, calls=2, bytes=size * self.itemsize)


@dataclass(frozen=True)
class Evaluation:
    """The values that a strategy computes."""

    image: str  # ``M x̂ / gain`` in any shape
    energies: tuple[tuple[str, ...], ...]  # for each form, the values that add up to it
    gain: float = 1.0  # a factor that the image still lacks


class Strategy:
    """The base of all strategies; they hold no state.

    A strategy that computes M x̂ and the values of the forms defines :meth:`evaluate`. A strategy that
    does not separate them defines :meth:`lower`.
    """

    name: ClassVar[str]

    def refuses(self, problem: Problem) -> str | None:
        """Return why the strategy does not apply to a problem, or None if it does."""
        raise NotImplementedError

    def cost(self, problem: Problem) -> Cost:
        """Predict the cost; nothing is built for it."""
        raise NotImplementedError

    def effort(self, problem: Problem) -> float:
        """Bound the multiply-adds of building the constants: by default M and the forms."""
        inputs = math.prod(problem.stage.input_shape)
        return problem.stage.multiply_adds * 2 * inputs + problem.effort_of_matrix()

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append the operations that compute ``M x̂ / gain`` and the energies of each form."""
        raise NotImplementedError

    def lower(self, problem: Problem, builder: RecipeBuilder, start: PointValues) -> PointValues:
        """Append the operations of a stage; return the points that leave it."""
        stage = problem.stage
        found = self.evaluate(problem, builder, start.z)
        image = add_reshape(builder, found.image, stage.output_shape)
        points = start
        for group, energies in zip(stage.groups, found.energies, strict=True):
            points = points.advance(builder, group[0].site, energies)
        end, size = stage.end.lacking(found.gain), size_after(stage.layers, start.size)
        return replace(points, z=image, scaling=end, bound=stage.exit / found.gain, size=size)


class Layers(Strategy):
    """Run the layers, every α resolved, every factor merged into a weight, and sum the energies that share a form."""

    name = "layers"

    def refuses(self, problem: Problem) -> str | None:
        """Refuse nothing."""
        return None

    def cost(self, problem: Problem) -> Cost:
        """Count the layers as they are, and a pass over each map whose energy is taken."""
        stage, item = problem.stage, problem.itemsize
        shapes = (s.operators[-1].output_shape if s.operators else () for s in stage.segments)
        energies = Cost(stream=sum(map(math.prod, shapes)), calls=3 * len(stage.segments))
        return sum((layer_cost(operator, item) for operator in stage.operators), energies)

    def effort(self, problem: Problem) -> float:
        """Return 0: nothing is built."""
        return 0.0

    def lower(self, problem: Problem, builder: RecipeBuilder, start: PointValues) -> PointValues:
        """Append the layers, on points where bounds do not keep z in range."""
        if problem.keeps_range():
            return super().lower(problem, builder, start)
        points = start
        for action in problem.stage.layers:
            if isinstance(action, ActivationSite):
                # Bounds say nothing of numbers that are too small.
                points = replace(points, bound=math.inf).activate(builder, action)
            else:
                points = add_layer(builder, action, points)
        return points

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append the layers and the energy after each segment."""
        stage, z = problem.stage, x
        energies: list[list[str]] = [[] for _ in stage.groups]
        for segment in stage.segments:
            z = add_operators(builder, z, segment.operators, segment.factor)
            n = builder.add(point.SumSquares, z, name="n", weight=segment.weight)
            energies[segment.group].append(n)
        image = add_operators(builder, z, stage.trailing, 1.0)
        return Evaluation(image, tuple(map(tuple, energies)))


# -- the choice ------------------------------------------------------------------------------------

STRATEGIES: dict[str, Strategy] = {}  # by name; the folder beside this file adds all others


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
    problem: Problem, settings: Settings, *, absorbed: int, inaccurate: Collection[str]
) -> Plan:
    """Choose a strategy for a problem: the requested one, or the fastest that is not ``inaccurate``.

    Where the requested strategy does not apply, the layers stay.
    """
    candidates = tuple(
        _candidate(strategy, problem, _INACCURATE if strategy.name in inaccurate else "")
        for strategy in STRATEGIES.values()
    )
    if settings.strategy == "auto":
        strategy, reason = _choice(problem, settings.effort, candidates, inaccurate)
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
) -> tuple[str, str]:
    """Return the name of the fastest strategy, and the reason."""
    (layers,) = (c for c in candidates if c.name == "layers")
    best = min([c for c in candidates if not c.note] or [layers], key=lambda c: c.seconds)
    if inaccurate:
        return best.name, f"{', '.join(sorted(inaccurate))} is {_INACCURATE}"
    if best.seconds >= _WORTH_IT * layers.seconds:
        return "layers", "no fold would be a tenth faster"
    chosen = STRATEGIES[best.name]
    if chosen.effort(problem) > effort:
        work = count(chosen.effort(problem))
        return "layers", f"a fold would take {work} multiply-adds to build; call cl.fold"
    ratio = layers.seconds / best.seconds
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return best.name, f"expected {times} times as fast as the layers"


def checked_strategy(strategy: object) -> str:
    """Return the name of a strategy, or refuse it with the list of all names."""
    names = ("auto", *STRATEGIES)
    if not isinstance(strategy, str) or strategy not in names:
        listed = ", ".join(f'"{name}"' for name in names)
        remedy = f'Try "auto".{suggest(str(strategy), names)}'
        raise refusal("fold(strategy=...)", f"one of {listed}", repr(strategy), remedy)
    return strategy


def _candidate(strategy: Strategy, problem: Problem, note: str) -> Candidate:
    """Return a strategy with its cost or refusal."""
    reason = strategy.refuses(problem)
    if reason is not None:
        return Candidate(strategy.name, None, None, math.inf, reason)
    cost = strategy.cost(problem)
    if strategy.name != "layers" and cost.bytes > MEMORY_LIMIT:
        note = "too large for auto"
    return Candidate(strategy.name, cost.multiply_adds, cost.bytes, cost.seconds(), note)
