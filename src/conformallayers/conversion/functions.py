"""Replace functions and methods in the graph of a model by modules that compute the same."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..errors import shape_text
from ..nn.branches import Join
from ..nn.homogeneous import Abs
from ..utils.text import call_text

SAMPLES = 7  # of the batch that records shapes: a number that few models have as a size
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_CATS = (torch.cat, torch.concat, torch.concatenate)
_CLAMPS = (torch.clamp, torch.clip, "clamp", "clip", "clamp_", torch.clamp_min, "clamp_min")
# Standardisation of an input: the sign of a constant that is added, the power of one that multiplies.
_SHIFTS = {operator.sub: -1, torch.sub: -1, "sub": -1, operator.add: 1, torch.add: 1, "add": 1}
_FACTORS = {operator.mul: 1, torch.mul: 1, "mul": 1}
_FACTORS |= {operator.truediv: -1, torch.div: -1, "div": -1}
_RESHAPES = (torch.flatten, "flatten", torch.reshape, "reshape", "view")
_MEANS = (torch.mean, "mean")
CONSTANT = "constant"  # in the meta of a dropout: it does not follow the mode
_IGNORED = ("inplace", "_stacklevel")  # arguments that do not change a value

Values = Mapping[fx.Node, Any]  # of a run with SAMPLES samples; of tensors only the shapes count
Replacement = tuple[nn.Module, list[fx.Node]] | str  # with the nodes it reads, or why there is none
_Row = tuple[type[nn.Module], tuple[str, ...]]


def _spatial_rows(n: int) -> dict[Any, _Row]:
    """Return the functions that torch has for n spatial axes, with the names of their arguments."""
    window = ("kernel_size", "stride", "padding")
    names = {
        "max_pool": ("MaxPool", (*window, "dilation", "ceil_mode", "return_indices")),
        "avg_pool": ("AvgPool", (*window, "ceil_mode", "count_include_pad", "divisor_override")),
        "adaptive_avg_pool": ("AdaptiveAvgPool", ("output_size",)),
        "adaptive_max_pool": ("AdaptiveMaxPool", ("output_size", "return_indices")),
        "lp_pool": ("LPPool", ("norm_type", *window[:2], "ceil_mode")),
        "dropout": ("Dropout", ("p", "training")),
    }
    return {
        getattr(F, f"{function}{n}d"): (getattr(nn, f"{module}{n}d"), arguments)
        for function, (module, arguments) in names.items()
    }


# Functions of one tensor: the module, and the names of the arguments behind the tensor.
_MODULES: dict[Any, _Row] = {
    **dict.fromkeys((torch.relu, F.relu, torch.relu_, "relu", "relu_"), (nn.ReLU, ())),
    **dict.fromkeys((torch.abs, operator.abs, "abs"), (Abs, ())),
    F.leaky_relu: (nn.LeakyReLU, ("negative_slope",)),
    F.dropout: (nn.Dropout, ("p", "training")),
    **_spatial_rows(1),
    **_spatial_rows(2),
    **_spatial_rows(3),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), (nn.Sigmoid, ())),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), (nn.Tanh, ())),
    **dict.fromkeys((torch.softmax, F.softmax, "softmax"), (nn.Softmax, ("dim",))),
    **dict.fromkeys((torch.log_softmax, F.log_softmax, "log_softmax"), (nn.LogSoftmax, ("dim",))),
    F.gelu: (nn.GELU, ("approximate",)),
    F.silu: (nn.SiLU, ()),
    F.relu6: (nn.ReLU6, ()),
    "contiguous": (nn.Identity, ()),
}


def module_for(node: fx.Node, values: Values) -> Replacement:
    """Return the module that computes a function, with the nodes it reads, or why there is none."""
    standardised = _standardisation(node, values)
    if standardised is not None:
        return standardised
    if node.target in _SUMS:
        return _sum(node, values)
    if node.target in _CATS:
        return _concatenation(node, values)
    source: Any = node.args[0] if node.args else node.kwargs.get("input")
    if not is_map(source, values) or not is_map(node, values):
        return _unknown(node)
    if node.target in _RESHAPES:
        module = _reshape(node, values[source].shape, values[node].shape)
    elif node.target in _MEANS:
        module = _mean(node, values[source].dim(), values)
    elif node.target in _CLAMPS:
        module = _clamp(node, values)
    elif node.target in _MODULES:
        module = _function(node, values)
    else:
        module = _unknown(node)
    return module if isinstance(module, str) else (module, [source])


def modules_of_call(node: fx.Node, rank: int) -> list[nn.Module]:
    """Return the modules that compute a function of one tensor and constants in a row; empty if none do."""
    if len(node.all_input_nodes) != 1 or node.target not in {*_MODULES, *_MEANS}:
        return []
    found = _mean(node, rank, {}) if node.target in _MEANS else _function(node, {})
    if isinstance(found, str):
        return []
    return list(found) if isinstance(found, nn.Sequential) else [found]


def _arguments(node: fx.Node, names: Sequence[str], values: Values) -> dict[str, Any]:
    """Return the arguments behind the tensor by name, with numbers for nodes such as ``x.size(3)``."""
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    given.pop("input", None)
    return dict(fx.node.map_arg(given, lambda one: values[one]))


def _function(node: fx.Node, values: Values) -> nn.Module | str:
    kind, names = _MODULES[node.target]
    given = _arguments(node, names, values)
    given = {name: value for name, value in given.items() if name not in _IGNORED}
    other = given.pop("dtype", None) is not None or bool(given.keys() - {*names})
    tensors = any(isinstance(value, Tensor) for value in given.values())
    if other or tensors or len(node.args) > 1 + len(names):
        return _unknown(node)
    if "training" in names and given.pop("training", True):
        return "it drops values at evaluation too. Pass training=self.training, or use nn.Dropout."
    return nn.Identity() if node.meta.get(CONSTANT) else kind(**given)


def dropout_mode(node: fx.Node) -> bool | None:
    """Return the argument ``training`` of a function of dropout; None for other nodes."""
    names = _MODULES.get(node.target, (None, ()))[1]
    if node.op != "call_function" or "training" not in names:
        return None
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    return bool(given.get("training", True))


def is_map(value: Any, values: Values) -> bool:
    """Tell whether an argument is a batch of feature maps, and no parameter or number."""
    node = isinstance(value, fx.Node) and value.op != "get_attr"
    return node and isinstance(values[value], Tensor)


def _sum(node: fx.Node, values: Values) -> Replacement:
    terms = [*node.args, *(node.kwargs[name] for name in ("other",) if name in node.kwargs)]
    nodes = [term for term in terms if isinstance(term, fx.Node)]
    if len(nodes) != 2 or not all(is_map(term, values) for term in nodes) or "alpha" in node.kwargs:
        return f"{call_text(node)} is no sum of two maps. Give a constant to a layer as its bias."
    shapes = [tuple(values[term].shape[1:]) for term in nodes]
    if shapes[0] != shapes[1]:
        both = " and ".join(shape_text(shape) for shape in shapes)
        return f"a sum of shapes {both} would broadcast. Give both the same shape."
    return Join("sum"), nodes


def _concatenation(node: fx.Node, values: Values) -> Replacement:
    parts: Any = node.args[0] if node.args else node.kwargs.get("tensors", ())
    axis: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    maps = isinstance(parts, Sequence) and all(is_map(part, values) for part in parts)
    if not maps or not parts or not isinstance(axis, int) or axis in (0, -values[parts[0]].dim()):
        return f"{call_text(node)} is no concatenation of maps. Concatenate along axis 1."
    return Join("concatenate", axis), list(parts)


def _clamp(node: fx.Node, values: Values) -> nn.Module | str:
    """Return the rectifier that ``clamp(min=0)`` is."""
    ends = "min", "max"
    low, high = map(_arguments(node, ends, values).get, ends)
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float, type(None)))
    if numbers and low == 0 and high in (None, 6):
        return nn.ReLU() if high is None else nn.ReLU6()
    return f"{call_text(node)} is no rectifier. Use relu, which clamp(min=0) is."


def _standardisation(node: fx.Node, values: Values) -> Replacement | None:
    """Return the layer of ``x - mean`` or ``x / std`` with constants on the model's input, or None.

    It is a 1×1 convolution of every channel by itself, with weights that do not train. Constants that
    are not finite in the dtype of the model are refused.
    """
    if not _is_standardisation(node) or not _is_input(node.args[0], values):
        return None
    source: Any = node.args[0]
    shape = values[source].shape
    constant, count, rank = _constant(node.args[1]), shape[1], len(shape) - 2
    broadcast = None if constant is None or not 1 <= rank <= 3 else _by_channel(constant, shape)
    if broadcast is None:
        return None
    shift = node.target in _SHIFTS
    layer: Any = getattr(nn, f"Conv{rank}d")(count, count, 1, groups=count, bias=shift).double()
    with torch.no_grad():
        if shift:
            layer.weight.fill_(1)
            layer.bias.copy_(_SHIFTS[node.target] * broadcast)
        else:
            layer.weight.copy_((broadcast ** _FACTORS[node.target]).view_as(layer.weight))
    like = next(cast(nn.Module, node.graph.owning_module).parameters(), layer.weight)
    layer.requires_grad_(False).to(like.dtype)
    if not all(one.is_meta or one.isfinite().all() for one in layer.parameters()):
        return (
            f"{call_text(node)} is a shift or factor that is not finite in {like.dtype}. Use finite "
            "constants, and divide by none that is or is nearly 0."
        )
    return layer.to(like.device), [source]


def _is_standardisation(node: fx.Node) -> bool:
    known = node.target in _SHIFTS or node.target in _FACTORS
    return known and len(node.args) == 2 and not node.kwargs


def _is_input(value: Any, values: Values) -> bool:
    """Tell whether a value is the input of the model, or that with constants added or multiplied."""
    while is_map(value, values) and _is_standardisation(value):
        if _constant(value.args[1]) is None:
            return False
        value = value.args[0]
    return is_map(value, values) and value.op == "placeholder"


def _by_channel(constant: Tensor, shape: torch.Size) -> Tensor | None:
    """Return a constant as one number for each channel, (C,) in float64, or None if it is none."""
    try:
        return constant.double().expand(1, shape[1], *[1] * (len(shape) - 2)).flatten()
    except RuntimeError:
        return None


def _constant(value: Any) -> Tensor | None:
    """Return a number or a tensor that does not train, such as a buffer, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    found: Any = operator.attrgetter(str(value.target))(value.graph.owning_module)
    return found if isinstance(found, Tensor) and not found.requires_grad else None


