"""The layers between two homogeneous maps or joins: linear operators and activations, as stages of two kinds.

- An affine stage has biases, or no activation. A bias is multiplied by the coordinate t, which activations change:
  a bias after an activation starts a new stage, and an activation ends a stage with biases.
- A radial stage is a chain of linear layers and activations: one linear map, and quadratic forms. Its balanced
  recurrence keeps every number in float range:

    z₀ = x̂        z_l = factor_l · U_l z_{l-1}        n_l = weight_l · ‖z_l‖²
    τ ← τ + m·n_l  (published)        τ ← τ + n_l/τ  (projective)        y = scale · V z_k / τ + bias
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.graph import device_of
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape, channel_factor, per_axis
from ..nn.layers import ChannelScale
from ..nn.registry import computes_like, find_spec, is_affine

_SIMPLE = 1e3  # a bound that is small enough in every dtype: no closer one is needed


CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
POOLINGS = nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d


@dataclass(frozen=True, eq=False)
class Operator:
    """One linear map U between samples of fixed shapes, made from a frozen module."""

    module: nn.Module  # without a bias
    input_shape: Shape  # of one sample
    output_shape: Shape
    bias: Tensor | None = None  # float64 (*output_shape), added to U x at t = 1

    def apply(self, x: Tensor) -> Tensor:
        """Return U x for a batch of samples, (B, *input_shape) → (B, *output_shape)."""
        result: Tensor = self.module(x)
        return result

    @cached_property
    def norm(self) -> float:
        """A proven upper bound of the operator norm.

        A convolution that pads with zeros is a part of one on the infinite plane, whose norm is the
        largest norm of its transfer matrix over all frequencies. A trigonometric polynomial of degree
        d exceeds its largest value on N equal steps by at most 1/cos(πd/N).
        """
        module: Any = self.module
        bound = self.simple_bound
        convolves = is_plain(module, CONVOLUTIONS)
        if not convolves or module.padding_mode != "zeros" or module.groups != 1:
            return bound
        weight = module.weight.detach().double()
        sizes = [1 if n == 1 else 8 * n for n in weight.shape[2:]]
        transfer = torch.fft.rfftn(weight, s=sizes, dim=tuple(range(2, weight.dim())))
        # (frequencies, C_out, C_in), in this order in memory: products of strided matrices take ten times as long
        transfer = transfer.flatten(2).permute(2, 0, 1).contiguous()
        rows, columns = weight.shape[:2]
        gram = transfer.mH @ transfer if rows >= columns else transfer @ transfer.mH
        power = 1
        scale = torch.ones(len(gram), dtype=torch.float64, device=weight.device)
        # ‖G‖ ≤ tr(G^p)^(1/p), closer with every squaring. Dividing by the trace keeps the powers of G in
        # range; ``scale`` collects the roots of the traces.
        for _ in range(5):
            trace = gram.diagonal(dim1=1, dim2=2).real.sum(1).clamp_min(1e-300)
            gram = gram / trace[:, None, None]
            scale = scale * trace ** (1 / power)
            gram, power = gram @ gram, 2 * power
        trace = gram.diagonal(dim1=1, dim2=2).real.sum(1)
        largest = float((scale * trace ** (1 / power)).max()) ** 0.5
        # Centred, a kernel of k taps is a trigonometric polynomial of degree (k − 1)/2 along its axis.
        for size, kernel in zip(sizes, weight.shape[2:], strict=True):
            largest /= math.cos(math.pi * (kernel - 1) / 2 / size)
        return float(min(bound, largest * (1 + 1e-9)))

    @cached_property
    def simple_bound(self) -> float:
        """An upper bound of the operator norm that takes no time: Young's inequality."""
        kind = find_spec(self.module)
        return math.inf if kind is None else float(kind.bound(self.module, self.input_shape))

    @property
    def has_tensors(self) -> bool:
        """Whether the module holds weights or other tensors."""
        return next(self.module.buffers(), None) is not None

    def multiply_adds(self) -> int:
        """Count the multiply-adds of one sample, from the sizes of the weight and the output."""
        weight = getattr(self.module, "weight", None)
        outputs = math.prod(self.output_shape)
        if not isinstance(weight, Tensor):
            axes = max(1, len(self.output_shape) - 1)
            size = math.prod(per_axis(getattr(self.module, "kernel_size", 1), axes))
            return outputs * size if size > 1 else 0
        if "Transpose" in type(self.module).__name__:
            return math.prod(self.input_shape) * weight[0].numel()
        return outputs * weight[0].numel()


