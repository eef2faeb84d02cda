"""Run the layers one by one: batches of points in the balanced scaling, with branches.

A bias right before a batch norm in training is left out of the computation: the norm subtracts it
again with the batch mean. Its gradient would be rounding noise, which Adam scales up to full steps,
and the running mean could not follow. The running mean still includes the bias, as in torch.nn, so
evaluation, folds and checkpoints need no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import (
    Scalar,
    activate,
    activate_and_dehomogenize,
    advance,
    dehomogenize,
    energy,
    guarded_ratio,
    length,
    may_look,
    norm_unit,
    rescaled,
    squares_fit,
    transformed,
    unity,
)
from ..scaling import Scaling, constant, positive, product
from .activations import RadialActivation, ReSPro
from .branches import Composite, Flow, Join, below, joined_bound
from .collapse import collapsible, run_collapsed
from .homogeneous import Split
from .input_checks import check_batch_axis, check_input
from .power_iteration import Layer, power_step
from .registry import (
    bias_is_redundant,
    branches,
    has_batch_statistics,
    has_global_hooks,
    is_affine,
    modules_in,
    pool_at_once,
    run,
    spec_of,
)

_BIAS_IN_MEAN = "_bias_in_mean"  # attribute of a batch norm: the bias in its running mean
LARGEST_COORDINATE = 1.7e308  # coordinates are cut here, so that they stay finite
_RESCALE_EVERY = 8  # activations between rescalings, where values cannot be read to decide


@dataclass
class LinearSegment:
    """The layers since the last activation, homogeneous map or join, with a batch that entered them.

    ``start`` is the bound behind an activation or the embedding. ``before`` holds the segment before the
    ``map``, or those of the joined branches. With ``one_coordinate`` no branch has passed an activation.
    """

    entry: Tensor
    start: float = 1.0
    layers: list[Layer] = field(default_factory=list)
    before: tuple[LinearSegment, ...] = ()
    map: Layer | None = None
    join: Join | None = None
    one_coordinate: bool = False

    def fork(self) -> LinearSegment:
        """Return a copy with a list of layers of its own."""
        bounds = self.before, self.map, self.join, self.one_coordinate
        return LinearSegment(self.entry, self.start, list(self.layers), *bounds)

    def base(self) -> Scalar:
        """Return the bound at the entry."""
        bounds = [segment.bound() for segment in self.before]
        if self.map is not None:
            module, spec, shape = self.map
            return product(spec.bound(module, shape), bounds[0])
        if self.join is not None:
            return joined_bound(bounds, self.join, self.one_coordinate)
        return self.start

    def bound(self) -> Scalar:
        """Return the bound after the last layer."""
        bound = self.base()
        for module, spec, shape in self.layers:
            bound = product(spec.bound(module, shape), bound)
        return bound

    def alpha(self, activation: RadialActivation, advance: bool, unit: float) -> Scalar:
        """Return α as a multiple of ``unit``; ``advance`` makes one step of a power iteration."""
        if isinstance(activation.alpha, float):
            return activation.alpha
        if activation.alpha == "spectral" and advance and self.layers:
            norm: Tensor = power_step(activation, self.layers, self.entry)
            base = self.base() if unit == 1.0 else self.base() / unit
            return positive(product(norm, base))
        bound, base = self.bound(), self.base()
        if unit != 1.0:
            bound, base = bound / unit, base / unit
        return activation.resolve(bound, base)


@dataclass
class Points:
    """A batch of points: ``x = m·κ·z`` and ``t = m·σ·τ``, with the scalars in ``scaling``.

    ``age`` counts the activations since the norm of z was last known to be moderate. ``coordinate`` is equal
    for values that have passed the same activations, and so have the same t. With ``divided`` τ is known to
    be 1 for all samples, and ρ is 1 until the next activation. With ``alive`` no τ is 0.
    """

    z: Tensor
    m: Scalar
    tau: Tensor
    scaling: Scaling
    segment: LinearSegment
    age: int = 0
    coordinate: int = 0
    divided: bool = False
    alive: bool = False

    def fork(self) -> Points:
        """Return a copy for a branch; tensors are shared."""
        scaling, segment = self.scaling.copy(), self.segment.fork()
        flags = self.age, self.coordinate, self.divided, self.alive
        return Points(self.z, self.m, self.tau, scaling, segment, *flags)

    def rebase(self) -> Points:
        """Return the same points with ``z`` the point, ``m`` the coordinate and τ = 1 (0 for x = 0).

        A bias is added to points, and branches with different coordinates are joined as points.
        """
        m = (self.tau * product(self.scaling.sigma, self.m)).clamp_max(LARGEST_COORDINATE)
        tau = self.tau.detach()
        looks = not self.alive and may_look(tau) and tau.numel() > 0
        nonzero = self.alive or (looks and tau.min().item() > 0)  # False for NaN
        one = torch.ones_like(tau) if nonzero else tau.clamp_max(1).ceil()  # NaN stays
        flags = _RESCALE_EVERY, self.coordinate, nonzero, nonzero
        return Points(self.dehomogenize(), m, one, Scaling(), self.segment, *flags)

    def rescaled(self) -> Points:
        """Return the same points with norms of z near 1.

        Needed where squares would leave the range of the dtype: in float32 after about 60 layers that
        preserve the norm, and after a bias when large inputs have made the points tiny.
        """
        z, factor = rescaled(self.z)
        m, tau = self.m / factor, self.tau * factor
        flags = -1, self.coordinate, False, self.alive
        return Points(z, m, tau, self.scaling, self.segment, *flags)

    def fits(self, n: Tensor) -> bool:
        """Check that the squares of z, whose sums are n, are in the range of the dtype."""
        if may_look(self.z):
            return squares_fit(self.z, n, self.tau)
        return self.age < _RESCALE_EVERY

    def dehomogenize(self) -> Tensor:
        """Return the points ``x / t``."""
        if self.divided:
            return self.z
        return dehomogenize(self.z, self.scaling.rho, self.tau, self.alive)


@dataclass
class Activation:
    """An activation of a batch: its module, the weight of ``‖z‖²`` in τ, and α if it has a gradient.

    The scalars between a point and (z, τ) are free to choose, as long as each step uses the same ones.
    They are computed from the value of α, without a gradient; only the step of τ has the gradient of α.
    """

    module: RadialActivation
    weight: Scalar
    alpha: Tensor | None

    @property
    def fuses(self) -> bool:
        """Whether the step of τ is a sum, one node of autograd."""
        return type(self.module).step is ReSPro.step

    def gain(self, value: Points) -> Tensor:
        """Return the factors of ``‖z‖²`` in τ, one for each sample."""
        if not self.module.on_points:
            gain = value.m * self.weight
            if isinstance(gain, Tensor):
                return gain.clamp_max(LARGEST_COORDINATE)  # 0·∞ would be a gradient of NaN
            return value.tau.new_full((), min(gain, LARGEST_COORDINATE))
        if value.divided:  # τ = 1 is its own inverse
            return value.tau * self.weight
        return self.weight / value.tau if value.alive else guarded_ratio(self.weight, value.tau)

    def advance(self, value: Points) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, to use afterwards, the next τ, and ``‖z‖²``."""
        if self.fuses:
            return activate(value.z, value.tau, self.gain(value), self.alpha)
        z, n = energy(value.z)
        tau = value.tau if self.alpha is None else value.tau * unity(self.alpha)
        return z, advance(self.module.step, tau, value.m, n.to(tau.dtype) * self.weight), n


