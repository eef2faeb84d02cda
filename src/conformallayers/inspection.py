"""Inspect a network: its matrix M, its quadratic forms Q and the terms of its denominators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .container import ConformalLayers, layer_by_layer
from .errors import check_count, checked_shape, refusal, shape_text
from .folding.fold import stages_by_part
from .folding.forms import dense_matrix, forms_of, matrix_of, too_many_entries
from .folding.operators import apply_all, push_constant
from .folding.scaling import Scaling
from .folding.stages import AffineStage, HomogeneousMap, RadialStage, Segment, StageGraph
from .functional import advance, guarded_ratio, scale_samples
from .graph.freeze import frozen_wide
from .nn.activations import RadialActivation
from .nn.bounds import Shape
from .nn.formula import Formula
from .utils.html import Block, Printed, Table, separated

_REACH = 0.99  # of the energy of Q's rows lies within the reach
_CHUNK = 256  # samples, or rows of Q, that are processed at once
_Row = tuple[Tensor, Tensor, Tensor]  # norms, shares and gains of a chunk of samples, as in Terms


@dataclass(frozen=True, eq=False)
class Form:
    """One quadratic form Q: a published network has one, a projective one for each activation.

    Attributes:
        layers: paths of the activations whose terms it adds up.
        formula: how its value n enters the denominator tau.
        eigenvalues: of Q, (d_in,), largest first.
        eigenimages: its first eigenvectors, (top, *input_shape), of norm 1 and a sum ≥ 0.
        falloff: shares of the energy ``Σ Q[i, j]²`` by the distance of the pixels of i and j: the
            larger of those along the axes. None for samples without spatial axes.
    """

    layers: tuple[str, ...]
    formula: Formula
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


@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of the denominator D of each sample.

    Attributes:
        names: of the term that enters, and the paths of the activations. ``‖x‖`` enters a network,
            ``√(‖x‖² + c²)`` one with an offset c, and the coordinate ``t`` a stage.
        norms: the values of the term that enters, (samples,).
        shares: of each term in D, (samples, 1 + activations); every row has the sum 1.
        gains: ``xᵀQx / ‖x‖²`` of each activation's own form, (samples, activations). Where it is
            the same for all samples, Q does no more than a multiple of the identity. In a stage with biases
            the energy of its output takes the place of the form; 0 where x = 0.
    """

    names: tuple[str, ...]
    norms: Tensor
    shares: Tensor
    gains: Tensor

    @property
    def denominators(self) -> Tensor:
        """The denominator D of each sample in ``y = M x / D + bias``, of shape (samples,)."""
        return self.norms / self.shares[:, 0]


@dataclass(frozen=True, eq=False, repr=False)
class Part(Printed):
    """One ConformalLayers of a model with the linear layers behind it, or one of its stages.

    Homogeneous maps cut a ConformalLayers into stages. Then x and t are those that enter the stage,
    and y is the point that leaves it. A stage with biases has no form but the energy of its own output, and
    ``y = (M x + t·bias) / D``.

    Attributes:
        path: of the ConformalLayers, empty if it is the model; "… stage 2" for a stage.
        input_shape, output_shape: of one sample.
        forms: every Q.
        templates: the rows of M as samples, (outputs, *input_shape): ``y = M x / D + bias``.
        bias: (outputs,), or None.
        terms: of the denominator, None without data.
        stage: its number, from 1, or None.
    """

    path: str
    input_shape: Shape
    output_shape: Shape
    forms: tuple[Form, ...]
    templates: Tensor
    bias: Tensor | None
    terms: Terms | None
    stage: int | None = None

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
        if self.terms is not None:
            yield from ("", _terms_table(self.terms))


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Printed):
    """The result of :func:`conformallayers.inspect`, part by part; prints as tables."""

    parts: tuple[Part, ...]

    def _blocks(self) -> Iterator[Block]:
        yield from separated(self.parts)


