"""Inspect a network: its matrix M and the spectra of its quadratic forms Q."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import check_count, checked_shape, refusal, shape_text
from .folding.forms import dense_matrix, forms_of, matrix_of
from .folding.plan import too_many_entries
from .folding.stage_graph import StageGraph, stages_by_part
from .folding.stages import RadialStage, Scaling, Segment, push_constant
from .nn.bounds import Shape
from .nn.formula import Formula
from .utils.text import Block, Printed, Table, separated

_REACH = 0.99  # of the energy of Q's rows lies within the reach
_CHUNK = 256  # rows of Q that are processed at once


@dataclass(frozen=True, eq=False)
class Form:
    """One quadratic form Q: a published network has one, a projective one for each activation.

    Attributes:
        layers: paths of the activations whose terms it adds up.
        formula: how its value n enters the denominator tau.
        matrix: Q, (d_in, d_in). A published network has ``D = ‖x‖ + xᵀQx``; with several forms D meets them in order,
            starting from ``√(‖x‖² + c²)`` with an offset c: ``D ← D + xᵀQx/D`` if they are projective.
        eigenvalues: of Q, (d_in,), largest first.
        eigenimages: its first eigenvectors, (top, *input_shape), of norm 1 and a sum ≥ 0.
        falloff: shares of the energy ``Σ Q[i, j]²`` by the distance of the pixels of i and j: the
            larger of those along the axes. None for samples without spatial axes.
    """

    layers: tuple[str, ...]
    formula: Formula
    matrix: Tensor
    eigenvalues: Tensor
    eigenimages: Tensor
    falloff: Tensor | None

    @property
    def trace(self) -> float:
        """The sum of the eigenvalues."""
        return float(self.eigenvalues.sum())

    @property
    def effective_rank(self) -> float:
        """The exponential of the entropy of the eigenvalues' shares; k for k equal ones and zeros."""
        shares = self.eigenvalues / (self.trace or 1.0)
        return math.exp(float(torch.special.entr(shares).sum())) if self.trace else 0.0

    @property
    def reach(self) -> int | None:
        """The distance within which 99 % of the energy of Q's rows lies."""
        if self.falloff is None:
            return None
        return int((self.falloff.cumsum(0) < _REACH * self.falloff.sum()).sum())

    def share(self, count: int) -> float:
        """Return the share that the largest ``count`` eigenvalues have in the trace."""
        return float(self.eigenvalues[:count].sum()) / (self.trace or 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class InspectedPart(Printed):
    """One ConformalLayers of a model with the linear layers after it, or one of its stages.

    A published network has the denominator ``D = t + xᵀ Q x``, where t = ‖x‖ is the coordinate that the
    embedding gives x; others have one Q for each activation and the recurrence of their formulas.
    Homogeneous maps cut a ConformalLayers into stages. Then x and t are those that enter the stage,
    and y is the point that leaves it. A stage with biases has no form but the energy of its own output, and
    ``y = (M x + t·bias) / D``.

    Attributes:
        path: of the ConformalLayers, empty if it is the model; "… stage 2" for a stage.
        input_shape, output_shape: of one sample.
        forms: every Q.
        templates: the rows of M as samples, (outputs, *input_shape): ``y = M x / D + bias``.
        bias: (outputs,), or None.
        stage: its number, from 1, or None.
    """

    path: str
    input_shape: Shape
    output_shape: Shape
    forms: tuple[Form, ...]
    templates: Tensor
    bias: Tensor | None
    stage: int | None

    def _blocks(self) -> Iterator[Block]:
        shapes = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        yield f"{self.path or 'model'}: {shapes}"
        header = ("Q of", "trace", "largest", "effective rank", "top 1", "top 10", "reach")
        rows = [
            (
                ", ".join(form.layers),
                f"{form.trace:.3g}",
                f"{float(form.eigenvalues[0]):.3g}",
                f"{form.effective_rank:.1f}",
                *(f"{100 * form.share(count):.1f} %" for count in (1, 10)),
                "" if form.reach is None else str(form.reach),
            )
            for form in self.forms
        ]
        if rows:
            yield from ("", Table(header, rows))


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Printed):
    """The result of :func:`conformallayers.inspect`, part by part; prints as tables."""

    parts: tuple[InspectedPart, ...]

    def _blocks(self) -> Iterator[Block]:
        yield from separated(self.parts)


