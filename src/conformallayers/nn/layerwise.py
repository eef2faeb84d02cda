"""The layers one by one: batches of points in the balanced scaling, through chains and branches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..functional import (
    Scalar,
    Scaling,
    activate_and_dehomogenize,
    dehomogenize,
    energy,
    guarded_ratio,
    may_look,
    normalise,
    positive,
    rescaled,
    squares_fit,
    transformed,
)
from ..registry.bounds import Shape
from ..registry.registry import (
    LayerSpec,
    check_batch_axis,
    check_input,
    has_batch_statistics,
    is_affine,
    modules_in,
    run,
    spec_of,
)
from .activations import LARGEST, PROJECTIVE, PUBLISHED, RadialActivation
from .branches import Composite, Flow, Join, branches, joined_bound
from .power_iteration import power_step

_RENEWAL = 8  # activations between rescalings, where nobody may look whether they are needed


@dataclass
class Segment:
    """The layers since the last activation, and a batch that entered them.

    ``before`` are the segments of branches that were joined since then.
    """

    entry: Tensor
    layers: list[tuple[nn.Module, LayerSpec, Shape]] = field(default_factory=list)
    before: tuple[Segment, ...] = ()
    join: Join | None = None

    def base(self) -> Scalar:
        """Return the bound of what entered: 1 behind an activation, else that of the branches."""
        return joined_bound([segment.bound() for segment in self.before], self.join)

    def bound(self) -> Scalar:
        """Return the bound of what leaves the layers."""
        bound = self.base()
        for module, kind, shape in self.layers:
            bound = kind.bound(module, shape) * bound
        return bound

    def alpha(self, activation: RadialActivation, advance: bool) -> Scalar:
        """Return α; ``advance`` lets a spectral norm take its step."""
        if isinstance(activation.alpha, float):
            return activation.alpha
        if activation.alpha == "spectral" and advance and self.layers:
            norm: Tensor = power_step(activation, self.layers, self.entry)
            return positive(norm * self.base())
        return activation.resolve(self.bound(), self.base())


@dataclass
class Points:
    """A batch of points: ``x = m·κ·z`` and ``t = m·σ·τ``, with the scalars in ``scaling``.

    ``age`` counts the activations since z was last known to be of moderate norm.
    """

    z: Tensor
    m: Tensor
    tau: Tensor
    scaling: Scaling
    segment: Segment
    age: int = 0

    def fork(self) -> Points:
        """Return points of their own for a branch; tensors are shared."""
        segment = self.segment
        copied = Segment(segment.entry, list(segment.layers), segment.before, segment.join)
        return Points(self.z, self.m, self.tau, self.scaling.copy(), copied, self.age)

    def rebase(self) -> Points:
        """Return the same with ``z`` the point itself, ``m`` the coordinate, and τ 1 (0 for x = 0)."""
        m = (self.m * self.scaling.sigma * self.tau).clamp_max(LARGEST)
        tau = self.tau.detach()
        alive = torch.where(tau.isnan(), tau, (tau != 0).to(tau.dtype))
        z = dehomogenize(self.z, self.scaling.rho, self.tau)
        return Points(z, m, alive, Scaling(), self.segment, _RENEWAL)

    def measured(self) -> tuple[Points, Tensor]:
        """Return the points and ``‖z‖²``, rescaled where that would leave the range of z's dtype.

        In float32 it would after some 60 layers that keep the norm, or behind a bias where large
        inputs have made the points tiny.
        """
        z, n = energy(self.z)
        m, tau, age = self.m, self.tau, self.age + 1
        fits = squares_fit(z, n, tau) if may_look(z) else age <= _RENEWAL
        if not fits:
            z, factor = rescaled(self.z)
            z, n = energy(z)
            m, tau, age = m / factor, tau * factor, 0
        return Points(z, m, tau, self.scaling, self.segment, age), n.to(tau.dtype)

    def dehomogenize(self) -> Tensor:
        """Return the points."""
        return dehomogenize(self.z, self.scaling.rho, self.tau)


class Running(Flow[Points]):
    """Run modules on batches.

    Args:
        advance: let spectral norms take their steps.
        alphas: the radii of the activations in the order they are passed; None: work them out.
    """

    def __init__(self, advance: bool, alphas: Sequence[float] | None = None) -> None:
        self.advance = advance
        self.alphas = None if alphas is None else iter(alphas)

    def run(self, path: str, module: nn.Module, value: Points) -> Points:
        """Pass one module of a branch, or all of an nn.Sequential."""
        value = value.fork()
        for name, child in modules_in(path, module):
            value = self.step(name, child, value)
        return value

    def join(self, path: str, values: list[Points], join: Join) -> Points:
        """Add or concatenate points, with the coordinate of the first."""
        if len(values) == 1:
            return values[0]
        segments = tuple(value.segment for value in values)
        rebased = [value.rebase() for value in values]
        first = rebased[0]
        z = join.merge([value.z for value in rebased])
        segment = Segment(z, [], segments, join)
        return Points(z, first.m, first.tau, Scaling(), segment, _RENEWAL)

    def step(self, path: str, module: nn.Module, value: Points) -> Points:
        """Pass a layer, an activation or a composite."""
        if isinstance(module, RadialActivation):
            return self._activate(module, value, self._weight(module, value))
        if isinstance(module, Composite) and branches(module):
            return module.flow(path, value, self)
        kind = spec_of(path, module)
        batch = value.z.shape[0]
        check_input(path, module, kind, tuple(value.z.shape))
        value.segment.layers.append((module, kind, tuple(value.z.shape[1:])))
        if isinstance(module, Composite) and has_batch_statistics(module):
            # For α it is one linear layer, but the statistics are those of points on their way.
            segment = value.segment
            value = module.flow(path, value, self)
            value.segment = segment
        elif is_affine(module):
            value = value.rebase()
            value.z = module(value.z)
        else:
            factor = value.scaling.take() if kind.scaled else None
            value.z = run(module, kind, value.z, factor)
        check_batch_axis(path, module, value.z.shape, batch)
        return value

    def _activate(self, module: RadialActivation, value: Points, weight: Scalar) -> Points:
        value, n = value.measured()
        tau = module.rule.advance(value.tau, n * weight, value.m)
        return Points(value.z, value.m, tau, value.scaling, Segment(value.z), value.age)

    def finish(self, module: RadialActivation, value: Points) -> Tensor:
        """Pass the last activation and leave: in one pass, where rule and range allow it."""
        weight = self._weight(module, value)
        looks = may_look(value.z)
        if module.rule in (PUBLISHED, PROJECTIVE) and (looks or value.age < _RENEWAL):
            published = module.rule == PUBLISHED
            gain = value.m * weight if published else guarded_ratio(weight, value.tau)
            y, n = activate_and_dehomogenize(value.z, value.tau, gain, value.scaling.rho)
            if not looks or squares_fit(value.z, n, value.tau):
                return y
        return self._activate(module, value, weight).dehomogenize()

    def _weight(self, module: RadialActivation, value: Points) -> Scalar:
        resolved = self.alphas is not None
        alpha = next(self.alphas) if resolved else value.segment.alpha(module, self.advance)  # type: ignore[arg-type]
        return value.scaling.activate(alpha, module.rule.on_points, module.slope)


def run_layers(
    layers: Iterable[tuple[str, nn.Module]],
    input: Tensor,
    training: bool,
    alphas: Sequence[float] | None = None,
) -> Tensor:
    """Run (path, module) pairs one by one on a batch (see ``fold.py`` for the letters).

    Args:
        layers: in order.
        input: (B, ...).
        training: let spectral norms take their steps.
        alphas: the radii of all activations, if they are known.
    """
    z, m, tau = normalise(input)
    running = Running(training and _may_step(), alphas)
    value = Points(z, m, tau, Scaling(), Segment(z))
    pairs = list(layers)
    for index, (path, module) in enumerate(pairs):
        if index + 1 == len(pairs) and isinstance(module, RadialActivation):
            return running.finish(module, value)
        value = running.step(path, module, value)
    return value.dehomogenize()


def _may_step() -> bool:
    """Power iteration needs autograd of its own, which transforms and inference mode do not give."""
    if torch.compiler.is_compiling():
        return True
    return not (transformed() or torch.is_inference_mode_enabled())