def _reshape(node: fx.Node, before: torch.Size, after: torch.Size) -> nn.Module | str:
    """Return the layers of a flattening or another shape of each sample."""
    if after[:1] != (SAMPLES,) or len(after) < 2:
        return f"{call_text(node)} does not keep the batch axis. Use flatten(1)."
    flatten, unflatten = nn.Flatten(), nn.Unflatten(1, after[1:])
    if len(after) == 2:
        return flatten
    return unflatten if len(before) == 2 else nn.Sequential(flatten, unflatten)


def _mean(node: fx.Node, rank: int, values: Values) -> nn.Module | str:
    """Return the pooling that a mean over all spatial axes is."""
    given = _arguments(node, ("dim", "keepdim"), values)
    axes = given.pop("dim", None)
    axes = (axes,) if isinstance(axes, int) else tuple(axes or ())
    keeps = given.pop("keepdim", False)
    if given.pop("dtype", None) is not None or given:
        return _unknown(node)
    if not 3 <= rank <= 5 or sorted(axis % rank for axis in axes) != [*range(2, rank)]:
        return f"{call_text(node)} is no mean over all spatial axes. Use nn.AdaptiveAvgPool2d(1)."
    pool: nn.Module = getattr(nn, f"AdaptiveAvgPool{rank - 2}d")(1)
    return pool if keeps else nn.Sequential(pool, nn.Flatten())


def _unknown(node: fx.Node) -> str:
    if node.target is F.interpolate:
        return f"{call_text(node)}. Use the module nn.Upsample."
    if any(one.op == "get_attr" for one in node.all_input_nodes):
        return (
            f"{call_text(node)} reads a parameter. Use the module that has it, such as nn.Conv2d."
        )
    return (
        f"{call_text(node)} is no layer. Write it with modules, +, torch.cat, flatten and relu, "
        "or leave it out of the model."
    )