class LayerFlow(Flow[Points]):
    """Run modules on batches; with ``advance`` each spectral norm makes one step of power iteration.

    With ``rms`` lengths are root mean squares. Bounds stay bounds of norms: points of root mean square 1 have
    the norm √d, and an activation acts like one with the radius α·√d and the same slope at 0. With
    ``collapse`` convolutions in a row run as one where that is cheaper.
    """

    def __init__(self, advance: bool, rms: bool = False, collapse: bool = False) -> None:
        self.advance, self.rms, self.collapse = advance, rms, collapse
        self.coordinates = 0  # number of coordinates created

    def run(self, path: str, module: nn.Module, value: Points) -> Points:
        """Run one module of a branch, or all modules of an nn.Sequential."""
        return self.run_chain(list(modules_in(path, module)), value.fork())

    def run_chain(self, pairs: Sequence[tuple[str, nn.Module]], value: Points) -> Points:
        """Run (path, module) pairs in order."""
        modules = [module for _, module in pairs]
        bias: Tensor | None = None  # left out of the layer before
        index = 0
        while index < len(pairs):
            shapes = collapsible(modules[index:], value.z) if self.collapse else []
            if shapes:
                leading = modules[index : index + len(shapes)]
                every = zip(leading, shapes, strict=True)
                value.segment.layers += [(m, spec_of("", m), shape) for m, shape in every]
                value.z = run_collapsed(leading, value.z, value.scaling.take())
                index += len(shapes)
                continue
            path, module = pairs[index]
            index += 1
            following = modules[index] if index < len(pairs) else None
            redundant = bias_is_redundant(module, following, value.z.dim())
            fresh = None if bias is None else _is_fresh(module)
            value = self.step(path, module, value, with_bias=not redundant)
            if bias is not None:
                _add_to_running_mean(module, bias, fresh)
            bias = module.bias if redundant else None  # type: ignore[assignment]
            if bias is not None:  # a gradient of exactly 0, since autograd.grad and DDP want one
                value.tau, value.divided = value.tau + 0 * bias.sum(), False
        return value

    def split(self, path: str, groups: Sequence[Any], value: Points) -> list[Points]:
        """Divide the channels at once: the gradients of slices would each fill and add a whole map."""
        if has_global_hooks():
            return super().split(path, groups, value)
        spec, shape, parts = spec_of("", groups[0]), tuple(value.z.shape), []
        check_input(below(path, "channels.0"), groups[0], spec, shape)
        widths = [module.stop - module.start for module in groups]
        for module, z in zip(groups, value.z.split(widths, 1), strict=True):
            part = value.fork()
            part.segment.layers.append((module, spec, shape[1:]))
            part.z = z
            parts.append(part)
        return parts

    def join(self, path: str, values: list[Points], join: Join) -> Points:
        """Add or concatenate points; the result has the coordinate of the first."""
        if len(values) == 1:
            return values[0]
        segments, first = tuple(value.segment for value in values), values[0]
        one_coordinate = all(value.coordinate == first.coordinate for value in values)
        if any(value.m is not first.m or value.tau is not first.tau for value in values):
            # Coordinates differ: join x₁/t₁ and x₂/t₂, and keep t₁.
            values = [value.rebase() for value in values]
        elif len({value.scaling.pending for value in values}) == 2:
            for value in values:  # some branches have applied the factor, and now all of them do
                factor = value.scaling.take()
                value.z = value.z if factor is None else value.z * factor
        z = join.merge([value.z for value in values])
        segment = LinearSegment(z, before=segments, join=join, one_coordinate=one_coordinate)
        first, age = values[0], max(value.age for value in values)
        coordinate = first.coordinate if one_coordinate else self._new_coordinate()
        flags = age, coordinate, first.divided, first.alive
        return Points(z, first.m, first.tau, first.scaling, segment, *flags)

    def _pool_at_once(self, split: Split, value: Points) -> bool:
        """Pool the groups of channels of a split in one pass; False where they cannot be."""
        channels, before = split.channels, value.segment
        ranges = [slice(part.start, part.stop) for part in channels]
        pooled = pool_at_once(split.groups, ranges, value.z)
        if pooled is None:
            return False
        sample, segments = tuple(value.z.shape[1:]), []
        for part, module in zip(channels, split.groups, strict=True):
            segment, spec = before.fork(), spec_of("", module)
            segment.layers.append((part, spec_of("", part), sample))
            layer = module, spec, (part.stop - part.start, *sample[1:])
            if spec.homogeneous:
                segment = LinearSegment(pooled, before=(segment,), map=layer)
            else:
                segment.layers.append(layer)
            segments.append(segment)
        value.z = pooled
        value.segment = LinearSegment(
            pooled, before=tuple(segments), join=split.join, one_coordinate=True
        )
        return True

    def _new_coordinate(self) -> int:
        self.coordinates += 1
        return self.coordinates

    def step(self, path: str, module: nn.Module, value: Points, with_bias: bool = True) -> Points:
        """Run a layer, an activation or a composite."""
        if isinstance(module, RadialActivation):
            return self._activate(self._activation(module, value), value)
        if self.collapse and type(module) is Split and self._pool_at_once(module, value):
            return value
        if isinstance(module, Composite) and branches(module):
            return module.flow(path, value, self)
        spec = spec_of(path, module)
        batch = value.z.shape[0]
        check_input(path, module, spec, tuple(value.z.shape))
        layer = module, spec, tuple(value.z.shape[1:])
        if spec.homogeneous:
            value.z = run(module, spec, value.z, None)
            value.segment = LinearSegment(value.z, before=(value.segment,), map=layer)
            check_batch_axis(path, module, value.z.shape, batch)
            return value
        value.segment.layers.append(layer)
        if isinstance(module, Composite) and has_batch_statistics(module):
            # One linear layer for α, but its batch norms must see the points inside it.
            segment = value.segment
            value = module.flow(path, value, self)
            value.segment = segment
        elif with_bias and is_affine(module):
            value = value.rebase()
            value.z = module(value.z)
        else:
            factor = value.scaling.take() if spec.scaled else None
            if not with_bias and factor is None:
                factor = 1.0  # the scaled form has no bias
            value.z = run(module, spec, value.z, factor)
        check_batch_axis(path, module, value.z.shape, batch)
        return value

    def _activate(self, activation: Activation, value: Points) -> Points:
        z, tau, n = activation.advance(value)
        if not value.fits(n):  # repeat the step where squares are in range
            value = value.rescaled()
            z, tau, n = activation.advance(value)
        value.segment = LinearSegment(z, norm_unit(z.shape[1:], self.rms))
        value.z, value.tau, value.divided = z, tau, False
        value.coordinate, value.age = self._new_coordinate(), value.age + 1
        return value

    def finish(self, module: RadialActivation, value: Points) -> Tensor:
        """Apply the last activation and dehomogenize, in one pass if its step and the range allow it."""
        activation = self._activation(module, value)
        if activation.fuses and (may_look(value.z) or value.age < _RESCALE_EVERY):
            gain, alpha = activation.gain(value), activation.alpha
            rho = value.scaling.rho
            y, n = activate_and_dehomogenize(value.z, value.tau, gain, rho, alpha, value.alive)
            if value.fits(n):
                return y
        return self._activate(activation, value).dehomogenize()

    def _activation(self, module: RadialActivation, value: Points) -> Activation:
        """Return the activation of a value, and note it in the scaling."""
        unit = norm_unit(value.z.shape[1:], self.rms)
        alpha = value.segment.alpha(module, self.advance, unit)
        fixed = constant(alpha)
        weight = value.scaling.activate(fixed * unit, module.on_points, module.slope * unit)
        return Activation(module, weight, alpha if isinstance(alpha, Tensor) else None)


