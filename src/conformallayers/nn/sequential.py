"""The container that runs its layers one by one, in the behaviour of nn.Sequential."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..errors import is_real, refusal, refusal_at
from ..functional import (
    Scalar,
    at_least_float32,
    autocasts,
    full_precision,
    guarded_inverse,
    length,
    norm_pool,
    norm_unit,
    positive,
    scale_samples,
    squared_norm,
    transformed,
    wide_dtype,
    window_sums,
)
from .activations import RadialActivation
from .bounds import pool_axes
from .branches import BatchFlow, Composite, Flow, Join, below, branches, check_module, joined_bound
from .registry import (
    BATCH_NORMS,
    NORM_POOLS,
    POOLS,
    SUPPORTED_KINDS,
    LayerSpec,
    check_input,
    flatten_modules,
    has_global_hooks,
    has_hooks,
    is_affine,
    modules_in,
    spec_of,
)


class ConformalSequential(nn.Sequential):
    """Run linear layers, radial activations and homogeneous maps one by one, without folding.

    :class:`conformallayers.ConformalLayers` is this container, folded in ``eval()``, and documents the arguments.
    """

    _offset: str | float | None = None  # of the class, for pickles without one
    _unit: str = "norm"

    def __init__(
        self, *modules: Any, offset: str | float | None = None, unit: str = "norm"
    ) -> None:
        super().__init__(*modules)
        self.offset, self.unit = offset, unit

    # -- the embedding --------------------------------------------------------------------------

    @property
    def offset(self) -> Scalar | None:
        """The offset of the embedding; a tensor if it is learned. Set it to any value of the argument."""
        if self._offset == "learned":
            return self.log_offset.to(wide_dtype(self.log_offset.device)).exp()
        return self._offset  # type: ignore[return-value]

    @offset.setter
    def offset(self, value: str | float | None) -> None:
        if value is not None and not (isinstance(value, str) and value == "learned"):
            if not is_real(value) or not 0 < value < math.inf:
                expected = 'None, "learned" or a finite number > 0'
                remedy = "Leave it out for the paper's embedding."
                raise refusal("ConformalLayers(offset=...)", expected, repr(value), remedy)
            value = float(value)
        self._offset = value
        self._parameters.pop("log_offset", None)
        if self._offset == "learned":
            like = next(self.parameters(), torch.empty(()))
            self.log_offset = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))

    @property
    def unit(self) -> str:
        """The unit of lengths, ``"norm"`` or ``"rms"``."""
        return self._unit

    @unit.setter
    def unit(self, value: str) -> None:
        if value not in ("norm", "rms"):
            remedy = 'The paper\'s is "norm"; "rms" makes entries of order 1.'
            raise refusal("ConformalLayers(unit=...)", '"norm" or "rms"', repr(value), remedy)
        self._unit = value

    @property
    def embedding(self) -> tuple[float, str]:
        """The offset as a number, 0 for none, and the unit."""
        with torch.no_grad():
            offset = float(self.offset or 0.0)
        if not math.isfinite(offset):
            remedy = "Look for NaN or infinity in log_offset."
            raise refusal("ConformalLayers", "a finite offset", str(offset), remedy)
        return offset, self.unit

    def reset_parameters(self) -> None:
        """Set a learned offset to 1."""
        if self._offset == "learned":
            nn.init.zeros_(self.log_offset)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments beside the modules that are not the defaults."""
        offset = {} if self._offset is None else {"offset": self._offset}
        return offset if self._unit == "norm" else {**offset, "unit": self._unit}

    def extra_repr(self) -> str:
        """Return the settings."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def _share_embedding(self, other: Self) -> Self:
        """Copy the embedding to another container; a learned offset is shared, as layers are."""
        other._offset, other._unit = self._offset, self._unit
        if self._offset == "learned":
            other.log_offset = self.log_offset
        return other

    # -- nn.Sequential's interface ---------------------------------------------------------------

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a layer under a name; refuse what does not fold."""
        self._check(name, module)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        modules = self.__dict__.get("_modules")
        if modules is not None and (isinstance(value, nn.Module) or name in modules):
            self._check(name, value)
        super().__setattr__(name, value)

    @overload
    def __getitem__(self, idx: slice) -> Self: ...
    @overload
    def __getitem__(self, idx: int) -> nn.Module: ...
    def __getitem__(self, idx: slice | int) -> Self | nn.Module:
        item: Any = super().__getitem__(idx)
        return self._share_embedding(item) if isinstance(idx, slice) else item

    def insert(self, index: int, module: nn.Module) -> Self:
        """Insert a layer; refuse what does not fold."""
        self._check(str(index), module)
        super().insert(index, module)
        return self

    def __add__(self, other: Iterable[nn.Module]) -> Self:
        return self._share_embedding(self.__class__(*self, *other))

    def __mul__(self, other: int) -> Self:
        return self._share_embedding(self.__class__(*(list(self) * other)))

    __rmul__ = __mul__

    # -- forward --------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Map a batch."""
        self._check_batch(input)
        return self._run(input)

    def _run(self, input: Tensor) -> Tensor:
        return self._run_layers(input)

    def _run_layers(self, input: Tensor) -> Tensor:
        """Run the layers one by one, on points."""
        offset = self.offset
        offset = 0.0 if offset is None else offset
        return run_layers(flatten_modules(self), input, self.training, offset, self._unit == "rms")

    # -- checks ---------------------------------------------------------------------------------

    def _check(self, name: str, module: Any) -> None:
        if not isinstance(module, nn.Module):
            where, remedy = (
                f"ConformalLayers at position {name}",
                "Pass modules, or one OrderedDict.",
            )
            raise refusal(where, SUPPORTED_KINDS, repr(module), remedy)
        passed = [a for path, child in modules_in(name, module) for a in check_module(path, child)]
        spectral = [act for act in passed if getattr(act, "alpha", None) == "spectral"]
        others = {
            m for key, part in self._modules.items() if key != name and part for m in part.modules()
        }
        if len(set(spectral)) < len(spectral) or others & set(spectral):
            where = f"ConformalLayers at position {name}"
            expected = f'one place for each {type(spectral[0]).__name__}(alpha="spectral")'
            remedy = "Create a second one: each stores the norm of the layers before it."
            raise refusal(where, expected, "one that is used twice", remedy)

    def _check_batch(self, input: Tensor) -> None:
        if not isinstance(input, Tensor) or not input.is_floating_point():
            tensor = isinstance(input, Tensor)
            got = str(input.dtype) if tensor else type(input).__name__
            remedy = "Scale bytes as x.float() / 255." if tensor else "Use torch.as_tensor(x)."
            raise refusal("ConformalLayers", "a floating-point tensor", got, remedy)
        parameter = next(self.parameters(), None)
        if parameter is not None and parameter.dtype != input.dtype and not autocasts(input):
            expected = f"an input of the parameters' dtype {parameter.dtype}"
            remedy = "Convert the input, or the model with model.to(x.dtype)."
            raise refusal("ConformalLayers", expected, str(input.dtype), remedy)
        if input.dim() < 2 or 0 in input.shape[1:]:
            expected = "a batch of samples, each with at least one coefficient"
            got, remedy = f"shape {tuple(input.shape)}", "Add the batch axis with x.unsqueeze(0)."
            raise refusal("ConformalLayers", expected, got, remedy)


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

    def __init__(self, advance: bool, rms: bool) -> None:
        self.advance, self.rms = advance, rms

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
    offset: Scalar,
    rms: bool,
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
    for path, module in pairs:
        points = flow.step(path, module, points)
    x = points.scaled().x
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
            # Reproducible, and independent of the global seed.
            generator = torch.Generator().manual_seed(0)
            start = torch.randn(layout[0], generator=generator, dtype=torch.float64)
            vector = (start / torch.linalg.vector_norm(start)).to(x.device, dtype)
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