def inspect(
    model: nn.Module, input_shape: tuple[int, ...], data: Tensor | None = None, *, top: int = 16
) -> Inspection:
    """Compute M and the spectrum of every Q of a model, in float64 and evaluation semantics.

    Args:
        model: a :class:`ConformalLayers`, or any module that torch.fx can trace with some inside.
        input_shape: of one sample, without the batch axis.
        data: (B, *input_shape), samples for the terms of the denominator; None leaves them out.
        top: how many eigenvectors of each Q to keep.

    Returns:
        An :class:`Inspection` with a :class:`~conformallayers.inspection.Part` for each ConformalLayers, or for each of its stages.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.AvgPool2d(2), cl.ReSPro(2.0), cl.Flatten())
        >>> x = torch.stack([torch.ones(1, 4, 4), torch.full((1, 4, 4), 2.0)])
        >>> print(cl.inspect(model, (1, 4, 4), x))
        model: (1, 4, 4) → (4,)
        <BLANKLINE>
        Q of  trace  largest  effective rank   top 1   top 10  reach
        ----  -----  -------  --------------  ------  -------  -----
        1      0.25   0.0625             4.0  25.0 %  100.0 %      1
        <BLANKLINE>
        term  share of D  spread  xᵀQx/‖x‖²  spread
        ----  ----------  ------  ---------  ------
        ‖x‖        0.733  0.0667
        1          0.267  0.0667     0.0625       0
    """
    shape = checked_shape(input_shape, "inspect(input_shape=...)")
    check_count("inspect(top=...)", top, "The default is 16.")
    with torch.inference_mode(False), torch.no_grad():
        if data is not None:
            data = _checked_data(data, shape)
        # The whole linear head is part of M, whether a fold would absorb it or not.
        found = stages_by_part(model, shape, prefix=False)
        graphs = {path: longer[-1] for path, longer in found.items()}
        for path, graph in graphs.items():
            _check(path, graph)
        terms = None if data is None else _terms(model, list(graphs.values()), data)
        parts = [part for path, graph in graphs.items() for part in _parts(path, graph, top)]
        if terms is not None:
            both = zip(parts, terms, strict=True)
            parts = [replace(part, terms=of_part) for part, of_part in both]
    return Inspection(tuple(parts))


def _check(path: str, graph: StageGraph) -> None:
    """Refuse stages whose forms are too large."""
    for stage in graph.stages:
        sizes = math.prod(stage.input_shape), math.prod(stage.output_shape)
        reason = too_many_entries(*sizes)
        if reason is not None:
            where = f"inspect({graph.label(path, stage) or 'model'})"
            remedy = "Inspect it on smaller images."
            raise refusal(where, "forms that can be written out", f"larger ones: {reason}", remedy)


def _parts(path: str, graph: StageGraph, top: int) -> Iterator[Part]:
    """Yield every stage of a network, without its terms."""
    for number, stage in enumerate(graph.stages, 1):
        forms: tuple[Form, ...] = ()
        bias = graph.bias if stage is graph.last else None
        if isinstance(stage, RadialStage):
            radial = stage.entered(_start(graph))
            scale, matrix = float(radial.end.rho), matrix_of(radial)
            found = zip(radial.groups, forms_of(radial).values, strict=True)
            forms = tuple(_form(group, form, stage.input_shape, top) for group, form in found)
        else:
            scale = float(_after(stage, _start(graph))[0].rho)
            shapes = stage.input_shape, stage.output_shape
            matrix = dense_matrix(*shapes, stage.operators, stage.device)
            constant = push_constant(stage.operators)
            if constant is not None:
                bias = scale * constant + (0.0 if bias is None else bias)
        yield Part(
            graph.label(path, stage),
            stage.input_shape,
            stage.output_shape,
            forms,
            (matrix * scale).view(-1, *stage.input_shape),
            None if bias is None else bias.flatten(),
            None,
            None if len(graph.nodes) == 1 else number,
        )


def _start(graph: StageGraph) -> Scaling:
    """Return the scaling of what enters a stage: the sample, if the stage is all of its network, else points."""
    return Scaling(graph.norm_factor) if len(graph.nodes) == 1 else Scaling()


def _after(stage: AffineStage, start: Scaling) -> tuple[Scaling, list[float]]:
    """Return the scaling behind the activations of an affine stage, and the weights of their energies."""
    scaling = Scaling() if stage.biased else start.copy()
    return scaling, [site.activate(scaling) for site in stage.sites]


