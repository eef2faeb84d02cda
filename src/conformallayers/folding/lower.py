"""Modules → operations: lower each layer of torch.nn and of this package to a recipe.

A module that has no operation becomes a ``call``, which only torch can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.bounds import channel_factor, conv_pads, pad_mode, per_axis, pool_axes
from ..nn.branches import Composite, Flow, Join
from ..nn.layers import Abs, Centre, Channels, ChannelScale, Permute, RepeatChannels, Rescale, Scale
from ..nn.registry import PADS, by_axis, computes_like, find_spec, shape_after
from ..recipe import layer_operations as layer
from ..recipe import point_operations as point
from ..recipe.recipe import Operation, RecipeBuilder, Shape
from .stages import ActivationSite, Layer, Operator, Scaling

Lower = Callable[["Lowering", str, Any, Shape], str]
LOWER: dict[type[nn.Module], Lower] = {}


@dataclass(frozen=True)
class Lowering:
    """Append operations of modules to the recipe under construction."""

    builder: RecipeBuilder

    def module(self, value: str, module: nn.Module, output_shape: Shape) -> str:
        """Append a module; return the new value."""
        lower = find_lowering(module)
        if lower is None:
            return self.call(value, module, output_shape)
        return lower(self, value, module, output_shape)

    def add(self, kind: type[Operation], *sources: str, **settings: Any) -> str:
        """Append an operation; return the new value."""
        return self.builder.add(kind, *sources, **settings)

    def constant(self, name: str, array: Tensor | None) -> Any:
        """Add a constant to the recipe; return its name, None for None."""
        return None if array is None else self.builder.constant(name, array.detach())

    def call(
        self, value: str, module: nn.Module, output_shape: Shape, *, by_sample: bool = True
    ) -> str:
        """Append a call of a module; ``by_sample`` if it keeps samples apart."""
        name, what = self.builder.module("module", module), type(module).__name__
        options = {"module": name, "what": what, "result": output_shape, "by_sample": by_sample}
        return self.add(layer.Call, value, **options)

    def multiply(self, value: str, factor: Tensor | float) -> str:
        """Append the product with a constant that broadcasts to the sample."""
        held = self.constant("factor", torch.as_tensor(factor, dtype=torch.float64))
        return self.add(layer.Multiply, value, factor=held)

    def shift(self, value: str, constant: Tensor) -> str:
        """Append the sum with a constant that broadcasts to the sample."""
        return self.add(layer.AddConstant, value, value=self.constant("shift", constant))


def find_lowering(module: nn.Module) -> Lower | None:
    """Return the lowering function of a module; None if it has none or overrides forward."""
    if "forward" in vars(module):
        return None
    for ancestor in type(module).__mro__:
        if ancestor in LOWER:
            return LOWER[ancestor] if computes_like(type(module), ancestor) else None
    return None


def lowers(*kinds: type[nn.Module]) -> Callable[[Lower], Lower]:
    """Register a lowering function for classes of modules."""

    def register(function: Lower) -> Lower:
        LOWER.update(dict.fromkeys(kinds, function))
        return function

    return register


# -- layers with weights ----------------------------------------------------------------------------


@lowers(nn.Linear)
def _linear(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return to.add(layer.Matmul, value, **_weights(to, module))


@lowers(*by_axis("Conv"))
def _conv(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    pads, padding = conv_pads(module), (0,) * len(module.kernel_size)
    if module.padding_mode == "zeros" and all(before == after for before, after in pads):
        padding = tuple(before for before, _ in pads)
    elif any(map(any, pads)):
        value = to.add(layer.Pad, value, pads=pads, mode=module.padding_mode)
    options = {name: getattr(module, name) for name in ("stride", "dilation", "groups")}
    return to.add(layer.Conv, value, padding=padding, **_weights(to, module), **options)


def _weights(to: Lowering, module: Any) -> dict[str, Any]:
    return {name: to.constant(name, getattr(module, name)) for name in ("weight", "bias")}


@lowers(*by_axis("ConvTranspose"))
def _conv_transpose(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    names = "stride", "padding", "output_padding", "dilation", "groups"
    options = {name: getattr(module, name) for name in names}
    return to.add(layer.ConvTranspose, value, **_weights(to, module), **options)


@lowers(*by_axis("BatchNorm"))
def _batch_norm(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    factor = channel_factor(module)
    shift = -module.running_mean.to(factor) * factor
    if module.bias is not None:
        shift = shift + module.bias.to(factor)
    scaled = to.multiply(value, _per_channel(factor, shape))
    return to.shift(scaled, _per_channel(shift, shape))


def _per_channel(array: Tensor, shape: Shape) -> Tensor:
    """View an array (channels,) so that it broadcasts to samples of a shape."""
    return array.view(-1, *[1] * (len(shape) - 1))


@lowers(Scale)
def _scale(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return to.multiply(value, module.gain)


@lowers(ChannelScale)
def _channel_scale(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return to.multiply(value, _per_channel(module.factor, shape))


@lowers(Rescale)
def _rescale(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    value = value if module.factor is None else to.multiply(value, module.factor)
    return value if module.bias is None else to.shift(value, module.bias)


@lowers(Centre)
def _centre(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return to.shift(value, -module.mean)


# -- layers without weights -------------------------------------------------------------------------


@lowers(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
def _identity(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return value


@lowers(nn.Flatten, nn.Unflatten)
def _reshape(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    if to.builder.shape(value) == shape:
        return value
    return to.add(layer.Reshape, value, shape=shape)


def _rearranged(to: Lowering, value: str, split: Shape, order: Shape, shape: Shape) -> str:
    """Append a reshape to ``split``, a permutation of the axes, and a reshape to ``shape``."""
    value = to.add(layer.Reshape, value, shape=split)
    value = to.add(layer.Permute, value, order=order)
    return to.add(layer.Reshape, value, shape=shape)


@lowers(nn.PixelShuffle)
def _pixel_shuffle(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    (c, h, w), r = shape, module.upscale_factor
    return _rearranged(to, value, (c, r, r, h // r, w // r), (0, 3, 1, 4, 2), shape)


@lowers(nn.PixelUnshuffle)
def _pixel_unshuffle(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    (c, h, w), r = shape, module.downscale_factor
    return _rearranged(to, value, (c // r**2, h, r, w, r), (0, 2, 4, 1, 3), shape)


@lowers(nn.ChannelShuffle)
def _channel_shuffle(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    c, *spatial = shape
    split = (module.groups, c // module.groups, *spatial)
    return _rearranged(to, value, split, (1, 0, *range(2, len(split))), shape)


@lowers(RepeatChannels)
def _repeat_channels(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return to.add(layer.Concatenate, *[value] * module.times, axis=0)


@lowers(Permute)
def _permute(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return to.add(layer.Permute, value, order=module.order)


@lowers(Channels)
def _channels(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    return to.add(layer.Slice, value, axis=0, start=module.start, stop=module.stop)


@lowers(*by_axis("AvgPool"))
def _avg_pool(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    options, divisor = pool_axes(module, len(shape) - 1), getattr(module, "divisor_override", None)
    del options["dilation"]
    if divisor is None:
        options |= {name: getattr(module, name) for name in ("ceil_mode", "count_include_pad")}
        return to.add(layer.AvgPool, value, **options)
    if module.ceil_mode:
        return to.call(value, module, shape)
    means = to.add(layer.AvgPool, value, **options)
    return to.multiply(means, math.prod(options["kernel"]) / divisor)


@lowers(*by_axis("MaxPool"))
def _max_pool(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    if module.return_indices:
        return to.call(value, module, shape)
    options = pool_axes(module, len(shape) - 1)
    return to.add(layer.MaxPool, value, ceil_mode=module.ceil_mode, **options)


@lowers(*by_axis("LPPool"))
def _norm_pool(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    if module.norm_type != 2:
        return to.call(value, module, shape)
    sizes = pool_axes(module, len(shape) - 1)
    options = {"kernel": sizes["kernel"], "stride": sizes["stride"], "ceil_mode": module.ceil_mode}
    return to.add(layer.NormPool, value, **options)


@lowers(*by_axis("AdaptiveMaxPool", "AdaptiveAvgPool"))
def _adaptive_pool(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    if getattr(module, "return_indices", False):
        return to.call(value, module, shape)
    largest = isinstance(module, by_axis("AdaptiveMaxPool"))
    kind = layer.AdaptiveMaxPool if largest else layer.AdaptiveAvgPool
    return to.add(kind, value, size=shape[1:])


@lowers(*by_axis(*PADS))
def _pad(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    ends = tuple(module.padding)
    pads = tuple((ends[i], ends[i + 1]) for i in range(len(ends) - 2, -1, -2))
    mode, filled = pad_mode(module), float(getattr(module, "value", 0.0))
    if mode != "zeros" and min(ends) < 0:
        return to.call(value, module, shape)
    return to.add(layer.Pad, value, pads=pads, mode=mode, value=filled)


@lowers(nn.Upsample)
def _upsample(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    scales = per_axis(module.scale_factor or 0.5, len(shape) - 1)  # None: a size of its own
    if not module.mode.startswith("nearest") or any(scale != int(scale) for scale in scales):
        return to.call(value, module, shape)
    return to.add(layer.Upsample, value, scales=tuple(map(int, scales)))


# -- functions around the folded parts --------------------------------------------------------------

_FUNCTIONS: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    Abs: ("abs", ()),
    nn.ReLU: ("relu", ()),
    nn.Hardtanh: ("clip", ("min_val", "max_val")),  # ReLU6, too
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.SiLU: ("silu", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.Tanh: ("tanh", ()),
    nn.Hardswish: ("hardswish", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
    nn.GELU: ("gelu", ()),
}


@lowers(*_FUNCTIONS)
def _function(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    if getattr(module, "approximate", "none") != "none":
        return to.call(value, module, shape)
    kind = next(kind for kind in type(module).__mro__ if kind in _FUNCTIONS)
    function, names = _FUNCTIONS[kind]
    parameters = tuple(float(getattr(module, name)) for name in names)
    return to.add(layer.Elementwise, value, function=function, parameters=parameters)


@lowers(nn.PReLU)
def _prelu(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    slope = to.constant("slope", _per_channel(module.weight, shape))
    return to.add(layer.PRelu, value, slope=slope)


@lowers(nn.Softmax, nn.LogSoftmax)
def _softmax(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    axes = len(shape) + 1
    if module.dim is None or module.dim % axes == 0:  # over the batch; None may mean that, too
        return to.call(value, module, shape, by_sample=False)
    log = isinstance(module, nn.LogSoftmax)
    return to.add(layer.Softmax, value, axis=module.dim % axes - 1, log=log)


# -- branches without activations -------------------------------------------------------------------


class _Branches(Flow[str]):
    """Lower the branches of a composite without activations."""

    def __init__(self, to: Lowering) -> None:
        self.to = to

    def step(self, path: str, module: nn.Module, value: str) -> str:
        shape = tuple(shape_after(module, self.to.builder.shape(value))[1:])
        return self.to.module(value, module, shape)

    def join(self, path: str, values: list[str], join: Join) -> str:
        return add_join(self.to.builder, values, join)


def add_join(builder: RecipeBuilder, values: list[str], join: Join) -> str:
    """Append a sum or a concatenation."""
    if len(values) == 1:
        return values[0]
    if join.how == "sum":
        return builder.add(layer.Add, *values)
    rank = len(builder.shape(values[0])) + 1
    return builder.add(layer.Concatenate, *values, axis=join.dim % rank - 1)


@lowers(Composite)
def _composite(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    result: str = module.flow("", value, _Branches(to))
    return result


_FREE = (*by_axis("ConstantPad", "CircularPad"), nn.Upsample)


def by_sample(module: nn.Module) -> bool:
    """Check whether a module is known to treat samples independently in evaluation mode."""
    spec = find_spec(module)
    # The problems of these specs concern ConformalLayers alone: pads other than 0, other interpolations.
    free = spec is None or spec.homogeneous or isinstance(module, _FREE)
    if spec is None or free:
        return find_lowering(module) is not None
    return spec.problem(module) is None


# -- points ----------------------------------------------------------------------------------------


SQUARED = 1e15  # numbers whose square fits into float32 with room


@dataclass(frozen=True)
class PointValues:
    """Points of a recipe, by the names of their values: ``x = m·κ·z`` and ``t = m·σ·τ``."""

    z: str
    peak: str  # m
    tau: str
    scaling: Scaling  # κ and σ, and a factor that is still to be applied
    bound: float  # of the norm of z, in units of the input of the network
    size: float  # a bound of the norm of the point

    def rebase(self, builder: RecipeBuilder) -> PointValues:
        """Append the change to z = the point itself, m = its coordinate and τ = 1 (0 for x = 0)."""
        z, peak, tau = builder.add_many(
            point.Rebase,
            *(self.z, self.peak, self.tau),
            names=("z", "peak", "tau"),
            scale=float(self.scaling.rho),
            coordinate=float(self.scaling.sigma),
        )
        return PointValues(z, peak, tau, Scaling(), self.size, self.size)

    def in_range(self, builder: RecipeBuilder) -> PointValues:
        """Rebase points whose squares could leave the range of float32."""
        return self if self.bound <= SQUARED else self.rebase(builder)

    def advance(
        self, builder: RecipeBuilder, site: ActivationSite, energies: tuple[str, ...]
    ) -> PointValues:
        """Append the effect of an activation on τ."""
        inputs = self.tau, self.peak, *energies
        formula = str(site.module.formula)
        tau = builder.add(point.Advance, *inputs, name="tau", formula=formula)
        return replace(self, tau=tau)

    def activate(self, builder: RecipeBuilder, site: ActivationSite) -> PointValues:
        """Append an activation."""
        points = self.in_range(builder)
        scaling = points.scaling.copy()
        weight = site.activate(scaling)
        n = builder.add(point.SumSquares, points.z, name="n", weight=weight)
        size = site.bound_after(self.size)
        return replace(points.advance(builder, site, (n,)), scaling=scaling, size=size)


def size_after(layers: tuple[Layer, ...], size: float) -> float:
    """Bound the norm of the points after layers, given a bound of the entering points."""
    for action in layers:
        if isinstance(action, ActivationSite):
            size = action.bound_after(size)
            continue
        size *= action.simple_bound
        if action.bias is not None:
            size += float(torch.linalg.vector_norm(action.bias))
    return size


def add_reshape(builder: RecipeBuilder, value: str, shape: tuple[int, ...]) -> str:
    """Append a reshape, unless the value has the shape already."""
    if builder.shape(value) == shape:
        return value
    return builder.add(layer.Reshape, value, name="rows" if len(shape) == 1 else "z", shape=shape)


def add_flatten(builder: RecipeBuilder, value: str) -> str:
    """Append a reshape to one row."""
    return add_reshape(builder, value, (math.prod(builder.shape(value)),))


def add_product(builder: RecipeBuilder, rows: str, matrix: Tensor) -> tuple[str, float]:
    """Append ``M x̂ / gain`` of a flat value; return its name and the gain."""
    scaled, gain = normalized(matrix)
    weight = builder.constant("matrix", scaled.contiguous())
    return builder.add(layer.Matmul, rows, name="image", weight=weight), gain


def normalized(array: Tensor) -> tuple[Tensor, float]:
    """Split an array into one with largest entry 1, and that entry as a float64 number."""
    peak = float(array.abs().max()) if array.numel() else 0.0
    return (array / peak, peak) if peak else (array, 1.0)


def add_operators(
    builder: RecipeBuilder, z: str, operators: Sequence[Operator], factor: float
) -> str:
    """Append operators, and a factor after the last weight, into which the merge pass moves it."""
    to, last = Lowering(builder), len(operators)
    last = max((i for i, op in enumerate(operators, 1) if op.has_tensors), default=last)
    for operator in operators[:last]:
        z = to.module(z, operator.module, operator.output_shape)
    z = z if factor == 1.0 else to.multiply(z, factor)
    for operator in operators[last:]:
        z = to.module(z, operator.module, operator.output_shape)
    return z


def add_layer(builder: RecipeBuilder, operator: Operator, before: PointValues) -> PointValues:
    """Append a layer without its bias, and the pending factor of z."""
    scaling = before.scaling.copy()
    # A layer without a weight leaves the factor to a later layer, which merges it for free.
    factor = (scaling.take() or 1.0) if operator.has_tensors else 1.0
    norm = operator.simple_bound
    z = add_operators(builder, before.z, (operator,), factor)
    bound, size = before.bound * norm * factor, before.size * norm
    return replace(before, z=z, scaling=scaling, bound=bound, size=size)
