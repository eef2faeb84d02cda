"""Run the layers one by one, on batches of points ``x/t`` and their coordinates t, with branches.

Points stay in the range of floats at any depth, where coefficients and coordinates would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..errors import refusal_at
from ..functional import (
    Scalar,
    at_least_float32,
    autocasts,
    full_precision,
    guarded_inverse,
    length,
    norm_unit,
    positive,
    scale_samples,
    squared_norm,
    transformed,
    wide_dtype,
)
from .activations import RadialActivation
from .branches import Composite, Flow, Join, below, joined_bound
from .registry import branches, check_input, is_affine, linear_part, modules_in, run, spec_of
from .supported import POOLS, LayerSpec

Layer = tuple[nn.Module, LayerSpec, tuple[int, ...]]  # with the shape of one input sample


@dataclass(frozen=True)
class LinearSegment:
    """The layers since the last activation, homogeneous map or join, with a batch that entered them.

    ``base`` computes the bound of the points that enter; without a rule for α that needs it, nothing does.
    """

    entry: Tensor
    base: Callable[[], Scalar]
    layers: tuple[Layer, ...] = ()

    def then(self, *layers: Layer) -> LinearSegment:
        """Return the segment with further layers."""
        return LinearSegment(self.entry, self.base, (*self.layers, *layers))

    def bound(self) -> Scalar:
        """Return the bound after the last layer."""
        bound = self.base()
        for module, spec, shape in self.layers:
            bound = spec.bound(module, shape) * bound
        return bound

    def alpha(self, activation: RadialActivation, advance: bool, unit: float) -> Scalar:
        """Return α as a multiple of ``unit``; ``advance`` makes one step of a power iteration."""
        if isinstance(activation.alpha, float):
            return activation.alpha
        base = self.base() / unit
        if activation.alpha == "spectral" and advance and self.layers:
            return positive(power_step(activation, self.layers, self.entry) * base)
        return activation.resolve(self.bound() / unit, base)


@dataclass(frozen=True)
class Points:
    """A batch of points ``factor · x`` (B, ...), and their coordinates t (B,), both in the wide dtype.

    The factor of a sample waits for pooling, which makes the map smaller. With ``first`` it is that of the
    embedding, and waits for all layers without a bias: the gradient of the first input is not computed then.
    """

    x: Tensor
    t: Tensor
    segment: LinearSegment
    factor: Tensor | None = None
    first: bool = False

    def scaled(self) -> Points:
        """Return the same points without factors."""
        if self.factor is None:
            return self
        return Points(scale_samples(self.x, self.factor), self.t, self.segment)


class LayerFlow(Flow[Points]):
    """Run modules on batches; with ``advance`` each spectral norm makes one step of power iteration.

    With ``rms`` lengths are root mean squares. Bounds stay bounds of norms: points of root mean square 1 have
    the norm √d.
    """

    def __init__(self, advance: bool, rms: bool = False) -> None:
        self.advance, self.rms = advance, rms

    def run(self, path: str, module: nn.Module, value: Points) -> Points:
        """Run one module of a branch, or all modules of an nn.Sequential."""
        return self.run_chain(list(modules_in(path, module)), value)

    def run_chain(self, pairs: Iterable[tuple[str, nn.Module]], value: Points) -> Points:
        """Run (path, module) pairs in order."""
        for path, module in pairs:
            value = self.step(path, module, value)
        return value

    def split(self, path: str, groups: Sequence[nn.Module], value: Points) -> list[Points]:
        """Divide the channels at once: the gradients of slices would each fill and add a whole map."""
        shape, layers = tuple(value.x.shape), [(part, spec_of("", part)) for part in groups]
        check_input(below(path, "channels.0"), *layers[0], shape)
        parts = value.x.split([part.stop - part.start for part in groups], 1)  # type: ignore[operator]
        return [
            replace(value, x=x, segment=value.segment.then((*layer, shape[1:])))
            for x, layer in zip(parts, layers, strict=True)
        ]

    def join(self, path: str, values: list[Points], join: Join) -> Points:
        """Add or concatenate points; the result has the coordinate of the first."""
        if len(values) == 1:
            return values[0]
        values = [value.scaled() for value in values]
        x, t = join.merge([value.x for value in values]), values[0].t
        segments = [value.segment for value in values]
        one = all(value.t is t for value in values)  # no branch has passed an activation
        segment = LinearSegment(x, lambda: joined_bound([s.bound() for s in segments], join, one))
        return Points(x, t if one else t.view_as(t), segment)

    def step(self, path: str, module: nn.Module, value: Points) -> Points:
        """Run a layer, an activation or a composite."""
        if isinstance(module, Composite) and branches(module):
            return module.flow(path, value, self)
        if isinstance(module, RadialActivation):
            return self._activate(module, value)
        if is_affine(module) or not (value.first or isinstance(module, POOLS)):
            value = value.scaled()
        spec, before = spec_of(path, module), value.segment
        check_input(path, module, spec, tuple(value.x.shape))
        shape, x = tuple(value.x.shape[1:]), run(module, value.x)
        if x.shape[:1] != value.x.shape[:1]:
            expected, got = (
                "a layer that keeps the batch axis",
                f"an output of shape {tuple(x.shape)}",
            )
            raise refusal_at(path, module, expected, got, "Keep axis 0 out of the layer.")
        if not spec.homogeneous:
            return replace(value, x=x, segment=before.then((module, spec, shape)))
        bound = LinearSegment(x, lambda: spec.bound(module, shape) * before.bound())
        return replace(value, x=x, segment=bound)

    def _activate(self, module: RadialActivation, value: Points) -> Points:
        unit = norm_unit(value.x.shape[1:], self.rms)
        alpha = value.segment.alpha(module, self.advance, unit)
        before = 1.0 if value.factor is None else value.factor
        q = squared_norm(value.x) * (before / (alpha * unit)) ** 2
        factor, t = module.activate(q, value.t, alpha)
        return Points(value.x, t, LinearSegment(value.x, lambda: unit), before * factor)


def run_layers(
    layers: Iterable[tuple[str, nn.Module]],
    input: Tensor,
    training: bool,
    offset: Scalar = 0.0,
    rms: bool = False,
) -> Tensor:
    """Run (path, module) pairs on a batch, (B, ...) → (B, ...)."""
    compiling = torch.compiler.is_compiling()
    # Power iteration needs autograd, which transforms and inference mode take away.
    iterate = compiling or not (transformed() or torch.is_inference_mode_enabled())
    flow = LayerFlow(training and iterate, rms)
    if not compiling and input.is_inference():
        input = input.clone()  # outside of inference mode a layer can save the copy
    unit = norm_unit(input.shape[1:], rms)
    t = length(input, offset * unit) / unit
    pairs, entry = list(layers), LinearSegment(input, lambda: unit)
    points = Points(input, t, entry, guarded_inverse(t), first=True)
    if autocasts(input) or at_least_float32(input.dtype) != input.dtype:
        points = points.scaled()  # half precision has no range for what follows
    x = flow.run_chain(pairs, points).scaled().x
    if isinstance(offset, float) and offset == 0 and any(is_affine(module) for _, module in pairs):
        dead = (t == 0).view(-1, *[1] * (x.dim() - 1))  # t = 0 switches biases off
        x = torch.where(dead, 0.0, x)
    return x


# -- power iteration for alpha="spectral" ---------------------------------------------------------------

_WARM_UP = 8  # steps before the first use; a random vector gives far too small a norm


# torch.compiler.disable would import the compiler at once, which takes as long as the import of torch.
@_disable_dynamo
def power_step(activation: RadialActivation, segment: Sequence[Layer], x: Tensor) -> Tensor:
    """Advance the vector and the norm of the activation by one step, and return the norm.

    The norm is that of the layers of ``segment`` on samples like those of x. It is 0-dim, in the wide
    dtype, and differentiable in the weights but not in the vector.
    """
    with full_precision(x):
        dtype = next((p.dtype for m, *_ in segment for p in m.parameters()), x.dtype)
        vector = activation.vector
        layout = (1, *x.shape[1:]), dtype, x.device
        if vector is None or (vector.shape, vector.dtype, vector.device) != layout:
            vector = _random_unit(*layout)
            for _ in range(_WARM_UP):
                vector = _advance(segment, vector)[1]
        norm, activation.vector = _advance(segment, vector)
        with torch.no_grad():
            activation.norm.copy_(norm)
    # Use the rounded norm that evaluation reads back, with the gradient of the exact one.
    stored = activation.norm.detach().to(wide_dtype(x.device))
    wide = norm.to(wide_dtype(x.device))
    return stored + (wide - wide.detach())


def _advance(segment: Sequence[Layer], vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖U v‖ and the next unit vector UᵀU v / ‖UᵀU v‖."""
    with torch.enable_grad():
        start = vector.detach().requires_grad_()
        image = start
        for module, spec, _ in segment:
            image = linear_part(module, spec, image)
        norm = torch.linalg.vector_norm(image)
        (gradient,) = torch.autograd.grad(norm, start, retain_graph=True)  # UᵀU v / ‖U v‖
    length = torch.linalg.vector_norm(gradient)
    return norm, torch.where(length > 0, gradient / length, vector).detach()


def _random_unit(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a fixed random unit vector: reproducible, and independent of the global seed."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(shape, generator=generator, dtype=torch.float64)
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit.to(device, dtype)