def operator_of(module: nn.Module, input_shape: Shape, output_shape: Shape) -> Operator:
    """Split a frozen affine module in float64 into a linear operator and its bias."""
    bias = None
    if is_affine(module):
        zero = torch.zeros(1, *input_shape, dtype=torch.float64, device=device_of([module]))
        with torch.no_grad():
            bias = module(zero)[0]
        module = _without_bias(copy.deepcopy(module))
    return Operator(module, input_shape, output_shape, bias)


def _without_bias(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return ChannelScale(channel_factor(module))
    for name, child in list(module.named_children()):
        setattr(module, name, _without_bias(child))
    if module._buffers.get("bias") is not None:
        module._buffers["bias"] = None
    return module


def apply_all(operators: Iterable[Operator], x: Tensor) -> Tensor:
    """Apply operators one after the other."""
    for operator in operators:
        x = operator.apply(x)
    return x


def push_constant(operators: Iterable[Operator], constant: Tensor | None = None) -> Tensor | None:
    """Return the image of a constant sample under operators and their biases; None stands for zeros."""
    with torch.no_grad():
        for operator in operators:
            if constant is not None:
                constant = operator.apply(constant.unsqueeze(0))[0]
            if operator.bias is not None:
                constant = operator.bias if constant is None else constant + operator.bias
    return constant


def adjoint(operators: Sequence[Operator], g: Tensor) -> Tensor:
    """Return Uᵀ g of the chain: (B, *output_shape) → (B, *input_shape)."""
    if not operators:
        return g
    with torch.enable_grad():  # linear: the gradient is the same at every point
        shape = (g.shape[0], *operators[0].input_shape)
        x = torch.zeros(shape, dtype=g.dtype, device=g.device, requires_grad=True)
        (result,) = torch.autograd.grad(apply_all(operators, x), x, g)
    return result


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Check whether a module is one of torch's kinds and computes what that kind computes."""
    return any(isinstance(module, kind) and computes_like(type(module), kind) for kind in kinds)


def impulses(shape: Shape, chunk: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the identity in float64 as batches of at most ``chunk`` samples of the given shape."""
    size = math.prod(shape)
    for start in range(0, size, chunk):
        rows = min(chunk, size - start)
        identity = torch.zeros(rows, size, dtype=torch.float64, device=device)
        identity.diagonal(start).fill_(1)
        yield identity.view(-1, *shape)


class Scaling:
    """The scalars of ``x = m·κ·z`` and ``t = m·σ·τ``, chosen so that z and τ stay in range.

    ``balance = κ²/σ`` and ``rho = κ/σ``. A published activation keeps the balance at 1 (z = x/√s);
    one that acts on points keeps rho at 1 (z/τ is the point). :meth:`take` returns the factor of z
    that restores this. It is deferred so that the next layer can apply it to its weights.
    """

    def __init__(self, norm_factor: float = 1.0) -> None:
        # t starts as norm_factor·‖x‖, so κ = 1 and σ = norm_factor.
        self._balance: float = 1.0 / norm_factor
        self._rho: float = 1.0 / norm_factor
        # slope/α of the last activation and whether it acts on points, until :meth:`take`.
        self._last: tuple[float, bool] | None = None

    @property
    def rho(self) -> float:
        """The factor of the point ``rho · z / τ``, for the current z."""
        return self._rho if self._last is None else self._rho * self._last[0]

    def copy(self) -> Scaling:
        """Return an independent copy for a branch."""
        other = Scaling()
        other._balance, other._rho, other._last = self._balance, self._rho, self._last
        return other

    def lacking(self, gain: float) -> Scaling:
        """Return the scalars of ``z / gain``."""
        other = self.copy()
        other._balance, other._rho = self._balance * gain * gain, self._rho * gain
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaling) and vars(self) == vars(other)

    @property
    def sigma(self) -> float:
        """The factor of the coordinate ``m · sigma · τ``."""
        balance, rho = self._balance, self._rho
        if self._last is not None:
            balance, rho = balance * self._last[0], rho * self._last[0]
        return balance / (rho * rho)  # rho**2 of a float raises on overflow

    def activate(self, alpha: float, on_points: bool, slope: float = 2.0) -> float:
        """Pass an activation; return the weight of ``‖z‖²`` in τ, for the current z."""
        if self._last is not None:  # no layer has applied the previous factor
            before = self._last[0]
            self._balance, self._rho = self._balance * before, self._rho * before
        self._last = slope / alpha, on_points
        return (self._rho * self._rho if on_points else self._balance) / (alpha * alpha)

    def take(self) -> float | None:
        """Return the pending factor of z, or None."""
        if self._last is None:
            return None
        (ratio, on_points), self._last = self._last, None
        balance, rho = self._balance * ratio, self._rho * ratio
        # z ← factor·z divides κ by the factor, so κ/σ by it and κ²/σ by its square.
        factor = rho if on_points else balance**0.5
        if on_points:
            self._balance, self._rho = balance / factor**2, 1.0
        else:
            self._balance, self._rho = 1.0, rho / factor
        return factor


@dataclass(frozen=True)
class ActivationSite:
    """An activation with its α resolved.

    ``unit`` is √d where norms are root mean squares over the d coefficients here, else 1. Then q is
    ``‖p‖²/(α·unit)²``, which is an activation of radius α·unit and slope·unit.
    """

    module: RadialActivation
    alpha: float  # in units of the Euclidean norm
    path: str
    unit: float

    @property
    def slope(self) -> float:
        """α times the derivative at the origin: a short point is multiplied by slope/α."""
        return self.module.slope * self.unit

    def activate(self, scaling: Scaling) -> float:
        """Advance the scaling past the activation; return the weight of ``‖z‖²`` in τ, for the current z."""
        return float(scaling.activate(self.alpha, self.module.on_points, self.slope))

    def bound_after(self, size: float) -> float:
        """Bound the norm of a point after the activation, given a bound of its norm before it."""
        limit = self.unit if self.module.bounded else math.inf
        return min(limit, size * self.slope / self.alpha)

    def __str__(self) -> str:
        return f"{self.path}: {type(self.module).__name__}, α {self.alpha / self.unit:.4g}"


Layer = Operator | ActivationSite


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers in a row on samples of a fixed shape."""

    input_shape: Shape
    layers: tuple[Layer, ...]

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, Operator))

    @property
    def sites(self) -> tuple[ActivationSite, ...]:
        """All activations in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, ActivationSite))

    @property
    def output_shape(self) -> Shape:
        """The shape of one output sample."""
        return self.operators[-1].output_shape if self.operators else self.input_shape

    @property
    def device(self) -> torch.device:
        """The device of the operators."""
        return device_of(operator.module for operator in self.operators)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of its operators for one sample."""
        return sum(operator.multiply_adds() for operator in self.operators)


