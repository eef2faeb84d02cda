"""Look into a network: what its matrix M and its quadratic forms Q have come to encode."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import checked_shape, refusal, shape_text
from .folding.certificate import ErrorBudget
from .folding.fold import stages_by_part
from .folding.forms import forms_of, matrix_of
from .folding.operators import frozen_wide
from .folding.problem import Problem
from .folding.split import StageGraph
from .folding.stages import Chain, Stage
from .folding.strategies.dense import too_large
from .nn.activations import Rule
from .nn.container import ConformalLayers, layer_by_layer
from .registry.bounds import Shape
from .utils.text import table

_REACH = 0.99  # of the energy of Q's rows lies within the reach
_CHUNK = 256  # samples, or rows of Q, that are looked at together


@dataclass(frozen=True, eq=False)
class Form:
    """One quadratic form Q: a published network has one, a projective one for each activation.

    Attributes:
        layers: paths of the activations whose terms it adds up.
        rule: how its value enters the denominator.
        eigenvalues: of Q, (d_in,), largest first.
        eigenimages: its first eigenvectors, (top, *input_shape), of norm 1 and a sum ≥ 0.
        falloff: shares of the energy ``Σ Q[i, j]²`` by the distance of the pixels of i and j: the
            larger of those along the axes. None for samples without spatial axes.
    """

    layers: tuple[str, ...]
    rule: Rule
    eigenvalues: Tensor
    eigenimages: Tensor
    falloff: Tensor | None

    @property
    def trace(self) -> float:
        """The sum of the eigenvalues."""
        return float(self.eigenvalues.sum())

    @property
    def effective_rank(self) -> float:
        """The exponential of the entropy of the eigenvalues' shares: k for k equal ones and zeros."""
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
    """What the denominator consists of, sample by sample.

    Attributes:
        names: ``‖x‖`` and the paths of the activations.
        norms: ‖x‖ of what enters the layers, (samples,).
        shares: of each in the denominator, (samples, 1 + activations); every row has the sum 1.
        gains: ``xᵀQx / ‖x‖²`` of each activation's own form, (samples, activations). Where it is
            the same for all samples, Q does no more than a multiple of the identity.
    """

    names: tuple[str, ...]
    norms: Tensor
    shares: Tensor
    gains: Tensor

    @property
    def denominators(self) -> Tensor:
        """D of each sample, (samples,): ``y = M x / D + bias``."""
        return self.norms / self.shares[:, 0]


@dataclass(frozen=True, eq=False)
class Part:
    """One ConformalLayers of a model with the linear layers behind it.

    Attributes:
        path: of the ConformalLayers, empty if it is the model.
        input_shape, output_shape: of one sample.
        forms: every Q.
        templates: the rows of M as samples, (outputs, *input_shape): ``y = M x / D + bias``.
        bias: (outputs,), or None.
        terms: of the denominator, None without data.
    """

    path: str
    input_shape: Shape
    output_shape: Shape
    forms: tuple[Form, ...]
    templates: Tensor
    bias: Tensor | None
    terms: Terms | None

    def __str__(self) -> str:
        shapes = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        parts = [f"{self.path or 'model'}: {shapes}"]
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
        parts.append(table(header, rows))
        if self.terms is not None:
            parts.append(_terms_text(self.terms))
        return "\n\n".join(parts)


@dataclass(frozen=True, eq=False)
class Inspection:
    """What :func:`conformallayers.inspect` found, part by part; prints as tables."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "\n\n".join(str(part) for part in self.parts)

    __repr__ = __str__


def inspect(
    model: nn.Module, input_shape: tuple[int, ...], data: Tensor | None = None, *, top: int = 16
) -> Inspection:
    """Compute what M and every Q of a model look like, in float64 and evaluation semantics.

    Args:
        model: a :class:`ConformalLayers`, or any module that torch.fx can trace with some inside.
        input_shape: of one sample, without the batch axis.
        data: (B, *input_shape); the denominator's terms are taken on it. None leaves them out.
        top: how many eigenvectors of each Q to keep.

    Returns:
        An :class:`Inspection` with a :class:`Part` for each ConformalLayers.

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
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise refusal("inspect(top=...)", "a whole number > 0", repr(top), "The default is 16.")
    with torch.inference_mode(False), torch.no_grad():
        if data is not None:
            data = _checked_data(data, shape)
        # The whole linear head is part of M, whether a fold would absorb it or not.
        found = stages_by_part(model, shape, prefix=False)
        graphs = {path: longer[-1] for path, longer in found.items()}
        stages = {path: _checked(path, graph) for path, graph in graphs.items()}
        terms: list[Terms] | list[None] = [None] * len(stages)
        if data is not None:
            terms = _terms(model, [stage.chain for stage in stages.values()], data)
        parts = [
            _part(path, stage, graphs[path].bias, found, top)
            for (path, stage), found in zip(stages.items(), terms, strict=True)
        ]
    return Inspection(tuple(parts))