def _form(group: tuple[Segment, ...], form: Tensor, shape: Shape, top: int) -> Form:
    values, vectors = torch.linalg.eigh(form)
    images = vectors.flip(1)[:, :top].T
    images = torch.where(images.sum(1, keepdim=True) < 0, -images, images)
    return Form(
        tuple(segment.site.path for segment in group),
        group[0].site.module.formula,
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


def _terms(model: nn.Module, graphs: list[StageGraph], data: Tensor) -> list[Terms]:
    """Run a model on data; return the terms of every part, from what enters its ConformalLayers."""
    frozen = frozen_wide(model)
    entered: list[Tensor] = []
    for module in frozen.modules():
        if isinstance(module, ConformalLayers):
            module.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    chunks: list[list[_Row]] = []  # of every chunk the row of each part
    for chunk in data.split(_CHUNK):
        entered.clear()
        with layer_by_layer():
            frozen(chunk)
        pairs = zip(graphs, entered, strict=True)
        chunks.append([row for graph, x in pairs for row in _rows(graph, x)])
    names = [_names(graph, stage) for graph in graphs for stage in graph.stages]
    return [
        Terms(of_part, *(torch.cat(column) for column in zip(*rows, strict=True)))
        for of_part, rows in zip(names, zip(*chunks, strict=True), strict=True)
    ]


def _names(graph: StageGraph, stage: AffineStage | RadialStage) -> tuple[str, ...]:
    first = "t"
    if len(graph.nodes) == 1:
        first = "√(‖x‖² + c²)" if graph.offset else "‖x‖"
    return (first, *(site.path for site in stage.sites))


def _rows(graph: StageGraph, x: Tensor) -> Iterator[_Row]:
    """Take samples through the stages, maps and joins of a network; yield the terms of every stage."""
    norm = torch.linalg.vector_norm(x.flatten(1), dim=1) * graph.norm_factor
    t = torch.hypot(norm, torch.full_like(norm, graph.offset))
    zero = int((t == 0).sum())
    if zero:
        got, remedy = f"{zero} of zeros, whose denominator is 0", "Leave them out."
        raise refusal("inspect(data=...)", "samples with a norm", got, remedy)
    start = scale_samples(x, 1 / t), t
    inspected = [id(stage) for stage in graph.stages]
    values: list[tuple[Tensor, Tensor]] = []  # points and their coordinates
    for node in graph.nodes:
        sources = [start if source < 0 else values[source] for source in node.sources]
        action, (point, t) = node.action, sources[0]
        if isinstance(action, (AffineStage, RadialStage)):
            row, after = _recurrence(action, _start(graph), point, t)
            values.append(after)
            if id(action) in inspected:
                yield row
        elif isinstance(action, HomogeneousMap):
            values.append((action.module(point), t))
        else:
            values.append((action.merge([other for other, _ in sources]), t))


def _recurrence(
    stage: AffineStage | RadialStage, start: Scaling, point: Tensor, t: Tensor
) -> tuple[_Row, tuple[Tensor, Tensor]]:
    """Run a stage on points and their t; return the terms of its denominator, and the points and t behind it."""
    steps: list[tuple[Callable[[Tensor], Tensor], float, RadialActivation]]
    if isinstance(stage, RadialStage):
        stage = stage.entered(start)
        z, end, trailing = point, stage.end, stage.trailing
        steps = [(segment.apply, segment.weight, segment.site.module) for segment in stage.segments]
    else:  # the energy is that of its output, biases included
        end, weights = _after(stage, start)
        start, trailing = Scaling() if stage.biased else start, ()
        constant = push_constant(stage.operators)
        z = apply_all(stage.operators, point)
        z = z if constant is None else z + constant
        sites = zip(weights, stage.sites, strict=True)
        steps = [(lambda z: z, weight, site.module) for weight, site in sites]
    tau = torch.full_like(t, 1 / float(start.sigma))
    terms, energies = [tau], []
    for apply, weight, activation in steps:
        z = apply(z)
        energies.append(weight * z.flatten(1).square().sum(1))
        grown = advance(activation.step, tau, t, energies[-1])
        terms.append(grown - tau)
        tau = grown
    z = apply_all(trailing, z)
    squares = point.flatten(1).square().sum(1)
    gains = t.new_empty(len(t), 0)
    if energies:
        gains = torch.stack([guarded_ratio(n, squares) for n in energies], 1)
    row = t * terms[0], torch.stack(terms, 1) / tau[:, None], gains
    return row, (scale_samples(z, float(end.rho) / tau), t * float(end.sigma) * tau)


def _terms_table(terms: Terms) -> Table:
    header = ("term", "share of D", "spread", "xᵀQx/‖x‖²", "spread")
    rows = []
    for index, name in enumerate(terms.names):
        columns = [terms.shares[:, index], *([terms.gains[:, index - 1]] if index else [])]
        cells = [f"{float(v):.3g}" for c in columns for v in (c.mean(), c.std(correction=0))]
        rows.append((name, *cells, *[""] * (4 - len(cells))))
    return Table(header, rows)


def _checked_data(data: Tensor, shape: Shape) -> Tensor:
    where = "inspect(data=...)"
    if not isinstance(data, Tensor) or not data.is_floating_point():
        got = str(data.dtype) if isinstance(data, Tensor) else type(data).__name__
        raise refusal(where, "a floating-point tensor", got, "Use torch.as_tensor(x).float().")
    if tuple(data.shape[1:]) != shape or not len(data):
        expected = f"a batch of at least one sample of shape {shape_text(shape)}"
        remedy = "Add the batch axis with x.unsqueeze(0), or give the shape of the data."
        raise refusal(where, expected, f"a tensor of shape {tuple(data.shape)}", remedy)
    if not bool(data.isfinite().all()):
        raise refusal(where, "finite numbers", "NaN or infinity", "Leave those samples out.")
    return data.detach().double()