class AffineStage(Stage):
    """Layers with biases and at most one activation, at their end; or layers without an activation."""

    @property
    def biased(self) -> bool:
        """Whether some layer has a bias."""
        return any(operator.bias is not None for operator in self.operators)


@dataclass(frozen=True)
class Segment:
    """The operators up to one activation, ``z ← factor·U z``, and the weight of ``‖z‖²`` in τ.

    ``group`` is the number of the quadratic form that the energy belongs to.
    """

    operators: tuple[Operator, ...]
    factor: float
    weight: float
    site: ActivationSite
    group: int

    def apply(self, z: Tensor) -> Tensor:
        """Return ``factor·U z``."""
        return apply_all(self.operators, z) * self.factor


@dataclass(frozen=True, eq=False, repr=False)
class RadialStage(Stage):
    """Linear layers and activations: one linear map, and a recurrence of quadratic forms."""

    start: Scaling = field(default_factory=Scaling)  # of the points that enter
    entry: float = 1.0  # a bound of the norm of the z that enters, in units of the network's input
    least: float = 0.0  # a lower bound of τ/‖z‖ where it starts: 1 right after the embedding

    def entered(self, start: Scaling, entry: float = 1.0, least: float = 0.0) -> RadialStage:
        """Return the stage with other entering points."""
        return RadialStage(self.input_shape, self.layers, start, entry, least)

    @cached_property
    def _recurrence(self) -> tuple[tuple[Segment, ...], tuple[Operator, ...], Scaling]:
        segments: list[Segment] = []
        pending: tuple[Operator, ...] = ()
        group, scaling = -1, self.start.copy()
        for layer in self.layers:
            if isinstance(layer, Operator):
                pending = (*pending, layer)
                continue
            # The factor goes into the weights of this segment, so its z comes out scaled already, and
            # the weight of ‖z‖² is divided by factor².
            weight = layer.activate(scaling)
            factor = float(scaling.take() or 1.0)
            weight /= factor * factor
            # Consecutive activations of a formula that collapses share a form.
            formula = layer.module.formula
            alike = bool(segments) and segments[-1].site.module.formula == formula
            group += not (alike and layer.module.collapses)
            segments.append(Segment(pending, factor, weight, layer, group))
            pending = ()
        return tuple(segments), pending, scaling

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers up to each activation."""
        return self._recurrence[0]

    @property
    def trailing(self) -> tuple[Operator, ...]:
        """The operators after the last activation."""
        return self._recurrence[1]

    @property
    def end(self) -> Scaling:
        """The scaling of the points that leave."""
        return self._recurrence[2]

    @property
    def groups(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each quadratic form; their activations have the same formula."""
        return tuple(
            tuple(members) for _, members in groupby(self.segments, lambda segment: segment.group)
        )

    def rows_of(self, group: int) -> int:
        """Count the outputs of all layers that a form sums up."""
        rows, shape = 0, self.input_shape
        for segment in self.segments:
            shape = segment.operators[-1].output_shape if segment.operators else shape
            rows += math.prod(shape) if segment.group == group else 0
        return rows

    @property
    def provable(self) -> bool:
        """Whether an error bound of a simplified form is an error bound of the denominator."""
        return all(site.module.provable for site in self.sites)

    @property
    def unit(self) -> float:
        """1 if the denominator is proportional to the norm of the input, else 0; see ``forms.py``."""
        return self.least * all(site.module.on_points for site in self.sites)

    @cached_property
    def _bounds(self) -> tuple[float, ...]:
        """Bounds of the norm of z after each segment and at the end; may be infinite."""
        found = self._bounds_by("simple_bound")
        return found if max(found) <= _SIMPLE else self._bounds_by("norm")

    def _bounds_by(self, name: str) -> tuple[float, ...]:
        parts = [*((s.factor, s.operators) for s in self.segments), (1.0, self.trailing)]
        steps = (factor * math.prod(getattr(op, name) for op in ops) for factor, ops in parts)
        return tuple(accumulate(steps, mul, initial=self.entry))

    @property
    def bound(self) -> float:
        """A bound of the norm of every z on the way, in units of the input of the network."""
        return max(self._bounds)

    @property
    def exit(self) -> float:
        """The same bound for the z that leaves."""
        return self._bounds[-1]


def stage_of(input_shape: Shape, layers: Sequence[Layer]) -> AffineStage | RadialStage:
    """Return the stage of layers in a row."""
    activates = any(isinstance(layer, ActivationSite) for layer in layers)
    radial = activates and not any(map(has_bias, layers))
    return (RadialStage if radial else AffineStage)(input_shape, tuple(layers))


def has_bias(layer: Layer) -> bool:
    """Check whether a layer is an operator with a bias."""
    return isinstance(layer, Operator) and layer.bias is not None
