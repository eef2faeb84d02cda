"""Records of a health check: statistics of every layer, plans of the fold, and warnings with remedies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import shape_text
from ..folding.folded import Explanation
from ..folding.plan import Plan
from ..nn.bounds import Shape
from ..utils.html import Block, Printed, Table
from ..utils.text import count

LISTED = 3  # names in a warning that are written out


@dataclass(frozen=True)
class NormHealth:
    """The statistics of a batch norm; medians are those over its channels.

    Attributes:
        variance: the median variance; of the batch where the running ones are not settled yet.
        below_eps: the share of channels whose variance is below eps.
        mean: the median of ``|mean|/σ``.
        lag: the median of ``|running mean − mean of the batch|/σ``; None where it is not settled yet.
        eps: of the norm.
    """

    variance: float
    below_eps: float
    mean: float
    lag: float | None
    eps: float


@dataclass(frozen=True)
class LayerHealth:
    """One layer, activation or map on a batch; lengths and shares are medians over the samples.

    Attributes:
        path: of the module in the model.
        kind: its class.
        shape: of one sample behind it.
        length: of the points behind it: their norm, or their root mean square, by the unit.
        finite: whether all of their numbers are.
        alpha: of an activation, with the ``arriving`` length and the share of the new t that it has ``added``.
        dead: the number of channels behind a map that are zero in all samples, of ``channels``.
        norm: the statistics of a batch norm.
    """

    path: str
    kind: str
    shape: Shape
    length: float
    finite: bool
    alpha: float | None = None
    arriving: float | None = None
    added: float | None = None
    dead: int | None = None
    channels: int | None = None
    norm: NormHealth | None = None


@dataclass(frozen=True, repr=False)
class PartHealth(Printed):
    """One ConformalLayers on a batch.

    Attributes:
        path: of the ConformalLayers, empty if it is the model.
        offset, unit: of its embedding.
        entering: the median length of its inputs, in the unit.
        leaving: the root mean square of all entries of its outputs.
        layers: in the order in which they run.
    """

    path: str
    offset: float
    unit: str
    entering: float
    leaving: float
    layers: tuple[LayerHealth, ...]

    def _blocks(self) -> Iterator[Block]:
        yield (
            f"{self.path or 'model'}: unit {self.unit}, offset {self.offset:.3g}, inputs of length "
            f"{self.entering:.3g}, entries of outputs {self.leaving:.3g}"
        )
        header = ["path", "kind", "output", "length", "alpha", "arriving", "added to t", "dead"]
        header += ["variance", "|mean|/σ", "lag/σ"]
        rows = [_cells(layer) for layer in self.layers]
        kept = [i for i in range(len(header)) if i < 4 or any(row[i] for row in rows)]
        yield Table([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _cells(layer: LayerHealth) -> list[str]:
    norm, dead = layer.norm, layer.dead
    statistics = (None,) * 3 if norm is None else (norm.variance, norm.mean, norm.lag)
    return [
        *(layer.path, layer.kind, shape_text(layer.shape), f"{layer.length:.3g}"),
        *(_number(layer.alpha), _number(layer.arriving)),
        "" if layer.added is None else f"{100 * layer.added:.3g} %",
        "" if dead is None else f"{dead} of {layer.channels}",
        *map(_number, statistics),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


@dataclass(frozen=True, repr=False)
class HealthWarning(Printed):
    """One problem, with its measured value, its consequence and a remedy.

    Attributes:
        kind: a word or two, equal for warnings of the same kind.
        paths: of the modules; modules of one part whose warnings differ in numbers alone share one.
        seen: the measured value, or the range of those of all paths.
        why: the consequence.
        remedy: the suggested change.
    """

    kind: str
    paths: tuple[str, ...]
    seen: str
    why: str
    remedy: str

    @property
    def path(self) -> str:
        """The paths as text; of more than three, the first three and the number of the others."""
        shown = ", ".join(path or "model" for path in self.paths[:LISTED])
        more = len(self.paths) - LISTED
        return f"{shown} and {more} more" if more > 0 else shown

    @property
    def line(self) -> str:
        """The warning as one line."""
        return f"{self.path}: {self.seen}; {self.why}. {self.remedy}"

    def _blocks(self) -> Iterator[Block]:
        yield f"{self.path}: {self.seen}\n  why: {self.why}\n  remedy: {self.remedy}"


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """The result of :func:`conformallayers.diagnose`; prints as tables, and warnings with their remedies.

    Attributes:
        samples: the size of the batch.
        parts: every ConformalLayers, in the order in which they run.
        warnings: empty for a healthy model.
        fold: the plan of each folded part or stage, as :meth:`Folded.explain` has it; None if the model does
            not fold, has NaN or infinity among its weights, or was not asked to.
    """

    samples: int
    parts: tuple[PartHealth, ...]
    warnings: tuple[HealthWarning, ...]
    fold: Explanation | None = None

    def _blocks(self) -> Iterator[Block]:
        for part in self.parts:
            yield from (*part._blocks(), "")
        if self.fold is not None:
            header = "fold of", "strategy", "multiply-adds", "of its layers", "reason"
            yield from (Table(header, [_plan(*item) for item in self.fold.items()]), "")
        found, samples = len(self.warnings), f"{self.samples} samples"
        yield f"{found or 'no'} warning{'s' * (found != 1)} on {samples}"
        for warning in self.warnings:
            yield from warning._blocks()


def _plan(path: str, plan: Plan) -> tuple[str, ...]:
    costs = {item.name: item.multiply_adds for item in plan.candidates}
    figures = (costs.get(name) for name in (plan.strategy, "layers"))
    cells = ("" if figure is None else count(figure) for figure in figures)
    return path or "model", plan.strategy, *cells, plan.reason