def linear_part(module: nn.Module, spec: LayerSpec, x: Tensor) -> Tensor:
    """Return U x for α: the module without its bias, with the normalizations its bound ignores."""
    if spec.identity_in_eval:
        return x
    if isinstance(module, BATCH_NORMS):
        return x if module.weight is None else x * module.weight.view(-1, *[1] * (x.dim() - 2))
    if isinstance(module, Composite):
        return module.flow("", x, _Linear())
    result: Tensor = module.forward(x)
    return result - module.forward(torch.zeros_like(x)) if is_affine(module) else result


class _Linear(BatchFlow):
    """Apply the linear part of branches without activations."""

    def run(self, path: str, module: nn.Module, value: Tensor) -> Tensor:
        for name, child in modules_in(path, module):
            value = linear_part(child, spec_of(name, child), value)
        return value


def run(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x); pooling takes less time, and has gradients where the norm of a window is 0."""
    if isinstance(module, nn.Upsample):
        x = x.contiguous()  # torch copies other entries of a channels-last map
    if isinstance(module, POOLS) and not (has_hooks(module) or has_global_hooks()):
        sizes, ceil_mode = pool_axes(module, x.dim() - 2), bool(module.ceil_mode)
        if isinstance(module, NORM_POOLS):
            return norm_pool(x, sizes["kernel"], sizes["stride"], ceil_mode)
        if not any(sizes["padding"]) and not ceil_mode:
            divisor = getattr(module, "divisor_override", None) or math.prod(sizes["kernel"])
            return window_sums(x, sizes["kernel"], sizes["stride"]) / divisor
    result: Tensor = module(x)
    return result
