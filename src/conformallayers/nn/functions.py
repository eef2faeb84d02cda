"""Functions and methods as modules: the one table from the calls of a torch.fx graph to layers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .bounds import Shape
from .branches import Join
from .layers import Abs, Channels, Permute, Product, RepeatChannels, Rescale


@dataclass(frozen=True)
class Batch:
    """A value with one entry per sample; ``shape`` is that of a sample, None while it is unknown."""

    shape: Shape | None = None


# What is known of each node: a Batch, a tuple of them, or a constant as it is. Others are left out.
Values = Mapping[fx.Node, Any]
# Modules in order, each with what it reads: nodes, or the positions of earlier modules.
Replacement = list[tuple[nn.Module, tuple[fx.Node | int, ...]]]


@dataclass(frozen=True)
class Call:
    """A call of a function or method. Nodes of batches stay nodes, other nodes are their values."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Values

    def shape(self, source: Any) -> Shape | None:
        """Return the shape of one sample of a node, or None if it is unknown or no batch."""
        value = self.values.get(source) if isinstance(source, fx.Node) else None
        return value.shape if isinstance(value, Batch) else None

    @property
    def source(self) -> fx.Node:
        """The first argument, a batch."""
        return self.batch(self.args[0] if self.args else self.kwargs["input"])

    def batch(self, value: Any) -> fx.Node:
        """Return a node that is a batch; raise TypeError for other values."""
        if not isinstance(value, fx.Node) or not isinstance(self.values.get(value), Batch):
            raise TypeError("no batch")
        return value

    def arguments(self, *names: str) -> dict[str, Any]:
        """Return the arguments after the first by name; raise TypeError for others, or for batches."""
        if len(self.args) > 1 + len(names):
            raise TypeError("too many arguments")
        given = dict(zip(names, self.args[1:], strict=False)) | self.kwargs
        given = {name: value for name, value in given.items() if name not in _IGNORED}
        if given.pop("dtype", None) is not None or not given.keys() <= {*names}:
            raise TypeError("an argument that modules do not have")
        if any(isinstance(value, fx.Node) for value in given.values()):
            raise TypeError("an argument that depends on the batch")
        return given


def call_text(node: fx.Node) -> str:
    """Format a graph node as Python code.

    Examples:
        >>> graph = fx.symbolic_trace(lambda x: torch.cat([x * 2, x.flatten(1)], dim=1)).graph
        >>> [call_text(node) for node in graph.nodes]
        ['x', 'mul(x, 2)', 'x.flatten(1)', 'cat([mul, flatten], dim=1)', 'output(cat)']
    """
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    values = [str(value) for value in node.args]
    named = [f"{key}={value}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{values[0]}.{node.target}({', '.join([*values[1:], *named])})"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node)
    return f"{name}({', '.join([*values, *named])})"


_IGNORED = ("input", "inplace", "_stacklevel")
_Row = Callable[[Call], nn.Module | Replacement | None]  # a module alone reads the first argument
_ROWS: dict[Any, _Row] = {}


def modules_of(node: fx.Node, values: Values) -> Replacement | None:
    """Return the modules that compute a function or method, or None if there are none."""
    row = _ROWS.get(node.target) if node.op in ("call_function", "call_method") else None
    if row is None:
        return None

    def value(source: fx.Node) -> Any:
        found = values.get(source, source)  # what is unknown stays a node, too
        return source if isinstance(found, Batch) else found

    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        call = Call(node, tuple(args), dict(kwargs), values)
        found = row(call)
        return [(found, (call.source,))] if isinstance(found, nn.Module) else found
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None


def _rows(*targets: Any) -> Callable[[_Row], _Row]:
    def register(function: _Row) -> _Row:
        _ROWS.update(dict.fromkeys(targets, function))
        return function

    return register


# -- functions with a module of the same arguments -----------------------------------------------------


def _module(kind: type[nn.Module], names: Sequence[str] = ()) -> _Row:
    """Return the row of a function whose module has the same arguments."""

    def row(call: Call) -> nn.Module | None:
        given = call.arguments(*names)
        if "training" in names and given.pop("training", True):
            return None  # drops values at evaluation too
        return kind(**given)

    return row


