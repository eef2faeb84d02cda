"""Stages with biases or branches: a point is a sum of parts, linear ones and constant ones.

``p = Σ_a k_a·A_a x̂ + Σ_c k_c·v_c``. Every activation divides all parts of its point by one growth, so
the coefficient of a part is a product: ``k_a = (1/τ₀)·Π 1/growth``, ``k_c = Π 1/growth`` over the sites
(activations) that the part has passed. A site needs the energy of its point: forms ``x̂ᵀ A_aᵀA_b x̂``,
dot products ``(A_aᵀ v_c)·x̂`` and constants ``v_c·v_d``. All coefficients stay bounded, even where the
coordinate overflows.

A sum of two branches has the parts of both. Parts that have passed the same activations have the same
coefficient and are added. So n residual blocks in a row can have 2ⁿ parts, and every activation needs a
form for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.branches import Join
from ..recipe.point_operations import Key, pairs
from ..registry.bounds import Shape
from ..utils.progress import progress
from .forms import COLUMN_BYTES
from .operators import Operator, adjoint, impulses
from .stages import ActivationSite, Chain, Stage, StageNode, shape_at

MOST_PATHS = 2**12  # of a stage that are counted
Parts = dict[Key, Tensor]  # the parts of a value, (B, *shape), by the sites they have passed


@dataclass(frozen=True)
class SiteTerms:
    """The terms of the energy of a point at one activation, or at several that collapse; float64."""

    site: ActivationSite
    linear: tuple[Key, ...]  # of the linear parts; the forms of pairs (a, b ≥ a) come in this order
    constant: tuple[Key, ...]  # of the constant parts
    rows: Tensor  # (linear · constant, d_in): A_aᵀ v_c
    gram: Tensor  # (constant, constant): v_c·v_d
    coordinate: Key  # the sites that the coordinate has passed
    factor: float = 1.0  # of the coordinate, beside the growths


@dataclass(frozen=True)
class Recurrence:
    """The activations in order, and the parts of the output."""

    sites: tuple[SiteTerms, ...]
    linear: tuple[Key, ...]  # of the linear parts of the output
    constant: tuple[Key, ...]  # of its constant parts
    vectors: Tensor  # float64 (constant, *output_shape): the constant parts

    @property
    def dots(self) -> int:
        """The number of dot products that biases cost a sample."""
        return sum(len(terms.rows) for terms in self.sites)


class PathArrays(NamedTuple):
    """A branched stage written out, in float64."""

    matrix: Tensor  # (linear parts of the output · d_out, d_in)
    forms: Tensor  # (forms, d_in, d_in), in the order of the recurrence
    recurrence: Recurrence


def chain_recurrence(chain: Chain, device: torch.device) -> Recurrence:
    """Push the biases of a chain through the layers behind them."""
    groups, biased = chain.groups, chain.bias_segments
    # A bias of the first segment of a group has not passed that group's activation yet: its key starts
    # there. A bias ends a form, so biases are in first segments alone; trailing ones pass no activation.
    first = {members[0]: group for group, members in enumerate(groups)}
    first[len(chain.segments)] = len(groups)
    constants: dict[int, Tensor] = {}  # by the first group that they pass
    sites: list[SiteTerms] = []
    operators: list[Operator] = []
    scale, d_in = 1.0, math.prod(chain.input_shape)
    with torch.no_grad():
        for group, members in enumerate(groups):
            size = len([segment for segment in biased if segment <= members[0]])
            rows = torch.zeros(size, d_in, dtype=torch.float64, device=device)
            gram = torch.zeros(size, size, dtype=torch.float64, device=device)
            for index in members:
                segment = chain.segments[index]
                operators.extend(segment.operators)
                _push(constants, segment.operators, first.get(index, group), segment.factor)
                scale *= segment.factor
                if constants:
                    c = torch.stack(list(constants.values()))
                    flat = c.flatten(1)
                    gram += segment.weight * flat @ flat.T
                    rows += segment.weight * scale * adjoint(operators, c).flatten(1)
            keys = tuple(tuple(range(start, group)) for start in constants)
            before = tuple(range(group))
            sites.append(SiteTerms(chain.sites[group], (before,), keys, rows, gram, before))
        _push(constants, chain.trailing, len(groups), 1.0)
    every: Key = tuple(range(len(groups)))
    keys = tuple(tuple(range(start, len(groups))) for start in constants)
    shape = len(constants), *chain.output_shape
    vectors = torch.stack(list(constants.values())) if constants else torch.zeros(shape)
    return Recurrence(tuple(sites), (every,), keys, vectors.double())


def _push(
    constants: dict[int, Tensor], operators: tuple[Operator, ...], group: int, factor: float
) -> None:
    """Push the constant parts through a segment, whose biases start new ones or add to them."""
    for operator in operators:
        for start, value in constants.items():
            constants[start] = operator.apply(value.unsqueeze(0))[0]
        if operator.bias is not None:
            known = constants.get(group)
            constants[group] = operator.bias if known is None else known + operator.bias
    for start in constants:
        constants[start] = constants[start] * factor


# -- branches ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """The linear parts of every value of a stage: one for each set of activations on the way."""

    keys: tuple[tuple[Key, ...], ...]  # by node
    forms: int

    @property
    def most(self) -> int:
        """The largest number of paths that meet at a node; beyond the limit of the search a lower bound."""
        return max((len(keys) for keys in self.keys), default=1)

    @property
    def meeting(self) -> str:
        """How many paths meet at a node, in words."""
        count = f"more than {MOST_PATHS}" if self.most > MOST_PATHS else f"up to {self.most}"
        return f"{count} paths meet"

    def __str__(self) -> str:
        known = "" if self.most > MOST_PATHS else f", {self.forms} quadratic forms"
        return self.meeting + known

    @property
    def output(self) -> tuple[Key, ...]:
        """The keys of the parts of the output."""
        return self.keys[-1] if self.keys else ((),)


def paths_of(stage: Stage, limit: int = MOST_PATHS) -> Paths:
    """Follow all paths from the input by the activations that they pass.

    Residual blocks double the paths, so no more than ``limit`` + 1 paths to a node are followed.
    """
    found: list[tuple[Key, ...]] = []
    forms = 0
    for node in stage.nodes:
        merged: dict[Key, None] = {}
        for source in node.sources:
            merged.update(dict.fromkeys(((),) if source < 0 else found[source]))
        keys = tuple(merged)[: limit + 1]
        if isinstance(node.action, ActivationSite):
            forms += pairs(len(keys))
            keys = tuple((*key, node.action.number) for key in keys)
        found.append(keys)
    return Paths(tuple(found), forms)


def _follow(stage: Stage, start: Parts, biased: bool) -> Iterator[tuple[StageNode, Parts, Parts]]:
    """Yield every node with the parts that enter it (of its first source) and that leave it."""
    values: list[Parts] = []
    for node in stage.nodes:
        sources = [start if source < 0 else values[source] for source in node.sources]
        action, before = node.action, sources[0]
        if isinstance(action, Operator):
            after = {key: action.apply(value) for key, value in before.items()}
            if biased and action.bias is not None:
                known = after.get(())
                bias = action.bias.unsqueeze(0)
                after[()] = bias if known is None else known + bias
        elif isinstance(action, ActivationSite):
            factor = action.slope / action.alpha
            after = {(*key, action.number): value * factor for key, value in before.items()}
        else:
            at = partial(shape_at, stage.nodes, input_shape=stage.input_shape)
            after = _joined(action, sources, [at(source) for source in node.sources])
        values.append(after)
        yield node, before, after


def _joined(join: Join, sources: list[Parts], shapes: list[Shape]) -> Parts:
    """Join parts by their keys; a branch that has no part of a key counts as zeros."""
    found: Parts = {}
    for key in dict.fromkeys(key for parts in sources for key in parts):
        like = next(parts[key] for parts in sources if key in parts)
        values = [
            parts[key] if key in parts else like.new_zeros(len(like), *shape)
            for parts, shape in zip(sources, shapes, strict=True)
        ]
        found[key] = join.merge(values)
    return found


def write_out_paths(stage: Stage) -> PathArrays:
    """Push the identity through all paths: a column of a form is the gradient of an inner product."""
    device, d_in, paths = stage.device, math.prod(stage.input_shape), paths_of(stage)
    like = torch.empty(0, dtype=torch.float64, device=device)
    recurrence, fixed = _constant_parts(stage, paths, like)
    forms = torch.zeros(paths.forms, d_in, d_in, dtype=torch.float64, device=device)
    # (constant, linear, d_in): the order of a site's rows is linear parts first, then constant ones
    rows = [like.new_zeros(len(s.constant), len(s.linear), d_in) for s in recurrence.sites]
    columns: list[Tensor] = []
    largest = max((math.prod(op.output_shape) for op in stage.operators), default=1)
    chunk = max(1, COLUMN_BYTES // (8 * 4 * max(1, paths.most) * max(largest, d_in)))
    start = 0
    batches = impulses(stage.input_shape, chunk, device)
    for batch in progress(batches, -(-d_in // chunk), "folding paths"):
        stop = start + len(batch)
        columns.append(_columns(stage, batch, slice(start, stop), forms, rows, fixed))
        start = stop
    # xᵀ F x is that of the symmetric half, and A_aᵀ A_b of two different parts is not symmetric.
    forms = (forms + forms.transpose(1, 2)) / 2
    matrix = torch.cat(columns).T.contiguous()
    sites = tuple(
        replace(terms, rows=row.transpose(0, 1).reshape(-1, d_in))
        for terms, row in zip(recurrence.sites, rows, strict=True)
    )
    return PathArrays(matrix, forms, replace(recurrence, sites=sites))


def _columns(
    stage: Stage,
    batch: Tensor,
    place: slice,
    forms: Tensor,
    rows: list[Tensor],
    fixed: list[tuple[Tensor, ...]],
) -> Tensor:
    """Fill in the columns of forms and rows for a batch of impulses; return those of the matrix."""
    x = batch.requires_grad_()
    form = 0
    with torch.enable_grad():
        start: Parts = {(): x * float(stage.start.rho)}  # the point, but for 1/τ
        output = start
        for node, before, after in _follow(stage, start, biased=False):
            output = after
            site = node.action
            if not isinstance(site, ActivationSite):
                continue
            # With v = A_b e_i held fixed, the gradient of ⟨A_a x, v⟩ is A_aᵀ A_b e_i: column i of the form.
            weight, values = site.alpha**-2, list(before.values())
            for a, left in enumerate(values):
                for right in values[a:]:
                    inner = (left * right.detach()).sum()
                    (slope,) = torch.autograd.grad(
                        inner, x, retain_graph=True, materialize_grads=True
                    )
                    forms[form, place] = weight * slope.flatten(1)
                    form += 1
            for index, c in enumerate(fixed[site.number]):
                for a, left in enumerate(values):
                    dots = (left.detach() * c).flatten(1).sum(1)
                    rows[site.number][index, a, place] = weight * dots
    return torch.cat([part.detach().flatten(1) for part in output.values()], 1)


def _constant_parts(
    stage: Stage, paths: Paths, like: Tensor
) -> tuple[Recurrence, list[tuple[Tensor, ...]]]:
    """Push the biases through a stage; return all sites but their rows, and their constant parts."""
    sites: list[SiteTerms] = []
    fixed: list[tuple[Tensor, ...]] = []
    coordinates: list[tuple[Key, float]] = []  # of the value that each node gives
    parts: Parts = {}
    with torch.no_grad():
        for index, (node, before, after) in enumerate(_follow(stage, {}, biased=True)):
            source = node.sources[0]
            key, factor = ((), float(stage.start.sigma)) if source < 0 else coordinates[source]
            parts = after
            if isinstance(node.action, ActivationSite):
                site = node.action
                flat = [value.flatten() for value in before.values()]
                c = torch.stack(flat) if flat else like.new_zeros(0, 1)
                linear = tuple(k[:-1] for k in paths.keys[index])
                gram, rows = c @ c.T / site.alpha**2, like.new_zeros(0, 1)
                sites.append(SiteTerms(site, linear, tuple(before), rows, gram, key, factor))
                fixed.append(tuple(before.values()))
                key, factor = (*key, site.number), factor * site.alpha / site.slope
            coordinates.append((key, factor))
    vectors = torch.cat(list(parts.values())) if parts else like.new_zeros(0, *stage.output_shape)
    return Recurrence(tuple(sites), paths.output, tuple(parts), vectors), fixed