def embed_batch(input: Tensor, offset: Scalar, rms: bool) -> Points:
    """Embed a batch, (B, ...) → points."""
    if not torch.compiler.is_compiling() and input.is_inference():
        input = input.clone()  # outside of inference mode a layer saves the copy for its gradient
    unit = norm_unit(input.shape[1:], rms)
    tau = length(input, offset * unit)
    return Points(input, 1.0, tau, Scaling(1 / unit), LinearSegment(input, unit))


def run_layers(
    layers: Iterable[tuple[str, nn.Module]],
    input: Tensor,
    training: bool,
    offset: Scalar = 0.0,
    rms: bool = False,
) -> Tensor:
    """Run (path, module) pairs on a batch, (B, ...) → (B, ...)."""
    compiling, transforms = torch.compiler.is_compiling(), transformed()
    # Power iteration needs autograd, which transforms and inference mode take away.
    iterate = compiling or not (transforms or torch.is_inference_mode_enabled())
    flow = LayerFlow(training and iterate, rms, training and not (compiling or transforms))
    value = embed_batch(input, offset, rms)
    pairs = list(layers)
    last = pairs[-1][1] if pairs else None
    if isinstance(last, RadialActivation):
        return flow.finish(last, flow.run_chain(pairs[:-1], value))
    return flow.run_chain(pairs, value).dehomogenize()


def _is_fresh(norm: Any) -> Tensor:
    """Check whether a batch norm has seen no batch; converted checkpoints have a mean, but no count."""
    fresh: Tensor = (norm.num_batches_tracked == 0) & ~norm.running_mean.any()
    return fresh


def _add_to_running_mean(norm: Any, bias: Tensor, fresh: Any) -> None:
    """Correct the running mean after a batch whose bias b was left out.

    The mean of the batches without their bias is averaged, and the current b added:
    ``mean + b − (1 − momentum)·b_before``, where b_before is the bias that the mean included. Averaging
    b itself would lag behind weight decay by many standard deviations of small points. The initial
    mean of 0, of a fresh norm, includes no bias.
    """
    with torch.no_grad():
        batches = norm.num_batches_tracked.to(bias.dtype)
        share = 1 / batches if norm.momentum is None else norm.momentum
        before = vars(norm).get(_BIAS_IN_MEAN)
        before = bias if before is None else before.to(bias)  # unknown after loading a checkpoint
        # Through .data: the backward pass holds the running mean, but does not use its values.
        norm.running_mean.data.add_(bias - (1 - share) * before * ~fresh)
        if not torch.compiler.is_compiling():
            vars(norm)[_BIAS_IN_MEAN] = bias.clone()