_WINDOW = ("kernel_size", "stride", "padding")
_SPATIAL = {
    "max_pool": ("MaxPool", (*_WINDOW, "dilation", "ceil_mode", "return_indices")),
    "avg_pool": ("AvgPool", (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override")),
    "adaptive_avg_pool": ("AdaptiveAvgPool", ("output_size",)),
    "adaptive_max_pool": ("AdaptiveMaxPool", ("output_size", "return_indices")),
    "lp_pool": ("LPPool", ("norm_type", *_WINDOW[:2], "ceil_mode")),
    "dropout": ("Dropout", ("p", "training")),
}
for _n, (_function, (_kind, _names)) in product((1, 2, 3), _SPATIAL.items()):
    _rows(getattr(F, f"{_function}{_n}d"))(_module(getattr(nn, f"{_kind}{_n}d"), _names))
_rows(torch.relu, F.relu, torch.relu_, "relu", "relu_")(_module(nn.ReLU))
_rows(torch.abs, operator.abs, "abs")(_module(Abs))
_rows(F.leaky_relu)(_module(nn.LeakyReLU, ("negative_slope",)))
_rows(F.dropout)(_module(nn.Dropout, ("p", "training")))
_rows(torch.sigmoid, F.sigmoid, "sigmoid")(_module(nn.Sigmoid))
_rows(torch.tanh, F.tanh, "tanh")(_module(nn.Tanh))
_rows(torch.softmax, F.softmax, "softmax")(_module(nn.Softmax, ("dim",)))
_rows(torch.log_softmax, F.log_softmax, "log_softmax")(_module(nn.LogSoftmax, ("dim",)))
_rows(F.gelu)(_module(nn.GELU, ("approximate",)))
_rows(F.silu)(_module(nn.SiLU))
_rows(F.relu6)(_module(nn.ReLU6))
_rows(F.hardtanh)(_module(nn.Hardtanh, ("min_val", "max_val")))
_rows(F.hardswish)(_module(nn.Hardswish))
_rows(F.hardsigmoid)(_module(nn.Hardsigmoid))
_rows(F.pixel_shuffle)(_module(nn.PixelShuffle, ("upscale_factor",)))
_rows(F.pixel_unshuffle)(_module(nn.PixelUnshuffle, ("downscale_factor",)))
_rows("contiguous", "clone", "detach")(_module(nn.Identity))


@_rows(torch.clamp, torch.clip, "clamp", "clip", "clamp_", torch.clamp_min, "clamp_min")
def _clamp(call: Call) -> nn.Module | None:
    given = call.arguments("min", "max")
    low, high = given.get("min"), given.get("max")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return None
    if high is None:
        return nn.ReLU() if low == 0 else None
    return nn.Hardtanh(low, high) if low is not None and low < high else None


@_rows(F.interpolate)
def _interpolate(call: Call) -> nn.Module | None:
    names = "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"
    given = call.arguments(*names)
    return None if given.pop("antialias", False) else nn.Upsample(**given)


@_rows(F.pad)
def _pad(call: Call) -> nn.Module | None:
    given = call.arguments("pad", "mode", "value")
    shape, pads, mode = call.shape(call.source), tuple(given["pad"]), given.get("mode", "constant")
    axes = len(shape) - 1 if shape else 0
    if not 1 <= axes <= 3 or len(pads) > 2 * axes:
        return None
    pads += (0,) * (2 * axes - len(pads))
    names = {"reflect": "Reflection", "replicate": "Replication", "circular": "Circular"}
    value = () if mode != "constant" else (given.get("value") or 0.0,)
    pad: nn.Module = getattr(nn, f"{names.get(mode, 'Constant')}Pad{axes}d")(pads, *value)
    return pad


# -- weights as arguments --------------------------------------------------------------------------------


def _holding(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """Replace parameters of a module by constants."""
    for name, tensor in tensors.items():
        module._parameters.pop(name, None)
        module.register_buffer(name, tensor)
    return module


@_rows(F.linear)
def _linear(call: Call) -> nn.Module:
    given = call.arguments("weight", "bias")
    weight: Tensor = given["weight"]
    module = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    return _holding(module, weight=weight, bias=given.get("bias"))


@_rows(F.conv1d, F.conv2d, F.conv3d)
def _conv(call: Call) -> nn.Module:
    given = call.arguments("weight", "bias", "stride", "padding", "dilation", "groups")
    weight, bias = given.pop("weight"), given.pop("bias", None)
    kind, inputs = getattr(nn, f"Conv{weight.dim() - 2}d"), weight.shape[1] * given.get("groups", 1)
    module = kind(inputs, weight.shape[0], tuple(weight.shape[2:]), **given, device="meta")
    return _holding(module, weight=weight, bias=bias)


@_rows(F.batch_norm)
def _batch_norm(call: Call) -> nn.Module | None:
    names = "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
    given, shape = call.arguments(*names), call.shape(call.source)
    mean, variance = given["running_mean"], given["running_var"]
    if given.get("training") or mean is None or variance is None or shape is None:
        return None
    kind = getattr(nn, f"BatchNorm{max(1, len(shape) - 1)}d")
    norm = kind(len(mean), eps=given.get("eps", 1e-5), device="meta").eval()
    norm.num_batches_tracked = torch.ones((), dtype=torch.long)
    held = {name: given.get(name) for name in names[:4]}
    return _holding(norm, **held)


@_rows(F.prelu, torch.prelu, "prelu")
def _prelu(call: Call) -> nn.Module:
    weight: Tensor = call.arguments("weight")["weight"]
    return _holding(nn.PReLU(weight.numel(), device="meta"), weight=weight)


# -- sums, products and joins ------------------------------------------------------------------------------

_ADD = (operator.add, operator.iadd, torch.add, "add", "add_")
_SUB = (operator.sub, operator.isub, torch.sub, "sub", "sub_")
_MUL = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_DIV = (operator.truediv, operator.itruediv, torch.div, "div", "div_")


def _operands(call: Call, *more: str) -> tuple[Any, Any]:
    """Return both operands; raise TypeError for another number of them, or for other options."""
    given = [*call.args, *(call.kwargs[name] for name in ("input", "other") if name in call.kwargs)]
    if len(given) != 2 or not call.kwargs.keys() <= {"input", "other", *more}:
        raise TypeError("options")
    return given[0], given[1]


@_rows(*_ADD, *_SUB)
def _sum(call: Call) -> Replacement | None:
    left, right = _operands(call, "alpha")
    minus, times = call.node.target in _SUB, float(call.kwargs.get("alpha", 1))
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        one, two = call.shape(call.batch(left)), call.shape(call.batch(right))
        if one != two:
            return _broadcast(left, right, one, two) if times == 1 and not minus else None
        if minus or times != 1:
            factor = _constant(-times if minus else times, two)
            return [(Rescale(factor), (right,)), (Join("sum"), (left, 0))]
        return [(Join("sum"), (left, right))]
    if times != 1:
        return None
    source, other = (left, right) if isinstance(left, fx.Node) else (right, left)
    constant = _constant(other, call.shape(call.batch(source)))
    if minus and source is left:
        constant = -constant
    return _rescaled(source, torch.tensor(-1.0) if minus and source is right else None, constant)


def _broadcast(
    left: fx.Node, right: fx.Node, one: Shape | None, two: Shape | None
) -> Replacement | None:
    """Return the sum of a map and one of a single channel."""
    if not one or not two or one[1:] != two[1:] or 1 not in (one[0], two[0]):
        return None
    left, right = (left, right) if two[0] == 1 else (right, left)
    return [(RepeatChannels(max(one[0], two[0])), (right,)), (Join("sum"), (left, 0))]


@_rows(*_MUL, *_DIV)
def _product(call: Call) -> Replacement | None:
    left, right = _operands(call)
    divides = call.node.target in _DIV
    if isinstance(left, fx.Node) and isinstance(right, fx.Node) and not divides:
        left, right = (_unexpanded(call, side) for side in (left, right))
        one, two = call.shape(call.batch(left)), call.shape(call.batch(right))
        known = one is not None and two is not None and len(one) == len(two)
        full = known and tuple(map(max, one or (), two or ())) == call.shape(call.node)
        return [(Product(), (left, right))] if full else None
    source, other = (left, right) if isinstance(left, fx.Node) else (right, left)
    if isinstance(other, fx.Node) or (divides and source is right):
        return None
    factor = _constant(other, call.shape(call.batch(source)))
    return _rescaled(source, 1 / factor if divides else factor, None)


def _unexpanded(call: Call, node: fx.Node) -> fx.Node:
    """Return the value before an expansion, as in ``x * gate.expand_as(x)``: a product broadcasts it."""
    source = node.args[0] if node.target in ("expand", "expand_as") else None
    shape = call.shape(source)
    same = isinstance(source, fx.Node) and shape and len(shape) == len(call.shape(node) or ())
    return source if isinstance(source, fx.Node) and same else node


@_rows(operator.neg, torch.neg, "neg")
def _negative(call: Call) -> nn.Module:
    call.arguments()
    return Rescale(torch.tensor(-1.0))


def _rescaled(source: fx.Node, weight: Tensor | None, bias: Tensor | None) -> Replacement | None:
    weight = None if weight is None or bool((weight == 1).all()) else weight
    bias = None if bias is None or not bool(bias.any()) else bias
    if weight is None and bias is None:
        return [(nn.Identity(), (source,))]
    if not all(bool(one.isfinite().all()) for one in (weight, bias) if one is not None):
        return None
    return [(Rescale(weight, bias), (source,))]


def _constant(value: Any, shape: Shape | None) -> Tensor:
    """Return a constant that broadcasts to one sample; raise for others. Only a number fits any shape."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.is_complex() or (shape is None and value.dim()):
        raise TypeError("no constant")
    tensor = value.detach().double()
    while shape is not None and tensor.dim() > len(shape) and tensor.shape[0] == 1:
        tensor = tensor[0]
    if shape is not None and tuple(torch.broadcast_shapes(tensor.shape, shape)) != shape:
        raise ValueError("a constant that changes the shape")
    return tensor


@_rows(torch.cat, torch.concat, torch.concatenate)
def _concatenation(call: Call) -> Replacement | None:
    parts = call.args[0] if call.args else call.kwargs["tensors"]
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
    shape = call.shape(parts[0])
    if axis == 0 or (shape is not None and axis % (len(shape) + 1) == 0):
        return None
    return [(Join("concatenate", axis), tuple(call.batch(part) for part in parts))]


def assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    """Write a value into a part of a tensor, in place."""
    x[index] = value
    return x


@_rows(assigned)
def _assignment(call: Call) -> Replacement | None:
    """Return constants that are written into parts of a sample as factors and summands."""
    source: Any = call.node
    parts: list[tuple[Any, Any]] = []
    while source.target is assigned:
        _, index, value = fx.node.map_arg(source.args, lambda node: call.values.get(node, node))
        parts.append((index, value))
        source = source.args[0]
    shape = call.shape(call.batch(source))
    if shape is None or any(index[0] != slice(None) for index, _ in parts):
        return None
    kept, shift = (torch.full((1, *shape), n, dtype=torch.float64) for n in (1.0, 0.0))
    for index, value in reversed(parts):
        kept[index], shift[index] = 0.0, value
    inner = kept[0]
    zeros = source.kwargs.get("mode") in (None, "constant") and not source.kwargs.get("value")
    if source.target is F.pad and len(source.args) == 2 and zeros:
        ends = (*source.args[1], *(0,) * (2 * len(shape) - len(source.args[1])))
        for axis in range(len(shape)):
            before, after = ends[-2 * axis - 2], ends[-2 * axis - 1]
            inner = inner.narrow(axis, before, shape[axis] - before - after)
    return [(Rescale(None if bool(inner.all()) else kept[0], shift[0]), (source,))]


# -- parts of the channels ------------------------------------------------------------------------------------

_SPLITS = (torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split")


@_rows(operator.getitem)
def _part(call: Call) -> nn.Module | Replacement | None:
    """Return channels: ``x[:, a:b]``, or one of the parts of ``x.chunk(2, 1)``."""
    split: Any = call.node.args[0]
    if isinstance(call.args[0], fx.Node):
        return _indexed(call)
    if split.target not in _SPLITS or split.args[0] not in call.values:
        return None
    (parts, number), (whole, *sizes) = call.args, split.args
    given = {**dict(zip(("n", "dim"), sizes, strict=False)), **split.kwargs}
    number, shape = range(len(parts))[number], call.shape(whole)
    if shape is None or given.get("dim", 0) % (len(shape) + 1) != 1:
        return None
    start, count = sum(part.shape[0] for part in parts[:number]), parts[number].shape[0]
    return [(Channels(start, start + count, shape[0]), (whole,))] if count else None


def _indexed(call: Call) -> nn.Module | Replacement | None:
    """Return channels, ``x[:, a:b]``; or a crop and averages of single pixels, ``x[..., 1::2, ::2]``."""
    index, shape = call.args[1], call.shape(call.source)
    if shape is None or not isinstance(index, tuple):
        return None
    if None in index:
        kept = all(one in (None, slice(None), Ellipsis) for one in index)
        return _reshape(call) if kept and index[0] == slice(None) else None
    dots = index.index(Ellipsis) if Ellipsis in index else len(index)
    every = [slice(None)] * (len(shape) + 2 - len(index) - (dots == len(index)))
    full: list[Any] = [*index[:dots], *every, *index[dots + 1 :]]
    batch, channels, *axes = full
    if batch != slice(None) or len(axes) != len(shape) - 1:
        return None
    if channels != slice(None) or not axes:
        start, stop, step = channels.indices(shape[0])
        whole = step == 1 and all(one == slice(None) for one in axes)
        return [(Channels(start, stop, shape[0]), (call.source,))] if whole else None
    starts, steps = [one.start or 0 for one in axes], tuple(one.step or 1 for one in axes)
    if any(one.stop is not None for one in axes) or min(starts) < 0 or len(axes) > 3:
        return None
    pool: nn.Module = getattr(nn, f"AvgPool{len(axes)}d")(1, steps)
    ends = tuple(end for start in reversed(starts) for end in (-start, 0))
    crop: nn.Module = getattr(nn, f"ConstantPad{len(axes)}d")(ends, 0.0)
    found = [crop] * any(starts) + [pool] * (max(steps) > 1)
    return _in_a_row(call.source, found or [nn.Identity()])


# -- shapes and averages -----------------------------------------------------------------------------------------


@_rows(
    *(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.unflatten),
    *("flatten", "reshape", "view", "squeeze", "unsqueeze", "unflatten"),
)
def _reshape(call: Call) -> Replacement | None:
    before, after = call.shape(call.source), call.shape(call.node)
    if before is None or after is None:
        if call.node.target not in (torch.flatten, "flatten"):
            return None
        given = call.arguments("start_dim", "end_dim")
        return [(nn.Flatten(**given), (call.source,))] if given.get("start_dim", 0) else None
    if math.prod(before) != math.prod(after):
        return None  # another dtype
    return _in_a_row(call.source, _reshaped(before, after) or [nn.Identity()])


def _reshaped(before: Shape, after: Shape) -> list[nn.Module]:
    flatten = [nn.Flatten()] * (len(before) > 1)
    return [] if before == after else [*flatten, *[nn.Unflatten(1, after)] * (len(after) > 1)]


def _in_a_row(source: fx.Node, modules: Sequence[nn.Module]) -> Replacement:
    return [(module, (number - 1 if number else source,)) for number, module in enumerate(modules)]


@_rows(torch.permute, torch.transpose, torch.swapaxes, "permute", "transpose", "swapaxes")
def _permute(call: Call) -> nn.Module | None:
    shape, dims = call.shape(call.source), [*call.args[1:], *call.kwargs.values()]
    if shape is None or "input" in call.kwargs:
        return None
    rank = len(shape) + 1
    if call.node.target in (torch.permute, "permute"):
        axes = [axis % rank for axis in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    else:
        axes, (one, other) = list(range(rank)), (axis % rank for axis in dims)
        axes[one], axes[other] = other, one
    return Permute([axis - 1 for axis in axes[1:]]) if axes[0] == 0 else None


@_rows(torch.mean, "mean", torch.amax, "amax")
def _average(call: Call) -> Replacement | None:
    """Return a mean or maximum over spatial axes as a pooling."""
    given, shape = call.arguments("dim", "keepdim"), call.shape(call.source)
    after = call.shape(call.node)
    rank = len(shape) + 1 if shape else 0
    dims = given["dim"]
    axes = {axis % rank for axis in ((dims,) if isinstance(dims, int) else dims)}
    if shape is None or after is None or not 3 <= rank <= 5 or not axes or min(axes) < 2:
        return None
    name = "Avg" if call.node.target in (torch.mean, "mean") else "Max"
    sizes = tuple(1 if axis in axes else None for axis in range(2, rank))
    pool: nn.Module = getattr(nn, f"Adaptive{name}Pool{rank - 2}d")(sizes)
    pooled = (shape[0], *(1 if axis in axes else shape[axis - 1] for axis in range(2, rank)))
    return _in_a_row(call.source, [pool, *_reshaped(pooled, after)])