def inspect(model: nn.Module, input_shape: tuple[int, ...], *, top: int = 16) -> Inspection:
    """Compute M and the spectrum of every Q of a model, in float64 and evaluation semantics.

    Args:
        model: a :class:`ConformalLayers`, or any module that torch.fx can trace with some inside.
        input_shape: of one sample, without the batch axis.
        top: how many eigenvectors of each Q to keep.

    Returns:
        An :class:`Inspection` with a :class:`~conformallayers.inspection.InspectedPart` for each ConformalLayers, or for each of its stages.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.AvgPool2d(2), cl.ReSPro(2.0), cl.Flatten())
        >>> print(cl.inspect(model, (1, 4, 4)))
        model: (1, 4, 4) → (4,)
        <BLANKLINE>
        Q of  trace  largest  effective rank   top 1   top 10  reach
        ----  -----  -------  --------------  ------  -------  -----
        1      0.25   0.0625             4.0  25.0 %  100.0 %      1
    """
    shape = checked_shape(input_shape, "inspect(input_shape=...)")
    check_count("inspect(top=...)", top, "The default is 16.")
    with torch.inference_mode(False), torch.no_grad():
        # The whole linear head is part of M, whether a fold would absorb it or not.
        graphs = stages_by_part(model, shape)
        for graph, stage in [(one, stage) for one in graphs for stage in one.stages]:
            reason = too_many_entries(math.prod(stage.input_shape), math.prod(stage.output_shape))
            if reason is not None:  # before any form is computed
                where, remedy = graph.label(stage) or "model", "Inspect it on smaller images."
                expected, got = "forms that can be written out", f"larger ones: {reason}"
                raise refusal(f"inspect({where})", expected, got, remedy)
        parts = [part for graph in graphs for part in _parts(graph, top)]
    return Inspection(tuple(parts))


def _parts(graph: StageGraph, top: int) -> Iterator[InspectedPart]:
    """Yield every stage of a network."""
    for number, stage in enumerate(graph.stages, 1):
        forms: tuple[Form, ...] = ()
        bias = graph.bias if stage is graph.last else None
        if isinstance(stage, RadialStage):
            radial = stage.entered(_start(graph))
            scale, matrix = float(radial.end.rho), matrix_of(radial)
            found = zip(radial.groups, forms_of(radial), strict=True)
            forms = tuple(_form(group, form, stage.input_shape, top) for group, form in found)
        else:
            scaling = Scaling() if stage.biased else _start(graph)
            for site in stage.sites:
                site.activate(scaling)
            scale = float(scaling.rho)
            shapes = stage.input_shape, stage.output_shape
            matrix = dense_matrix(*shapes, stage.operators, stage.device)
            constant = push_constant(stage.operators)
            if constant is not None:
                bias = scale * constant + (0.0 if bias is None else bias)
        yield InspectedPart(
            graph.label(stage),
            stage.input_shape,
            stage.output_shape,
            forms,
            (matrix * scale).view(-1, *stage.input_shape),
            None if bias is None else bias.flatten(),
            None if len(graph.nodes) == 1 else number,
        )


def _start(graph: StageGraph) -> Scaling:
    """Return the scaling of what enters a stage: the sample, if the stage is all of its network, else points."""
    return Scaling(graph.norm_factor) if len(graph.nodes) == 1 else Scaling()


def _form(group: tuple[Segment, ...], form: Tensor, shape: Shape, top: int) -> Form:
    values, vectors = torch.linalg.eigh(form)
    images = vectors.flip(1)[:, :top].T
    images = torch.where(images.sum(1, keepdim=True) < 0, -images, images)
    return Form(
        tuple(segment.site.path for segment in group),
        group[0].site.module.formula,
        form,
        values.flip(0).clamp_min(0),  # rounding may leave a zero below 0
        images.reshape(-1, *shape),
        _falloff(form, shape),
    )


def _falloff(form: Tensor, shape: Shape) -> Tensor | None:
    """Return the shares of the energy of a form by the distance of two pixels."""
    if len(shape) < 2:
        return None
    channels, sides = shape[0], shape[1:]
    pixels = math.prod(sides)
    energy = form.square().view(channels, pixels, channels, pixels).sum((0, 2))
    places = torch.tensor(list(itertools.product(*map(range, sides))), device=form.device)
    found = torch.zeros(max(sides), dtype=form.dtype, device=form.device)
    for rows in torch.arange(pixels, device=form.device).split(_CHUNK):
        distance = (places[rows, None] - places).abs().amax(2)
        found.index_add_(0, distance.flatten(), energy[rows].flatten())
    return found / energy.sum().clamp_min(torch.finfo(form.dtype).tiny)