def _checked(path: str, graph: StageGraph) -> Stage:
    """Return the stage of a network whose denominator is a sum of forms that can be written out."""
    where = f"inspect({path or 'model'})"
    stage = graph.single
    if stage is None or stage.affine:
        got = "homogeneous maps inside"
        if stage is not None:
            got = "branches that pass activations" if stage.branched else "biases inside"
        remedy = "There the denominator is a recurrence over more than forms of x."
        raise refusal(where, "a chain of linear layers and activations", got, remedy)
    reason = too_large(Problem(stage, ErrorBudget(0.0), torch.float64, stage.device))
    if reason is not None:
        remedy = "Inspect it on smaller images."
        raise refusal(where, "forms that can be written out", reason, remedy)
    return stage


def _part(path: str, stage: Stage, bias: Tensor | None, terms: Terms | None, top: int) -> Part:
    chain = stage.chain
    values = forms_of(chain, stage.device, ErrorBudget(0.0)).values
    found = zip(chain.groups, values, strict=True)
    forms = tuple(_form(chain, group, form, top) for group, form in found)
    templates = (matrix_of(chain, stage.device) * chain.scale).view(-1, *stage.input_shape)
    held = None if bias is None else bias.flatten()
    return Part(path, stage.input_shape, stage.output_shape, forms, templates, held, terms)


def _form(chain: Chain, group: tuple[int, ...], form: Tensor, top: int) -> Form:
    segments = [chain.segments[index] for index in group]
    values, vectors = torch.linalg.eigh(form)
    images = vectors.flip(1)[:, :top].T
    images = torch.where(images.sum(1, keepdim=True) < 0, -images, images)
    return Form(
        tuple(segment.site.path for segment in segments),
        segments[0].rule,
        values.flip(0).clamp_min(0),  # rounding may leave a zero below 0
        images.reshape(-1, *chain.input_shape),
        _falloff(form, chain.input_shape),
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


def _terms(model: nn.Module, chains: list[Chain], data: Tensor) -> list[Terms]:
    """Run a model on data, and look at every denominator where its ConformalLayers is entered."""
    frozen = frozen_wide(model)
    entered: list[Tensor] = []
    for module in frozen.modules():
        if isinstance(module, ConformalLayers):
            module.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in chains]
    for chunk in data.split(_CHUNK):
        entered.clear()
        with layer_by_layer():
            frozen(chunk)
        for rows, chain, x in zip(found, chains, entered, strict=True):
            rows.append(_recurrence(chain, x))
    results = []
    for chain, rows in zip(chains, found, strict=True):
        names = ("‖x‖", *(segment.site.path for segment in chain.segments))
        results.append(Terms(names, *(torch.cat(tensors) for tensors in zip(*rows, strict=True))))
    return results


def _recurrence(chain: Chain, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖x‖, the shares of the terms of D, and each form over ‖x‖², for each sample."""
    norm = torch.linalg.vector_norm(x.flatten(1), dim=1)
    zero = int((norm == 0).sum())
    if zero:
        got, remedy = f"{zero} of zeros, whose denominator is 0", "Leave them out."
        raise refusal("inspect(data=...)", "samples with a norm", got, remedy)
    z = x / norm.view(-1, *[1] * (x.dim() - 1))
    tau, terms, gains = torch.ones_like(norm), [torch.ones_like(norm)], []
    for segment in chain.segments:
        z = segment.apply(z)
        gains.append(segment.weight * z.flatten(1).square().sum(1))
        grown = segment.rule.advance(tau, gains[-1], norm)
        terms.append(grown - tau)
        tau = grown
    empty = norm.new_empty(len(norm), 0)
    shares = torch.stack(terms, 1) / tau[:, None]
    return norm, shares, torch.stack(gains, 1) if gains else empty


def _terms_text(terms: Terms) -> str:
    header = ("term", "share of D", "spread", "xᵀQx/‖x‖²", "spread")
    rows = []
    for index, name in enumerate(terms.names):
        columns = [terms.shares[:, index], *([terms.gains[:, index - 1]] if index else [])]
        cells = [f"{float(v):.3g}" for c in columns for v in (c.mean(), c.std(correction=0))]
        rows.append((name, *cells, *[""] * (4 - len(cells))))
    return table(header, rows)


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
